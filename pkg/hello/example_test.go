package hello_test

import (
	"crypto/tls"
	"fmt"
	"net"

	"tunnel.example/tunnel/pkg/hello"
)

// A server decides by the name in the ClientHello, before it answers.
func Example() {
	ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer ln.Close()
	go tls.Dial("tcp", ln.Addr().String(), &tls.Config{ServerName: "edge1"})
	conn, err := ln.AcceptTCP()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()
	h, read, err := hello.Peek(conn)
	if err != nil {
		fmt.Println(err)
		return
	}
	c := hello.NewConn(conn, conn.RemoteAddr(), h, read)
	again := make([]byte, len(read))
	n, err := c.Read(again) // TLS can begin on c
	fmt.Println(h.ServerName, n > 0, err)
	// Output: edge1 true <nil>
}
