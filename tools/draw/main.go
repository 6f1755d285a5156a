// Command draw picks comments of the code and sentences of the pages at random, so that somebody who
// does not know the project can say what each of them means:
//
//	go run ./tools/draw -seed 1 -comments 40 -sentences 20
//
// The same seed draws the same ones from the same tree.
package main

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// piece is a comment or a sentence, and where it stands.
type piece struct {
	at, text string
}

func main() {
	seed := flag.Uint64("seed", 1, "of the random numbers")
	comments := flag.Int("comments", 40, "how many comments of the code")
	sentences := flag.Int("sentences", 20, "how many sentences of the pages")
	flag.Parse()
	if err := run(*seed, *comments, *sentences); err != nil {
		fmt.Fprintln(os.Stderr, "draw:", err)
		os.Exit(1)
	}
}

func run(seed uint64, comments, sentences int) error {
	var code, pages []piece
	for _, root := range []string{"cmd", "conf", "internal", "pkg"} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			found, err := commentsOf(path)
			code = append(code, found...)
			return err
		})
		if err != nil {
			return err
		}
	}
	files, err := filepath.Glob("docs/*.md")
	if err != nil {
		return err
	}
	for _, path := range append(files, "README.md", "CHANGELOG.md") {
		found, err := sentencesOf(path)
		if err != nil {
			return err
		}
		pages = append(pages, found...)
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	show("comment", code, comments, rng)
	show("sentence", pages, sentences, rng)
	return nil
}

// show prints n of all, each once.
func show(kind string, all []piece, n int, rng *rand.Rand) {
	for i, at := range rng.Perm(len(all))[:min(n, len(all))] {
		fmt.Printf("%s %d, %s\n%s\n\n", kind, i+1, all[at].at, all[at].text)
	}
}

// commentsOf returns the comments of a Go file that have words of their own, each with the lines that
// follow it, which a reader sees as well.
func commentsOf(path string) (found []piece, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, path, text, parser.ParseComments)
	if err != nil || ast.IsGenerated(f) {
		return nil, err
	}
	lines := strings.Split(string(text), "\n")
	for _, group := range f.Comments {
		if len(strings.Fields(group.Text())) < 6 {
			continue // a unit, a name
		}
		from, to := set.Position(group.Pos()).Line, set.Position(group.End()).Line
		to = min(to+3, len(lines))
		found = append(found, piece{fmt.Sprintf("%s:%d", path, from), strings.Join(lines[from-1:to], "\n")})
	}
	return found, nil
}

var notProse = regexp.MustCompile("^(#|```|\\s*$|<!--|\\|[ |:-]*$|    )")

// sentencesOf returns the lines of a page that are sentences or rows of tables, outside code.
func sentencesOf(path string) (found []piece, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	inCode := false
	for i, line := range strings.Split(string(text), "\n") {
		if strings.HasPrefix(line, "```") {
			inCode = !inCode
		}
		if !inCode && !notProse.MatchString(line) && len(strings.Fields(line)) >= 6 {
			found = append(found, piece{fmt.Sprintf("%s:%d", path, i+1), line})
		}
	}
	return found, nil
}
