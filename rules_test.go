package gatewayd_test

import (
	"fmt"
	"go/ast"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const (
	maxFile     = 500 // lines, of code
	maxFunction = 100
)

// rules are what the repository test holds every package to. Each tells what is
// wrong, with its place.
var rules = map[string]func(*pkg) []string{
	"layers":             checkLayers,
	"owners":             checkOwners,
	"package comments":   checkPackageComment,
	"exported names":     checkExported,
	"size":               checkSize,
	"sleeping tests":     checkSleep,
	"effects of loading": checkInit,
}

// checkPackageComment wants exactly one, so that there is one place to read.
func checkPackageComment(p *pkg) []string {
	var commented []string
	for _, f := range p.files {
		if f.Doc != nil {
			commented = append(commented, filepath.Base(p.at(f).Filename))
		}
	}
	if len(p.files) > 0 && len(commented) != 1 {
		return []string{fmt.Sprintf("%s: %d package comments %v, want one", p.path, len(commented), commented)}
	}
	return nil
}

func checkExported(p *pkg) (problems []string) {
	undocumented := func(n ast.Node, name string) {
		problems = append(problems, fmt.Sprintf("%s: %s is exported and has no comment", p.at(n), name))
	}
	for _, f := range p.files {
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Doc == nil && d.Name.IsExported() && exportedReceiver(d) {
					undocumented(d, d.Name.Name)
				}
			case *ast.GenDecl:
				for _, s := range d.Specs {
					for _, name := range bareNames(d, s) {
						undocumented(s, name)
					}
				}
			}
		}
	}
	return problems
}

// bareNames are the exported names of a declaration that have a comment neither
// of their own nor, as part of a group of constants or variables, of the group.
func bareNames(d *ast.GenDecl, s ast.Spec) (names []string) {
	switch s := s.(type) {
	case *ast.TypeSpec:
		if s.Name.IsExported() && s.Doc == nil && (d.Doc == nil || d.Lparen.IsValid()) {
			names = append(names, s.Name.Name)
		}
	case *ast.ValueSpec:
		for _, n := range s.Names {
			if n.IsExported() && s.Doc == nil && s.Comment == nil && d.Doc == nil {
				names = append(names, n.Name)
			}
		}
	}
	return names
}

func exportedReceiver(d *ast.FuncDecl) bool {
	if d.Recv == nil {
		return true
	}
	t := d.Recv.List[0].Type
	for {
		switch x := t.(type) {
		case *ast.StarExpr:
			t = x.X
		case *ast.IndexExpr:
			t = x.X
		case *ast.IndexListExpr:
			t = x.X
		case *ast.Ident:
			return x.IsExported()
		default:
			return true
		}
	}
}

func checkSize(p *pkg) (problems []string) {
	for _, f := range p.files {
		if n := p.fset.File(f.Pos()).LineCount(); n > maxFile {
			problems = append(problems, fmt.Sprintf("%s: %d lines, want at most %d", p.at(f).Filename, n, maxFile))
		}
		for _, d := range f.Decls {
			n := p.fset.Position(d.End()).Line - p.at(d).Line + 1
			if fn, ok := d.(*ast.FuncDecl); ok && n > maxFunction {
				problems = append(problems, fmt.Sprintf("%s: %s has %d lines, want at most %d", p.at(d), fn.Name.Name, n, maxFunction))
			}
		}
	}
	return problems
}

// timePasses are what bubbles and namespace tests import.
var timePasses = []string{"testing/synctest", module + "/internal/testnet", module + "/internal/hostnet/hostnettest"}

// checkSleep wants tests to wait for conditions. Time passes by itself only in
// bubbles and for processes in namespaces.
func checkSleep(p *pkg) (problems []string) {
	for _, f := range p.tests {
		imported := func(path string) bool { return importsPath(f, path) }
		if slices.ContainsFunc(timePasses, imported) || strings.HasSuffix(p.at(f).Filename, "_ns_test.go") {
			continue
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "Sleep" {
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == "time" {
					problems = append(problems, fmt.Sprintf("%s: time.Sleep in a test without a bubble or a namespace", p.at(n)))
				}
			}
			return true
		})
	}
	return problems
}

func importsPath(f *ast.File, path string) bool {
	for _, i := range f.Imports {
		if s, err := strconv.Unquote(i.Path.Value); err == nil && s == path {
			return true
		}
	}
	return false
}

func checkInit(p *pkg) (problems []string) {
	for _, f := range p.files {
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" {
				problems = append(problems, fmt.Sprintf("%s: func init", p.at(d)))
			}
		}
	}
	return problems
}
