package hostile

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"tunnel.example/tunnel/internal/testkit"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/test/rig"
	"tunnel.example/tunnel/test/rig/rigtest"
)

// crowd is strangers of several addresses, each of which holds so many connections to one
// port, and connects again when one is closed.
type crowd struct {
	network *rig.Network // where they are; nil: here
	from    []net.IP
	each    int
	to      string // host:port
	begin   string // what a connection sends
}

// hold holds the connections until stop is called. It returns when each was opened once.
func (c crowd) hold() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var opened, all sync.WaitGroup
	dial, end := c.dialer(ctx)
	for _, ip := range c.from {
		for range c.each {
			opened.Add(1)
			all.Go(func() {
				first := sync.OnceFunc(opened.Done)
				defer first()
				for ctx.Err() == nil {
					conn, err := dial(ip)
					if err == nil {
						io.WriteString(conn, c.begin)
						first()
						io.Copy(io.Discard, conn)
						conn.Close()
					}
					first()
					select {
					case <-time.After(again):
					case <-ctx.Done():
					}
				}
			})
		}
	}
	opened.Wait()
	return func() {
		cancel()
		all.Wait()
		end()
	}
}

// again is how long a connection of a crowd waits before it is made again.
const again = time.Second

// dialer returns what makes the crowd's connections, one at a time. In another network
// all of that happens on one thread.
func (c crowd) dialer(ctx context.Context) (dial func(net.IP) (net.Conn, error), end func()) {
	type result struct {
		net.Conn
		error
	}
	from, to := make(chan net.IP), make(chan result)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.network.Do(func() error {
			for ip := range from {
				conn, err := dialFrom(ctx, nil, ip, c.to)
				to <- result{conn, err}
			}
			return nil
		})
	}()
	var mu sync.Mutex // one asks and takes the answer
	return func(ip net.IP) (net.Conn, error) {
			mu.Lock()
			defer mu.Unlock()
			from <- ip
			r := <-to
			return r.Conn, r.error
		}, func() {
			close(from)
			<-ended
		}
}

// dialFrom connects from an address. The connection ends with ctx, by a reset.
func dialFrom(ctx context.Context, network *rig.Network, ip net.IP, to string) (c net.Conn, err error) {
	err = network.Do(func() error {
		c, err = (&net.Dialer{LocalAddr: &net.TCPAddr{IP: ip}, Timeout: hangs}).DialContext(ctx, "tcp", to)
		return err
	})
	if err != nil {
		return nil, err
	}
	c.(*net.TCPConn).SetLinger(0)
	context.AfterFunc(ctx, func() { c.Close() })
	return c, nil
}

// joinFrom joins as a node from an address, and leaves.
func joinFrom(network *rig.Network, ip net.IP, v *victim, node string) error {
	ctx, cancel := context.WithTimeout(context.Background(), hangs)
	defer cancel()
	cc, err := grpc.NewClient("passthrough:///"+v.Addr["grpc"],
		grpc.WithTransportCredentials(credentials.NewTLS(v.edgeTLS())), grpc.WithDisableRetry(),
		grpc.WithContextDialer(func(_ context.Context, a string) (net.Conn, error) { return dialFrom(ctx, network, ip, a) }))
	if err != nil {
		return err
	}
	defer cc.Close()
	e := &evil{StreamClient: pb.NewStreamClient(cc), node: node}
	if err := v.open(ctx, e); err != nil {
		return err
	}
	if err := e.say("stream", "hello", "", &pb.Hello{Version: 1, Software: "evil"}); err != nil {
		return e.end()
	}
	_, err = e.control.Recv()
	return err
}

// joinsFrom returns a function that joins from an address, as each of the evil nodes in turn: a single node may not
// join so often.
func joinsFrom(network *rig.Network, ip net.IP, v *victim) func() error {
	n := 0
	return func() error {
		n++
		return joinFrom(network, ip, v, evils[n%len(evils)])
	}
}

// getFrom asks the server at addr for a page, on a connection of its own.
func getFrom(network *rig.Network, ip net.IP, addr, url string, conf *tls.Config) error {
	transport := &http.Transport{TLSClientConfig: conf, DisableKeepAlives: true}
	transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return dialFrom(ctx, network, ip, addr)
	}
	resp, err := (&http.Client{Transport: transport, Timeout: hangs}).Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// wantServed asks as somebody else does, again and again. In the long form, an answer may take so long.
func wantServed(t *testing.T, within time.Duration, ask func() error) {
	t.Helper()
	var longest time.Duration
	failed := 0
	const asked = 20
	for range asked {
		begun := time.Now()
		if err := ask(); err != nil {
			failed++
			t.Log(err)
		}
		longest = max(longest, time.Since(begun))
		time.Sleep(5 * poll)
	}
	t.Logf("others: %d of %d failed, the longest took %s", failed, asked, longest.Round(time.Millisecond))
	if failed > 0 || long() && longest > within { // beside other tests, only a failure counts
		t.Errorf("others: %d of %d failed, the longest took %s; want none, and %s at most", failed, asked, longest, within)
	}
}

// what a stranger sends, and what follows never comes.
var beginnings = map[string]string{
	"silent":             "",
	"half a ClientHello": string([]byte{22, 3, 1, 2, 0, 1, 0}),
	"half a header":      "GET /healthz HTTP/1.1\r\n",
}

const (
	// soon is how long others may wait while strangers hold all places.
	soon = 2 * time.Second
	// probed is how long a kubelet waits for its probe by default.
	probed = time.Second
)

// TestHostileStrangers is idle strangers of a few addresses, who could hold all places of a
// port. Others are served as ever.
func TestHostileStrangers(t *testing.T) {
	l := newLab(t, nil, "")
	v := l.victim()
	other := net.IPv4(127, 0, 0, 3)
	for _, tc := range []struct {
		door          string
		sources, each int
		begin         []string
		within        time.Duration
		ask           func() error
	}{
		{"grpc", 16, 128, []string{"silent", "half a ClientHello"}, soon, joinsFrom(nil, other, v)},
		{"https", 4, 256, []string{"silent", "half a ClientHello"}, soon, func() error {
			return getFrom(nil, other, v.Addr["https"], "https://"+rig.Node+"/", v.callerTLS(true))
		}},
		{"health", 8, 32, []string{"silent", "half a header"}, probed, func() error {
			return getFrom(nil, other, v.Addr["health"], "http://cloud/healthz", nil)
		}},
	} {
		for _, begin := range tc.begin {
			t.Run(fmt.Sprintf("%s: %d x %d, %s", tc.door, tc.sources, tc.each, begin), func(t *testing.T) {
				c := crowd{each: tc.each, to: v.Addr[tc.door], begin: beginnings[begin]}
				for i := range tc.sources {
					c.from = append(c.from, net.IPv4(127, 0, 1, byte(i)))
				}
				defer c.hold()()
				wantServed(t, tc.within, tc.ask)
			})
		}
	}
}

// TestHostilePrefix is one customer with a /48 of IPv6, who has 65,536 times a /64.
func TestHostilePrefix(t *testing.T) {
	network := rigtest.Network(t)
	const networks, each = 64, 32
	addresses := []string{"2001:db8:2::1"} // of somebody else
	for i := range networks {
		addresses = append(addresses, fmt.Sprintf("2001:db8:1:%x::1", i*64))
	}
	var ips []net.IP
	for _, a := range addresses {
		if err := network.IP("addr add " + a + "/128 dev lo nodad"); err != nil {
			t.Skipf("this kernel has no IPv6: %v", err)
		}
		ips = append(ips, net.ParseIP(a))
	}
	pair, err := rig.NewPair(rig.Config{Binary: program, Dir: t.TempDir(), Others: evils,
		CloudHost: rig.Host{Network: network}})
	if err != nil {
		t.Fatal(err)
	}
	cloud, err := pair.StartCloud()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if !cloud.Alive() {
			t.Errorf("the cloud has ended by itself, with exit code %d", cloud.ExitCode())
		}
		cloud.Kill()
		if t.Failed() {
			t.Log(cloud.Log())
		}
	}()
	v := &victim{Addr: make(map[string]string), Token: make(map[string]string), Dir: pair.Path("")}
	for _, node := range evils {
		v.Token[node] = pair.Token(node).Reveal()
	}
	for door, at := range map[string]string{"grpc": pair.GRPC(), "health": pair.CloudHealth()} {
		_, port, err := net.SplitHostPort(at)
		if err != nil {
			t.Fatal(err)
		}
		v.Addr[door] = net.JoinHostPort("::1", port)
	}
	probe := func() error {
		return getFrom(network, ips[0], v.Addr["health"], "http://cloud/healthz", nil)
	}
	testkit.Within(t, readyWithin, "the cloud is up", probe)
	join := joinsFrom(network, ips[0], v)
	for _, tc := range []struct {
		door, begin string
		within      time.Duration
		ask         func() error
	}{
		{"grpc", "silent", soon, join},
		{"grpc", "half a ClientHello", soon, join},
		{"health", "silent", probed, probe},
		{"health", "half a header", probed, probe},
	} {
		name := strings.Join([]string{tc.door, strconv.Itoa(networks) + " x " + strconv.Itoa(each), tc.begin}, ", ")
		t.Run(name, func(t *testing.T) {
			c := crowd{network: network, from: ips[1:], each: each, to: v.Addr[tc.door], begin: beginnings[tc.begin]}
			defer c.hold()()
			wantServed(t, tc.within, tc.ask)
		})
	}
}
