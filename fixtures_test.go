package gatewayd_test

import (
	"go/token"
	"strings"
	"testing"
)

func fixture(t *testing.T, path string, files map[string]string) *pkg {
	t.Helper()
	p := &pkg{path: path, fset: token.NewFileSet()}
	for name, source := range files {
		if err := p.add(name, source); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func expect(t *testing.T, name string, problems []string, want string) {
	t.Helper()
	all := strings.Join(problems, "\n")
	if want == "" && len(problems) > 0 {
		t.Errorf("%s: %s", name, all)
	}
	if want != "" && !strings.Contains(all, want) {
		t.Errorf("%s: no %q among the problems %q", name, want, all)
	}
}

func TestABrokenLayerIsFound(t *testing.T) {
	for _, c := range []struct{ path, imports, want string }{
		{"track", "gatewayd/user", "track: must not import user"},
		{"user", "gatewayd/track", "user: must not import track"},
		{"fanout", "gatewayd/internal/config", "must not import internal/config"},
		{"netstack", "gatewayd/tun", "must not import tun"},
		{"flow", "gatewayd/internal/epoll", "must not import internal/epoll"},
		{"internal/epoll", "gatewayd/netstack", "must not import netstack"},
		{"internal/api", "gatewayd/internal/gateway", "must not import internal/gateway"},
		{"track", "gatewayd/route/routetest", "must not import route/routetest"},
		{"route/matches", "", "not in the table"},
		{"track", "gatewayd/flow", ""},
		{"netstack", "gatewayd/internal/epoll", ""},
		{"netstack/wire", "gatewayd/flow", ""},
		{"internal/gateway", "gatewayd/fanout", ""},
		{"route/routetest", "gatewayd/route", ""},
		{"route/routetest", "gatewayd/track", "must not import track"},
		{"fanout/fanouttest", "gatewayd/route/routetest", ""},
	} {
		p := &pkg{path: c.path, imports: strings.Fields(c.imports)}
		expect(t, c.path+" importing "+c.imports, checkLayers(p), c.want)
	}
}

func TestADependencyOfAnotherOwnerIsFound(t *testing.T) {
	const netlink, goleak = "github.com/vishvananda/netlink/nl", "go.uber.org/goleak"
	for _, c := range []struct{ path, imports, tests, want string }{
		{"tun", netlink, "", "which internal/hostnet owns"},
		{"tun", "", netlink, "which internal/hostnet owns"},
		{"internal/hostnet", netlink, "", ""},
		{"route", "golang.org/x/sys/unix net/netip", "", ""},
		{"wg", "golang.zx2c4.com/wireguard/wgctrl/wgtypes", "", ""},
		{"track", goleak, "", "nobody owns"},
		{"track", "", goleak, ""},
		{"track/tracktest", goleak, "", ""},
		{"track", "example.org/new", "", "nobody owns"},
		{"track", "github.com/vishvananda/netlinkx", "", "nobody owns"},
	} {
		p := &pkg{path: c.path, imports: strings.Fields(c.imports), testImports: strings.Fields(c.tests)}
		expect(t, c.path+" importing "+c.imports+c.tests, checkOwners(p), c.want)
	}
}

func TestPackagesWithoutOrWithTwoCommentsAreFound(t *testing.T) {
	const bare, commented = "package p\n", "// Package p is.\npackage p\n"
	expect(t, "none", checkPackageComment(fixture(t, "p", map[string]string{"a.go": bare})), "0 package comments")
	expect(t, "two", checkPackageComment(fixture(t, "p", map[string]string{"a.go": commented, "b.go": commented})), "2 package comments")
	expect(t, "one", checkPackageComment(fixture(t, "p", map[string]string{"a.go": commented, "b.go": bare, "c_test.go": commented})), "")
	expect(t, "tests only", checkPackageComment(fixture(t, "p", map[string]string{"c_test.go": bare})), "")
}

func TestBareExportedNamesAreFound(t *testing.T) {
	for _, c := range []struct{ source, want string }{
		{"func F() {}", "F is exported"},
		{"type T struct{}", "T is exported"},
		{"type t struct{}; func (t) M() {}", ""},
		{"// T is.\ntype T[V any] int\nfunc (*T[V]) M(){}", "M is exported"},
		{"const C = 1", "C is exported"},
		{"// Some.\nconst (\nC = 1\nD = 2\n)", ""},
		{"const (\nC = 1 // one\n)", ""},
		{"// Types.\ntype (\nT int\n)", "T is exported"},
		{"var V, w int", "V is exported"},
		{"// F does.\nfunc F() {}", ""},
	} {
		expect(t, c.source, checkExported(fixture(t, "p", map[string]string{"a.go": "package p\n" + c.source})), c.want)
	}
}

func TestLongFilesAndFunctionsAreFound(t *testing.T) {
	lines := func(n int) string { return strings.Repeat("\n", n) }
	long := "package p\nfunc f() {" + lines(maxFunction) + "}\n"
	expect(t, "function", checkSize(fixture(t, "p", map[string]string{"a.go": long})), "f has 101 lines")
	expect(t, "file", checkSize(fixture(t, "p", map[string]string{"a.go": "package p" + lines(maxFile+1)})), "501 lines")
	expect(t, "test", checkSize(fixture(t, "p", map[string]string{"a_test.go": long + lines(maxFile)})), "")
	short := "package p\nfunc f() {" + lines(maxFunction-1) + "}\n"
	expect(t, "short", checkSize(fixture(t, "p", map[string]string{"a.go": short})), "")
}

func TestSleepingTestsAreFound(t *testing.T) {
	const sleep = "func f() { time.Sleep(1) }\n"
	for name, c := range map[string]struct{ file, source, want string }{
		"plain":     {"a_test.go", "package p\nimport \"time\"\n" + sleep, "time.Sleep in a test"},
		"as value":  {"a_test.go", "package p\nimport \"time\"\nvar s = time.Sleep\n", "time.Sleep in a test"},
		"bubble":    {"a_test.go", "package p\nimport (\"time\"; \"testing/synctest\")\n" + sleep, ""},
		"lab":       {"a_test.go", "package p\nimport (\"time\"; \"gatewayd/internal/testnet\")\n" + sleep, ""},
		"namespace": {"a_ns_test.go", "package p\nimport \"time\"\n" + sleep, ""},
		"code":      {"a.go", "package p\nimport \"time\"\n" + sleep, ""},
	} {
		expect(t, name, checkSleep(fixture(t, "p", map[string]string{c.file: c.source})), c.want)
	}
}

func TestInitIsFound(t *testing.T) {
	expect(t, "init", checkInit(fixture(t, "p", map[string]string{"a.go": "package p\nfunc init() {}"})), "func init")
	expect(t, "method", checkInit(fixture(t, "p", map[string]string{"a.go": "package p\ntype t int\nfunc (t) init() {}"})), "")
}
