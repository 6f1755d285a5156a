package stream

import (
	"context"
	"fmt"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// An edge whose cloud is away for a day writes a few dozen warnings, not one for each attempt.
func TestCloudAwayForADay(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRigOn(t, newMemNet())
		r.net.dead.Store(true)
		r.start(r.clientConfig("edge1"), direct)
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		attempts := len(r.log.lines("end=edge", "no session; trying again"))
		warnings := len(r.log.lines("end=edge", "level=WARN", "no session; trying again", "retry_in="))
		if attempts < 4000 || warnings < 5 || warnings > 60 {
			t.Errorf("%d attempts had %d warnings", attempts, warnings)
		}
	})
}

// A clean end has words of its own, and no error.
func TestCleanEndHasNoError(t *testing.T) {
	r := newRig(t)
	e := r.join("edge1", direct)
	e.Stop()
	for _, end := range []string{"end=edge", "end=cloud"} {
		testkit.Eventually(t, end, func() bool { return len(r.log.lines(end, "session ended: ", "dur=")) == 1 })
		if l := r.log.lines(end, "session ended", "err="); len(l) > 0 {
			t.Errorf("a clean end has an error: %s", l)
		}
	}
}

// What ends each connection before its TLS handshake is probably a balancer that speaks the PROXY protocol, or
// another program. The edge says what to look at.
func TestHungUpInTheHandshake(t *testing.T) {
	r := newRig(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := testkit.Run(t, func(context.Context) error {
		for {
			c, err := ln.Accept()
			if err != nil {
				return nil
			}
			io.CopyN(io.Discard, c, 5) // the begin of the ClientHello
			c.Close()
		}
	})
	defer func() {
		ln.Close()
		served.Stop()
	}()
	r.notReady(t, func(cfg *ClientConfig) { cfg.Address = ln.Addr().String() },
		"before it showed a certificate", "PROXY protocol", "is that the cloud's port")
}

// The edge's lines of a session name the replica and the address that it has reached, so that they can be found
// in the log of that replica. Lines about another replica name its address once.
func TestSessionLinesNameTheReplica(t *testing.T) {
	f := newFleet(t, 2)
	r := f[0]
	r.join("edge1", direct)
	addr := r.server.Addr().String()
	line := []string{"end=edge", "session started", "node=edge1", "replica=" + r.others.id, "addr=" + addr}
	testkit.Eventually(t, fmt.Sprintf("a line with %q", line), func() bool { return len(r.log.lines(line...)) == 1 })
}
