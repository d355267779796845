package config

import (
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestSizesAreReadWithTheirUnits(t *testing.T) {
	for text, want := range map[string]Size{
		"0": 0, "123": 123, "0B": 0, "7B": 7, "1kB": 1000, "1KB": 1000, "50GB": 50e9, "2TB": 2e12, "1.5MB": 1500000,
		"1KiB": 1024, "4MiB": 4 << 20, "4 MiB": 4 << 20, "0.5GiB": 512 << 20, "1TiB": 1 << 40, "0.3B": 0,
		"18446744073709551615": math.MaxUint64,
	} {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "B", "-1", "-1B", "+1B", "1mb", "1 ", "1  B", "1.B", ".5B", "1e3B", "1GBs", "20MB/s", "18446744073709551616", "99999999TiB", "1_0B", "0x1B", "1.5", "1,5MB"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("%q is %d, want an error", text, got)
		}
	}
}

func TestRatesAreReadWithTheirUnits(t *testing.T) {
	for text, want := range map[string]Rate{
		"0": 0, "125": 125, "20Mbit/s": 2500000, "2500kB/s": 2500000, "8bit/s": 1, "9bit/s": 1, "1Gbit/s": 125e6, "0.5kbit/s": 62,
		"1MiB/s": 1 << 20, "0bit/s": 0, "0.0Mbit/s": 0, "1.5 MB/s": 1500000, "1Kbit/s": 125,
	} {
		if got, err := ParseRate(text); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "/s", "20/s", "20Mbit", "20MB", "-1B/s", "1bit/s", "0.5B/s", "20mbit/s", "20Mbps", "20Mbit/m", "999999999999Gbit/s"} {
		if got, err := ParseRate(text); err == nil {
			t.Errorf("%q is %d, want an error", text, got)
		}
	}
}

func TestDurationsHaveDaysAndWeeks(t *testing.T) {
	day := 24 * time.Hour
	for text, want := range map[string]time.Duration{
		"0s": 0, "10s": 10 * time.Second, "1h30m": 90 * time.Minute, "100ms": 100 * time.Millisecond, "5µs": 5 * time.Microsecond,
		"7d": 7 * day, "2w": 14 * day, "1d12h": 36 * time.Hour, "1w1d1ns": 8*day + 1, "1.5d": 36 * time.Hour, "0.5w": 84 * time.Hour, "12h1d": 36 * time.Hour,
	} {
		if got, err := ParseDuration(text); err != nil || got != want {
			t.Errorf("%s: %s, %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"", "0", "10", "d", "-1d", "-1s", "1 d", "1D", "1y", "1d-1h", "+1d", "1..5d", ".", "1d.", "15251w", "106751d24h", "9999999999999999999s", "1e3s"} {
		if got, err := ParseDuration(text); err == nil {
			t.Errorf("%q is %s, want an error", text, got)
		}
	}
}

func TestADurationReadsBackWhatGoWrites(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := time.Duration(rapid.Int64Range(0, math.MaxInt64).Draw(t, "d"))
		if got, err := ParseDuration(d.String()); err != nil || got != d {
			t.Fatalf("%s is %s, %v", d, got, err)
		}
	})
}

func TestARateIsExactToTheByte(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		whole, fraction := rapid.Uint32().Draw(t, "whole"), rapid.IntRange(0, 999).Draw(t, "fraction")
		want := new(big.Rat).SetFrac64(int64(whole)*1000+int64(fraction), 1000) // Mbit
		want.Mul(want, big.NewRat(1e6, 8))
		bytes := new(big.Int).Quo(want.Num(), want.Denom()).Uint64()
		if got, err := ParseRate(fmt.Sprintf("%d.%03dMbit/s", whole, fraction)); err != nil || uint64(got) != bytes {
			t.Fatalf("%d, %v, want %d", got, err, bytes)
		}
	})
}

func TestSizesAndRatesAreIntegersInJSON(t *testing.T) {
	var v struct {
		S []Size
		R []Rate
	}
	if err := json.Unmarshal([]byte(`{"S":[5,"5KB","5"],"R":[5,"8kbit/s"]}`), &v); err != nil {
		t.Fatal(err)
	}
	if b, _ := json.Marshal(v); string(b) != `{"S":[5,5000,5],"R":[5,1000]}` {
		t.Errorf("written as %s", b)
	}
	for _, bad := range []string{`{"S":[-5]}`, `{"S":[1.5]}`, `{"R":["5"x]}`, `{"R":[true]}`, `{"R":[null]}`, `{"R":["fast"]}`} {
		if err := json.Unmarshal([]byte(bad), &v); err == nil {
			t.Errorf("%s is accepted", bad)
		}
	}
}

func FuzzUnits(f *testing.F) {
	for _, s := range []string{"10s", "1.5d", "20Mbit/s", "2500kB/s", "4 MiB", "18446744073709551615", "15250w", "0.000001", "999.999999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if d, err := ParseDuration(s); err == nil && d < 0 {
			t.Errorf("%q is negative", s)
		}
		if m, err := ParseMultiplier(s); err == nil {
			exact, ok := new(big.Rat).SetString(s)
			if !ok || !m.Set || exact.Cmp(big.NewRat(int64(m.Millionths), 1e6)) != 0 {
				t.Errorf("%q is %+v", s, m)
			}
		}
		size, err := ParseSize(s)
		if again, sizeErr := ParseSize(fmt.Sprint(uint64(size))); err == nil && (sizeErr != nil || again != size) {
			t.Errorf("%q is %d, and that is %d", s, size, again)
		}
		rate, err := ParseRate(s)
		if again, rateErr := ParseRate(fmt.Sprint(uint64(rate))); err == nil && (rateErr != nil || again != rate) {
			t.Errorf("%q is %d, and that is %d", s, rate, again)
		}
	})
}
