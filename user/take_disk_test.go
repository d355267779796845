package user

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"gatewayd/flow"
	"gatewayd/internal/store"
	"gatewayd/internal/store/storetest"
)

// A take that a full disk refuses was never given out: the next one has its number, and
// everything that was moved meanwhile. What was moved is not lost either.
func TestATakeThatTheDiskRefusesIsGivenOutLater(t *testing.T) {
	dir := t.TempDir()
	storetest.Small(t, dir)
	l, s := openLedger(t, dir)
	var users []flow.UserKey // of whom the records are longer than the last page of the journal
	for key := range flow.UserKey(500) {
		users = append(users, key+1)
		observe(l, key+1, Usage{Up: 5}, ledgerStart)
	}
	filler := filepath.Join(dir, "filler")
	_ = os.WriteFile(filler, make([]byte, 1<<20), 0o600)
	if _, err := l.Take(ledgerStart, users...); !errors.Is(err, store.ErrNotDurable) {
		t.Fatalf("a take on a full disk: %v", err)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	observe(l, 7, Usage{Up: 9}, ledgerStart)
	later := ledgerStart.Add(aDay)
	taken, err := l.Take(later, users...)
	if err != nil || len(taken) != len(users) || taken[6].Sequence != 1 || taken[6].Up != 9 || taken[7].Up != 5 {
		t.Fatalf("%+v of %d, %v", taken[6:8], len(taken), err)
	}
	s.Close(later)
	l, _ = openLedger(t, dir)
	again, err := l.Take(later, users...)
	if err != nil || !slices.Equal(again, taken) {
		t.Errorf("after a restart %+v, %v", again[6], err)
	}
	if got := seriesTotal(t, l, aDay, ledgerStart); got.Up != 500*5+4 {
		t.Errorf("series %v", got)
	}
}
