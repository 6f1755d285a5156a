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

// startNear starts the edge again, with the shortcut between edges and a further line for its table. It returns where
// the edge listens for others, and its certificate.
func startNear(t *testing.T, o *operated, line string) (near string, pair tls.Certificate) {
	t.Helper()
	o.edgeRuns.cmd.Process.Signal(os.Interrupt)
	o.edgeRuns.wait()
	near = testkit.FreeAddress(t)
	f, err := os.OpenFile(o.edge, os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = fmt.Fprintf(f, "\n[mode.edge.services]\nstate = %q\nnear = %q\n%s\n",
			filepath.Join(filepath.Dir(o.edge), "state", "services.db"), near, line)
	}
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	o.startEdge()
	e, err := conf.LoadEdge(o.edge, conf.Env{})
	if err == nil {
		var text []byte
		if text, err = os.ReadFile(e.NodeCert); err == nil { // once, since the edge may renew it meanwhile
			pair, err = tls.X509KeyPair(text, text)
		}
	}
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
	return near, pair
}

// The cloud tells edges by which CAs they verify each other: when they join, and when they need the CAs and have none.
func TestEdgesOfOneSiteAreTold(t *testing.T) {
	if !testkit.InOwnNetwork(t) { // as above
		return
	}
	o := newOperated(t, nil)
	told := filepath.Join(filepath.Dir(o.edge), "cloud.json")
	if text, err := os.ReadFile(told); err != nil || !strings.Contains(string(text), "node_cas") {
		t.Fatalf("after the join, the edge has\n%s\n%v", text, err)
	}
	if err := os.Remove(told); err != nil { // as if an older cloud had answered
		t.Fatal(err)
	}
	near, pair := startNear(t, o, "")
	var got []byte
	testkit.Eventually(t, "the edge verifies others", func() bool {
		c, err := tls.Dial("tcp", near, &tls.Config{
			Certificates: []tls.Certificate{pair}, NextProtos: []string{"tunnel-near/1"},
			InsecureSkipVerify: true, //nolint:gosec // the certificate of a node names no host
		})
		if err != nil {
			return false
		}
		defer c.Close()
		fmt.Fprintln(c, "endpoint/shop/web/web-a/10.88.2.5 TCP 8080")
		got, err = io.ReadAll(c)
		return err == nil
	})
	if !strings.HasPrefix(string(got), "denied node edge1 is not known") {
		t.Errorf("the edge answers %q", got)
	}
}

// Edges of one site prove their nodes by the certificates that tunnel join has got, and verify them by the file of the
// cloud.
func TestEdgesOfOneSite(t *testing.T) {
	if !testkit.InOwnNetwork(t) { // as above
		return
	}
	o := newOperated(t, nil)
	near, pair := startNear(t, o, fmt.Sprintf("nearca = %q", filepath.Join(filepath.Dir(o.cloud), "nodes-ca.crt")))
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
