package listen

import (
	"net"
	"net/netip"
	"testing"
	"time"
)

func TestHandover(t *testing.T) {
	from := NewStrangers(1, 1)
	h := NewHandover(func() net.Addr { return &net.TCPAddr{Port: 443} }, from)
	if h.Addr().String() != ":443" {
		t.Errorf("address %v", h.Addr())
	}
	here, there := net.Pipe()
	defer here.Close()
	defer there.Close()
	if h.Give(here, time.Millisecond) {
		t.Error("a connection is handed over to nobody")
	}
	accepted := make(chan net.Conn)
	go func() {
		c, _ := h.Accept()
		accepted <- c
	}()
	if !h.Give(here, 0) || <-accepted != here {
		t.Error("the connection is not handed over")
	}
	a := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1)}
	if h.Met(a); !from.Knows(netip.MustParseAddr("192.0.2.1")) || from.Knows(netip.MustParseAddr("192.0.2.2")) {
		t.Error("the wrong sources are known")
	}
	(*Handover)(nil).Met(a)
	h.Close()
	h.Close()
	if _, err := h.Accept(); err == nil || h.Give(here, 0) {
		t.Error("it works after Close")
	}
}
