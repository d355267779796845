package gatewayd_test

import (
	"go/ast"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// testName is how a document names a test.
var testName = regexp.MustCompile("`((?:Test|Benchmark|Example|Fuzz)(?:[A-Z_][A-Za-z0-9_]*)?)`")

// missingTests are the names of tests in a document that no package has.
func missingTests(document string, all []*pkg) (missing []string) {
	there := make(map[string]bool)
	for _, p := range all {
		for _, f := range p.tests {
			for _, d := range f.Decls {
				if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
					there[fn.Name.Name] = true
				}
			}
		}
	}
	for _, m := range testName.FindAllStringSubmatch(document, -1) {
		if !there[m[1]] {
			missing = append(missing, m[1])
		}
	}
	return missing
}

func TestEveryTestThatADocumentNamesIsThere(t *testing.T) {
	all, err := loadPackages()
	if err != nil {
		t.Fatal(err)
	}
	documents, err := filepath.Glob("docs/*.md")
	if err != nil || len(documents) == 0 {
		t.Fatalf("documents %v, %v", documents, err)
	}
	for _, name := range documents {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, missing := range missingTests(string(b), all) {
			t.Errorf("%s names %s, which no package has", name, missing)
		}
	}
}

func TestADocumentsTestThatIsMissingIsFound(t *testing.T) {
	p := fixture(t, "p", map[string]string{"a_test.go": "package p\nfunc TestIt() {}\nfunc Example() {}\n"})
	got := missingTests("`TestIt`, `TestOther`: `Example`, `ExampleT_M`, `Testing`, TestBare", []*pkg{p})
	if strings.Join(got, " ") != "TestOther ExampleT_M" {
		t.Errorf("missing %q", got)
	}
}
