package interop

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/freeport"
	"tunnel.example/tunnel/test/rig"
)

// stock builds a program of Konnectivity, "agent" or "server". The go command remembers it.
func stock(t testing.TB, program string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), program)
	if out, err := exec.Command("go", "build", "-o", path,
		"sigs.k8s.io/apiserver-network-proxy/cmd/"+program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}

func port(t testing.TB) int {
	t.Helper()
	p, err := freeport.New()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// serving serves every connection until the test ends.
func serving(t *testing.T, f func(c *net.TCPConn)) string {
	t.Helper()
	addr, stop, err := serve(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	return addr
}

// until waits for something; log says what has happened instead.
func until(t testing.TB, what string, log func() string, is func() bool) {
	t.Helper()
	for late := time.Now().Add(20 * time.Second); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(late) {
			t.Fatalf("it does not come to pass that %s\n%s", what, log())
		}
	}
}

// startAgent starts a stock agent that joins our cloud as the pair's node.
func (o *ours) startAgent(t *testing.T, binary string, agentPort int, more ...string) (*rig.Process, *rig.Log) {
	t.Helper()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(o.pair.Token(rig.Node).Reveal()), 0o600); err != nil {
		t.Fatal(err)
	}
	log := new(rig.Log)
	agent, err := rig.Start(log, binary, append([]string{
		"--agent-id=" + rig.Node, "--service-account-token-path=" + token, "--ca-cert=" + o.pair.Path("ca.crt"),
		"--proxy-server-host=127.0.0.1", "--proxy-server-port=" + strconv.Itoa(agentPort),
		"--health-server-port=" + strconv.Itoa(port(t)), "--admin-server-port=" + strconv.Itoa(port(t)), "-v=0",
	}, more...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(agent.Kill)
	return agent, log
}

// carries returns how many conns to targets a stock agent has, by its metrics; -1: it does
// not say yet.
func carries(t testing.TB, health int) int {
	t.Helper()
	res, err := http.Get("http://127.0.0.1:" + strconv.Itoa(health) + "/metrics")
	if err != nil {
		return -1
	}
	defer res.Body.Close()
	for lines := bufio.NewScanner(res.Body); lines.Scan(); {
		if n, ok := strings.CutPrefix(lines.Text(), "konnectivity_network_proxy_agent_open_endpoint_connections "); ok {
			conns, err := strconv.Atoi(n)
			if err != nil {
				t.Fatal(err)
			}
			return conns
		}
	}
	return 0 // it has had none
}

// dialTo opens a conn and returns how many more the agent with those metrics has since.
func dialTo(t testing.TB, health int, dial dialer, addr string) (c net.Conn, more int) {
	t.Helper()
	before := carries(t, health)
	c, err := dial(t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { hangUp(c) })
	if answer, err := say(c, "here"); err != nil || answer != "here" { // it counts when it has told us
		t.Fatalf("%q, %v", answer, err)
	}
	return c, carries(t, health) - before
}

// through dials until the conn is one of the agent with those metrics.
func through(t testing.TB, what string, log func() string, health int, dial dialer, addr string) (c net.Conn) {
	t.Helper()
	until(t, what, log, func() bool {
		if carries(t, health) < 0 {
			return false
		}
		var more int
		c, more = dialTo(t, health, dial, addr)
		if more != 1 {
			c.Close()
		}
		return more == 1
	})
	return c
}

// works reports whether a byte comes back.
func works(dial dialer, addr string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := dial(ctx, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	_, err = io.ReadFull(c, make([]byte, 1))
	return err
}

// The stock agent joins our cloud.
func TestStockAgent(t *testing.T) {
	agentPort := port(t)
	o := prepare(t, fmt.Sprintf("agentport = %d\n", agentPort), "")
	o.startCloud(t)
	binary := stock(t, "agent")
	agent, log := o.startAgent(t, binary, agentPort, "--agent-identifiers=host=elsewhere&cidr=127.0.0.0/8")
	logs := func() string { return o.pair.CloudLog.String() + log.String() }
	all := dialers(t, o.grpc)
	all["CONNECT"] = connector(o.connect)
	back := serving(t, echo)
	until(t, "a dial gets through", logs, func() bool { return works(all["CONNECT"], back) == nil })
	target, big := newTarget(t)
	for name, dial := range all {
		t.Run(name, func(t *testing.T) {
			traffic(t, target, big, dial)
			oneWrite(t, target, big, dial)
			if _, err := dial(t.Context(), "127.0.0.1:1"); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("nobody listens there: %v", err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			if _, err := dial(ctx, "192.0.2.1:80"); err == nil {
				t.Error("nobody is there")
			}
			endless := serving(t, func(c *net.TCPConn) { io.Copy(c, rig.Limited(zeros{}, 1<<30)) })
			stalled, err := dial(t.Context(), endless)
			if err != nil {
				t.Fatal(err)
			}
			defer stalled.Close()
			var others sync.WaitGroup
			for range 10 {
				others.Go(func() {
					for range 20 {
						if err := works(dial, back); err != nil {
							t.Errorf("beside a stalled reader: %v", err)
							return
						}
					}
				})
			}
			others.Wait()
		})
	}
	t.Run("the caller closes", func(t *testing.T) { // over TLS: close_notify, then FIN
		pair, err := tls.LoadX509KeyPair(o.pair.Path("client.crt"), o.pair.Path("client.key"))
		if err != nil {
			t.Fatal(err)
		}
		roots := x509.NewCertPool()
		roots.AddCert(o.pair.CA().Certificate())
		overTLS := &tls.Dialer{Config: &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots}}
		got := make(chan string, 1)
		target := serving(t, func(c *net.TCPConn) {
			all, err := io.ReadAll(c)
			got <- fmt.Sprintf("%q, %v", all, err)
		})
		c, err := connecting(func(ctx context.Context) (net.Conn, error) {
			return overTLS.DialContext(ctx, "tcp", o.connectTLS)
		})(t.Context(), target)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, "upload")
		c.Close()
		select {
		case g := <-got:
			if g != `"upload", <nil>` {
				t.Errorf("the target gets %s", g)
			}
		case <-time.After(patience / 2): // half of the time after which the cloud ends an idle half-closed conn
			t.Errorf("the target waits for the end of the upload\n%s", logs())
		}
	})
	t.Run("drains", func(t *testing.T) {
		dial := all["CONNECT"]
		health := port(t)
		another, _ := o.startAgent(t, binary, agentPort, "--health-server-port="+strconv.Itoa(health))
		c := through(t, "the agent that came later is asked", logs, health, dial, back)
		another.Signal(syscall.SIGTERM) // the first one means no more than that
		drains := func(n int, c net.Conn) func() bool {
			return func() bool {
				say(c, "well?") // it tells nobody before it has received something
				return strings.Count(o.pair.CloudLog.String(), "agent drains") == n
			}
		}
		until(t, "the cloud hears of it", logs, drains(1, c))
		next, more := dialTo(t, health, dial, back)
		if more != 0 {
			t.Error("a dial goes to an agent that drains")
		}
		if answer, err := say(c, "here"); err != nil || answer != "here" {
			t.Errorf("a conn of an agent that drains: %q, %v", answer, err)
		}
		another.Kill()
		if answer, err := say(next, "here"); err != nil || answer != "here" {
			t.Errorf("a conn of the other agent: %q, %v", answer, err)
		}
		agent.Signal(syscall.SIGTERM)
		until(t, "the cloud hears of that, too", logs, drains(2, next))
		for name, dial := range all { // there is no other
			if err := works(dial, back); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
	t.Run("killed", func(t *testing.T) {
		c, err := all["CONNECT"](t.Context(), back)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		pending := make(chan error, 1)
		go func() {
			_, err := all["CONNECT"](context.Background(), "192.0.2.1:80")
			pending <- err
		}()
		time.Sleep(200 * time.Millisecond)
		agent.Kill()
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("a conn goes on without its agent")
		}
		if err := <-pending; err == nil {
			t.Error("a dial succeeds without its agent")
		}
		o.startAgent(t, binary, agentPort)
		until(t, "the agent is back", logs, func() bool { return works(all["CONNECT"], back) == nil })
	})
	t.Run("cloud restarted", func(t *testing.T) {
		o.startAgent(t, binary, agentPort)
		until(t, "a dial gets through", logs, func() bool { return works(all["CONNECT"], back) == nil })
		o.cloud.Kill()
		o.startCloud(t)
		until(t, "the agent has joined again", logs, func() bool { return works(all["CONNECT"], back) == nil })
	})
}

// zeros never ends.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

// Another node's name, and no credential at all, let no agent in.
func TestStockAgentRefused(t *testing.T) {
	agentPort := port(t)
	o := prepare(t, fmt.Sprintf("agentport = %d\n", agentPort), "")
	o.startCloud(t)
	o.startAgent(t, stock(t, "agent"), agentPort, "--agent-id=another")
	until(t, "it is refused", o.pair.CloudLog.String,
		func() bool { return strings.Contains(o.pair.CloudLog.String(), "agent refused") })
	if err := works(connector(o.connect), serving(t, echo)); err == nil ||
		!strings.Contains(err.Error(), "No agent available") {
		t.Errorf("a dial without a node: %v", err)
	}
}

// server is a stock proxy-server.
type server struct {
	socket    string
	agentPort int
	log       *rig.Log
	process   *rig.Process
}

func (o *ours) startServer(t testing.TB, binary, mode, id string, count, agentPort int, more ...string) *server {
	t.Helper()
	dir, err := os.MkdirTemp("", "tunnel-interop-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &server{socket: filepath.Join(dir, "s"), agentPort: agentPort, log: new(rig.Log)}
	s.process, err = rig.Start(s.log, binary,
		append([]string{"--mode=" + mode, "--uds-name=" + s.socket, "--server-port=0", "--server-id=" + id,
			"--server-count=" + strconv.Itoa(count),
			"--cluster-cert=" + o.pair.Path("cloud.crt"), "--cluster-key=" + o.pair.Path("cloud.key"),
			"--cluster-ca-cert=" + o.pair.Path("ca.crt"),
			"--agent-port=" + strconv.Itoa(agentPort), "--health-port=" + strconv.Itoa(port(t)),
			"--admin-port=" + strconv.Itoa(port(t)), "-v=0",
		}, more...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.process.Kill)
	until(t, "the server listens", s.log.String, func() bool {
		c, err := net.Dial("unix", s.socket)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	return s
}

// Our edge joins stock servers, two behind a balancer, and is an agent of each.
func TestStockServer(t *testing.T) {
	ports := [2]int{port(t), port(t)}
	var turn int
	var mu sync.Mutex
	balancer := serving(t, func(c *net.TCPConn) {
		mu.Lock()
		turn++
		to := ports[turn%2]
		mu.Unlock()
		s, err := net.Dial("tcp", "127.0.0.1:"+strconv.Itoa(to))
		if err != nil {
			return
		}
		defer s.Close()
		go func() {
			io.Copy(s, c)
			s.Close()
		}()
		io.Copy(c, s)
	})
	o := prepare(t, "", fmt.Sprintf("[mode.edge.konnectivity]\nservers = [%q]\nca = \"ca.crt\"\ncert = "+
		"\"client.crt\"\nkey = \"client.key\"\n", "tls://"+balancer))
	o.startCloud(t)
	binary := stock(t, "server")
	byGRPC := o.startServer(t, binary, "grpc", "one", 2, ports[0])
	byConnect := o.startServer(t, binary, "http-connect", "two", 2, ports[1])
	edge, err := o.pair.StartEdge()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(edge.Kill)
	insecure := map[string]dialer{"grpc": dialers(t, byGRPC.socket)["single use"],
		"http-connect": connector(byConnect.socket)}
	back := serving(t, echo)
	logs := func() string { return o.pair.EdgeLog.String() + byGRPC.log.String() + byConnect.log.String() }
	target, big := newTarget(t)
	for mode, dial := range insecure {
		t.Run(mode, func(t *testing.T) {
			until(t, "a dial gets through", logs, func() bool { return works(dial, back) == nil })
			traffic(t, target, big, dial)
			if _, err := dial(t.Context(), "127.0.0.1:1"); err == nil ||
				(mode == "grpc" && !strings.Contains(err.Error(), "refused")) {
				t.Errorf("nobody listens there: %v", err)
			}
			if _, err := dial(t.Context(), "192.0.2.1:80"); err == nil ||
				(mode == "grpc" && !strings.Contains(err.Error(), "denied")) {
				t.Errorf("the edge may not dial that: %v", err)
			}
			if mode == "grpc" {
				return // the stock client loses what it has not read when a close comes
			}
			// It is asked first: the stock server may put what comes at once in front of its status line.
			whole := serving(t, func(c *net.TCPConn) {
				c.Read(make([]byte, 1))
				c.Write(big[:1<<20])
			})
			c, err := dial(t.Context(), whole)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := c.Write([]byte("?")); err != nil {
				t.Fatal(err)
			}
			if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, big[:1<<20]) {
				t.Errorf("what was written before a close: %d bytes, %v", len(got), err)
			}
		})
	}
	t.Run("restarted", func(t *testing.T) {
		byGRPC.process.Kill()
		again := o.startServer(t, binary, "grpc", "three", 2, ports[0])
		dial := dialers(t, again.socket)["single use"]
		until(t, "the edge finds the new server", logs, func() bool { return works(dial, back) == nil })
	})
	t.Run("drain", func(t *testing.T) {
		dial := insecure["http-connect"]
		c, err := dial(t.Context(), back)
		if err != nil {
			t.Fatal(err)
		}
		// Another agent of that server, beside the edge: each is as good as the other.
		health := port(t)
		o.startAgent(t, stock(t, "agent"), ports[1], "--agent-id=another", "--agent-cert="+o.pair.Path("client.crt"),
			"--agent-key="+o.pair.Path("client.key"), "--health-server-port="+strconv.Itoa(health))
		through(t, "the other agent is asked", logs, health, dial, back)
		edge.Signal(syscall.SIGTERM)
		// By chance they would go there once in 2^20 times.
		until(t, "all dials go to the other agent", logs, func() bool {
			for range 20 {
				if c, more := dialTo(t, health, dial, back); more != 1 {
					c.Close()
					return false
				}
			}
			return true
		})
		if answer, err := say(c, "here"); err != nil || answer != "here" {
			t.Errorf("a conn of an edge that drains: %q, %v", answer, err)
		}
		select {
		case <-edge.Done():
			t.Error("the edge ends with a conn")
		default:
		}
		c.Close()
		select {
		case <-edge.Done():
		case <-time.After(20 * time.Second):
			t.Error("the edge does not end")
		}
	})
}

// A dial that a stock server sends to an edge that drains is answered, also while the server
// has no other agent.
func TestStockServerDrain(t *testing.T) {
	at := port(t)
	o := prepare(t, "", fmt.Sprintf("[mode.edge.konnectivity]\nservers = [%q]\nca = \"ca.crt\"\ncert = "+
		"\"client.crt\"\nkey = \"client.key\"\n", "tls://127.0.0.1:"+strconv.Itoa(at)))
	o.startCloud(t)
	server := o.startServer(t, stock(t, "server"), "grpc", "one", 1, at)
	back := serving(t, echo)
	logs := func() string { return o.pair.EdgeLog.String() + server.log.String() }
	for range 3 {
		edge, err := o.pair.StartEdge()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(edge.Kill)
		dial := dialers(t, server.socket)["single use"]
		until(t, "a dial gets through", logs, func() bool { return works(dial, back) == nil })
		var dials sync.WaitGroup
		var hung atomic.Int32
		for i := range 20 {
			dials.Go(func() {
				time.Sleep(time.Duration(i) * 2 * time.Millisecond)
				if i == 5 {
					edge.Signal(syscall.SIGTERM)
				}
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				c, err := dial(ctx, back)
				if ctx.Err() != nil {
					hung.Add(1)
				}
				if err == nil {
					c.Close()
				}
			})
		}
		dials.Wait()
		if n := hung.Load(); n != 0 {
			t.Errorf("%d of 20 dials hang", n)
		}
		select {
		case <-edge.Done():
		case <-time.After(20 * time.Second):
			t.Error("the edge does not end")
		}
	}
}
