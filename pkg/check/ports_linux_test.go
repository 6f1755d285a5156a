package check

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/api"
)

// A port of the cloud is in use, by the cloud or another program, or is free. Nothing is opened to find out.
func TestPort(t *testing.T) {
	down := daemon{mode: "cloud", socket: "/none.sock"}
	tcp, err := net.Listen("tcp", testkit.FreeAddress(t))
	if err != nil {
		t.Fatal(err)
	}
	udp, err := net.ListenPacket("udp4", fmt.Sprintf(":%d", testkit.FreePort(t)))
	if err != nil {
		t.Fatal(err)
	}
	addr, datagrams := tcp.Addr().String(), fmt.Sprintf("127.0.0.1:%d", udp.LocalAddr().(*net.UDPAddr).Port)
	_, port, _ := net.SplitHostPort(addr)
	of := func(listener string) daemon {
		return daemon{mode: "cloud", asked: true, last: &api.Status{Mode: "cloud", Listeners: []string{listener}}}
	}
	look := func(d daemon, module, addr string) Result {
		t.Helper()
		return (&cloud{daemon: d}).port(t.Context(), module, addr)
	}
	const another = "another program has the port"
	want(t, "of another program", look(down, "tcp", addr), StateFail, another, "ss -ltnup")
	want(t, "every address", look(down, "tcp", ":"+port), StateFail, another, "ss -ltnup")
	want(t, "datagrams", look(down, "udp", datagrams), StateFail, another, "ss -ltnup")
	want(t, "both", look(down, "dns", datagrams), StateFail, another, "ss -ltnup")
	want(t, "a cloud that nobody can ask", look(daemon{mode: "cloud"}, "tcp", addr), StateWarn,
		"by this cloud or by another program", "the line daemon")
	want(t, "of this cloud", look(of("tcp "+addr), "tcp", addr), StateOK, "the cloud has the port", "")
	want(t, "of another module", look(of("https "+addr), "tcp", addr), StateFail, another, "ss -ltnup")
	want(t, "another address", look(down, "tcp", "127.0.0.2:"+port), StateOK, "is free", "")
	want(t, "not ours", look(down, "tcp", "192.0.2.1:9"), StateFail, "does not have the address", "ip address")
	want(t, "no address", look(down, "tcp", "127.0.0.1"), StateFail, "missing port", "correct")
	tcp.Close()
	udp.Close()
	want(t, "closed", look(down, "tcp", addr), StateOK, "is free", "")
	want(t, "lost", look(of("tcp "+addr), "tcp", addr), StateFail, "nobody listens", "the cloud's log")
	want(t, "new", look(of("tcp 127.0.0.1:1"), "tcp", addr), StateWarn, "another configuration", "tunnel reload")

	six, err := net.Listen("tcp6", fmt.Sprintf("[::]:%d", testkit.FreePort(t))) // with IPV6_V6ONLY
	if err != nil {
		return // a kernel without IPv6
	}
	defer six.Close()
	_, port, _ = net.SplitHostPort(six.Addr().String())
	const every = "a program listens at every address of IPv6"
	want(t, "IPv4, beside IPv6", look(down, "tcp", "127.0.0.1:"+port), StateWarn, every, "if its address is *")
	want(t, "IPv6", look(down, "tcp", "[::1]:"+port), StateFail, another, "ss -ltnup")
	want(t, "both families", look(down, "tcp", ":"+port), StateFail, another, "ss -ltnup")
}

// A listener at every address conflicts with one at any address of its families. At :: it may have no IPv4.
func TestConflict(t *testing.T) {
	for _, tt := range []struct {
		socket, at string
		want       use
	}{
		{"127.0.0.1:1", "127.0.0.1:1", taken},
		{"127.0.0.1:1", "127.0.0.1:2", free},
		{"127.0.0.1:1", "127.0.0.2:1", free},
		{"127.0.0.1:1", "0.0.0.0:1", taken},
		{"0.0.0.0:1", "127.0.0.1:1", taken},
		{"0.0.0.0:1", "[::1]:1", free},
		{"0.0.0.0:1", "[::]:1", taken},
		{"127.0.0.1:1", "[::]:1", taken},
		{"[::1]:1", "[::]:1", taken},
		{"[::]:1", "127.0.0.1:1", unclear},
		{"[::]:1", "0.0.0.0:1", unclear},
		{"[::]:1", "[::1]:1", taken},
		{"[::]:1", "[::]:1", taken},
		{"[::]:1", "[::1]:2", free},
	} {
		if got := conflict(netip.MustParseAddrPort(tt.socket), netip.MustParseAddrPort(tt.at)); got != tt.want {
			t.Errorf("%s for %s: %d; want %d", tt.socket, tt.at, got, tt.want)
		}
	}
}

// FuzzHasPort: whatever the table holds, a listener in it has its port.
func FuzzHasPort(f *testing.F) {
	f.Add("  sl  local_address rem_address   st\n   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000\n", true)
	f.Add("0: 00000000000000000000000001000000:0050 0:0 07\n1: x:y z 0A\n2: 00:1 z 0A", false)
	f.Fuzz(func(t *testing.T, table string, isTCP bool) {
		for line := range strings.Lines(table) {
			fields := strings.Fields(line)
			if len(fields) < 4 || isTCP && fields[3] != "0A" {
				continue
			}
			if at, ok := parseSocket(fields[1]); ok {
				if has, err := hasPort(strings.NewReader(line), isTCP, at); has == free && err == nil {
					t.Errorf("%q does not have %s", line, at)
				}
			}
		}
	})
}
