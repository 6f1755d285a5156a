package tcp

import (
	"bufio"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/pires/go-proxyproto"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/balancer"
)

// fromBalancer is the header of a balancer whose caller is 10.1.2.3:4711.
const fromBalancer = "PROXY TCP4 10.1.2.3 10.9.9.9 4711 443\r\n"

// networks returns a list of networks.
func networks(list ...string) (all auth.Sources) {
	for _, n := range list {
		all = append(all, netip.MustParsePrefix(n))
	}
	return all
}

// headerTarget is a target that expects a PROXY header. It sends "CALLER DEST" of the header, and then
// echoes. It needs no byte from the caller before.
func headerTarget(t *testing.T) string {
	t.Helper()
	return target(t, func(c *net.TCPConn) {
		r := bufio.NewReader(c)
		h, err := proxyproto.Read(r)
		if err != nil {
			io.WriteString(c, err.Error())
			return
		}
		io.WriteString(c, h.SourceAddr.String()+" "+h.DestinationAddr.String()+"\n")
		io.Copy(c, r)
		c.CloseWrite()
	})
}

func (r *running) caller() string {
	r.t.Helper()
	c := r.connect()
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		r.t.Fatal(err)
	}
	if own := c.LocalAddr().String() + " " + c.RemoteAddr().String() + "\n"; line != own {
		r.t.Errorf("the target sees %q, want %q", line, own)
	}
	return line
}

// A target that asks for the header sees who calls, before the caller has sent a byte.
func TestTargetSeesCaller(t *testing.T) {
	for _, v := range []balancer.Version{1, 2} {
		r := run(t, Listener{Target: headerTarget(t), SendProxy: v}, new(tunnelDouble))
		r.caller()
	}
}

// The bytes of the caller follow the header, and half-closes pass through.
func TestBytesFollowHeader(t *testing.T) {
	r := run(t, Listener{Target: headerTarget(t), SendProxy: 2}, new(tunnelDouble))
	c := r.connect()
	sent := strings.Repeat("hello", 100_000)
	go func() {
		io.WriteString(c, sent)
		c.CloseWrite()
	}()
	all, err := io.ReadAll(c)
	if _, echoed, _ := strings.Cut(string(all), "\n"); err != nil || echoed != sent {
		t.Errorf("%d bytes come back, want %d: %v", len(echoed), len(sent), err)
	}
}

// Behind a balancer, the allow list, the dial and the header for the target have the caller's address.
func TestCallerOfBalancer(t *testing.T) {
	d := new(tunnelDouble)
	r := run(t, Listener{
		Target: headerTarget(t), Allow: networks("10.0.0.0/8"), ProxyFrom: networks("127.0.0.0/8"), SendProxy: 1,
	}, d)
	c := r.connect()
	io.WriteString(c, fromBalancer+"hello")
	c.CloseWrite()
	got, err := io.ReadAll(c)
	if want := "10.1.2.3:4711 10.9.9.9:443\nhello"; err != nil || string(got) != want {
		t.Errorf("the target sends %q, %v; want %q", got, err, want)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.last.Caller != "10.1.2.3:4711" {
		t.Errorf("the caller of the dial is %s", d.last.Caller)
	}
}

// The allow list does not permit a caller because of its balancer's address.
func TestCallerOfBalancerIsDenied(t *testing.T) {
	d := new(tunnelDouble)
	r := run(t, Listener{Target: "127.0.0.1:1", Allow: networks("127.0.0.0/8"), ProxyFrom: networks("127.0.0.0/8")}, d)
	c := r.connect()
	io.WriteString(c, fromBalancer)
	wantReset(t, c, "the caller is not allowed")
	if d.dials.Load() > 0 {
		t.Error("the target was dialled")
	}
	testkit.Eventually(t, "the log names the caller", func() bool {
		return strings.Contains(r.log.String(), "caller denied") && strings.Contains(r.log.String(), "10.1.2.3:4711")
	})
}

// A balancer's check whose address is not allowed causes no warning.
func TestCheckIsNotDeniedAloud(t *testing.T) {
	r := run(t, Listener{
		Target: "127.0.0.1:1", Allow: networks("10.0.0.0/8"), ProxyFrom: networks("127.0.0.0/8"),
	}, new(tunnelDouble))
	c := r.connect()
	io.WriteString(c, "PROXY UNKNOWN\r\n")
	wantReset(t, c, "the check is not allowed")
	r.stop()
	r.wait() // what the module logs about the check comes before its end
	if log := r.log.String(); strings.Contains(log, "WARN") {
		t.Errorf("the log has\n%s", log)
	}
}

// A caller that is not a balancer may not send a header where balancers may.
func TestUnexpectedHeader(t *testing.T) {
	r := run(t, Listener{Target: target(t, echo), ProxyFrom: networks("192.0.2.0/24")}, new(tunnelDouble))
	c := r.connect()
	io.WriteString(c, fromBalancer)
	wantReset(t, c, "a header of a stranger")
	testkit.Eventually(t, "the log says what to write", func() bool {
		return strings.Contains(r.log.String(), `[\"127.0.0.1\"] into [mode.cloud.tcpproxyfrom]`)
	})
	// Other bytes pass.
	c = r.connect()
	io.WriteString(c, "PROXIMITY")
	c.CloseWrite()
	if got, err := io.ReadAll(c); err != nil || string(got) != "PROXIMITY" {
		t.Errorf("the echo is %q, %v", got, err)
	}
}

// A header in several segments is refused as well, before it is whole. Other bytes pass at once, even if a header
// may begin so: each byte here waits for the echo of the one before.
func TestUnexpectedHeaderInPieces(t *testing.T) {
	for name, first := range map[string]string{
		"version 1": fromBalancer[:balancer.HeaderBegin-1], "version 2": "\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			r := run(t, Listener{Target: target(t, echo), ProxyFrom: networks("192.0.2.0/24")}, new(tunnelDouble))
			begin := func(then string) *net.TCPConn {
				c := r.connect()
				got := make([]byte, 1)
				for i := range first {
					io.WriteString(c, first[i:i+1])
					if _, err := io.ReadFull(c, got); err != nil || got[0] != first[i] {
						t.Fatalf("byte %d: the echo is %q, %v", i, got, err)
					}
				}
				io.WriteString(c, then)
				return c
			}
			wantReset(t, begin(map[string]string{"version 1": "Y", "version 2": "\x00"}[name]), "the header has begun")
			c := begin("IMITY")
			c.CloseWrite()
			if got, err := io.ReadAll(c); err != nil || string(got) != "IMITY" {
				t.Errorf("the echo is %q, %v", got, err)
			}
		})
	}
}

// Without balancers, a header is the target's.
func TestHeaderForTarget(t *testing.T) {
	r := run(t, Listener{Target: target(t, echo)}, new(tunnelDouble))
	c := r.connect()
	io.WriteString(c, fromBalancer)
	c.CloseWrite()
	if got, err := io.ReadAll(c); err != nil || string(got) != fromBalancer {
		t.Errorf("the target gets %q, %v", got, err)
	}
}
