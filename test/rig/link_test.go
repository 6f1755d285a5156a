package rig

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// A link takes its time: its delay, and what its rate asks for.
func TestLinkTakesTime(t *testing.T) {
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skipf("networks are made with ip(8), of iproute2: %v", err)
	}
	var networks [2]*Network
	for i := range networks {
		n, err := NewNetwork()
		if errors.Is(err, syscall.EPERM) {
			t.Skip("needs the right to make network namespaces (CAP_SYS_ADMIN)")
		}
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close()
		networks[i] = n
	}
	const (
		delay = 20 * time.Millisecond
		rate  = 1 << 20
		sent  = 1 << 19
	)
	ends := [2]netip.Prefix{netip.MustParsePrefix("10.1.0.1/24"), netip.MustParsePrefix("10.1.0.2/24")}
	link, err := NewLink(networks, ends, 1500, Quality{Delay: delay, Rate: rate})
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("this kernel has no /dev/net/tun")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	var ln net.Listener
	if err = networks[1].Do(func() (err error) { ln, err = net.Listen("tcp", "10.1.0.2:0"); return err }); err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	began := time.Now()
	var out net.Conn
	if err = networks[0].Do(func() (err error) {
		out, err = net.Dial("tcp", ln.Addr().String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if took := time.Since(began); took < 2*delay {
		t.Errorf("a connection is there after %v, want %v and more", took, 2*delay)
	}
	in, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	began = time.Now()
	go func() {
		out.Write(make([]byte, sent))
		out.Close()
	}()
	n, err := io.Copy(io.Discard, in)
	if err != nil || n != sent {
		t.Fatalf("%d bytes have come, want %d: %v", n, sent, err)
	}
	// The bucket is empty at first, so nothing goes faster than the rate.
	if took, want := time.Since(began), time.Duration(sent)*time.Second/rate; took < want {
		t.Errorf("%d bytes have come in %v, want %v and more", sent, took, want)
	}
}
