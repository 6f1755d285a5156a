package vanish

import (
	"context"
	"io"
	"net"
	"testing"
	"time"

	core "tunnel.example/tunnel/pkg/tunnel"
)

// A link that is away while bytes are under way, for longer than Splice needs to look at its
// connections, ends no conn: the kernel reports such an outage as a soft error, which TCP
// survives (RFC 1122 section 4.2.3.9).
func TestLinkReturns(t *testing.T) {
	t.Parallel()
	n := newNetworks(t)
	n.sysctl(n.inside, "tcp_retries2", "15") // the kernel's default
	l, err := n.outside.Listen(outsideIP + ":999")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	near, err := n.inside.Dial(context.Background(), "tcp", outsideIP+":999")
	if err != nil {
		t.Fatal(err)
	}
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	caller, b := loopback(t)
	done := make(chan error, 1)
	go func() {
		_, _, err := core.Splice(context.Background(), b, near)
		done <- err
	}()
	expect := func(want string) {
		t.Helper()
		if _, err := io.WriteString(caller, want); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(want))
		far.SetReadDeadline(time.Now().Add(30 * time.Second))
		if _, err := io.ReadFull(far, got); err != nil || string(got) != want {
			t.Fatalf("the target gets %q, %v; want %q", got, err, want)
		}
	}
	expect("before")
	n.ip(n.outside, "link set veth0 down")
	n.ip(n.inside, "neigh flush dev veth0")
	back := make(chan error, 1)
	time.AfterFunc(8*time.Second, func() { back <- n.outside.IP("link set veth0 up") })
	expect("meanwhile")
	if err := <-back; err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		t.Errorf("Splice has ended: %v", err)
	default:
	}
	caller.Close()
	far.Close()
	<-done
}

// loopback is a TCP connection on loopback.
func loopback(t *testing.T) (dialled, accepted net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if dialled, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if accepted, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	return dialled, accepted
}
