package client

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
)

// Event is one server-sent event.
type Event struct {
	ID   string // "" if the stream sends none
	Name string // "message" if the stream names none
	Data []byte
}

// maxLine is the longest line of a stream in bytes; a longer one ends it.
const maxLine = 4 << 20

// Stream reads the events of a stream until ctx ends, the server ends it (nil
// error at the end of the sequence), or it breaks. lastID goes on after a break.
func (c *Client) Stream(ctx context.Context, path string, query url.Values, lastID string) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		header := http.Header{"Accept": {"text/event-stream"}}
		if lastID != "" {
			header.Set("Last-Event-ID", lastID)
		}
		resp, err := c.Send(ctx, Request{Path: path, Query: query, Header: header})
		if err != nil {
			yield(Event{}, err)
			return
		}
		defer resp.Body.Close()
		for ev, err := range Events(resp.Body) {
			if err != nil {
				err = c.explain(ctx, err)
			}
			if !yield(ev, err) {
				return
			}
		}
	}
}

// Events parses server-sent events as HTML's "9.2.6 Interpreting an event stream"
// has them, without retry. An event that the stream ends in the middle of is dropped.
func Events(r io.Reader) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		lines := bufio.NewScanner(r)
		lines.Buffer(make([]byte, 0, 4096), maxLine)
		lines.Split(splitLine)
		var p parser
		for lines.Scan() {
			complete, err := p.line(lines.Bytes())
			if err != nil {
				yield(Event{}, err)
				return
			}
			if complete && !yield(p.take(), nil) {
				return
			}
		}
		if err := lines.Err(); err != nil {
			yield(Event{}, err)
		}
	}
}

// splitLine ends lines at LF, CRLF or CR. A CR waits for what follows it.
func splitLine(data []byte, atEOF bool) (advance int, token []byte, err error) {
	i := bytes.IndexAny(data, "\r\n")
	switch {
	case i < 0: // a line that nothing ends belongs to no event
		return 0, nil, nil
	case data[i] == '\n':
		return i + 1, data[:i], nil
	case i+1 < len(data) && data[i+1] == '\n':
		return i + 2, data[:i], nil
	case i+1 < len(data) || atEOF:
		return i + 1, data[:i], nil
	}
	return 0, nil, nil
}

// parser gathers the lines of one event.
type parser struct {
	id, name string
	data     []byte
	hasData  bool
}

// line takes one line and tells whether it completes an event.
func (p *parser) line(b []byte) (bool, error) {
	if len(b) == 0 {
		complete := p.hasData
		if !complete {
			p.name = ""
		}
		return complete, nil
	}
	field, value, _ := bytes.Cut(b, []byte(":"))
	value = bytes.TrimPrefix(value, []byte(" "))
	switch string(field) {
	case "id":
		p.id = string(value)
	case "event":
		p.name = string(value)
	case "data":
		if len(p.data)+len(value) > maxLine {
			return false, fmt.Errorf("event: longer than %d bytes", maxLine)
		}
		if p.hasData {
			p.data = append(p.data, '\n')
		}
		p.data, p.hasData = append(p.data, value...), true
	}
	return false, nil
}

// take is the complete event; the id stays, as the standard has it.
func (p *parser) take() Event {
	ev := Event{p.id, p.name, p.data}
	if ev.Name == "" {
		ev.Name = "message"
	}
	p.name, p.data, p.hasData = "", p.data[:0:0], false
	return ev
}
