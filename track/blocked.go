package track

import "time"

// Block announces a flow that a rule refused: it was never registered, so that the
// event's record has no id and no counters; Started is when it was refused. Limiting
// how many there are is the caller's part.
func (t *Tracker) Block(m Meta) {
	if t.events.wanted() {
		t.events.publish(Blocked, &Record{Meta: m, Started: time.Now()})
	}
}
