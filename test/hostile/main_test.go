package hostile

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
	"tunnel.example/tunnel/test/rig/rigtest"
)

const (
	// readyWithin is how long a start may take on a busy machine.
	readyWithin = 20 * time.Second
	// hangs is when an answer that does not come is given up.
	hangs = 15 * time.Second
	poll  = 20 * time.Millisecond
)

// program is the program under test.
var program string

func TestMain(m *testing.M) {
	flag.Parse()
	if os.Getenv(attacking) != "" {
		if err := attackFor(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(rigtest.Main(m, &program))
}

// long reports whether the long variant was asked for.
func long() bool { return os.Getenv("TUNNEL_HOSTILE") == "1" }

// lab is a cloud, a calm edge and its targets. Nodes evil0 and evil1 may join as well,
// and there are TCP front doors to them.
type lab struct {
	*rig.Pair
	t       *testing.T
	kubelet *kubelet
	kube    *apiServer // nil: none

	cloud, edge *rig.Process
}

// opens is how many conns of a node may be opened in a second: more than the calm do, and a
// tenth of the default, so that floods come to their end sooner.
const opens = 500

// cloudNice is the priority of the cloud. Everything shares this machine's processors. Edge,
// callers and targets get them first, as if they had their own, then the cloud, and
// attackers what is left.
const cloudNice = 10

// evils are nodes that mean harm. They may join.
var evils = []string{"evil0", "evil1"}

// limited is the metric of a limit.
func limited(limit string) string { return fmt.Sprintf("tunnel_limited_total{limit=%q}", limit) }

// newLab starts a lab. kube is its Kubernetes, if the cloud is to have one; more are lines of the cloud's file.
func newLab(t *testing.T, kube *apiServer, more string) *lab {
	t.Helper()
	if kube != nil {
		t.Setenv("KUBECONFIG", kube.config)
	}
	nice := cloudNice
	if !long() {
		t.Setenv("GOGC", "100") // so that what is held shows in what a cloud weighs
		nice = 0                // only the long variant judges how long the calm wait
	}
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	l := &lab{t: t, kubelet: newKubelet(t, ca), kube: kube}
	l.Pair, err = rig.NewPair(rig.Config{
		Binary: program, Dir: t.TempDir(), CA: ca,
		TCP: map[string]string{
			"echo":  serve(t, func(c net.Conn) { io.Copy(c, c) }),
			"evil0": "evil0/127.0.0.1:9",
			"evil1": "evil1/127.0.0.1:9",
		},
		HTTPS: l.kubelet.addr, Others: evils,
		Cloud: fmt.Sprintf("[mode.cloud.limits]\nopens = %d\n", opens) + more,
		Nice:  nice,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.end)
	if l.cloud, err = l.StartCloud(); err != nil {
		t.Fatal(err)
	}
	if l.edge, err = l.StartEdge(); err != nil {
		t.Fatal(err)
	}
	testkit.Within(t, readyWithin, "cloud and edge are ready", func() error {
		return errors.Join(rig.Ready(l.CloudHealth()), rig.Ready(l.EdgeHealth()))
	})
	return l
}

func (l *lab) end() {
	for name, p := range map[string]*rig.Process{"cloud": l.cloud, "edge": l.edge} {
		if p == nil {
			continue
		}
		if !p.Alive() {
			l.t.Errorf("the %s has ended by itself, with exit code %d", name, p.ExitCode())
		}
		p.Kill()
		if log := p.Log().String(); strings.Contains(log, "panic") || l.t.Failed() {
			lines := strings.Split(log, "\n")
			l.t.Errorf("log of the %s, its end:\n%s", name, strings.Join(lines[max(0, len(lines)-30):], "\n"))
		}
	}
}

// serve runs a TCP target until the end of the test.
func serve(t *testing.T, handle func(net.Conn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				handle(c)
			}()
		}
	}()
	t.Cleanup(func() {
		ln.Close()
		<-done
	})
	return ln.Addr().String()
}
