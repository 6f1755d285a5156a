// Package compare has compare.sh, which is make bench-compare, and its test.
package compare

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// patience is how long something may take that must happen: it builds programs.
const patience = 2 * time.Minute

// repository is a module with one commit, whose benchmark is what source says.
func repository(t *testing.T, source string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range map[string]string{"go.mod": "module small\n\ngo 1.26\n",
		"small_test.go": "package small\n\n" + source} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	git(t, dir, "init", "--quiet")
	git(t, dir, "add", ".")
	git(t, dir, "-c", "user.name=test", "-c", "user.email=test@example.com", "commit", "--quiet", "-m", "one")
	return dir
}

func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", append([]string{"-C", dir}, args...)...)
	cmd.Env = environ()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %q: %v\n%s", args, err, out)
	}
	return string(out)
}

// environ is ours without what git tells its hooks: which repository to work on.
func environ() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "GIT_") })
}

// run is compare.sh in a repository. It has a temporary folder of its own.
type run struct {
	cmd       *exec.Cmd
	said      bytes.Buffer
	repo, tmp string
}

func start(t *testing.T, repo, base string, env ...string) *run {
	t.Helper()
	script, err := filepath.Abs("compare.sh")
	if err != nil {
		t.Fatal(err)
	}
	r := &run{cmd: exec.CommandContext(t.Context(), script, base, "."), repo: repo, tmp: t.TempDir()}
	r.cmd.Dir, r.cmd.Stdout, r.cmd.Stderr = repo, &r.said, &r.said
	r.cmd.Env = append(environ(), append(env, "TMPDIR="+r.tmp, "COUNT=1", "BENCHTIME=1x")...)
	r.cmd.WaitDelay = patience
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return r
}

// fails waits for the end, and wants that exit code, something said, and nothing left.
func (r *run) fails(t *testing.T, code int, say string) {
	t.Helper()
	err := r.cmd.Wait()
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok || exit.ExitCode() != code || !strings.Contains(r.said.String(), say) {
		t.Errorf("%v, want code %d and %q; it said:\n%s", err, code, say, &r.said)
	}
	if left, err := os.ReadDir(r.tmp); err != nil || len(left) > 0 {
		t.Errorf("it leaves %v behind, %v", left, err)
	}
	if trees := git(t, r.repo, "worktree", "list"); strings.Count(trees, "\n") != 1 {
		t.Errorf("it leaves worktrees behind:\n%s", trees)
	}
}

const nothing = `import "testing"

func BenchmarkNothing(b *testing.B) {}
`

func TestUnknownRevision(t *testing.T) {
	repo := repository(t, nothing)
	start(t, repo, "nowhere").fails(t, 1, "nowhere is no revision of this repository")
	start(t, repo, "").fails(t, 1, "compare with what?")
}

// A benchmark that only one side has is no error, but one of them must be on both.
func TestNothingToCompare(t *testing.T) {
	repo := repository(t, nothing)
	start(t, repo, "HEAD", "BENCH=Other").fails(t, 1, "nothing to compare")
	if err := os.WriteFile(filepath.Join(repo, "small_test.go"),
		[]byte("package small\n\n"+strings.ReplaceAll(nothing, "Nothing", "Other")), 0o600); err != nil {
		t.Fatal(err)
	}
	start(t, repo, "HEAD", "BENCH=Nothing|Other").fails(t, 1, "nothing to compare")
}

func TestBenchmarkFails(t *testing.T) {
	repo := repository(t, `import "testing"

func BenchmarkBroken(b *testing.B) { b.Fatal("it is broken") }
`)
	start(t, repo, "HEAD", "BENCH=Broken").fails(t, 1, "it is broken")
}

// Who interrupts it, as with Ctrl-C, has neither a worktree left nor a benchmark that
// goes on.
func TestInterrupted(t *testing.T) {
	repo := repository(t, `import (
	"os"
	"strconv"
	"testing"
	"time"
)

func BenchmarkLong(b *testing.B) {
	os.WriteFile(os.Getenv("RUNNING"), []byte(strconv.Itoa(os.Getpid())), 0o600)
	time.Sleep(time.Hour)
}
`)
	// A program that a shell starts in the background ignores SIGINT, and so do its children, unless
	// it handles the signal itself.
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	defer signal.Stop(interrupts)
	running := filepath.Join(t.TempDir(), "running")
	r := start(t, repo, "HEAD", "BENCH=Long", "RUNNING="+running)
	var pid []byte
	for end := time.Now().Add(patience); len(pid) == 0; time.Sleep(10 * time.Millisecond) {
		pid, _ = os.ReadFile(running)
		if time.Now().After(end) {
			t.Fatalf("the benchmark does not run: %s", &r.said)
		}
	}
	if err := r.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	r.fails(t, 130, "")
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat("/proc/" + string(pid)); err != nil {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the benchmark goes on as process %s", pid)
		}
	}
}
