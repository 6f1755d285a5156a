//go:build !linux

package udp

import (
	"net/netip"
	"syscall"
)

// The functions of this file do nothing: only Linux can send and receive several datagrams by one system call.

func growReceive(syscall.RawConn, int) {}

func receiveTrains(syscall.RawConn) {}

func trainSegment([]byte) int { return 0 }

func sourceFor([]byte) netip.Addr { return netip.Addr{} }

func canSegment() bool { return false }

func appendSegment(control []byte, _ int) []byte { return control }

// receiveDrops counts nothing: the kernel does not say how many datagrams found a buffer full.
type receiveDrops struct{ raw syscall.RawConn }

func (*receiveDrops) more() uint64 { return 0 }
