package user

import (
	"reflect"
	"testing"
)

// Whatever a record says, it is read or refused, and what was read is written as it is.
func FuzzRecords(f *testing.F) {
	full := tally{usage: Usage{Up: 1, Extended: -2, FirstUse: ledgerStart, Earlier: Moved{WireTx: 3}}, hour: openSlot{-4, Volume{Up: 5}}, lost: Moved{Up: 6}}
	f.Add(full.encode(nil))
	f.Add((&take{seq: 1, open: true, to: ledgerStart.UnixMilli(), moved: Moved{Up: 1}}).encode(nil))
	f.Add([]byte{recordVersion})
	f.Fuzz(func(t *testing.T, b []byte) {
		if a, err := decodeTally(b); err == nil {
			if again, err := decodeTally(a.encode(nil)); err != nil || !reflect.DeepEqual(a, again) {
				t.Fatalf("%+v\n%+v, %v", a, again, err)
			}
		}
		if a, err := decodeTake(b); err == nil {
			if again, err := decodeTake(a.encode(nil)); err != nil || a != again {
				t.Fatalf("%+v\n%+v, %v", a, again, err)
			}
		}
		decodeVolume(b)
		payerOf(b)
	})
}

// Records of the first version, as they were written then.
func TestRecordsOfTheFirstVersionAreRead(t *testing.T) {
	want := &tally{
		usage: Usage{
			Up: 1, Down: 2, ChargedUp: 3, ChargedDown: 4, CarryUp: 5, CarryDown: 6, WireRx: 7, WireTx: 8, Extra: 9, Extended: 10,
			FirstUse: ledgerStart, LastSeen: ledgerStart, PeriodStart: ledgerStart, Generation: 11, Earlier: Moved{12, 13, 14, 15, 16, 17},
		},
		hour: openSlot{18, Volume{19, 20, 21, 22}}, day: openSlot{23, Volume{24, 25, 26, 27}}, lost: Moved{28, 29, 30, 31, 32, 33},
	}
	const written = "\x01\x01\x02\x03\x04\x05\x06\a\b\t\x14\x80\xa8\xa8\x94\x95g\x80\xa8\xa8\x94\x95g\x80\xa8\xa8\x94\x95g\v\f\r\x0e\x0f\x10\x11$\x13\x14\x15\x16.\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f !"
	if got, err := decodeTally([]byte(written)); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v; now it would be %q", got, err, want.encode(nil))
	}
	wantTake := take{seq: 1, acked: Moved{2, 3, 4, 5, 6, 7}, from: ledgerStart.UnixMilli(), open: true, to: ledgerStart.UnixMilli(), moved: Moved{8, 9, 10, 11, 12, 13}}
	const writtenTake = "\x01\x01\x02\x03\x04\x05\x06\a\x80\xa8\xa8\x94\x95g\x80\xa8\xa8\x94\x95g\b\t\n\v\f\r"
	if got, err := decodeTake([]byte(writtenTake)); err != nil || got != wantTake {
		t.Errorf("%+v, %v; now it would be %q", got, err, wantTake.encode(nil))
	}
}
