package conn

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"sync"
	"testing"

	"golang.org/x/net/nettest"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// dataPair is a data connection over loopback, both ends of it, for one conn after the other.
type dataPair struct {
	t           testing.TB
	cloud, edge *Data
	wires       [2]*net.TCPConn // below cloud and edge
	counters    tunnel.Counters
	blocks      Blocks
}

func newDataPair(t testing.TB) *dataPair {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	near, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err := ln.Accept()
	if err != nil {
		near.Close()
		t.Fatal(err)
	}
	p := &dataPair{t: t, wires: [2]*net.TCPConn{near.(*net.TCPConn), far.(*net.TCPConn)}}
	p.cloud, p.edge = NewData(near, near, &p.blocks), NewData(far, far, &p.blocks)
	return p
}

func (p *dataPair) close() {
	for _, w := range p.wires {
		w.SetLinger(0)
		w.Close()
	}
}

// idle reports whether both ends wait for the next conn.
func (p *dataPair) idle() bool {
	for _, d := range []*Data{p.cloud, p.edge} {
		d.mu.Lock()
		idle := d.phase == phaseIdle && d.lease == nil && !d.interrupted
		d.mu.Unlock()
		if !idle {
			return false
		}
	}
	return true
}

// next opens the next conn. It does what the two sessions do around their conns.
func (p *dataPair) next() *fakeConns {
	must := func(err error) {
		p.t.Helper()
		if err != nil {
			p.t.Fatal(err)
		}
	}
	must(p.cloud.Ask(nil))
	if typ, _, err := p.edge.Receive(0); err != nil || typ != FrameOpen {
		p.t.Fatalf("got %#x, %v; want an open", typ, err)
	}
	edge := new(Lease)
	p.edge.LendAtEdge(edge)
	must(edge.Accept())
	if typ, _, err := p.cloud.Receive(0); err != nil || typ != FrameOpened {
		p.t.Fatalf("got %#x, %v; want opened", typ, err)
	}
	cloud := p.cloud.LendAtCloud()

	f := &fakeConns{}
	end := sync.OnceFunc(p.close)
	cfg := Config{Blocks: &p.blocks, Counters: &p.counters, Log: slog.New(slog.DiscardHandler)}
	at := cfg
	at.IsEdge = true
	at.Ended = func(err error) {
		if err != nil {
			edge.Revoke()
			go f.cloud.EndedByPeer() // the cancel on the control stream
			end()
		}
	}
	at.Gone = func() {
		awaited := edge.EndAwaited()
		if err := edge.ReturnAtEdge(); err != nil {
			f.gone.Add(1)
			return
		}
		if !awaited {
			f.gone.Add(1)
			return
		}
		go func() {
			if typ, data, err := p.edge.Receive(0); err == nil && !IsEnd(typ, data) {
				p.t.Errorf("got %#x with %d bytes; want the cloud's end", typ, len(data))
			}
			f.gone.Add(1)
		}()
	}
	f.edge = OverLease(edge, at)
	at = cfg
	at.Ended = func(err error) {
		if err == nil {
			cloud.End(f.cloud.PeerStopped())
			return
		}
		go f.edge.Abort() // the cancel on the control stream
		end()
	}
	at.Gone = func() {
		if f.cloud.Err() != nil {
			f.gone.Add(1)
			return
		}
		give := func() {
			defer f.gone.Add(1)
			if err := cloud.ReturnAtCloud(); err == nil && p.cloud.OwesEnd() {
				p.cloud.SayEnd() // if it fails, the edge sees that
			}
		}
		if cloud.ReturnsAtOnce() {
			give()
		} else {
			go give()
		}
	}
	f.cloud = OverLease(cloud, at)
	return f
}

// eachWay runs a test with conns by streams and with conns by a data connection.
func eachWay(t *testing.T, test func(t *testing.T, newConns func() *fakeConns)) {
	t.Run("stream", func(t *testing.T) { test(t, newFakeConns) })
	t.Run("data", func(t *testing.T) {
		var all []*dataPair
		t.Cleanup(func() {
			for _, p := range all {
				p.close()
			}
		})
		test(t, func() *fakeConns {
			p := newDataPair(t)
			all = append(all, p)
			return p.next()
		})
	})
}

// TestConn runs the net package's conformance suite over both ways, from both ends.
func TestConn(t *testing.T) {
	eachWay(t, func(t *testing.T, newConns func() *fakeConns) {
		pipe := func(swap bool) nettest.MakePipe {
			return func() (c1, c2 net.Conn, stop func(), err error) {
				p := newConns()
				c1, c2 = p.cloud, p.edge
				if swap {
					c1, c2 = c2, c1
				}
				return c1, c2, func() { c1.Close(); c2.Close() }, nil
			}
		}
		t.Run("cloud first", func(t *testing.T) { nettest.TestConn(t, pipe(false)) })
		t.Run("edge first", func(t *testing.T) { nettest.TestConn(t, pipe(true)) })
	})
}

// One data connection serves conn after conn, whichever side ends first, and both ends are idle in
// between.
func TestDataConnectionServesTheNextConn(t *testing.T) {
	p := newDataPair(t)
	defer p.close()
	for i := range 50 {
		f := p.next()
		first, second := f.cloud, f.edge
		if i%2 == 1 {
			first, second = second, first
		}
		want := bytes.Repeat([]byte{byte(i)}, 1+i*1000)
		go func() {
			first.Write(want)
			first.CloseWrite()
		}()
		got, err := io.ReadAll(second)
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("conn %d: %d of %d bytes, %v", i, len(got), len(want), err)
		}
		if i%3 == 0 {
			second.Write(want[:1])
		}
		second.Close()
		if i%5 == 0 {
			first.Close()
		} else if _, err := io.Copy(io.Discard, first); err != nil {
			t.Fatalf("conn %d: %v", i, err)
		}
		first.Close()
		testkit.Eventually(t, "nothing is left of the conn", func() bool { return f.gone.Load() == 2 })
		if !p.idle() {
			t.Fatalf("conn %d: the data connection is not idle: cloud in phase %d, edge in %d", i, p.cloud.phase, p.edge.phase)
		}
	}
}

// A lease that was returned or revoked touches no byte of the next conn.
func TestLeaseThatIsOver(t *testing.T) {
	p := newDataPair(t)
	defer p.close()
	f := p.next()
	old := f.cloud.way.(*Lease)
	f.cloud.Close()
	f.edge.Close()
	testkit.Eventually(t, "nothing is left of the conn", func() bool { return f.gone.Load() == 2 })
	f = p.next()
	late := &outgoing{block: p.blocks.get(), n: 1, pool: &p.blocks}
	if err := old.SendMsg(late); err == nil {
		t.Error("a conn that has ended sends")
	}
	if err := old.RecvMsg(new(incoming)); err == nil {
		t.Error("a conn that has ended receives")
	}
	revoked := f.edge.way.(*Lease)
	revoked.Revoke()
	if err := revoked.RecvMsg(new(incoming)); err == nil {
		t.Error("a conn that was reset receives")
	}
	if err := revoked.ReturnAtEdge(); err == nil {
		t.Error("the data connection of a conn that was reset can be used again")
	}
	f.cloud.Abort()
	f.edge.Abort()
	testkit.Eventually(t, "nothing is left of the conn", func() bool { return f.gone.Load() == 2 })
}
