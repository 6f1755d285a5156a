package links

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
	"tunnel.example/tunnel/test/rig/rigtest"
)

const (
	// noticed is how long either end may take to see that the other is gone: 15 s are
	// promised, and this machine has other things to do.
	noticed = 17 * time.Second
	// healed is how long it may take after that until a session is there again: an attempt
	// that is under way has to be given up (10 s), and a pause passes (10 s).
	healed = 22 * time.Second
	// moved is how long it may take after a change of the edge's address until a new session is there. The edge
	// hears of the change after 0.3 s, and gives the cloud 3 s to answer on the old connection. Without the kernel's
	// word it would notice nothing for 14 s.
	moved = 12 * time.Second

	cloudIP = "10.1.0.1"
	edgeIP  = "10.1.0.2"
	door    = "echo"
)

// Services behind the edge besides the echo.
const (
	source = "source" // sends for ever, and reads nothing
	sink   = "sink"   // reads for ever, and says nothing
)

var (
	good = rig.Quality{Delay: 5 * time.Millisecond}
	// bad is 300 ms ± 100 ms there and back, and a tenth of the packets lost each way.
	bad = rig.Quality{Delay: 150 * time.Millisecond, Jitter: 50 * time.Millisecond, Loss: 0.1}
)

// far is a cloud and an edge with a link between them.
type far struct {
	t           *testing.T
	link        *rig.Link
	cloud, edge *rig.Network
	replica     *rig.Replica
	member      *rig.Member
	door        string

	mu   sync.Mutex      // guards the following
	sunk []*atomic.Int64 // bytes that each conn to the sink has brought
}

// congestion is the congestion control of both ends: the one that a network of one's own may always
// have, or that of TUNNEL_CONGESTION.
func congestion() string {
	if name := os.Getenv("TUNNEL_CONGESTION"); name != "" {
		return name
	}
	return "reno"
}

// newFar starts both and waits for the session.
func newFar(t *testing.T) *far { return newFarOver(t, good) }

// newFarOver is newFar with a link of that quality.
func newFarOver(t *testing.T, q rig.Quality) *far {
	t.Helper()
	f := newNetworks(t, q)
	f.startBoth("")
	return f
}

// newNetworks makes two networks with a link between them.
func newNetworks(t *testing.T, q rig.Quality) *far {
	t.Helper()
	f := &far{t: t}
	networks := [2]*rig.Network{}
	for i := range networks {
		n := rigtest.Network(t)
		// What most kernels have is reno's kin; this machine's own may be another.
		if err := n.Do(func() error {
			return os.WriteFile("/proc/sys/net/ipv4/tcp_congestion_control", []byte(congestion()), 0)
		}); err != nil {
			t.Fatal(err)
		}
		networks[i] = n
	}
	f.cloud, f.edge = networks[0], networks[1]
	link, err := rig.NewLink(networks,
		[2]netip.Prefix{netip.MustParsePrefix(cloudIP + "/24"), netip.MustParsePrefix(edgeIP + "/24")}, 1280, q)
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("this kernel has no /dev/net/tun")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(link.Close)
	f.link = link
	return f
}

// startBoth starts a cloud and an edge in the networks, and waits for the session. client are more lines of
// the edge's [mode.edge.stream.client].
func (f *far) startBoth(client string) {
	t := f.t
	t.Helper()
	dir := t.TempDir()
	binary, err := rig.Build(dir)
	if err != nil {
		t.Fatal(err)
	}
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	fleet, err := rig.NewFleet(rig.FleetConfig{
		Binary: binary, Dir: dir, CA: ca, Hosts: []rig.Host{{IP: cloudIP, Network: f.cloud}},
		Nodes: []string{"edge1"}, Doors: map[string]string{
			door: "edge1/" + f.echo(), source: "edge1/" + f.service(sendForEver), sink: "edge1/" + f.service(f.readForEver),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	f.replica = fleet.Replicas[0]
	f.door = f.replica.Door(door)
	f.member, err = fleet.Edge(rig.EdgeConfig{Node: "edge1", Host: rig.Host{Network: f.edge}, Cloud: f.replica.GRPC(),
		Client: client})
	if err != nil {
		t.Fatal(err)
	}
	f.start(&f.replica.Member)
	// If a dial with Multipath TCP is refused, package net dials at once again with plain TCP. A cloud that opens its
	// port between the two would get a session with plain TCP.
	f.eventually(noticed, "the cloud is ready", f.replica.Ready)
	f.start(f.member)
	f.eventually(noticed, "the edge has a session", f.ready)
}

func (f *far) start(m *rig.Member) {
	f.t.Helper()
	p, err := m.Start()
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		if !p.Alive() {
			f.t.Errorf("%s has ended by itself", m.Name)
		}
		p.Kill()
		if f.t.Failed() {
			f.t.Logf("log of %s:\n%s", m.Name, p.Log())
		}
	})
}

// echo is a service behind the edge that sends back what it gets.
func (f *far) echo() string {
	return f.service(func(c net.Conn) {
		io.Copy(c, c)
		c.(*net.TCPConn).CloseWrite()
	})
}

func sendForEver(c net.Conn) { rig.SendNoise(c, 0, 1<<30) }

// readForEver counts what comes.
func (f *far) readForEver(c net.Conn) {
	n := new(atomic.Int64)
	f.mu.Lock()
	f.sunk = append(f.sunk, n)
	f.mu.Unlock()
	io.Copy(counted{n}, c)
}

// counted counts what is written to it.
type counted struct{ n *atomic.Int64 }

func (c counted) Write(p []byte) (int, error) {
	c.n.Add(int64(len(p)))
	return len(p), nil
}

// service has serve called with each connection to a port behind the edge, and returns its
// address.
func (f *far) service(serve func(net.Conn)) string {
	f.t.Helper()
	var ln net.Listener
	err := f.edge.Do(func() (err error) {
		ln, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return testkit.ServeOn(f.t, ln, func(_ context.Context, c net.Conn) { serve(c) })
}

// dial connects to an address in a network.
func dial(n *rig.Network, address string) (conn net.Conn, err error) {
	err = n.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", address, time.Minute) // no test judges it
		return err
	})
	return conn, err
}

// get asks a health port from within its network.
func get(n *rig.Network, address, path string) (string, error) {
	tr := &http.Transport{DisableKeepAlives: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) { return dial(n, address) }}
	client := &http.Client{Transport: tr, Timeout: 5 * time.Second}
	resp, err := client.Get("http://" + address + path)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("HTTP %d: %s", resp.StatusCode, strings.TrimSpace(string(body)))
	}
	return string(body), err
}

// ready returns nil when both ends say that there is a session.
func (f *far) ready() error {
	if _, err := get(f.edge, f.member.Health(), "/readyz?verbose"); err != nil {
		return err
	}
	return f.sessions(1)
}

// sessions returns nil when the cloud says that it has n.
func (f *far) sessions(n int) error {
	page, err := get(f.cloud, f.replica.Health(), "/metrics")
	if err == nil && !strings.Contains(page, fmt.Sprintf("\ntunnel_sessions %d\n", n)) {
		err = fmt.Errorf("the cloud has not %d sessions", n)
	}
	return err
}

// gone returns nil when both ends say that there is no session.
func (f *far) gone() error {
	if _, err := get(f.edge, f.member.Health(), "/readyz"); err == nil {
		return errors.New("the edge still has a session")
	}
	return f.sessions(0)
}

func (f *far) eventually(limit time.Duration, what string, check func() error) {
	f.t.Helper()
	took := testkit.Within(f.t, limit, what, check)
	f.t.Logf("%s after %v", what, took.Round(time.Millisecond))
}

// errWrong says that bytes came that nobody sent, or that an end looked clean and was not.
var errWrong = errors.New("wrong bytes")

// exchange sends n bytes and reads them back. Whatever the link does, what comes is
// right, and an end that looks clean is one.
func (f *far) exchange(n int, limit time.Duration) error {
	c, err := dial(f.cloud, f.door)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(limit))
	want := make([]byte, n)
	rng := rand.NewChaCha8([32]byte{byte(n)})
	rng.Read(want)
	var sending sync.WaitGroup
	sending.Go(func() {
		if _, err := c.Write(want); err == nil {
			c.(*net.TCPConn).CloseWrite()
		}
	})
	defer sending.Wait()
	got, err := io.ReadAll(c)
	if !bytes.HasPrefix(want, got) || err == nil && len(got) != n {
		return fmt.Errorf("%w: %d came of %d", errWrong, len(got), n)
	}
	return err
}

// Over a bad link things are slow. Nothing is wrong, and when the link is good again,
// everything is.
func TestBadLink(t *testing.T) {
	t.Parallel()
	f := newFar(t)
	f.link.Set(bad)
	const rounds = 25 * time.Second
	var done, failed atomic.Int64
	var asking sync.WaitGroup
	began := time.Now()
	for range 4 {
		asking.Go(func() {
			for time.Since(began) < rounds {
				switch err := f.exchange(400, noticed); {
				case errors.Is(err, errWrong):
					t.Error(err)
				case err != nil:
					failed.Add(1)
					time.Sleep(100 * time.Millisecond)
				default:
					done.Add(1)
				}
			}
		})
	}
	asking.Go(func() {
		for _, n := range []int{16 << 10, 32 << 10} {
			if err := f.exchange(n, rounds); errors.Is(err, errWrong) {
				t.Error(err)
			} else {
				t.Logf("%d bytes there and back: %v, %v after the start", n, err, time.Since(began).Round(time.Millisecond))
			}
		}
	})
	asking.Wait()
	t.Logf("%d small exchanges in %v, %d failed", done.Load(), rounds, failed.Load())
	if done.Load() < 10 {
		t.Errorf("only %d small exchanges in %v", done.Load(), rounds)
	}
	f.link.Set(good)
	f.eventually(noticed+healed, "the link is good again: a megabyte passes",
		func() error { return f.exchange(1<<20, noticed) })
}

// A link that is cut without a word is noticed by both ends, and heals.
func TestCutLink(t *testing.T) {
	t.Parallel()
	f := newFar(t)
	f.link.Set(rig.Quality{Cut: true})
	f.eventually(noticed, "both ends know that the link is cut", f.gone)
	f.link.Set(good)
	f.eventually(healed, "a session is there again", f.ready)
	if err := f.exchange(1<<20, noticed); err != nil {
		t.Error(err)
	}
}

// An edge that gets another address comes back with it, long before the old session is silent for too long.
func TestAddressChanges(t *testing.T) {
	t.Parallel()
	f := newFar(t)
	if err := errors.Join(f.edge.IP("addr del "+edgeIP+"/24 dev link"),
		f.edge.IP("addr add 10.1.0.3/24 dev link")); err != nil {
		t.Fatal(err)
	}
	f.eventually(moved, "a new session is there", func() error {
		all, err := f.replica.Metrics()
		if n := all["tunnel_sessions_established_total"]; err == nil && n != 2 {
			err = fmt.Errorf("%v sessions were established", n)
		}
		return errors.Join(err, f.ready())
	})
	if err := f.exchange(1<<20, noticed); err != nil {
		t.Error(err)
	}
}
