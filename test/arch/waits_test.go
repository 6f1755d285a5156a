package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// A test waits for a condition by testkit.Eventually or testkit.Within. If the condition never holds,
// these functions fail the test, and say what it has waited for. A loop that only sleeps hangs until the
// go command kills all tests of the package. A loop whose condition has && may have a bound in it.
func TestWaitsHaveABound(t *testing.T) {
	if found := sleepLoops(t, "bad_test.go", "package x\nfunc f() { for !ok() { time.Sleep(1) } }\n"); len(found) != 1 {
		t.Fatal("a loop that only sleeps is not found; this test would never fail")
	}
	err := filepath.WalkDir(filepath.Join("..", ".."), func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(file, "_test.go") {
			return err
		}
		for _, at := range sleepLoops(t, file, nil) {
			t.Errorf("%s: this loop waits without a bound: use testkit.Eventually; "+
				"in an example, give the context a timeout and wait for its end, too", at)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// sleepLoops returns the places of loops with a single condition whose body is one call of time.Sleep. src
// is as for parser.ParseFile.
func sleepLoops(t *testing.T, file string, src any) (found []token.Position) {
	t.Helper()
	files := token.NewFileSet()
	f, err := parser.ParseFile(files, file, src, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(f, func(n ast.Node) bool {
		loop, ok := n.(*ast.ForStmt)
		if !ok || loop.Cond == nil || hasAnd(loop.Cond) || loop.Init != nil || loop.Post != nil || len(loop.Body.List) != 1 {
			return true
		}
		if statement, ok := loop.Body.List[0].(*ast.ExprStmt); ok && isSleep(statement.X) {
			found = append(found, files.Position(loop.Pos()))
		}
		return true
	})
	return found
}

// hasAnd reports whether e is a && b.
func hasAnd(e ast.Expr) bool {
	b, ok := e.(*ast.BinaryExpr)
	return ok && b.Op == token.LAND
}

// isSleep reports whether e is a call of time.Sleep.
func isSleep(e ast.Expr) bool {
	call, ok := e.(*ast.CallExpr)
	if !ok {
		return false
	}
	name, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || name.Sel.Name != "Sleep" {
		return false
	}
	pkg, ok := name.X.(*ast.Ident)
	return ok && pkg.Name == "time"
}
