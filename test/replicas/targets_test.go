package replicas

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

// targets are what the edge of one node dials, and nobody else may. They run in the
// test's own process.
type targets struct {
	http string // says who it is, and the word it was asked
	echo string // sends back what it gets
	pour string // sends what it is asked for, see order
}

// doors returns the front doors of a node: name → node/target.
func (s *targets) doors(node string) map[string]string {
	return map[string]string{
		door(node, "http"): node + "/" + s.http,
		door(node, "echo"): node + "/" + s.echo,
		door(node, "pour"): node + "/" + s.pour,
	}
}

func door(node, kind string) string { return node + "." + kind }

// newTargets starts the targets of a node, in the network of its edge.
func newTargets(t *testing.T, network *rig.Network, node string) *targets {
	t.Helper()
	s := &targets{
		echo: serve(t, network, func(c net.Conn) {
			io.Copy(c, c)
			c.(*net.TCPConn).CloseWrite()
			io.Copy(io.Discard, c)
		}),
		pour: serve(t, network, servePour),
	}
	ln := listen(t, network)
	s.http = ln.Addr().String()
	serveHTTP(t, ln, nil, node)
	return s
}

// order is what a client asks of the target that pours.
type order struct{ Bytes, BytesPerSecond int64 }

func servePour(c net.Conn) {
	var o order
	if err := binary.Read(c, binary.BigEndian, &o); err != nil {
		return
	}
	if err := rig.SendNoise(c, o.Bytes, o.BytesPerSecond); err != nil {
		return
	}
	c.(*net.TCPConn).CloseWrite()
	io.Copy(io.Discard, c)
}

// serveHTTP answers requests until the test ends. With a configuration it speaks TLS,
// and is whoever it was asked for.
func serveHTTP(t *testing.T, ln net.Listener, conf *tls.Config, node string) {
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			me := node
			if r.TLS != nil {
				me = r.TLS.ServerName
			}
			fmt.Fprint(w, answer(me, r.URL.Query().Get("word")))
		}),
		ReadHeaderTimeout: 20 * time.Second,
		ErrorLog:          log.New(io.Discard, "", 0), // clients that go in the middle
	}
	if conf != nil {
		ln = tls.NewListener(ln, conf)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		server.Serve(ln)
	}()
	t.Cleanup(func() {
		server.Close()
		<-done
	})
}

// answer is what a node answers to a word.
func answer(node, word string) string { return node + " has heard " + word + "\n" }

// newTLSTarget starts the one HTTPS target of all nodes, and returns its address.
func newTLSTarget(t *testing.T, ca *auth.CA, nodes []string) string {
	t.Helper()
	pair := testca.CA{CA: ca}.Pair(t, auth.Leaf{CommonName: "nodes", DNSNames: nodes, Server: true})
	ln := listen(t, nil)
	serveHTTP(t, ln, &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}}, "")
	return ln.Addr().String()
}

func listen(t *testing.T, network *rig.Network) (ln net.Listener) {
	t.Helper()
	err := network.Do(func() (err error) {
		ln, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// serve gives every connection to f until the test ends, and returns the address.
func serve(t *testing.T, network *rig.Network, f func(c net.Conn)) string {
	t.Helper()
	return testkit.ServeOn(t, listen(t, network), func(_ context.Context, c net.Conn) { f(c) })
}
