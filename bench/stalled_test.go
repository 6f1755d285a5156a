package main

import (
	"io"
	"net"
	"strings"
	"testing"
)

// The windows are full when neither the target nor the edge has moved a byte for five looks, however long that
// takes.
func TestFilling(t *testing.T) {
	var f filling
	moves := func(written, sent int64) {
		t.Helper()
		if full, err := f.look(written, sent); full || err != nil {
			t.Fatalf("after %d looks: full %t, %v", f.looks, full, err)
		}
	}
	const chunk = 16
	for i := range int64(100_000) { // a slow machine: hours, a chunk at each look
		moves(1000+i*chunk, i*chunk)
	}
	written, sent := f.written, f.sent
	for range 4 {
		moves(written, sent)
	}
	moves(written, sent+chunk) // the edge has sent what it had read before
	for i := range int64(4) {
		moves(written, sent+chunk)
		moves(written+(i+1)*chunk, sent+chunk) // the kernel's buffers before the edge still fill up
		written += (i + 1) * chunk
	}
	for range 4 {
		moves(written, sent+chunk)
	}
	if full, err := f.look(written, sent+chunk); !full || err != nil {
		t.Errorf("nothing moves: full %t, %v", full, err)
	}
}

// Bytes that somebody takes never fill a window.
func TestNothingFillsUp(t *testing.T) {
	var f filling
	const before = 1 << 40 // of the conns before
	for written := int64(0); written <= mostWritten; written += mostWritten / 8 {
		if full, err := f.look(before+written, written); full || err != nil {
			t.Fatalf("%d bytes: full %t, %v", written, full, err)
		}
	}
	_, err := f.look(before+mostWritten+1, mostWritten)
	if err == nil || !strings.Contains(err.Error(), "do not fill up") {
		t.Errorf("more than any window holds: %v", err)
	}
}

// The target counts the bytes that it writes, and no more than the kernel takes.
func TestTargetTells(t *testing.T) {
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
	c, err := callWith(through(nil, l.target), order{Kind: orderFlood, Chunk: 16})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const read = 16 << 10
	if _, err = io.ReadFull(c, make([]byte, read)); err != nil {
		t.Fatal(err)
	}
	told, err := l.taken()
	if err != nil || told.Written < read || told.Written%16 != 0 || told.Open != 1 || told.Bytes != 0 {
		t.Errorf("after %d bytes the target tells %+v, %v", read, told, err)
	}
}
