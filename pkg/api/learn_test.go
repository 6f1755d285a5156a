package api

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/peers"
	"tunnel.example/tunnel/pkg/tunnel"
)

// replicaAPI dials the API of another replica, and counts the requests: each conn is for one.
type replicaAPI struct {
	dial  atomic.Pointer[dialFunc]
	asked atomic.Int32
}

func newReplicaAPI(dial dialFunc) *replicaAPI {
	a := new(replicaAPI)
	a.dial.Store(&dial)
	return a
}

func (a *replicaAPI) Dial(ctx context.Context, _ tunnel.Request) (net.Conn, error) {
	a.asked.Add(1)
	return (*a.dial.Load())(ctx)
}

// A replica that does not answer in time is asked again after longer and longer waits, however many changes there are,
// and even if there are none. A replica that has answered, or is too old to answer, is asked once.
func TestBusyReplicaIsAskedRarely(t *testing.T) {
	ca := testca.New(t, "replicas")
	leaf := auth.Leaf{CommonName: "replica", DNSNames: []string{"replicas"}, Server: true, Client: true}
	conf := &tls.Config{
		Certificates: []tls.Certificate{ca.Pair(t, leaf)}, RootCAs: ca.Pool(), ServerName: "replicas",
	}
	others, err := peers.New(peers.Config{
		TLS: func() *tls.Config { return conf }, Server: conf, Log: slog.New(slog.DiscardHandler),
	}, new(tunnel.Directory))
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		remote := newRig()
		remote.dir.Detach(remote.attach("gone"))
		answers := New(remote.cfg)
		serving := testkit.Run(t, answers.Run)
		busy := newReplicaAPI(func(context.Context) (net.Conn, error) {
			near, far := net.Pipe()
			go io.Copy(io.Discard, far) // it reads the request, and sends nothing
			return near, nil
		})
		old := newReplicaAPI(func(context.Context) (net.Conn, error) {
			return nil, tunnel.Refusef(tunnel.NoSuchNode, "no node localhost")
		})
		good := newReplicaAPI(answers.Dial)
		join := func(id string, api *replicaAPI) {
			others.Attach(id, nil, &tunnel.Session{Remote: id, Dialer: api})
		}
		join("busy", busy)
		join("good", good)
		join("old", old)

		r := newRig()
		r.cfg.Peers = others
		running := testkit.Run(t, New(r.cfg).Run)
		const long = 10 * time.Minute
		for began := time.Now(); time.Since(began) < long; time.Sleep(time.Second) {
			join("changes", good) // a change, as each node that comes or goes is one
		}
		// Waits of 1, 2, 4, … and 60 s, and askTimeout for each answer.
		if n := busy.asked.Swap(0); n < 10 || n > 17 {
			t.Errorf("the busy replica is asked %d times in %s", n, long)
		}
		time.Sleep(long)
		if n := busy.asked.Swap(0); n < 8 || n > 10 {
			t.Errorf("without changes, the busy replica is asked %d times in %s", n, long)
		}
		busy.dial.Store(good.dial.Load())
		time.Sleep(long)
		if b, g, o := busy.asked.Load(), good.asked.Load(), old.asked.Load(); b != 1 || g != 2 || o != 1 { // good is two
			t.Errorf("the busy replica is asked %d times after it can answer, the good ones %d and the old one %d times",
				b, g, o)
		}
		if _, known := r.nodes.All()["gone"]; !known {
			t.Error("the missing node is unknown")
		}
		running.Stop()
		serving.Stop()
	})
}
