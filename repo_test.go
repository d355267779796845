package gatewayd_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const module = "gatewayd"

// pkg is a package as the rules see it.
type pkg struct {
	path        string   // inside the module: "netstack/wire"
	imports     []string // of its code
	testImports []string // of its tests, inside the package and outside
	fset        *token.FileSet
	files       []*ast.File // code
	tests       []*ast.File
}

func (p *pkg) at(n ast.Node) token.Position { return p.fset.Position(n.Pos()) }

// add parses a file into the package. A nil source reads it.
func (p *pkg) add(name string, source any) error {
	f, err := parser.ParseFile(p.fset, name, source, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	if strings.HasSuffix(name, "_test.go") {
		p.tests = append(p.tests, f)
	} else {
		p.files = append(p.files, f)
	}
	return nil
}

// loadPackages asks the go command for every package of the module.
func loadPackages() ([]*pkg, error) {
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Dir,GoFiles,IgnoredGoFiles,TestGoFiles,XTestGoFiles,Imports,TestImports,XTestImports", "./...")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	var all []*pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var l struct {
			ImportPath, Dir                                    string
			GoFiles, IgnoredGoFiles, TestGoFiles, XTestGoFiles []string
			Imports, TestImports, XTestImports                 []string
		}
		if err := dec.Decode(&l); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		p := &pkg{path: inside(l.ImportPath), imports: l.Imports, testImports: append(l.TestImports, l.XTestImports...), fset: token.NewFileSet()}
		for _, names := range [][]string{l.GoFiles, l.IgnoredGoFiles, l.TestGoFiles, l.XTestGoFiles} {
			for _, name := range names {
				if err := p.add(filepath.Join(l.Dir, name), nil); err != nil {
					return nil, err
				}
			}
		}
		all = append(all, p)
	}
}

// inside is an import path relative to the module, "" for one outside it.
func inside(path string) string {
	if path == module {
		return "."
	}
	if rest, ok := strings.CutPrefix(path, module+"/"); ok {
		return rest
	}
	return ""
}

func TestTheRepositoryKeepsItsRules(t *testing.T) {
	all, err := loadPackages()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 5 {
		t.Fatalf("only %d packages found", len(all))
	}
	for name, rule := range rules {
		t.Run(name, func(t *testing.T) {
			for _, p := range all {
				for _, problem := range rule(p) {
					t.Error(problem)
				}
			}
		})
	}
}

func TestOnlyPackagesThatAreThereAreInTheTable(t *testing.T) {
	for path := range layers {
		if _, err := os.Stat(path); err != nil && !planned[path] {
			t.Errorf("layers: %s is in the table, but not in the tree", path)
		}
	}
}
