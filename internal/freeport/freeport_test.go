package freeport

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

// A port that New returned is locked until the process ends. Both protocols can use it at once.
func TestNew(t *testing.T) {
	seen := make(map[int]bool)
	for range 100 {
		port, err := New()
		if err != nil {
			t.Fatal(err)
		}
		if seen[port] {
			t.Fatalf("port %d was returned twice", port)
		}
		seen[port] = true
		dir := filepath.Join(os.TempDir(), fmt.Sprintf("tunnel-test-ports-%d", os.Getuid()))
		file, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(port)), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if lock(file) == nil {
			t.Errorf("port %d is not locked", port)
		}
		file.Close()
		if !free(port) {
			t.Errorf("port %d is in use", port)
		}
	}
}

// A port that has a listener is not free, whichever protocol the listener has.
func TestFree(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for protocol, port := range map[string]int{
		"TCP": ln.Addr().(*net.TCPAddr).Port, "UDP": c.LocalAddr().(*net.UDPAddr).Port,
	} {
		if free(port) {
			t.Errorf("port %d has a %s listener, and is said to be free", port, protocol)
		}
	}
}
