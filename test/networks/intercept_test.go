package networks

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"testing"
)

// serveHTTP serves HTTP on ln until the test ends.
func serveHTTP(t *testing.T, ln net.Listener, handler http.Handler) {
	t.Helper()
	server := &http.Server{Handler: handler, ErrorLog: log.New(io.Discard, "", 0)}
	served := make(chan struct{})
	go func() {
		defer close(served)
		server.Serve(ln)
	}()
	t.Cleanup(func() {
		server.Close()
		<-served
	})
}

// listenTLS listens with the certificate of boxes.
func (s *site) listenTLS() net.Listener {
	s.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	return tls.NewListener(ln, s.boxTLS())
}

// boxTLS is the certificate of boxes.
func (s *site) boxTLS() *tls.Config {
	s.t.Helper()
	pair, err := tls.LoadX509KeyPair(s.boxCrt, s.boxKy)
	if err != nil {
		s.t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}}
}

// ingress is an HTTP ingress of the standard library.
func (s *site) ingress() (addr string) {
	ln := s.listenTLS()
	serveHTTP(s.t, ln, httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: s.web}))
	return ln.Addr().String()
}

// interceptor is a proxy that ends the TLS of all connections, with certificates of its own CA, and passes on HTTP
// alone.
func (s *site) interceptor() (addr string) {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(s.ca.CertPEM())
	conf := s.boxTLS()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	intercepted := &passed{conns: make(chan net.Conn), done: make(chan struct{})}
	serveHTTP(s.t, intercepted, &httputil.ReverseProxy{
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: "https", Host: r.In.Host}) },
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true},
		ErrorLog:  log.New(io.Discard, "", 0),
	})
	serveHTTP(s.t, ln, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			http.Error(w, "a proxy", http.StatusBadRequest)
			return
		}
		c, buffered, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		inner := tls.Server(&peeked{c, buffered.Reader}, conf)
		if inner.HandshakeContext(context.Background()) != nil {
			c.Close()
			return
		}
		select {
		case intercepted.conns <- inner:
		case <-intercepted.done:
			c.Close()
		}
	}))
	return ln.Addr().String()
}

// peeked is a connection of which a reader holds bytes already.
type peeked struct {
	net.Conn
	from *bufio.Reader
}

func (p *peeked) Read(b []byte) (int, error) { return p.from.Read(b) }

// passed is a listener for connections that were accepted elsewhere.
type passed struct {
	conns chan net.Conn
	done  chan struct{}
}

func (p *passed) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *passed) Close() error {
	select {
	case <-p.done:
	default:
		close(p.done)
	}
	return nil
}

func (p *passed) Addr() net.Addr { return &net.TCPAddr{} }
