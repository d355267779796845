package shrink

import (
	"maps"
	"reflect"
	"testing"
)

func filled(n int) map[int]int {
	m := map[int]int{}
	for i := range n {
		m[i] = -i
	}
	return m
}

func same(a, b map[int]int) bool { return reflect.ValueOf(a).Pointer() == reflect.ValueOf(b).Pointer() }

func TestAMapIsCopiedOnceAnEighthOfItsPeakIsLeft(t *testing.T) {
	const most = 2 * keep
	peak := 0
	m := Map(filled(most), &peak)
	for i := range most {
		delete(m, i)
		left := maps.Clone(m)
		got := Map(m, &peak)
		if !maps.Equal(got, left) {
			t.Fatalf("%d entries of %d are left", len(got), len(left))
		}
		if want := len(m) == most/part; same(got, m) == want {
			t.Fatalf("copied is %v with %d of %d left", !want, len(m), most)
		}
		if m = got; len(m) == most/part {
			break
		}
	}
	if peak != most/part {
		t.Errorf("the peak is %d after the copy", peak)
	}
}

func TestASmallMapKeepsItsRoom(t *testing.T) {
	peak := 0
	m := Map(filled(keep), &peak)
	clear(m)
	if got := Map(m, &peak); !same(got, m) {
		t.Error("copied")
	}
	if got := Map[int, int](nil, new(int)); got != nil {
		t.Error("made one of nothing")
	}
}
