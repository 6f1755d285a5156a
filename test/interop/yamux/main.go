// Command yamux is the pair of relays that the benchmark compares the tunnel with: one TLS connection,
// which the edge dials, and a yamux stream on it for each conn. It is in this module so that the
// product does not require yamux.
//
//	yamux [-all] cloud CERTIFICATE KEY   prints the ports for callers and for the edge
//	yamux [-all] edge CLOUD TARGET       prints a line when it has joined
package main

import (
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"

	"github.com/hashicorp/yamux"
)

func main() {
	all := flag.Bool("all", false, "listen at all addresses, not on loopback alone")
	flag.Parse()
	fmt.Fprintln(os.Stderr, "yamux:", run(*all, flag.Args()))
	os.Exit(1)
}

// run relays until something fails. It returns no nil error.
func run(all bool, args []string) error {
	ip := "127.0.0.1"
	if all {
		ip = ""
	}
	switch {
	case len(args) == 3 && args[0] == "cloud":
		return cloud(ip, args[1], args[2])
	case len(args) == 3 && args[0] == "edge":
		return edge(args[1], args[2])
	}
	return errors.New("usage: yamux [-all] cloud CERTIFICATE KEY | yamux [-all] edge CLOUD TARGET")
}

// cloud listens for an edge and for callers, whose connections go to the edge.
func cloud(ip, cert, key string) error {
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return err
	}
	door, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		return err
	}
	carrier, err := tls.Listen("tcp", net.JoinHostPort(ip, "0"),
		&tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13})
	if err != nil {
		return err
	}
	var session atomic.Pointer[yamux.Session]
	go func() {
		for {
			c, err := carrier.Accept()
			if err != nil {
				return
			}
			if s, err := yamux.Client(c, nil); err == nil {
				session.Store(s)
			}
		}
	}()
	fmt.Println(door.Addr().(*net.TCPAddr).Port, carrier.Addr().(*net.TCPAddr).Port)
	for {
		in, err := door.Accept()
		if err != nil {
			return err
		}
		go func() {
			s := session.Load()
			if s == nil {
				in.Close()
				return
			}
			out, err := s.Open()
			if err != nil {
				in.Close()
				return
			}
			join(in, out)
		}()
	}
}

// edge joins the cloud, says so, and connects its streams to the target.
func edge(cloud, target string) error {
	// a benchmark on one machine
	c, err := tls.Dial("tcp", cloud, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13})
	if err != nil {
		return err
	}
	s, err := yamux.Server(c, nil)
	if err != nil {
		return err
	}
	fmt.Println(0)
	for {
		in, err := s.Accept()
		if err != nil {
			return fmt.Errorf("the session has ended: %w", err)
		}
		go func() {
			out, err := net.Dial("tcp", target)
			if err != nil {
				in.Close()
				return
			}
			join(in, out)
		}()
	}
}

// join copies both ways until one of them has ended. A yamux stream cannot be reset: a target that
// goes on sending would not learn that its client has gone, if join waited for both.
func join(a, b net.Conn) {
	ended := make(chan struct{}, 2) // one send by each direction
	for _, to := range [][2]net.Conn{{a, b}, {b, a}} {
		go func() {
			io.Copy(to[0], to[1]) //nolint:errcheck // the client judges
			ended <- struct{}{}
		}()
	}
	<-ended
	a.Close()
	b.Close()
}
