package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// foreign are texts of docs/troubleshooting.md that other programs say.
var foreign = []string{
	"x509: certificate is valid for",                                   // crypto/x509
	"no alternative certificate subject name matches target host name", // curl
	"remote error: tls: unrecognized name",                             // crypto/tls
	"authentication handshake failed: EOF",                             // grpc-go
	"connection refused", "address already in use",                     // errno
	"no such host",        // net
	"address not allowed", // kube-apiserver, isProxyableHostname
	"/nodes/NODE/proxy/",  // a path of kube-apiserver
}

// minText is how many bytes a part of a text has at least that the test looks for. Shorter parts
// are everywhere.
const minText = 8

// seen returns the texts in the first column of the tables that begin with "what you see". An
// ellipsis, which stands for names and numbers, parts a text in two.
func seen(page string) (texts []string) {
	inside := false
	for line := range strings.Lines(page) {
		switch {
		case strings.HasPrefix(line, "| what you see |"):
			inside = true
		case !strings.HasPrefix(line, "|"):
			inside = false
		case inside:
			first, _, _ := strings.Cut(line[1:], " | ")
			for _, m := range codeSpan.FindAllStringSubmatch(first, -1) {
				for _, part := range strings.Split(m[1], "…") {
					if part = strings.TrimSpace(part); len(part) >= minText {
						texts = append(texts, part)
					}
				}
			}
		}
	}
	return texts
}

// constant returns the text of a string literal, or of literals that are added.
func constant(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if text, err := strconv.Unquote(e.Value); err == nil && e.Kind == token.STRING {
			return text
		}
	case *ast.BinaryExpr:
		if e.Op == token.ADD {
			return constant(e.X) + constant(e.Y)
		}
	}
	return ""
}

// said returns the string constants of the program's files, one a line.
func said(t *testing.T) string {
	t.Helper()
	c := newCode(t)
	var all strings.Builder
	for _, file := range c.files {
		top, _, _ := strings.Cut(file, "/")
		if strings.HasSuffix(file, "_test.go") || !slices.Contains([]string{"cmd", "conf", "internal", "pkg"}, top) {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join("..", "..", filepath.FromSlash(file)), nil,
			parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			e, ok := n.(ast.Expr)
			if !ok {
				return true
			}
			text := constant(e)
			all.WriteString(text + "\n")
			return text == "" // the parts of an addition are in it
		})
	}
	return all.String()
}

// Every text that docs/troubleshooting.md quotes is one that the program, or a program that the test
// names, says.
func TestTroubleshooting(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "troubleshooting.md"))
	if err != nil {
		t.Fatal(err)
	}
	program, texts := said(t), seen(string(b))
	if len(texts) < 40 {
		t.Errorf("only %d texts are on the page: the test does not read it", len(texts))
	}
	for _, text := range texts {
		if !slices.Contains(foreign, text) && !strings.Contains(program, text) {
			t.Errorf("no program says %q any more", text)
		}
	}
	for _, text := range foreign {
		if !slices.Contains(texts, text) {
			t.Errorf("the page does not quote %q any more: remove it from this test", text)
		}
	}
	if strings.Contains(program, "a text that nobody says") {
		t.Error("the constants of tests count as the program's")
	}
}
