package main

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

// The windows are full when no byte has flowed for ten looks, however long that takes.
func TestFlow(t *testing.T) {
	var f flow
	flows := func(n int64) {
		t.Helper()
		if still, err := f.look(n); still || err != nil {
			t.Fatalf("after %d looks: still %t, %v", f.looks, still, err)
		}
	}
	const chunk = 16
	for i := range int64(100_000) { // a slow machine: hours, a chunk at each look
		flows(1000 + i*chunk)
	}
	for range 3 { // a pause, and one more chunk
		for n := f.last; f.still < 9; {
			flows(n)
		}
		flows(f.last + chunk)
	}
	for n := f.last; f.still < 9; {
		flows(n)
	}
	if still, err := f.look(f.last); !still || err != nil {
		t.Errorf("nothing flows: still %t, %v", still, err)
	}
}

// Bytes that somebody takes never fill a window.
func TestNothingFillsUp(t *testing.T) {
	var f flow
	const before = 1 << 40 // of the conns before
	for n := int64(0); n <= maxFlow; n += maxFlow / 8 {
		if still, err := f.look(before + n); still || err != nil {
			t.Fatalf("%d bytes: still %t, %v", n, still, err)
		}
	}
	if _, err := f.look(before + maxFlow + 1); err == nil || !strings.Contains(err.Error(), "do not fill up") {
		t.Errorf("more than any window holds: %v", err)
	}
}

// The target tells how many bytes it has written. When it is told to rest, it writes nothing more to readers that
// stall; their conns stay open, and other conns get their bytes.
func TestTargetRests(t *testing.T) {
	b := &bench{dir: t.TempDir()}
	if err := b.certify(); err != nil {
		t.Fatal(err)
	}
	serve, err := target(b.file("target.crt"), b.file("target.key"))
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go serve(c)
		}
	}()
	l := &line{target: ln.Addr().String()}
	if told, err := l.taken(); err != nil || told != (taken{}) {
		t.Errorf("at first the target tells %+v, %v", told, err)
	}
	flooded := func(chunk int32, n int) net.Conn {
		t.Helper()
		c, err := callWith(through(nil, l.target), order{Kind: orderFlood, Chunk: chunk})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err = io.ReadFull(c, make([]byte, n)); err != nil {
			t.Fatal(err)
		}
		return c
	}
	const read = 16 << 10
	c := flooded(16, read)
	told, err := l.taken()
	if err != nil || told.Written < read || told.Written%16 != 0 || told.Open != 1 || told.Bytes != 0 {
		t.Errorf("after %d bytes the target tells %+v, %v", read, told, err)
	}
	bulk := flooded(bulkChunk, 1)
	if err = l.rest(); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, io.LimitReader(bulk, 64*bulkChunk)); err != nil || n != 64*bulkChunk {
		t.Errorf("a conn whose reader reads gets %d bytes more, %v", n, err)
	}
	bulk.Close()
	c.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
	if _, err = io.Copy(io.Discard, c); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the conn of a reader that has stalled ends with %v, want no end", err)
	}
	flooded(16, read) // a reader that stalls later
}
