//go:build e2e

package e2e

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A pairOfClouds is two replicas that know each other, each with the front door that kube-apiserver
// calls. An edge reaches them by a balancer that prefers one of the two.
type pairOfClouds struct {
	tn   *tunnel
	ip   [2]string
	grpc [2]string // host:port
	log  [2]string // host:port of health
	run  [2]*daemon
}

func newPairOfClouds(ctx context.Context, t *testing.T, tn *tunnel) *pairOfClouds {
	t.Helper()
	p := &pairOfClouds{
		tn: tn, ip: [2]string{cloudIP, "10.77.0.251"},
		grpc: [2]string{cloudIP + ":9000", "10.77.0.251:9001"}, log: [2]string{cloudIP + ":7000", "10.77.0.251:7001"},
	}
	if _, err := run(command(ctx, "ip", "addr", "add", p.ip[1]+"/24", "dev", "te2e0"), nil); err != nil {
		t.Fatal(err) // it goes with the bridge
	}
	alone := tn.read(t, "cloud.toml")
	peers := strings.NewReplacer("PKI", tn.c.path("pki"), "NAME", joinName, "ONE", p.grpc[0], "TWO", p.grpc[1]).Replace(`
[mode.cloud.stream.peers]
addresses = ["ONE", "TWO"]
ca = "PKI/ca.crt"
servername = "NAME"
`)
	second := strings.NewReplacer(p.ip[0], p.ip[1], "grpcport = 9000", "grpcport = 9001",
		"logport = 7000", "logport = 7001")
	tn.write(t, "cloud1.toml", alone+peers)
	tn.write(t, "cloud2.toml", second.Replace(alone)+peers)
	t.Cleanup(func() {
		for _, d := range p.run {
			if d != nil {
				d.kill(t)
			}
		}
	})
	return p
}

// start starts one of the two and waits until it is ready.
func (p *pairOfClouds) start(ctx context.Context, t *testing.T, i int) {
	t.Helper()
	name := fmt.Sprintf("cloud%d", i+1)
	p.run[i] = startDaemon(t, p.tn.c, name, p.tn.cloudCommand(ctx, name, p.ip[i]))
	eventually(ctx, t, backAgain, name+" to be ready", func(ctx context.Context) error {
		return is200(get(ctx, &http.Transport{DisableKeepAlives: true}, "http://"+p.log[i]+"/readyz?verbose"))
	})
}

// joined waits until each has joined the other.
func (p *pairOfClouds) joined(ctx context.Context, t *testing.T) {
	t.Helper()
	for i := range p.run {
		eventually(ctx, t, 15*time.Second, "the replicas to know each other", func(ctx context.Context) error {
			_, page, err := get(ctx, &http.Transport{DisableKeepAlives: true}, "http://"+p.log[i]+"/metrics")
			if err == nil && !strings.Contains(page, "\ntunnel_replicas 1\n") {
				err = errors.New("tunnel_replicas is not 1")
			}
			return err
		})
	}
}

// balancer passes connections on to the first of backends that takes them, and returns where it listens.
func balancer(t *testing.T, listen string, backends ...string) string {
	t.Helper()
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	open := make(map[net.Conn]bool)
	keep := func(c net.Conn) {
		mu.Lock()
		defer mu.Unlock()
		open[c] = true
	}
	drop := func(c net.Conn) {
		c.Close()
		mu.Lock()
		defer mu.Unlock()
		delete(open, c)
	}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			keep(in)
			running.Go(func() {
				defer drop(in)
				for _, b := range backends {
					out, err := net.DialTimeout("tcp", b, time.Second)
					if err != nil {
						continue
					}
					keep(out)
					defer drop(out)
					running.Go(func() {
						io.Copy(in, out)
						drop(in)
					})
					io.Copy(out, in)
					return
				}
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for c := range open {
			c.Close()
		}
		mu.Unlock()
		running.Wait()
	})
	return ln.Addr().String()
}

// twoReplicas asks every verb of both nodes where each is held by another replica, kills a replica
// in the middle of traffic, and stops the other one as Kubernetes would, while requests go on.
func twoReplicas(ctx context.Context, t *testing.T, tn *tunnel) {
	c := tn.c
	p := newPairOfClouds(ctx, t, tn)
	p.start(ctx, t, 0)
	p.start(ctx, t, 1)
	p.joined(ctx, t)
	if err := c.script(ctx, "dns.sh", "forward", p.ip[0]+":5353 "+p.ip[1]+":5353"); err != nil {
		t.Fatal(err)
	}
	// edge1 is with the first replica, edge2 with the second, while they are there.
	tn.joinsAt(t, "edge1", balancer(t, p.ip[0]+":9101", p.grpc[0], p.grpc[1]))
	tn.joinsAt(t, "edge2", balancer(t, p.ip[0]+":9102", p.grpc[1], p.grpc[0]))
	for _, n := range c.nodes {
		tn.startEdge(ctx, t, n)
	}
	t.Cleanup(func() {
		for _, n := range c.nodes {
			tn.edges[n].kill(t)
		}
	})
	leads := func(node, ip string) {
		t.Helper()
		eventually(ctx, t, backAgain, node+" to lead to "+ip, func(ctx context.Context) error {
			a, err := lookup(ctx, coreDNS, node)
			return want(err, a, ip)
		})
	}
	leads("edge1", p.ip[0])
	leads("edge2", p.ip[1])

	c.step(t, "each by its own", func(t *testing.T) {
		succeeds(ctx, t, c, "edge1")
		succeeds(ctx, t, c, "edge2")
	})
	c.step(t, "relayed", func(t *testing.T) {
		for i, node := range []string{1: "edge1", 0: "edge2"} { // at the replica that does not hold it
			if body, err := p.healthz(ctx, i, node); err != nil || body != "ok" {
				t.Errorf("%s by way of %s: %q, %v", node, p.ip[i], body, err)
			}
		}
	})
	c.step(t, "replica killed", func(t *testing.T) {
		follow, err := start(c.command(ctx, "kubectl", "logs", "-f", "--tail=1", pod("edge1"), "-c", "web"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(follow.kill)
		cat := c.command(ctx, "kubectl", "exec", "-i", pod("edge2"), "-c", "web", "--", "cat")
		stdin, err := cat.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		echo, err := start(cat)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(echo.kill)
		says := func(line string) {
			t.Helper()
			ctx, cancel := within(ctx, gone)
			defer cancel()
			_, err := io.WriteString(stdin, line+"\n")
			if err := errors.Join(err,
				echo.until(ctx, func(out string) bool { return strings.HasSuffix(out, line+"\n") })); err != nil {
				t.Fatal(err)
			}
		}
		fctx, cancel := within(ctx, gone)
		defer cancel()
		if err := follow.until(fctx, ticks(1)); err != nil {
			t.Fatal(err)
		}
		says("before")
		p.run[0].kill(t)
		began := time.Now()
		says("after")
		follow.endsWithin(t, gone) // its node was with the replica that is gone
		recovers(ctx, t, c, "edge1")
		leads("edge1", p.ip[1])
		t.Logf("edge1 is with the other replica, and everything works, %v after the kill",
			time.Since(began).Round(time.Millisecond))
		says("still")
		stdin.Close()
		if err := echo.endsWithin(t, gone); err != nil {
			t.Errorf("exec on the other node: %v", err)
		}
	})
	c.step(t, "replica stopped", func(t *testing.T) {
		p.start(ctx, t, 0)
		p.joined(ctx, t)
		d := p.run[1]
		p.run[1] = nil
		if err := syscall.Kill(d.cmd.Process.Pid, syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		asked := 0
		for ; !d.ended() || asked < 20; asked++ {
			for _, n := range c.nodes {
				ctx, cancel := within(ctx, gone)
				if err := tryExec(ctx, c, n); err != nil {
					t.Errorf("exec on %s while the replica that holds it hands over: %v", n, err)
				}
				cancel()
			}
		}
		if err := d.endsWithin(t, 30*time.Second); err != nil {
			t.Errorf("after SIGTERM: %v", err)
		}
		d.killed = true
		d.log.Close()
		leads("edge1", p.ip[0])
		leads("edge2", p.ip[0])
		t.Logf("%d rounds of exec on both nodes, none refused", asked)
	})
}

// healthz asks a node's kubelet by way of a replica's front door.
func (p *pairOfClouds) healthz(ctx context.Context, i int, node string) (string, error) {
	pki := p.tn.c.path("pki/")
	pair, err := tls.LoadX509KeyPair(pki+"/apiserver-kubelet.crt", pki+"/apiserver-kubelet.key")
	if err != nil {
		return "", err
	}
	conf := &tls.Config{InsecureSkipVerify: true, ServerName: node, Certificates: []tls.Certificate{pair}}
	_, body, err := get(ctx, &http.Transport{TLSClientConfig: conf, DisableKeepAlives: true},
		"https://"+p.ip[i]+":"+kubelet+"/healthz")
	return body, err
}
