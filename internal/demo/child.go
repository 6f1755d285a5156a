package demo

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// readyPoll is the pause between two questions whether a child is ready.
const readyPoll = 20 * time.Millisecond

// child is this program, running again with other arguments.
type child struct {
	ended chan struct{} // closed by the goroutine that waits for the process
	err   error         // how the process ended, nil: well; set before ended is closed
}

// command returns this program with args. The process gets SIGTERM when ctx is done, and
// on Linux when the demo's own process ends in whatever way.
func command(ctx context.Context, args ...string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.SysProcAttr = childAttr()
	cmd.Cancel = func() error {
		if cmd.Process.Signal(syscall.SIGTERM) == nil {
			return nil
		}
		return cmd.Process.Kill() // Windows has no SIGTERM
	}
	cmd.WaitDelay = 5 * time.Second // from SIGTERM to SIGKILL
	return cmd, nil
}

// start starts a process of command.
func start(cmd *exec.Cmd) (*child, error) {
	c := &child{ended: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		defer close(c.ended)
		pinThread() // Linux ends the process with the thread that started it
		err := cmd.Start()
		started <- err
		if err == nil {
			c.err = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting tunnel %s: %w", cmd.Args[1], err)
	}
	return c, nil
}

// tunnel runs this program to its end, and returns its standard output.
func tunnel(ctx context.Context, stdin string, args ...string) (string, error) {
	cmd, err := command(ctx, args...)
	if err != nil {
		return "", err
	}
	var out, notes strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &notes
	c, err := start(cmd)
	if err != nil {
		return "", err
	}
	<-c.ended
	if c.err != nil {
		return out.String(), fmt.Errorf("tunnel %s: %w: %s", args[0], c.err, strings.TrimSpace(notes.String()))
	}
	return out.String(), nil
}

// awaitReady waits until the child that serves health on port is ready. An error tells what
// the child said last.
func (c *child) awaitReady(ctx context.Context, port int) error {
	for {
		body, err := get(ctx, http.DefaultClient, fmt.Sprintf("http://127.0.0.1:%d/readyz", port))
		if err == nil {
			return nil
		}
		select {
		case <-c.ended:
			return orExited(c.err)
		case <-ctx.Done():
			return errors.New(body)
		case <-time.After(readyPoll):
		}
	}
}

// orExited returns err, or an error for a process that ended well though nobody asked it to.
func orExited(err error) error {
	if err == nil {
		return errors.New("exited")
	}
	return err
}

// startDaemon runs one end, cloud or edge, with the demo's files until run is done.
func (d *demo) startDaemon(run context.Context, mode string) (*child, error) {
	cmd, err := command(run, mode, "-c", d.path(mode+".toml"))
	if err != nil {
		return nil, err
	}
	log, err := os.Create(d.path(mode + ".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	return start(cmd)
}

// ready waits until both ends are ready.
func (d *demo) ready(ctx context.Context, cloud, edge *child) error {
	ctx, cancel := context.WithTimeout(ctx, startupTimeout)
	defer cancel()
	for _, end := range []struct {
		*child
		port int
	}{{cloud, d.log}, {edge, d.edgeLog}} {
		err := end.awaitReady(ctx, end.port)
		if err == nil {
			continue
		}
		if early := unasked(cloud, edge); early != nil {
			err = early
		} else if ctx.Err() != nil {
			err = fmt.Errorf("not ready within %s: %w", startupTimeout, err)
		}
		return fmt.Errorf("%w\n%s", err, d.logs())
	}
	return nil
}

// unasked returns an error if an end has ended though the demo still needs it.
func unasked(cloud, edge *child) error {
	select {
	case <-cloud.ended:
		return fmt.Errorf("tunnel cloud: %w", orExited(cloud.err))
	default:
	}
	select {
	case <-edge.ended:
		return fmt.Errorf("tunnel edge: %w", orExited(edge.err))
	default:
	}
	return nil
}

// logs returns what both ends logged, for a failure.
func (d *demo) logs() string {
	var b strings.Builder
	for _, mode := range []string{"cloud", "edge"} {
		text, err := os.ReadFile(d.path(mode + ".log"))
		if err != nil {
			continue
		}
		fmt.Fprintf(&b, "--- log of tunnel %s\n%s", mode, text)
	}
	return strings.TrimRight(b.String(), "\n")
}
