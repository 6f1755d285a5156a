package listen_test

import (
	"fmt"
	"net"

	"tunnel.example/tunnel/pkg/listen"
)

// At most two strangers of one source have a place. When a peer has authenticated, its connection needs
// no place any more.
func ExampleStrangers() {
	strangers := listen.NewStrangers(100, 2) // places in all, places of one source
	admit := func() *listen.Stranger {
		conn, peer := net.Pipe() // without an IP address: all pipes are one source
		defer peer.Close()
		defer conn.Close()
		place, full := strangers.Admit(conn, func() { conn.Close() })
		fmt.Println("admitted:", place != nil, "too many of one source:", full.Source)
		return place
	}
	first := admit()
	admit()
	admit()
	first.Met()
	admit()
	// Output:
	// admitted: true too many of one source: false
	// admitted: true too many of one source: false
	// admitted: false too many of one source: true
	// admitted: true too many of one source: false
}
