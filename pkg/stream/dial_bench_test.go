package stream

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"runtime"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// BenchmarkDial measures what a new conn costs both ends, from the open request to the
// last bookkeeping, with a target in memory.
func BenchmarkDial(b *testing.B) {
	for name, connections := range map[string]int{"session": 1, "data": MaxConnections, "reach": 1} {
		b.Run(name, func(b *testing.B) {
			dial, reach := benchBoth(b, connections, func() net.Conn {
				near, far := net.Pipe()
				far.Close()
				return near
			})
			if name == "reach" {
				dial = reach
			}
			b.ReportAllocs()
			for b.Loop() {
				dial().Close()
			}
		})
	}
}

// BenchmarkDataConnection measures the memory of a data connection that waits, after it has
// carried a conn: of both ends together, without the kernel's.
func BenchmarkDataConnection(b *testing.B) {
	dial := benchEnds(b, MaxConnections, func() net.Conn { return flood{silent()} })
	memory := func() uint64 {
		for range 3 { // pools give up what they have after two
			runtime.GC()
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	use := func(n int) {
		var conns []net.Conn
		for range n {
			conns = append(conns, dial())
		}
		for _, c := range conns {
			if _, err := io.CopyN(io.Discard, c, 1<<20); err != nil {
				b.Fatal(err)
			}
			c.Close()
		}
		time.Sleep(300 * time.Millisecond) // until they wait again, and others have come
	}
	use(1)
	for b.Loop() {
		before := memory()
		for range 4 {
			use(MaxConnections)
		}
		b.ReportMetric(float64(memory()-before)/(MaxConnections-2), "B/connection")
	}
}

// BenchmarkConn measures a conn that is open, and that the cloud has dialled or the edge has asked for, with a target in memory: both ends of the
// session are in this process, with TLS over loopback between them.
func BenchmarkConn(b *testing.B) {
	for _, way := range []struct {
		name   string
		target func() net.Conn
		bytes  int
		once   func(c net.Conn, p []byte) error
	}{
		{"down", func() net.Conn { return flood{silent()} }, 64 << 10, func(c net.Conn, p []byte) error {
			_, err := io.ReadFull(c, p)
			return err
		}},
		{"up", func() net.Conn { return drain{silent()} }, 64 << 10, func(c net.Conn, p []byte) error {
			_, err := c.Write(p)
			return err
		}},
		{"roundTrip", echoed, 1, func(c net.Conn, p []byte) error {
			if _, err := c.Write(p); err != nil {
				return err
			}
			_, err := io.ReadFull(c, p)
			return err
		}},
	} {
		for _, by := range []string{"dialled", "reached"} {
			b.Run(way.name+"/"+by, func(b *testing.B) {
				dial, reach := benchBoth(b, 1, way.target)
				if by == "reached" {
					dial = reach
				}
				c := dial()
				defer c.Close()
				p := make([]byte, way.bytes)
				b.ReportAllocs()
				if len(p) > 1 {
					b.SetBytes(int64(len(p)))
				}
				for b.Loop() {
					if err := way.once(c, p); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// silent is a target that does nothing until it is closed.
func silent() net.Conn {
	near, _ := net.Pipe()
	return near
}

// flood is a target that sends without end.
type flood struct{ net.Conn }

func (flood) Read(p []byte) (int, error) { return len(p), nil }

// drain is a target that takes everything.
type drain struct{ net.Conn }

func (drain) Write(p []byte) (int, error) { return len(p), nil }

// echoed is a target that sends back what it gets.
func echoed() net.Conn {
	near, far := net.Pipe()
	go func() {
		defer far.Close()
		io.Copy(far, far)
	}()
	return near
}

// benchEnds is the first result of benchBoth.
func benchEnds(b *testing.B, connections int, target func() net.Conn) (dial func() net.Conn) {
	b.Helper()
	dial, _ = benchBoth(b, connections, target)
	return dial
}

// benchBoth joins an edge to a cloud, over TLS on loopback. dial dials a target through the two, and reach has the
// edge ask for it. The session has so many connections at most.
func benchBoth(b *testing.B, connections int, target func() net.Conn) (dial, reach func() net.Conn) {
	b.Helper()
	ca := testca.New(b, "bench")
	pair := ca.Pair(b, auth.Leaf{CommonName: "cloud", DNSNames: []string{"cloud"}, Server: true, TTL: time.Hour})
	log := slog.New(slog.NewTextHandler(io.Discard, nil)) //nolint:sloglint // what a logger costs counts
	dir := &tunnel.Directory{}
	server, err := NewServer(ServerConfig{
		Listen: "127.0.0.1:0", TLS: &tls.Config{Certificates: []tls.Certificate{pair}},
		Auth: &fakeAuth{}, Log: log, Software: "bench", Limits: Limits{Opens: 1e9},
		Reach: func(context.Context, *ReachRequest) (net.Conn, error) { return target(), nil },
	}, dir)
	if err != nil {
		b.Fatal(err)
	}
	testkit.Run(b, server.Run)
	testkit.Eventually(b, "the cloud listens", func() bool { return server.Addr() != nil })
	client, err := NewClient(ClientConfig{
		Address: server.Addr().String(), TLS: func() *tls.Config { return &tls.Config{RootCAs: ca.Pool(), ServerName: "cloud"} },
		Node: "edge1", Token: auth.StaticToken("token-edge1"),
		Log: log, Software: "bench", Connections: connections,
	}, &edgeModule{"tcp", func(context.Context, tunnel.Request) (net.Conn, error) { return target(), nil }})
	if err != nil {
		b.Fatal(err)
	}
	testkit.Run(b, client.Run)
	testkit.Eventually(b, "the edge joins", func() bool { return dir.Holds("edge1") && client.Ready() == nil })
	made := func(c net.Conn, err error) net.Conn {
		if err != nil {
			b.Fatal(err)
		}
		return c
	}
	return func() net.Conn {
			return made(dir.Dial(b.Context(), tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "target:1"}))
		}, func() net.Conn {
			return made(client.Reach(b.Context(), "target:1"))
		}
}
