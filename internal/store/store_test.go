package store

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gatewayd/internal/store/storetest"

	"pgregory.net/rapid"
)

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func mustOpen(t testing.TB, dir string) (*Store, []string) {
	t.Helper()
	s, notes, err := Open(dir, start)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(start) })
	return s, notes
}

type change struct {
	bucket Bucket
	key    string
	value  []byte
}

func changes(list ...change) (c Changes) {
	for _, l := range list {
		c.Set(l.bucket, l.key, l.value)
	}
	return c
}

func set(key, value string) Batch {
	return Batch{Changes: changes(change{Usage, key, []byte(value)})}
}

func mustWrite(t testing.TB, s *Store, b Batch) {
	t.Helper()
	if err := s.Write(b, start); err != nil {
		t.Fatal(err)
	}
}

func contents(s *Store) map[string]string {
	all := make(map[string]string)
	for b := Users; b <= Takes; b++ {
		s.Each(b, func(key string, value []byte) { all[fmt.Sprint(b, " ", key)] = string(value) })
	}
	return all
}

func rows(t testing.TB, s *Store, series Series) []string {
	t.Helper()
	var all []string
	if err := s.Rows(series, -1000, 1<<40, func(slot int64, key, value []byte) {
		all = append(all, fmt.Sprintf("%d %s %s", slot, key, value))
	}); err != nil {
		t.Error(err)
	}
	return all
}

func TestWhatIsCommittedIsThereAfterAStop(t *testing.T) {
	dir := t.TempDir()
	s, _ := mustOpen(t, dir)
	mustWrite(t, s, Batch{
		Changes: changes(change{Users, "a", []byte("1")}, change{Usage, "a", []byte("2")}, change{Usage, "b", []byte{}}, change{IDs, "gone", []byte("x")}),
		Blocks:  []Block{{Hourly, 7, []Row{{"a", []byte("v")}}}},
	})
	at := start.Add(time.Hour)
	if err := s.Write(Batch{Changes: changes(change{IDs, "gone", nil})}, at); err != nil {
		t.Fatal(err)
	}
	want, wantRows := contents(s), rows(t, s, Hourly)
	s.Close(at)
	s, notes := mustOpen(t, dir)
	if got := contents(s); !maps.Equal(got, want) || len(got) != 3 {
		t.Errorf("records %v, want %v", got, want)
	}
	if got := rows(t, s, Hourly); !slices.Equal(got, wantRows) || len(got) != 1 {
		t.Errorf("rows %v, want %v", got, wantRows)
	}
	if !s.LastCommit().Equal(at) || !s.Writable() || len(notes) > 0 {
		t.Errorf("last commit %v, trouble %v, notes %v", s.LastCommit(), s.Trouble(), notes)
	}
	if s.Get(Usage, "b") == nil {
		t.Error("an empty value is none")
	}
}

func TestADirectoryIsUsedByOneAndNamesIt(t *testing.T) {
	dir := t.TempDir()
	s, _ := mustOpen(t, dir)
	_, _, err := Open(dir, start)
	if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), fmt.Sprintf("process %d (", os.Getpid())) {
		t.Errorf("error %v", err)
	}
	s.Close(start)
	mustOpen(t, dir)
}

func TestWithoutADirectoryAllIsInMemory(t *testing.T) {
	s, _ := mustOpen(t, "")
	if err := s.Keep(set("a", "1"), start); !errors.Is(err, ErrNotDurable) {
		t.Errorf("keep: %v", err)
	}
	if err := s.Write(set("b", "1"), start); !errors.Is(err, ErrNotDurable) {
		t.Errorf("write: %v", err)
	}
	if string(s.Get(Usage, "a")) != "1" || s.Get(Usage, "b") != nil {
		t.Errorf("records %v", contents(s))
	}
}

// The model of a store is a map; of its series a list. A crash is a second store that
// reads a copy of the directory's files.
func TestAnyCommitsAndCrashesLeaveWhatWasCommitted(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		dir := t.TempDir()
		s, _, err := Open(dir, start)
		if err != nil {
			rt.Fatal(err)
		}
		defer func() { s.Close(start) }()
		model := make(map[string]string)
		var series []string
		keys := rapid.SampledFrom([]string{"a", "b", "c"})
		for i := range rapid.IntRange(1, 40).Draw(rt, "steps") {
			switch rapid.IntRange(0, 9).Draw(rt, "what") {
			case 0: // a crash, in the middle of a later commit that never ended
				copied := t.TempDir()
				if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
					rt.Fatal(err)
				}
				scribble(rt, copied)
				s.Close(start)
				dir = copied
				if s, _, err = Open(dir, start); err != nil {
					rt.Fatal(err)
				}
			case 1:
				slot := rapid.Int64Range(0, 60).Draw(rt, "slot")
				mustWrite(t, s, Batch{Blocks: []Block{{Hourly, slot, []Row{{"k", fmt.Append(nil, i)}}}}})
				series = append(series, fmt.Sprintf("%d k %d", slot, i))
			default:
				key, value := keys.Draw(rt, "key"), fmt.Sprint(i)+strings.Repeat("+", rapid.IntRange(0, 40).Draw(rt, "longer"))
				c := change{Usage, key, []byte(value)}
				model["5"+" "+key] = value
				if rapid.Bool().Draw(rt, "delete") {
					c.value = nil
					delete(model, "5"+" "+key)
				}
				mustWrite(t, s, Batch{Changes: changes(c)})
			}
		}
		got := make(map[string]string)
		s.Each(Usage, func(key string, value []byte) { got["5 "+key] = string(value) })
		if !maps.Equal(got, model) {
			rt.Fatalf("records %v, want %v", got, model)
		}
		if got := rows(t, s, Hourly); !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(series))) {
			rt.Fatalf("rows %v, want %v", got, series)
		}
	})
}

func TestACommitAndAnAnswerShareNoMemory(t *testing.T) {
	s, _ := mustOpen(t, t.TempDir())
	b := set("n", "one")
	mustWrite(t, s, b)
	clear(b.Changes)
	one := s.Get(Usage, "n")
	mustWrite(t, s, set("n", "two"))
	if two := s.Get(Usage, "n"); string(one) != "one" || string(two) != "two" {
		t.Errorf("%q, then %q", one, two)
	}
}

// scribble adds what an interrupted commit leaves: a torn frame, a block that the journal
// does not know yet, a series file and a snapshot that nothing tells of.
func scribble(t *rapid.T, dir string) {
	frame := appendChanges(nil, start, set("a", "never committed").Changes)
	block := appendBlock(nil, Block{Hourly, 3, []Row{{"k", []byte("never committed")}}})
	appendTo(t, filepath.Join(dir, journalName), frame[:rapid.IntRange(0, len(frame)-1).Draw(t, "torn")])
	appendTo(t, filepath.Join(dir, "hourly-0"), block)
	appendTo(t, filepath.Join(dir, "hourly-9"), block)
	appendTo(t, filepath.Join(dir, newName), block)
}

func appendTo(t interface{ Fatal(...any) }, path string, b []byte) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(b); err != nil {
		t.Fatal(err)
	}
}

// filled makes a directory whose journal has a good copy and 20 commits behind its snapshot:
// record "n" counts the commits.
func filled(t testing.TB) string {
	dir := t.TempDir()
	s, _ := mustOpen(t, dir)
	mustWrite(t, s, set("n", "0"))
	for i := range 40 {
		if i == 20 {
			s.commit.Lock()
			err := s.fs.compact(s.all(), start, nil)
			s.commit.Unlock()
			if err != nil {
				t.Fatal(err)
			}
		}
		mustWrite(t, s, set("n", fmt.Sprint(i+1)))
		mustWrite(t, s, set(fmt.Sprint("pad", i%8), strings.Repeat("x", i)))
	}
	s.Close(start)
	return dir
}

func TestDamageAnywhereIsKeptAsideAndAnEarlierStateUsed(t *testing.T) {
	whole := filled(t)
	journal, err := os.ReadFile(filepath.Join(whole, journalName))
	if err != nil {
		t.Fatal(err)
	}
	var fromJournal, fromCopy int
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 120 {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(whole)); err != nil {
			t.Fatal(err)
		}
		b := slices.Clone(journal)
		cut := rnd.IntN(2) == 0
		if cut {
			b = b[:rnd.IntN(len(b))]
		} else {
			b[rnd.IntN(len(b))] ^= byte(1 + rnd.IntN(255))
		}
		if err := os.WriteFile(filepath.Join(dir, journalName), b, 0o600); err != nil {
			t.Fatal(err)
		}
		s, notes := mustOpen(t, dir)
		n := string(s.Get(Usage, "n"))
		switch {
		case n == "20":
			fromCopy++
		case n > "20":
			fromJournal++
		default:
			t.Fatalf("n is %q: neither the journal's nor the copy's; %v", n, notes)
		}
		aside, _ := filepath.Glob(filepath.Join(dir, "*"+asideMark+"*"))
		if !cut && (len(aside) != 1 || len(notes) == 0) {
			t.Fatalf("kept aside %v, notes %v", aside, notes)
		}
		if len(aside) == 1 {
			if kept, err := os.ReadFile(aside[0]); err != nil || !slices.Equal(kept, b) {
				t.Fatalf("what was kept aside is not what was there: %v", err)
			}
		}
		mustWrite(t, s, set("after", "1"))
		s.Close(start)
		if s, notes = mustOpen(t, dir); string(s.Get(Usage, "after")) != "1" || string(s.Get(Usage, "n")) != n || len(notes) > 0 {
			t.Fatalf("after another start: %v %v", contents(s), notes)
		}
		s.Close(start)
	}
	if fromJournal == 0 || fromCopy == 0 {
		t.Errorf("%d from the journal, %d from the copy", fromJournal, fromCopy)
	}
}

func TestWithJournalAndCopyDamagedItBeginsAnew(t *testing.T) {
	dir := filled(t)
	for _, name := range []string{journalName, goodName} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("gwstate\nnonsense"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, notes := mustOpen(t, dir)
	aside, _ := filepath.Glob(filepath.Join(dir, "*"+asideMark+"*"))
	if len(contents(s)) != 0 || len(aside) != 2 || len(notes) != 3 {
		t.Errorf("records %v, kept aside %v, notes %q", contents(s), aside, notes)
	}
	mustWrite(t, s, set("a", "1"))
}

func TestNoMoreThanThreeDamagedFilesAreKept(t *testing.T) {
	dir := filled(t)
	for i := range 5 {
		if err := os.WriteFile(filepath.Join(dir, journalName), fmt.Append(nil, i), 0o600); err != nil {
			t.Fatal(err)
		}
		s, _, err := Open(dir, start.Add(time.Duration(i)*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		s.Close(start)
	}
	aside, _ := filepath.Glob(filepath.Join(dir, "*"+asideMark+"*"))
	if len(aside) != asideKept || !strings.HasSuffix(aside[2], "120004.000") {
		t.Errorf("kept %v", aside)
	}
}

func TestACrashBetweenTheRenamesOfASnapshotLosesNothing(t *testing.T) {
	dir := filled(t)
	if err := os.Rename(filepath.Join(dir, journalName), filepath.Join(dir, goodName)); err != nil {
		t.Fatal(err)
	}
	s, notes := mustOpen(t, dir)
	if string(s.Get(Usage, "n")) != "40" || len(notes) > 0 {
		t.Errorf("records %v, notes %v", contents(s), notes)
	}
}

// A journal's torn end is mended by a snapshot. Until that is on disk the journal is all
// there is: without a good copy before the first snapshot, with an old one later.
func TestACrashBeforeATornJournalIsMendedLosesNothing(t *testing.T) {
	for what, interrupt := range map[string]func(dir string) error{
		"no room for the snapshot": func(dir string) error { return os.Mkdir(filepath.Join(dir, newName), 0o700) },
		"between its renames": func(dir string) error {
			return os.Rename(filepath.Join(dir, journalName), filepath.Join(dir, goodName))
		},
	} {
		for _, copied := range []bool{false, true} {
			dir := filled(t)
			appendTo(t, filepath.Join(dir, journalName), []byte{20, 0, 0, 0, 1})
			if !copied {
				os.Remove(filepath.Join(dir, goodName))
			}
			if err := interrupt(dir); err != nil {
				t.Fatal(err)
			}
			for start := range 2 {
				s, notes := mustOpen(t, dir)
				if got := string(s.Get(Usage, "n")); got != "40" {
					t.Errorf("%s, good copy %v, start %d: n is %q; %v", what, copied, start, got, notes)
				}
				s.fs.close() // killed
				os.Remove(filepath.Join(dir, newName))
			}
		}
	}
}

func TestAJournalStaysBounded(t *testing.T) {
	dir := t.TempDir()
	s, _ := mustOpen(t, dir)
	value := strings.Repeat("x", 10_000)
	commit := func(what string, commits int, write func(Batch, time.Time) error, bound int64) (longest int64) {
		for i := range commits {
			if err := write(set(fmt.Sprint(i%3), value), start); err != nil {
				t.Fatal(err)
			}
			info, err := os.Stat(filepath.Join(dir, journalName))
			if err != nil || info.Size() > bound+8*int64(len(value)) {
				t.Fatalf("after %d of %s: %v, %v", i, what, info.Size(), err)
			}
			longest = max(longest, info.Size())
		}
		return longest
	}
	commit("Keep", 500, s.Keep, compactAfter)
	if longest := commit("Write", 500, s.Write, 2*compactAfter); longest <= 3*compactAfter/2 {
		t.Errorf("who waited has waited for a snapshot: the journal had at most %d bytes", longest)
	}
	commit("Keep, which makes up for it", 2, s.Keep, 2*compactAfter)
	commit("Keep", 500, s.Keep, compactAfter)
	if _, err := os.Stat(filepath.Join(dir, goodName)); err != nil {
		t.Error(err)
	}
}

func TestADirectoryThatSomebodyEmptiedIsWrittenAnew(t *testing.T) {
	dir := filled(t)
	s, _ := mustOpen(t, dir)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := s.Write(set("n", "41"), start); err != nil {
		// The directory itself is made again with the next try.
		t.Fatal(err)
	}
	want := contents(s)
	s.Close(start)
	if s, _ = mustOpen(t, dir); !maps.Equal(contents(s), want) {
		t.Errorf("records %v, want %v", contents(s), want)
	}
}

func TestStateThatAppearsLateIsLeftAlone(t *testing.T) {
	dir := filled(t)
	hidden := dir + ".hidden"
	if err := os.Rename(dir, hidden); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // in the way
		t.Fatal(err)
	}
	s, _ := mustOpen(t, dir)
	if s.Writable() {
		t.Fatal("writable without a directory")
	}
	_ = s.Keep(set("n", "1"), start)
	if err := errors.Join(os.Remove(dir), os.Rename(hidden, dir)); err != nil {
		t.Fatal(err)
	}
	if err := s.Keep(set("n", "2"), start.Add(time.Hour)); !errors.Is(err, errAppeared) {
		t.Errorf("error %v", err)
	}
	s.Close(start)
	if s, _ = mustOpen(t, dir); string(s.Get(Usage, "n")) != "40" {
		t.Errorf("n %s", s.Get(Usage, "n"))
	}
}

func TestANewerFormatIsRefused(t *testing.T) {
	dir := t.TempDir()
	s, _, err := open(dir, start, format{version: 7})
	if err != nil {
		t.Fatal(err)
	}
	s.Close(start)
	if _, _, err = Open(dir, start); !errors.Is(err, ErrNewer) || !strings.Contains(err.Error(), "format 7") {
		t.Errorf("error %v", err)
	}
}

func TestAnOldFormatIsMigratedOnceAndTheOldFileIsTheGoodCopy(t *testing.T) {
	dir := filled(t)
	old, err := os.ReadFile(filepath.Join(dir, journalName))
	if err != nil {
		t.Fatal(err)
	}
	grow := func(r records) error {
		r.set(Usage, []byte("n"), append(slices.Clone(r.get(Usage, "n")), "+1"...))
		return nil
	}
	for range 2 {
		s, notes, err := open(dir, start, format{version: 2, migrate: map[uint64]func(records) error{1: grow}})
		if err != nil || len(notes) > 0 {
			t.Fatal(err, notes)
		}
		if string(s.Get(Usage, "n")) != "40+1" {
			t.Errorf("n %s", s.Get(Usage, "n"))
		}
		s.Close(start)
	}
	if good, err := os.ReadFile(filepath.Join(dir, goodName)); err != nil || !slices.Equal(good, old) {
		t.Errorf("the good copy is not what was migrated: %v", err)
	}
}

func TestAFileOfTheFirstFormatIsRead(t *testing.T) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS("testdata/format1")); err != nil {
		t.Fatal(err)
	}
	s, notes := mustOpen(t, dir)
	want := map[string]string{"1 ann": "{}", "3 ann": "\x01", "5 ann": "usage"}
	if got := contents(s); !maps.Equal(got, want) || len(notes) > 0 {
		t.Errorf("records %q, want %q; %v", got, want, notes)
	}
	if got := rows(t, s, Hourly); !slices.Equal(got, []string{"7 ann v"}) {
		t.Errorf("rows %q", got)
	}
	if !s.LastCommit().Equal(start) {
		t.Errorf("last commit %v", s.LastCommit())
	}
}

func TestOldSeriesFilesGo(t *testing.T) {
	dir := t.TempDir()
	s, _ := mustOpen(t, dir)
	for slot := range int64(100) {
		mustWrite(t, s, Batch{Blocks: []Block{{Hourly, slot, []Row{{"k", nil}}}, {Daily, slot, []Row{{"k", nil}}}}})
	}
	if err := s.Forget(Hourly, 50, start); err != nil {
		t.Fatal(err)
	}
	if got := rows(t, s, Hourly); len(got) != 100-48 {
		t.Errorf("%d rows of hours are left, want those from slot 48 on", len(got))
	}
	if got := rows(t, s, Daily); len(got) != 100 {
		t.Errorf("%d rows of days are left", len(got))
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "hourly-*")); len(files) != 3 {
		t.Errorf("files %v", files)
	}
}

func TestADamagedSeriesFileCostsItsRowsAlone(t *testing.T) {
	dir := t.TempDir()
	s, _ := mustOpen(t, dir)
	for slot := range int64(3) {
		mustWrite(t, s, Batch{Blocks: []Block{{Hourly, slot * 24, []Row{{"k", []byte("vvvv")}}}}})
	}
	if err := os.WriteFile(filepath.Join(dir, "hourly-1"), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	n := 0
	if err := s.Rows(Hourly, 0, 100, func(int64, []byte, []byte) { n++ }); err == nil || n != 2 {
		t.Errorf("%d rows, error %v", n, err)
	}
	mustWrite(t, s, Batch{Blocks: []Block{{Hourly, 25, []Row{{"k", []byte("w")}}}}})
}

func TestRowsThatWaitAreBounded(t *testing.T) {
	s, _ := mustOpen(t, "")
	b := Block{Hourly, 1, []Row{{"k", make([]byte, 1<<20)}}}
	for range 40 {
		_ = s.Keep(Batch{Blocks: []Block{b}}, start)
	}
	n := len(rows(t, s, Hourly))
	if uint64(n)+s.Lost() != 40 || n < 14 || n > 16 {
		t.Errorf("%d rows wait, %d are lost", n, s.Lost())
	}
}

// A full disk: a small one that is filled and emptied again.
func TestAFullDiskIsToldAndMadeUpForLater(t *testing.T) {
	dir := t.TempDir()
	storetest.Small(t, dir)
	s, _ := mustOpen(t, dir)
	mustWrite(t, s, set("before", "1"))
	filler := filepath.Join(dir, "filler")
	_ = os.WriteFile(filler, make([]byte, 1<<20), 0o600)
	big := strings.Repeat("x", 8000)
	block := []Block{{Hourly, 1, []Row{{"k", []byte(big)}}}}
	if err := s.Write(set("refused", big), start); !errors.Is(err, ErrNotDurable) {
		t.Fatalf("write on a full disk: %v", err)
	}
	if err := s.Keep(Batch{Changes: set("kept", big).Changes, Blocks: block}, start); !errors.Is(err, ErrNotDurable) {
		t.Fatalf("keep on a full disk: %v", err)
	}
	if s.Writable() || s.Get(Usage, "refused") != nil || string(s.Get(Usage, "kept")) != big || len(rows(t, s, Hourly)) != 1 {
		t.Fatal("a full disk was not told, or what was kept is not there")
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if err := s.Keep(Batch{}, start.Add(time.Millisecond)); err == nil {
		t.Error("no pause after a failure")
	}
	if err := s.Keep(Batch{}, start.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	want := contents(s)
	s.Close(start)
	s, notes := mustOpen(t, dir)
	if got := contents(s); !maps.Equal(got, want) || len(got) != 2 || len(rows(t, s, Hourly)) != 1 || len(notes) > 0 {
		t.Errorf("records %d, rows %d, notes %v", len(got), len(rows(t, s, Hourly)), notes)
	}
}

func TestAReadOnlyDirectoryIsReadAndWrittenOnceItCanBe(t *testing.T) {
	dir := filled(t)
	storetest.Mount(t, dir, "--bind", dir)
	storetest.Mount(t, dir, "-o", "remount,bind,ro")
	s, _ := mustOpen(t, dir)
	if s.Writable() || string(s.Get(Usage, "n")) != "40" {
		t.Fatalf("trouble %v, records %v", s.Trouble(), contents(s))
	}
	_ = s.Keep(set("n", "41"), start)
	if out, err := exec.Command("mount", "-o", "remount,bind,rw", dir).CombinedOutput(); err != nil {
		t.Fatalf("%s", out)
	}
	if err := s.Keep(Batch{}, start.Add(time.Hour)); err != nil || !s.Writable() {
		t.Fatal(err)
	}
	s.Close(start)
	if s, _ = mustOpen(t, dir); string(s.Get(Usage, "n")) != "41" {
		t.Errorf("n %s", s.Get(Usage, "n"))
	}
}
