package udp

import (
	"log/slog"
	"net"
	"testing"
)

// A process that takes over a socket does not count again what the process before it has counted.
func TestReceiveDropsOfTheProcessBefore(t *testing.T) {
	socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	caller, err := net.DialUDP("udp", nil, socket.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer caller.Close()
	raw, err := socket.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := socket.SetReadBuffer(1); err != nil { // the least that the kernel allows
		t.Fatal(err)
	}
	for range 100 {
		caller.Write(make([]byte, 1000))
	}
	if n := (&receiveDrops{raw: raw}).more(); n == 0 {
		t.Fatal("the kernel has dropped nothing")
	}
	cfg := Config{Counters: new(Counters), Log: slog.New(slog.DiscardHandler)}
	p := newPort(Listener{Listen: "x"}, socket, t.Context(), &cfg, Limits{})
	defer p.endConns()
	if n := p.drops.more(); n != 0 {
		t.Errorf("%d datagrams are counted again", n)
	}
}
