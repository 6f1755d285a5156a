// Package interop holds the tunnel against the real programs and libraries of others. It is
// a module of its own, so that what they need is not needed by the tunnel.
package interop

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/pkg/client"

	"tunnel.example/tunnel/test/rig"
)

// ours is a cloud with the egress front door, and an edge.
type ours struct {
	grpc, connect string // sockets
	connectTLS    string // the address of HTTP CONNECT over TLS
	pair          *rig.Pair
	cloud, edge   *rig.Process
}

func start(t testing.TB) *ours {
	t.Helper()
	o := prepare(t, "", "")
	o.startCloud(t)
	o.startEdge(t)
	return o
}

// build builds the tunnel, by the versions in its own go.mod. The go command remembers it.
func build(t testing.TB, dir string) (path string) {
	t.Helper()
	path = filepath.Join(dir, "tunnel")
	if out, err := exec.Command("go", "build", "-C", "../..", "-o", path, "./cmd/tunnel").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}

// prepare starts nothing yet. More lines of cloud.toml belong to [mode.cloud.egress]; of
// edge.toml they are whole tables.
func prepare(t testing.TB, cloud, edge string) *ours {
	t.Helper()
	dir := t.TempDir()
	binary := build(t, dir)
	sockets, err := os.MkdirTemp("", "tunnel-interop-") // a test's own folder may be too long a path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(sockets) })
	o := &ours{
		grpc: filepath.Join(sockets, "g"), connect: filepath.Join(sockets, "c"),
		connectTLS: net.JoinHostPort("127.0.0.1", strconv.Itoa(port(t))),
	}
	p, err := rig.NewPair(rig.Config{Binary: binary, Dir: dir,
		Cloud: fmt.Sprintf("[mode.cloud.egress]\ngrpc = [%q]\nhttpconnect = [%q, %q]\ncert = \"cloud.crt\"\n"+
			"key = \"cloud.key\"\nclientca = \"ca.crt\"\nclientnames = [%q]\n%s",
			"unix://"+o.grpc, "unix://"+o.connect, "tls://"+o.connectTLS, "kube-apiserver-kubelet-client", cloud), Edge: edge})
	if err != nil {
		t.Fatal(err)
	}
	o.pair = p
	return o
}

func (o *ours) startCloud(t testing.TB) {
	t.Helper()
	var err error
	if o.cloud, err = o.pair.StartCloud(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(o.cloud.Kill)
}

// startEdge starts the edge and waits until it has a session.
func (o *ours) startEdge(t testing.TB) {
	t.Helper()
	var err error
	if o.edge, err = o.pair.StartEdge(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(o.edge.Kill)
	o.joined(t)
}

// joined waits until the edge has a session.
func (o *ours) joined(t testing.TB) {
	t.Helper()
	for late := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		res, err := http.Get("http://" + o.pair.EdgeHealth() + "/readyz")
		if err == nil {
			res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return
			}
		}
		if time.Now().After(late) {
			t.Fatalf("the edge has no session: %v\n%s", err, o.pair.EdgeLog.String())
		}
	}
}

// dialers are the two ways in which the stock client is used.
func (o *ours) dialers(t testing.TB) map[string]dialer { return dialers(t, o.grpc) }

func dialers(t testing.TB, socket string) map[string]dialer {
	insecurely := grpc.WithTransportCredentials(insecure.NewCredentials())
	reusable, err := client.CreateGRPCTunnel(t.Context(), "unix://"+socket, insecurely)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { reusable.Close() })
	return map[string]dialer{
		"single use": func(ctx context.Context, addr string) (net.Conn, error) {
			tunnel, err := client.CreateSingleUseGrpcTunnel(context.WithoutCancel(ctx), "unix://"+socket, insecurely)
			if err != nil {
				return nil, err
			}
			return tunnel.DialContext(ctx, "tcp", addr)
		},
		"reusable": func(ctx context.Context, addr string) (net.Conn, error) {
			return reusable.DialContext(ctx, "tcp", addr)
		},
	}
}

// ways are the ways to dial, at the sockets that there are.
func ways(t testing.TB, overGRPC, overConnect string) map[string]dialer {
	all := make(map[string]dialer)
	if overGRPC != "" {
		all = dialers(t, overGRPC)
	}
	if overConnect != "" {
		all["CONNECT"] = connector(overConnect)
	}
	return all
}

func TestStockClient(t *testing.T) {
	o := start(t)
	target, big := newTarget(t)
	for name, dial := range o.dialers(t) {
		t.Run(name, func(t *testing.T) {
			traffic(t, target, big, dial)
			oneWrite(t, target, big, dial)
			endsAtOnce(t, dial)
			if _, err := dial(t.Context(), "127.0.0.1:1"); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("nobody listens there: %v", err)
			}
			if _, err := dial(t.Context(), "192.0.2.1:80"); err == nil || !strings.Contains(err.Error(), "denied") {
				t.Errorf("the edge may not dial that: %v", err)
			}
		})
	}
}

// newTarget serves 20 MB at /big, echoes at /echo, and says its path elsewhere.
func newTarget(t *testing.T) (target *httptest.Server, big []byte) {
	big = make([]byte, 20<<20)
	rand.Read(big)
	target = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/big":
			w.Write(big)
		case "/echo":
			b, _ := io.ReadAll(r.Body)
			w.Write(b)
		default:
			fmt.Fprint(w, r.URL.Path)
		}
	}))
	t.Cleanup(target.Close)
	return target, big
}

// traffic sends 20 MB both ways and to many at once, and a hundred requests at once.
func traffic(t *testing.T, target *httptest.Server, big []byte, dial dialer) {
	t.Helper()
	tr := &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) { return dial(ctx, addr) }}
	c := &http.Client{Transport: tr, Timeout: 30 * time.Second}
	get := func(path string, body []byte) []byte {
		t.Helper()
		res, err := c.Post(target.URL+path, "application/octet-stream", bytes.NewReader(body))
		if err != nil {
			t.Error(err)
			return nil
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Error(err)
		}
		return b
	}
	if !bytes.Equal(get("/big", nil), big) || !bytes.Equal(get("/echo", big), big) {
		t.Error("20 MB did not come through whole")
	}
	var all sync.WaitGroup
	for range 5 {
		all.Go(func() {
			if !bytes.Equal(get("/big", nil), big) {
				t.Error("20 MB beside others did not come through whole")
			}
		})
	}
	all.Wait()
	for i := range 100 {
		all.Go(func() {
			if path := fmt.Sprintf("/%d", i); string(get(path, nil)) != path {
				t.Errorf("request %d was answered as another one", i)
			}
		})
	}
	all.Wait()
}

// oneWrite writes 20 MB with one call, as no client of the stock server could.
func oneWrite(t *testing.T, target *httptest.Server, big []byte, dial dialer) {
	t.Helper()
	conn, err := dial(t.Context(), strings.TrimPrefix(target.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	one := fmt.Appendf(nil, "POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n", len(big))
	if _, err := conn.Write(append(one, big...)); err != nil {
		t.Fatal(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	if answer, err := io.ReadAll(res.Body); err != nil || !bytes.Equal(answer, big) {
		t.Errorf("one write of 20 MB: %d bytes came back, %v", len(answer), err)
	}
	res.Body.Close()
	conn.Close()
}

// endsAtOnce dials a target that ends without a word. The client must not miss that: the end
// can come before it has noted the answer to its dial.
func endsAtOnce(t *testing.T, dial dialer) {
	t.Helper()
	addr := serving(t, func(*net.TCPConn) {})
	for range 30 {
		conn, err := dial(t.Context(), addr)
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() {
			_, err := conn.Read(make([]byte, 1))
			ended <- err
		}()
		select {
		case err := <-ended:
			if err == nil {
				t.Error("the target has sent nothing, and a byte came")
			}
		case <-time.After(patience):
			t.Fatal("the target has ended, and the client waits")
		}
		conn.Close()
	}
}
