package config

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// memory is files that are not on a disk.
func memory(texts map[string]string) files {
	return files{
		glob: func(pattern string) ([]string, error) {
			var found []string
			for _, name := range slices.Sorted(maps.Keys(texts)) {
				ok, err := filepath.Match(pattern, name)
				if err != nil {
					return nil, err
				}
				if ok {
					found = append(found, name)
				}
			}
			return found, nil
		},
		read: func(path string) ([]byte, error) {
			text, ok := texts[path]
			if !ok {
				return nil, os.ErrNotExist
			}
			return []byte(text), nil
		},
		same: filepath.Clean,
	}
}

func parseMemory(main string, texts map[string]string) (*Config, error) {
	return parse("/etc/gw.yaml", []byte(main), memory(texts))
}

func TestListsOfIncludedFilesAreAppended(t *testing.T) {
	c, err := parseMemory("version: 1\ninclude: [conf.d/*.yaml]\nlog: {level: warn}\nroute: {rules: [{name: one, outbound: drop}]}\n", map[string]string{
		"/etc/conf.d/b.yaml":      "route: {rules: [{name: three, outbound: b}]}\nlog: {format: json}\n",
		"/etc/conf.d/a.yaml":      "version: 1\nroute: {rules: [{name: two, outbound: a}], default: a}\noutbounds: {tag: a, type: direct}\ninclude: deep/c.yaml\n",
		"/etc/conf.d/deep/c.yaml": "outbounds: [{tag: b, type: direct}]\napi: {tls: {cert_file: /c}}\n",
		"/etc/conf.d/d.yaml":      "api: {tls: {key_file: /k}}\n",
	})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, r := range c.Route.Rules {
		names = append(names, r.Name)
	}
	if !slices.Equal(names, []string{"one", "two", "three"}) || c.Route.Default != "a" || c.Log.Format != "json" || c.API.TLS != (TLS{"/c", "/k"}) {
		t.Errorf("config %+v", c)
	}
	if want := []string{"/etc/gw.yaml", "/etc/conf.d/a.yaml", "/etc/conf.d/deep/c.yaml", "/etc/conf.d/b.yaml", "/etc/conf.d/d.yaml"}; !slices.Equal(c.Files(), want) {
		t.Errorf("files %v", c.Files())
	}
}

func TestAPatternMayMatchNothing(t *testing.T) {
	if _, err := parseMemory("version: 1\ninclude: none/*.yaml\n", nil); err != nil {
		t.Error(err)
	}
}

func TestBadIncludesAreToldWithTheirPlace(t *testing.T) {
	many := make(map[string]string)
	for i := range 70 {
		many["/etc/m/"+strconv.Itoa(i)] = ""
	}
	large := map[string]string{"/etc/l": "#" + strings.Repeat("x", maxText)}
	for name, test := range map[string]struct {
		main  string
		texts map[string]string
		want  string
	}{
		"a scalar twice": {
			"version: 1\nprivacy: full\ninclude: a\n",
			map[string]string{"/etc/a": "\nprivacy: full\n"},
			"/etc/a:2:10: privacy: set before at /etc/gw.yaml:2:10",
		},
		"a port twice": {
			"version: 1\ntimeouts: {udp: {ports: {53: 1s}}}\ninclude: a\n",
			map[string]string{"/etc/a": "timeouts: {udp: {ports: {53: 1s}}}\n"},
			"/etc/a:1:30: timeouts.udp.ports.53: set before at /etc/gw.yaml:2:30",
		},
		"a tag twice": {
			"version: 1\noutbounds: {tag: a, type: direct}\ninclude: a\n",
			map[string]string{"/etc/a": "outbounds: {tag: a, type: direct}\n"},
			"/etc/a:1:18: outbounds.tag: \"a\" is taken, by outbounds[0].tag at /etc/gw.yaml:2:18",
		},
		"a fault in the included file": {
			"version: 1\ninclude: a\nroute: {rules: {outbound: drop}}\n",
			map[string]string{"/etc/a": "route:\n  rules:\n    - {outbound: b}\n"},
			"/etc/a:3:18: route.rules[1].outbound: no outbound \"b\"",
		},
		"itself": {"version: 1\ninclude: gw.yaml\n", nil, "/etc/gw.yaml:2:10: include: includes itself: /etc/gw.yaml → /etc/gw.yaml"},
		"a cycle": {
			"version: 1\ninclude: a\n",
			map[string]string{"/etc/a": "include: [b]\n", "/etc/b": "include: [/etc/x/../a]\n"},
			"/etc/b:1:11: include[2]: includes itself: /etc/a → /etc/b → /etc/a",
		},
		"twice": {
			"version: 1\ninclude: [a, \"?\"]\n",
			map[string]string{"/etc/a": ""},
			"/etc/gw.yaml:2:14: include[1]: /etc/a is included already, by /etc/gw.yaml",
		},
		"a missing one":  {"version: 1\ninclude: a\nroute: {default: b}\n", nil, "/etc/gw.yaml:2:10: include: /etc/a can not be read"},
		"another format": {"version: 1\ninclude: a\n", map[string]string{"/etc/a": "version: 2\n"}, "/etc/a:1:10: version"},
		"not YAML":       {"version: 1\ninclude: a\n", map[string]string{"/etc/a": "{"}, "/etc/a:1:1: not YAML"},
		"too many":       {"version: 1\ninclude: m/*\n", many, "/etc/gw.yaml:2:10: include: more than 64 files"},
		"a large one":    {"version: 1\ninclude: l\n", large, "/etc/l: the file is larger than 1 MiB"},
	} {
		_, err := parseMemory(test.main, test.texts)
		if p := problems(t, err); !strings.HasPrefix(err.Error(), test.want) || len(p.List)+p.More > 7 {
			t.Errorf("%s: got\n%v\nwant %s", name, err, test.want)
		}
	}
}

func TestIncludesAreReadFromTheDisk(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("gw.yaml", "version: 1\ninclude: \"*.yml\"\n")
	write("a.yml", "outbounds: {tag: a, type: direct}\n")
	c, err := Load(filepath.Join(dir, "gw.yaml"))
	if err != nil || len(c.Outbounds) != 2 {
		t.Fatalf("config %+v, error %v", c, err)
	}
	if err := os.Symlink("gw.yaml", filepath.Join(dir, "b.yml")); err != nil {
		t.Fatal(err)
	}
	if _, err = Load(filepath.Join(dir, "gw.yaml")); !strings.Contains(err.Error(), "includes itself") {
		t.Errorf("a link to the file itself: %v", err)
	}
	write("gw.yaml", "version: 1\ninclude: /dev/zero\n")
	if _, err = Load(filepath.Join(dir, "gw.yaml")); !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a device: %v", err)
	}
}
