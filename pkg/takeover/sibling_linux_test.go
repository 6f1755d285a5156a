package takeover

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// With Sibling, the parent of the old process is the parent of the new process, too: only the parent learns the exit
// status. The old process learns only that the new process has ended.
func TestSibling(t *testing.T) {
	if os.Getenv("OLD_PROCESS") != "" {
		oldProcess(t)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestSibling$", "-test.v")
	cmd.Env = append(os.Environ(), "OLD_PROCESS=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var pid int
	if _, err = fmt.Sscanf(string(out), "=== RUN   TestSibling\nthe new process: %d\n", &pid); err != nil {
		t.Fatalf("%v in\n%s", err, out)
	}
	var status syscall.WaitStatus
	if _, err = syscall.Wait4(pid, &status, 0, nil); err != nil || status.Signal() != syscall.SIGKILL {
		t.Errorf("the new process: %v, %v; want a child of this process, killed by the old one", status, err)
	}
}

// oldProcess starts two new processes. It prints the id of the second one, and kills it.
func oldProcess(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := startSibling(t, "exits").Ready(ctx)
	if err == nil || !strings.HasPrefix(err.Error(), "the new process has ended;") {
		t.Errorf("it exits: %v", err)
	}
	s := startSibling(t, "hangs")
	fmt.Println("the new process:", s.PID())
	short, stop := context.WithTimeout(ctx, 100*time.Millisecond)
	defer stop()
	if err := s.Ready(short); !errors.Is(err, context.DeadlineExceeded) || tunnel.IsClosed(s.ended) {
		t.Errorf("it hangs: %v", err)
	}
	s.Kill()
}

func startSibling(t *testing.T, does string) *Successor {
	t.Helper()
	s, err := Start(Config{
		Program: os.Args[0], Args: []string{os.Args[0], does}, Env: os.Environ(), Sockets: listen.NewSockets(),
		Instance: "the instance", Sibling: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}
