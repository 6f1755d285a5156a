package main

import (
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
)

// An edge with the table serves beside its other modules, from the start to the end of the process: it adds its rules
// and leaves none behind.
func TestEdgeWithServices(t *testing.T) {
	if !testkit.InOwnNetwork(t) { // its rules must not be those of this machine
		return
	}
	o := newOperated(t, nil)
	o.edgeRuns.cmd.Process.Signal(os.Interrupt)
	o.edgeRuns.wait()
	state := filepath.Join(filepath.Dir(o.edge), "state", "services.db")
	f, err := os.OpenFile(o.edge, os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = fmt.Fprintf(f, "\n[mode.edge.services]\nstate = %q\n", state)
	}
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	o.startEdge()
	o.eventually("the edge has its state", exitOK, "services", "ls", "-c", o.edge)
	if out := o.want(exitOK, "services", "ls", "-c", o.edge); !strings.Contains(out, "no Services") {
		t.Errorf("it says %s", out)
	}
	if _, err := os.Stat(state); err != nil {
		t.Error(err)
	}
}

// Edges of one site prove their nodes by the certificates that tunnel join has got, and verify them by the file of the
// cloud.
func TestEdgesOfOneSite(t *testing.T) {
	if !testkit.InOwnNetwork(t) { // as above
		return
	}
	o := newOperated(t, nil)
	o.edgeRuns.cmd.Process.Signal(os.Interrupt)
	o.edgeRuns.wait()
	near := testkit.FreeAddress(t)
	f, err := os.OpenFile(o.edge, os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = fmt.Fprintf(f, "\n[mode.edge.services]\nstate = %q\nnear = %q\nnearca = %q\n",
			filepath.Join(filepath.Dir(o.edge), "state", "services.db"), near,
			filepath.Join(filepath.Dir(o.cloud), "nodes-ca.crt"))
	}
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	o.startEdge()
	e, err := conf.LoadEdge(o.edge, conf.Env{})
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(e.NodeCert, e.NodeCert)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the edge listens for others", func() bool {
		c, err := net.Dial("tcp", near)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	for _, with := range []struct {
		certs []tls.Certificate
		want  string
	}{{[]tls.Certificate{pair}, "denied node edge1 is not known"}, {nil, ""}} {
		c, err := tls.Dial("tcp", near, &tls.Config{
			Certificates: with.certs, NextProtos: []string{"tunnel-near/1"},
			InsecureSkipVerify: true, //nolint:gosec // the certificate of a node names no host
		})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if node, err := auth.NodeOf(c.ConnectionState().PeerCertificates[0]); node != "edge1" || err != nil {
			t.Errorf("the edge shows a certificate of %q, %v", node, err)
		}
		fmt.Fprintln(c, "endpoint/shop/web/web-a/10.88.2.5 TCP 8080")
		got, err := io.ReadAll(c)
		if !strings.HasPrefix(string(got), with.want) || with.want == "" && (len(got) > 0 || err == nil) {
			t.Errorf("with %d certificates: %q, %v", len(with.certs), got, err)
		}
	}
	if out := o.want(exitOK, "status", "-o", "wide", "-c", o.edge); !strings.Contains(out, "services-near") {
		t.Errorf("the status does not show the shortcut:\n%s", out)
	}
	if out := o.want(exitOK, "drain", "-c", o.edge); !strings.Contains(out, "drained; 0 conns go on") {
		t.Errorf("drain says %s", out)
	}
	c, err := tls.Dial("tcp", near, &tls.Config{
		Certificates: []tls.Certificate{pair}, NextProtos: []string{"tunnel-near/1"},
		InsecureSkipVerify: true, //nolint:gosec // as above
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintln(c, "endpoint/shop/web/web-a/10.88.2.5 TCP 8080")
	if got, err := io.ReadAll(c); !strings.HasPrefix(string(got), "draining ") {
		t.Errorf("after a drain: %q, %v", got, err)
	}
}

// The network of pods tells the relay of Services to which networks it has routes, if there is a relay.
func TestRoutesAreToldToServices(t *testing.T) {
	w := &edgeWiring{daemon: &daemon{log: slog.New(slog.DiscardHandler)}, conf: new(conf.Edge), policy: new(auth.Policy)}
	if w.podNetwork().Routed != nil {
		t.Error("an edge without Services tells somebody of its routes")
	}
	w.conf.Services = conf.EdgeServices{On: true, State: filepath.Join(t.TempDir(), "services.db")}
	if err := w.addServices(); err != nil {
		t.Fatal(err)
	}
	if w.podNetwork().Routed == nil {
		t.Error("an edge with Services tells nobody of its routes")
	}
}
