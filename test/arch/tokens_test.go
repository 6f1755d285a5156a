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

// An oauth2.Token prints its secret, so only pkg/auth handles one. Other packages hold an oauth2.TokenSource,
// and get an auth.Secret from auth.TokenOf.
func TestOnlyAuthHandlesTokens(t *testing.T) {
	sources := 0
	for _, dir := range []string{"cmd", "conf", "internal", "pkg"} {
		err := filepath.WalkDir(filepath.Join("..", "..", dir), func(file string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
				return err
			}
			set := token.NewFileSet()
			f, err := parser.ParseFile(set, file, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			auth := filepath.Base(filepath.Dir(file)) == "auth"
			ast.Inspect(f, func(n ast.Node) bool {
				asks := false // calls the method Token of a source
				if call, ok := n.(*ast.CallExpr); ok {
					of, isMethod := call.Fun.(*ast.SelectorExpr)
					asks = isMethod && len(call.Args) == 0 && of.Sel.Name == "Token"
				}
				s, ok := n.(*ast.SelectorExpr)
				names := ok && name(s.X) == "oauth2"
				if names && s.Sel.Name == "TokenSource" {
					sources++
				} else if (names || asks) && !auth {
					t.Errorf("%s: only pkg/auth handles an oauth2.Token; use auth.TokenOf", set.Position(n.Pos()))
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if sources < 3 {
		t.Errorf("%d sources of tokens are found; this test would never fail", sources)
	}
}
