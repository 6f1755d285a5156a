package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
)

// traceCollector is an OpenTelemetry collector.
type traceCollector struct {
	t   *testing.T
	url string

	mu     sync.Mutex // guards the following
	bodies []byte     // of all requests
	spans  []collected
}

// collected is a span, and the service that has sent it.
type collected struct {
	*trace.Span
	service string
}

func newTraceCollector(t *testing.T) *traceCollector {
	c := &traceCollector{t: t}
	server := httptest.NewServer(c)
	t.Cleanup(server.Close)
	c.url = server.URL
	return c
}

func (c *traceCollector) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var data trace.TracesData
	if err != nil || r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &data) != nil {
		c.t.Errorf("%s with %d bytes, %v", r.URL, len(body), err)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bodies = append(c.bodies, body...)
	for _, from := range data.GetResourceSpans() {
		service := from.GetResource().GetAttributes()[0].GetValue().GetStringValue()
		for _, s := range from.GetScopeSpans()[0].GetSpans() {
			c.spans = append(c.spans, collected{s, service})
		}
	}
}

// attribute returns an attribute of a span as text; "": it has none.
func (s collected) attribute(name string) string {
	for _, a := range s.GetAttributes() {
		if a.GetKey() == "tunnel."+name {
			if n := a.GetValue().GetIntValue(); n != 0 {
				return fmt.Sprint(n)
			}
			return a.GetValue().GetStringValue()
		}
	}
	return ""
}

// chain waits for a conn at a front door with a result, and returns its spans from the conn down to the span without a
// child. names are those of the spans, with their service.
func (c *traceCollector) chain(door, result string, names ...string) (chain []collected) {
	c.t.Helper()
	what := door + ": a conn with the result " + result
	testkit.Within(c.t, 20*time.Second, what, func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		chain = nil
		at := slices.IndexFunc(c.spans, func(s collected) bool {
			return s.GetName() == "tunnel.conn" && s.attribute("frontend") == door && s.attribute("result") == result
		})
		var found []string
		for at >= 0 {
			s := c.spans[at]
			chain, found = append(chain, s), append(found, s.service+" "+s.GetName())
			at = slices.IndexFunc(c.spans, func(child collected) bool {
				return bytes.Equal(child.GetTraceId(), s.GetTraceId()) &&
					bytes.Equal(child.GetParentSpanId(), s.GetSpanId())
			})
		}
		if !slices.Equal(found, names) {
			return fmt.Errorf("the spans are %q, want %q", found, names)
		}
		return nil
	})
	for _, s := range chain[1:] {
		if s.GetStartTimeUnixNano() < chain[0].GetStartTimeUnixNano() ||
			s.GetEndTimeUnixNano() > chain[0].GetEndTimeUnixNano() {
			c.t.Errorf("%s: the span %s is not within its conn", what, s.GetName())
		}
	}
	return chain
}

// tracedKubelet serves HTTPS as edge1, and stores the last traceparent.
type tracedKubelet struct {
	*httptest.Server
	mu     sync.Mutex
	parent string
}

func newTracedKubelet(t *testing.T, ca *auth.CA) *tracedKubelet {
	k := new(tracedKubelet)
	k.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.parent = r.Header.Get("Traceparent")
	}))
	k.TLS = &tls.Config{Certificates: []tls.Certificate{issued(t, ca, "edge1")}}
	k.StartTLS()
	t.Cleanup(k.Close)
	return k
}

// issued returns a certificate of a name, for clients and servers.
func issued(t *testing.T, ca *auth.CA, name string) tls.Certificate {
	t.Helper()
	cert, key, err := ca.Issue(auth.Leaf{CommonName: name, DNSNames: []string{name}, Client: true, Server: true})
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// tracedSite is two replicas, an edge and a kubelet. All but the kubelet send their spans to one collector.
type tracedSite struct {
	*operated
	*traceCollector

	kubelet                        *tracedKubelet
	ca                             *auth.CA
	echo, refused, denied, relayed string // TCP ports; relayed is the other replica's
	https                          string // the https port
}

func newTracedSite(t *testing.T) *tracedSite {
	t.Helper()
	s := &tracedSite{traceCollector: newTraceCollector(t)}
	s.echo, s.refused, s.denied, s.relayed, s.https =
		testkit.FreeAddress(t), testkit.FreeAddress(t), testkit.FreeAddress(t), testkit.FreeAddress(t), testkit.FreeAddress(t)
	target, nobody := testkit.Serve(t, testkit.Echo), testkit.FreeAddress(t)
	var other string
	s.operated = newOperated(t, func(o *operated, address string) {
		dir := filepath.Dir(o.cloud)
		ca, err := auth.ReadCA(filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key"))
		if err != nil {
			t.Fatal(err)
		}
		s.ca, s.kubelet = ca, newTracedKubelet(t, ca)
		cert, key, err := ca.Issue(auth.Leaf{CommonName: "cloud", DNSNames: []string{"edge1"}, Client: true, Server: true})
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(o.cloud)
		if err != nil {
			t.Fatal(err)
		}
		second := testkit.FreeAddress(t)
		_, port, _ := net.SplitHostPort(address)
		_, otherPort, _ := net.SplitHostPort(second)
		_, httpsPort, _ := net.SplitHostPort(s.https)
		both := fmt.Sprintf("\n[mode.cloud.stream.peers]\naddresses = [%q, %q]\nca = \"ca.crt\"\n"+
			"servername = \"127.0.0.1\"\n[mode.cloud.traces]\nendpoint = %q\npermillion = 1000000\n", address, second, s.url)
		other = filepath.Join(dir, "other.toml")
		for file, text := range map[string]string{
			o.cloud: string(text) + both + fmt.Sprintf("[mode.cloud.tcp]\n%q = \"edge1/%s\"\n%q = \"edge1/%s\"\n"+
				"%q = \"edge1/192.0.2.1:1\"\n[mode.cloud.https]\nlisten = \"127.0.0.1\"\ntls = \"terminate\"\n"+
				"cert = \"https.crt\"\nkey = \"https.key\"\nclientca = \"ca.crt\"\n[mode.cloud.https.addr]\n%q = %q\n"+
				"[mode.cloud.https.kubelet]\ncert = \"https.crt\"\nkey = \"https.key\"\nca = \"ca.crt\"\n",
				s.echo, target, s.refused, nobody, s.denied, httpsPort, s.kubelet.Listener.Addr()),
			other: strings.NewReplacer("grpcport = "+port, "grpcport = "+otherPort, "cloud.sock", "other.sock",
				"nodes.json", "other.json").Replace(string(text)) + both +
				fmt.Sprintf("[mode.cloud.tcp]\n%q = \"edge1/%s\"\n", s.relayed, target),
			filepath.Join(dir, "https.crt"): string(cert),
			filepath.Join(dir, "https.key"): string(key),
		} {
			if err = os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	})
	start(t, "cloud", "-c", other)
	s.eventually("the other replica lists the node", exitOK, "ls", "-c", other, "edge1")
	// The edge gets its table after it has joined.
	s.edgeRuns.cmd.Process.Signal(os.Interrupt)
	s.edgeRuns.wait()
	f, err := os.OpenFile(s.edge, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(f, "\n[mode.edge.traces]\nendpoint = %q\n", s.url)
	if err = f.Close(); err != nil {
		t.Fatal(err)
	}
	s.startEdge()
	s.eventually("the other replica lists the node again", exitOK, "ls", "-c", other, "edge1")
	return s
}

const (
	cloudConn  = "tunnel-cloud tunnel.conn"
	cloudOpen  = "tunnel-cloud tunnel.open"
	cloudRelay = "tunnel-cloud tunnel.relay"
	edgeDial   = "tunnel-edge tunnel.dial"
)

// Each conn has its spans, at the cloud, at the other replica and at the edge. A request continues its caller's trace,
// and the kubelet continues the request's.
func TestTraces(t *testing.T) {
	s := newTracedSite(t)
	for _, door := range []string{s.echo, s.relayed, s.refused, s.denied} {
		testkit.Within(t, 20*time.Second, "an answer of "+door, func() error {
			c, err := net.Dial("tcp", door)
			if err != nil {
				return err
			}
			defer c.Close()
			io.WriteString(c, "s3cret")
			c.(*net.TCPConn).CloseWrite()
			got, _ := io.ReadAll(c)
			if served := door == s.echo || door == s.relayed; served != (string(got) == "s3cret") {
				return fmt.Errorf("%q", got) // a replica may not know yet that the edge is back
			}
			return nil
		})
	}
	chain := s.chain(s.echo, "ok", cloudConn, cloudOpen, edgeDial)
	conn := chain[0]
	if len(conn.GetParentSpanId()) != 0 || conn.attribute("event") != "tcp" || conn.attribute("node") != "edge1" ||
		conn.attribute("sent_bytes") != "6" || conn.attribute("received_bytes") != "6" || conn.attribute("caller") == "" ||
		conn.attribute("result") != "ok" || conn.GetStatus() != nil {
		t.Errorf("the span of the conn is %v", conn)
	}
	for _, span := range chain[1:] {
		if span.attribute("node") != "edge1" || span.attribute("target") != conn.attribute("target") ||
			span.GetStatus() != nil {
			t.Errorf("a span of the conn is %v", span)
		}
	}
	s.chain(s.relayed, "ok", cloudConn, cloudOpen, cloudRelay, cloudOpen, edgeDial)
	for door, code := range map[string]string{s.refused: "refused", s.denied: "denied"} {
		for _, span := range s.chain(door, code, cloudConn, cloudOpen, edgeDial) {
			if span.GetStatus().GetCode() != trace.Status_STATUS_CODE_ERROR || span.attribute("result") != code ||
				!strings.HasPrefix(span.GetStatus().GetMessage(), code+": ") {
				t.Errorf("a span of a conn that is %s: %v", code, span)
			}
		}
	}

	caller := issued(t, s.ca, "kube-apiserver-kubelet-client")
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{Certificates: []tls.Certificate{caller}, InsecureSkipVerify: true},
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", s.https)
		},
	}}
	defer client.CloseIdleConnections()
	const id, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://edge1/logs/?token=s3cret", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Traceparent", "00-"+id+"-"+parent+"-01")
	req.Header.Set("Authorization", "Bearer s3cret")
	res, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusOK {
		t.Fatalf("the kubelet answers %s", res.Status)
	}
	conn = s.chain(s.https, "ok", cloudConn, cloudOpen, edgeDial)[0]
	if hex.EncodeToString(conn.GetTraceId()) != id || hex.EncodeToString(conn.GetParentSpanId()) != parent ||
		conn.attribute("path") != "/logs/" || conn.attribute("status") != "200" ||
		conn.attribute("caller") != "kube-apiserver-kubelet-client" {
		t.Errorf("the span of the request is %v", conn)
	}
	s.kubelet.mu.Lock()
	if want := "00-" + id + "-" + hex.EncodeToString(conn.GetSpanId()) + "-01"; s.kubelet.parent != want {
		t.Errorf("the kubelet gets the traceparent %q, want %q", s.kubelet.parent, want)
	}
	s.kubelet.mu.Unlock()
	s.traceCollector.mu.Lock()
	defer s.traceCollector.mu.Unlock()
	for _, secret := range []string{"s3cret", s.token} {
		if bytes.Contains(s.bodies, []byte(secret)) {
			t.Error("a secret is in a span")
		}
	}
}

// A cloud that stops sends the spans of its last conns.
func TestTracesAtTheEnd(t *testing.T) {
	s := newTracedSite(t)
	var c net.Conn
	testkit.Within(t, 20*time.Second, "a conn", func() (err error) {
		if c, err = net.Dial("tcp", s.echo); err != nil {
			return err
		}
		io.WriteString(c, "x")
		if _, err = io.ReadFull(c, make([]byte, 1)); err != nil {
			c.Close()
		}
		return err
	})
	s.cloudRuns.cmd.Process.Signal(os.Interrupt)
	c.Close()
	if code, out := s.cloudRuns.wait(); code != exitOK {
		t.Errorf("the cloud ends with the exit code %d: %s", code, out)
	}
	s.traceCollector.mu.Lock()
	defer s.traceCollector.mu.Unlock()
	if !slices.ContainsFunc(s.spans, func(span collected) bool { return span.attribute("received_bytes") == "1" }) {
		t.Error("the span of the last conn is missing")
	}
}
