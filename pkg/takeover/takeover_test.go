//go:build unix

package takeover

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// The test program is the new process, too: its first argument says what it does.
func TestMain(m *testing.M) {
	if value := os.Getenv(Variable); value != "" {
		next(value, os.Args[1])
	}
	leaks.Main(m)
}

// next is the new process. It never returns.
func next(value, does string) {
	if does == "exits" {
		os.Exit(3)
	}
	before, err := Join(value)
	if err != nil {
		panic(err)
	}
	if does == "fails" {
		before.Failed(&Failure{Text: "no such key", Configuration: true})
		os.Exit(3)
	}
	if before.Instance() != "the instance" {
		panic(before.Instance())
	}
	if does == "hangs" {
		select {}
	}
	ln, err := before.Sockets().Open(listen.Callers, listen.Name{Network: "tcp", Address: "127.0.0.1:0"},
		func() (net.Listener, error) { panic("the socket is not there") })
	if err != nil {
		panic(err)
	}
	nodes, err := before.Ready(context.Background())
	if err != nil || len(nodes) != 2 && does != "orphan" {
		panic(err)
	}
	if made := before.Endpoints(); does != "orphan" && !slices.Equal(made, []string{"10.1.0.2 dev 2"}) {
		panic(made)
	}
	before.Sockets().Serve()
	before.Serving()
	before.Failed(&Failure{Text: "too late"})
	c, err := ln.Accept()
	if err != nil {
		panic(err)
	}
	io.WriteString(c, "the new process")
	c.Close()
	os.Exit(0)
}

// begin starts a new process. It returns the address of the socket that the process takes over.
func begin(t *testing.T, does string) (*Successor, *listen.Sockets, net.Addr) {
	t.Helper()
	sockets := listen.NewSockets()
	ln, err := sockets.Open(listen.Callers, listen.Name{Network: "tcp", Address: "127.0.0.1:0"},
		func() (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	s, err := Start(Config{
		Program: os.Args[0], Args: []string{os.Args[0], does}, Env: os.Environ(), Sockets: sockets, Instance: "the instance",
		Endpoints: func() []string { return []string{"10.1.0.2 dev 2"} },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Kill() })
	return s, sockets, ln.Addr()
}

// patience is for what a busy machine does at once.
const patience = 20 * time.Second

func TestTakeover(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, sockets, addr := begin(t, "serves")
	if err := s.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Go([]tunnel.NodeName{"edge1", "edge2"}), s.Serving(ctx)); err != nil {
		t.Fatal(err)
	}
	s.Release()
	sockets.Leave()
	answered(t, addr)
}

// answered expects that the new process serves.
func answered(t *testing.T, addr net.Addr) {
	t.Helper()
	c, err := net.Dial("tcp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if text, err := io.ReadAll(c); err != nil || string(text) != "the new process" {
		t.Errorf("%q, %v", text, err)
	}
}

// If the old process ends before the new one serves, the new one serves.
func TestOrphan(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, sockets, addr := begin(t, "orphan")
	if err := s.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	s.Release()
	sockets.Leave()
	answered(t, addr)
}

// The old process learns why the new one does not serve.
func TestFailures(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, _, _ := begin(t, "fails")
	failure, ok := errors.AsType[*Failure](s.Ready(ctx))
	if !ok || !failure.Configuration || failure.Text != "no such key" {
		t.Errorf("it fails: %v", failure)
	}
	s, _, _ = begin(t, "exits")
	if err := s.Ready(ctx); err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("it exits: %v", err)
	}
	s, _, _ = begin(t, "hangs")
	short, stop := context.WithTimeout(ctx, 100*time.Millisecond)
	defer stop()
	if err := s.Ready(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("it hangs: %v", err)
	}
	s, _, _ = begin(t, "hangs")
	s.cmd.Process.Kill()
	if err := s.Ready(ctx); err == nil || !strings.Contains(err.Error(), "signal: killed") {
		t.Errorf("it is killed: %v", err)
	}
	_, err := Start(Config{Program: "/no/such/program", Sockets: listen.NewSockets()})
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no program: %v", err)
	}
}

func TestJoin(t *testing.T) {
	before, err := Join("")
	if before != nil || err != nil || before.Instance() != "" || before.Sockets() == nil {
		t.Errorf("without an old process: %v, %v", before, err)
	}
	before.Failed(nil)
	if _, err = Join("2"); !errors.Is(err, ErrVersion) {
		t.Errorf("another version: %v", err)
	}
}
