package demo

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/auth"
)

// services are an HTTPS and a TCP service behind the edge. They run in the demo's own
// process, so only the tunnel connects a caller at the cloud with them.
type services struct {
	page *http.Server
	echo net.Listener
	wg   sync.WaitGroup
}

// serve makes the certificate authority and starts the services. close ends them.
func (d *demo) serve() (*services, error) {
	var err error
	if d.ca, err = auth.NewCA("tunnel demo", lifetime); err != nil {
		return nil, err
	}
	cert, key, err := d.ca.Issue(auth.Leaf{CommonName: nodeName, DNSNames: []string{nodeName}, Server: true})
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	page, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		page.Close()
		return nil, err
	}
	d.page, d.echo = page.Addr().String(), echo.Addr().String()
	s := &services{echo: echo, page: &http.Server{
		Handler:           http.HandlerFunc(servePage),
		TLSConfig:         &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}},
		ReadHeaderTimeout: 5 * time.Second,
	}}
	s.wg.Go(func() { s.page.ServeTLS(page, "", "") }) //nolint:errcheck // it fails when close closes the listener
	s.wg.Go(func() {
		for {
			c, err := echo.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.Copy(c, c) //nolint:errcheck // the check that dialled reports it
			}()
		}
	})
	return s, nil
}

func (s *services) close() {
	s.page.Close()
	s.echo.Close()
	s.wg.Wait()
}

func servePage(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Trailer", "Demo-End")
	fmt.Fprintf(w, "hello from node %s, behind its NAT: %s %s\n", nodeName, r.Method, r.URL.Path)
	w.Header().Set("Demo-End", "all of it")
}
