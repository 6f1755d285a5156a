package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"

	"github.com/hashicorp/yamux"
)

// yamuxCloud listens for an edge, and returns the server of conns that go to it.
func yamuxCloud(ip, cert, key string) (carrier net.Listener, serve func(net.Conn), err error) {
	cfg, err := serverTLS(cert, key)
	if err != nil {
		return nil, nil, err
	}
	if carrier, err = tls.Listen("tcp", net.JoinHostPort(ip, "0"), cfg); err != nil {
		return nil, nil, err
	}
	var edge atomic.Pointer[yamux.Session]
	go func() {
		for {
			c, err := carrier.Accept()
			if err != nil {
				return
			}
			if s, err := yamux.Client(c, nil); err == nil {
				edge.Store(s)
			}
		}
	}()
	return carrier, func(in net.Conn) {
		s := edge.Load()
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
	}, nil
}

// yamuxEdge joins the cloud, says so, and serves its streams. It returns with an error.
func yamuxEdge(carrier, target, said string) error {
	c, err := tls.Dial("tcp", carrier, anyServer())
	if err != nil {
		return err
	}
	s, err := yamux.Server(c, nil)
	if err != nil {
		return err
	}
	fmt.Println(said)
	for {
		in, err := s.Accept()
		if err != nil {
			return errors.Join(errors.New("the session has ended"), err)
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

// join copies both ways until one of them has ended. A yamux stream cannot be reset: were
// both waited for, a target that goes on sending would not learn that its client has gone.
func join(a, b net.Conn) {
	ended := make(chan struct{}, 2) // a send each
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
