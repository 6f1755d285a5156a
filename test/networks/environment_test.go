package networks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
	"tunnel.example/tunnel/test/rig/rigtest"
)

// forwardProxy is an HTTP proxy with CONNECT in a network of its own.
type forwardProxy struct {
	network *rig.Network

	mu    sync.Mutex // guards the following
	asked []string   // the addresses that clients have asked for
}

// ServeHTTP implements http.Handler.
func (p *forwardProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodConnect {
		http.Error(w, "only CONNECT", http.StatusMethodNotAllowed)
		return
	}
	p.mu.Lock()
	p.asked = append(p.asked, r.Host)
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	to, err := p.network.Dial(ctx, "tcp", r.Host)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer to.Close()
	from, buffered, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	defer from.Close()
	io.WriteString(from, "HTTP/1.1 200 OK\r\n\r\n")
	var back sync.WaitGroup
	back.Go(func() {
		io.Copy(from, to)
		from.Close()
	})
	io.Copy(to, buffered)
	to.Close()
	back.Wait()
}

// log returns the addresses that clients have asked for.
func (p *forwardProxy) log() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.asked)
}

// newForwardProxy starts the proxy at an address of its network, and returns its URL.
func newForwardProxy(t *testing.T, n *rig.Network, ip string) (*forwardProxy, string) {
	t.Helper()
	ln, err := n.Listen(ip + ":0")
	if err != nil {
		t.Fatal(err)
	}
	p := &forwardProxy{network: n}
	serveHTTP(t, ln, p)
	return p, "http://" + ln.Addr().String()
}

// An edge with the default `proxy = "env"` uses the proxy that HTTPS_PROXY of its environment names, and no proxy for
// an address in NO_PROXY. The cloud is in another network, because no proxy is used for loopback. A third network is
// in between; it has the proxy, and forwards packets only in the second half.
func TestProxyOfEnvironment(t *testing.T) {
	const edgeIP, insideIP, outsideIP, cloudIP = "10.1.0.2", "10.1.0.1", "10.2.0.2", "10.2.0.1"
	edge, between, cloud := rigtest.Network(t), rigtest.Network(t), rigtest.Network(t)
	join := func(device string, a, b *rig.Network, ipA, ipB string) {
		t.Helper()
		link, err := rig.NewLinkAs(device, [2]*rig.Network{a, b}, [2]netip.Prefix{netip.MustParsePrefix(ipA + "/24"),
			netip.MustParsePrefix(ipB + "/24")}, 1500, rig.Quality{})
		if errors.Is(err, os.ErrNotExist) {
			t.Skip("this kernel has no /dev/net/tun")
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(link.Close)
	}
	join("inside", edge, between, edgeIP, insideIP)
	join("outside", between, cloud, outsideIP, cloudIP)
	if err := errors.Join(edge.IP("route add default via "+insideIP),
		cloud.IP("route add 10.1.0.0/24 via "+outsideIP)); err != nil {
		t.Fatal(err)
	}
	forward := func(value string) error {
		return between.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte(value), 0) })
	}
	if err := forward("0"); err != nil {
		t.Fatal(err)
	}
	proxy, url := newForwardProxy(t, between, insideIP)

	dir := t.TempDir()
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	target := echoIn(t, edge)
	fleet, err := rig.NewFleet(rig.FleetConfig{
		Binary: program, Dir: dir, CA: ca, Hosts: []rig.Host{{IP: cloudIP, Network: cloud}}, Nodes: []string{"edge1"},
		Doors: map[string]string{"echo": "edge1/" + target},
	})
	if err != nil {
		t.Fatal(err)
	}
	replica := fleet.Replicas[0]
	member, err := fleet.Edge(rig.EdgeConfig{Node: "edge1", Host: rig.Host{Network: edge}, Cloud: replica.GRPC()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the cloud:\n%s\nlog of the edge:\n%s", replica.Log.String(), member.Log.String())
		}
	})
	started, err := replica.Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(started.Kill)
	// run starts the edge with an environment, which env(1) sets, and waits until a conn passes.
	run := func(environment ...string) *rig.Process {
		t.Helper()
		args := slices.Concat(environment, []string{program, "edge", "-c", dir + "/edge1.toml"})
		p, err := rig.StartIn(edge, &member.Log, "/usr/bin/env", args...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Kill)
		testkit.Within(t, soon, "the edge has a session", member.Ready)
		testkit.Within(t, soon, "a conn passes", func() error { return passes(cloud, replica.Door("echo")) })
		return p
	}

	with := run("HTTPS_PROXY="+url, "NO_PROXY=192.0.2.1")
	asked := proxy.log()
	if len(asked) == 0 {
		t.Error("the proxy was not asked")
	}
	for _, address := range asked {
		if address != replica.GRPC() {
			t.Errorf("the proxy was asked for %s, want %s", address, replica.GRPC())
		}
	}
	want := replica.GRPC() + " through proxy " + strings.TrimPrefix(url, "http://")
	testkit.Eventually(t, "the log of the edge says "+want, func() bool {
		return strings.Contains(member.Log.String(), want)
	})
	with.Kill()

	if err := forward("1"); err != nil {
		t.Fatal(err)
	}
	before, said := len(proxy.log()), len(member.Log.String())
	without := run("HTTPS_PROXY="+url, "NO_PROXY="+cloudIP)
	if more := proxy.log()[before:]; len(more) > 0 {
		t.Errorf("the proxy was asked for an address in NO_PROXY: %q", more)
	}
	if strings.Contains(member.Log.String()[said:], "through proxy") {
		t.Error("the log of the edge names a proxy for an address in NO_PROXY")
	}
	without.Kill()
}

// echoIn starts a service on loopback of a network that sends back what it receives, and returns its address.
func echoIn(t *testing.T, n *rig.Network) string {
	t.Helper()
	ln, err := n.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return testkit.ServeOn(t, ln, func(_ context.Context, c net.Conn) { io.Copy(c, c) })
}

// passes returns nil when bytes come back through a door in a network.
func passes(n *rig.Network, door string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c, err := n.Dial(ctx, "tcp", door)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	want := []byte("there and back")
	if _, err = c.Write(want); err != nil {
		return err
	}
	got := make([]byte, len(want))
	if _, err = io.ReadFull(c, got); err == nil && string(got) != string(want) {
		err = fmt.Errorf("%q came back", got)
	}
	return err
}
