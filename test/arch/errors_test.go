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

// No branch depends on the text of an error: texts are for people, and change. Errors are told apart by
// errors.Is, errors.As, gRPC codes and reasons.
func TestNoBranchOnText(t *testing.T) {
	files := 0
	for _, dir := range []string{"cmd", "conf", "internal", "pkg"} {
		root := filepath.Join("..", "..", dir)
		err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
				return err
			}
			set := token.NewFileSet()
			f, err := parser.ParseFile(set, file, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			files++
			for _, at := range branchesOnText(f) {
				t.Errorf("%s: decides by the text of an error; use errors.Is, errors.As, a gRPC code or a reason", set.Position(at))
			}
			return nil
		})
		if err != nil && dir != "internal" {
			t.Fatal(err)
		}
	}
	if files < 100 {
		t.Errorf("only %d files were read", files)
	}
}

// The test above sees each shape that it is about, and nothing else.
func TestBranchesOnText(t *testing.T) {
	for body, want := range map[string]int{
		`_ = strings.Contains(err.Error(), "x")`:                              1,
		`msg := err.Error(); _ = strings.HasPrefix(msg, "x")`:                 1,
		`switch msg := fmt.Sprint(err); { case strings.Contains(msg, "x"): }`: 1,
		`_ = strings.Contains(strings.ToLower(err.Error()), "x")`:             1,
		`_ = err.Error() == "x"`:                                              1,
		`_ = status.Convert(err).Message() == "x"`:                            1,
		`switch err.Error() { case "x": }`:                                    1,
		`_ = strings.HasSuffix(refusal.Text, "x")`:                            1,
		`_ = failure.Detail == "x"`:                                           1,
		`_ = r.Text == "" || r.Detail != ""`:                                  0,
		`_ = strings.Contains(lines.Text(), "x")`:                             0,
		`if before.Error() != err.Error() {}`:                                 0,
		`log(err.Error())`:                                                    0,
		`_ = strings.Contains(line, "x")`:                                     0,
		`_ = errors.Is(err, other)`:                                           0,
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "x.go", "package x\nfunc f() {\n"+body+"\n}",
			parser.SkipObjectResolution)
		if err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		if got := len(branchesOnText(f)); got != want {
			t.Errorf("%s: %d branches, want %d", body, got, want)
		}
	}
}

// branchesOnText returns where the functions of a file compare the text of an error.
func branchesOnText(f *ast.File) (found []token.Pos) {
	for _, decl := range f.Decls {
		texts := map[string]bool{} // variables that hold the text of an error
		ast.Inspect(decl, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.AssignStmt:
				for i, right := range n.Rhs {
					if name, ok := n.Lhs[i].(*ast.Ident); ok && isErrorText(right, texts) {
						texts[name.Name] = true
					}
				}
			case *ast.CallExpr:
				of, ok := n.Fun.(*ast.SelectorExpr)
				if !ok || len(n.Args) == 0 || !isErrorText(n.Args[0], texts) {
					break
				}
				switch name(of.X) + "." + of.Sel.Name {
				case "strings.Contains", "strings.ContainsAny", "strings.HasPrefix", "strings.HasSuffix", "strings.Index",
					"strings.EqualFold", "strings.CutPrefix", "strings.CutSuffix", "regexp.MatchString":
					found = append(found, n.Pos())
				}
			case *ast.BinaryExpr:
				// Two texts of errors may be compared: what was logged already is not logged again.
				if (n.Op == token.EQL || n.Op == token.NEQ) &&
					(isErrorText(n.X, texts) && isLiteral(n.Y) || isLiteral(n.X) && isErrorText(n.Y, texts)) {
					found = append(found, n.Pos())
				}
			case *ast.SwitchStmt:
				if n.Tag != nil && isErrorText(n.Tag, texts) {
					found = append(found, n.Pos())
				}
			}
			return true
		})
	}
	return found
}

// isErrorText reports whether an expression is the text of an error, or made of it. The fields Text and Detail are
// those of a tunnel.Refusal or a Failure: the text of another program's refusal changes, too.
func isErrorText(e ast.Expr, texts map[string]bool) (is bool) {
	switch e := e.(type) {
	case *ast.Ident:
		return texts[e.Name]
	case *ast.SelectorExpr:
		return e.Sel.Name == "Text" || e.Sel.Name == "Detail"
	case *ast.CallExpr:
		if of, ok := e.Fun.(*ast.SelectorExpr); ok {
			if len(e.Args) == 0 && (of.Sel.Name == "Error" || of.Sel.Name == "Message") {
				return true
			}
			if name(of.X) == "fmt" && strings.HasPrefix(of.Sel.Name, "Sprint") {
				for _, arg := range e.Args {
					is = is || strings.HasPrefix(name(arg), "err")
				}
				return is
			}
			if name(of.X) == "strings" {
				for _, arg := range e.Args {
					is = is || isErrorText(arg, texts)
				}
			}
		}
	}
	return is
}

// isLiteral reports whether an expression is a literal, but "": whether there is a text may decide.
func isLiteral(e ast.Expr) bool {
	literal, ok := e.(*ast.BasicLit)
	return ok && literal.Value != `""`
}

// name returns the name of an identifier, "" for any other expression.
func name(e ast.Expr) string {
	if id, ok := e.(*ast.Ident); ok {
		return id.Name
	}
	return ""
}
