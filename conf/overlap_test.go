package conf

import (
	"errors"
	"net"
	"strconv"
	"syscall"
	"testing"
)

// overlap says of two listeners what the kernel does.
func TestOverlap(t *testing.T) {
	ln, err := listenOn(listener{host: "::1"}, 0)
	if err != nil {
		t.Skipf("this machine has no IPv6: %v", err)
	}
	ln.Close()
	var all []listener
	for _, host := range []string{"", "0.0.0.0", "::", "127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1", "localhost"} {
		all = append(all, listener{host: host}, listener{host: host, oneFamily: true})
	}
	for _, a := range all {
		for _, b := range all {
			if got, want := overlap(a, b), collide(t, a, b); got != want {
				t.Errorf("overlap(%+v, %+v) = %t, want %t", a, b, got, want)
			}
		}
	}
}

// A name may resolve to addresses of either family, so only a listener on all addresses certainly takes
// its port.
func TestOverlapOfNames(t *testing.T) {
	name := listener{host: "tunnel.example"}
	for _, tt := range []struct {
		other listener
		want  bool
	}{
		{listener{host: "tunnel.example"}, true},
		{listener{host: ""}, true},
		{listener{host: "0.0.0.0"}, true},
		{listener{host: "::", oneFamily: true}, true},
		{listener{host: "0.0.0.0", oneFamily: true}, false},
		{listener{host: "127.0.0.1"}, false},
		{listener{host: "other.example"}, false},
	} {
		if overlap(name, tt.other) != tt.want || overlap(tt.other, name) != tt.want {
			t.Errorf("overlap with %+v is not %t", tt.other, tt.want)
		}
	}
}

// collide reports whether two listeners cannot open one port. Other programs may take the port that the
// kernel has chosen for a, so a port that b cannot have is tried several times.
func collide(t *testing.T, a, b listener) bool {
	t.Helper()
	for range 5 {
		first, err := listenOn(a, 0)
		if err != nil {
			t.Fatal(err)
		}
		second, err := listenOn(b, first.Addr().(*net.TCPAddr).Port)
		first.Close()
		if err == nil {
			second.Close()
			return false
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatal(err)
		}
	}
	return true
}

// listenOn opens a port as the packages do: pkg/tcp and pkg/dns choose the family of the address.
func listenOn(l listener, port int) (net.Listener, error) {
	addr, err := net.ResolveTCPAddr("tcp", net.JoinHostPort(l.host, strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	network := "tcp"
	if l.oneFamily && addr.IP.To4() != nil {
		network = "tcp4"
	}
	return net.Listen(network, addr.String())
}
