//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const (
	// echoPort is where the test serves echoes in the network of each pod, and the port of the Services of
	// testdata/kills.yaml.
	echoPort = "7"
	// comers is how many Services come and go.
	comers = 8
	// heldConns is how many conns of each node stay open all the time.
	heldConns = 10
	// roundTime is how long processes are killed until the state is checked.
	roundTime = time.Minute
	// settles is how long the state may take to be right when everything runs again.
	// client-go waits for up to a minute before it asks an API server again that was away several times.
	settles = 3 * time.Minute
	// answers is how long a Service may take to answer.
	answers = 2 * time.Second
)

// TestServicesKills kills edges, the cloud and kube-apiserver at random for the time that the environment variable
// TUNNEL_E2E_KILLS says, such as 10m. Meanwhile Services come and go, and callers use them. No conn to an endpoint of
// the own node is cut. Once a minute everything runs for a moment: then each node serves the Services that exist, and
// has no rule and no flow of UDP for the others.
func TestServicesKills(t *testing.T) {
	text := os.Getenv("TUNNEL_E2E_KILLS")
	if text == "" {
		t.Skip("make e2e-kills runs it")
	}
	lasts, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("TUNNEL_E2E_KILLS: %v", err)
	}
	ctx := contextOf(t)
	program := binary(ctx, t)
	c := upCluster(ctx, t, "KUBEPROXY=none")
	if _, err := c.kubectl(ctx, "apply", "-f", "../../deployment/cloud-rbac.yaml"); err != nil {
		t.Fatal(err)
	}
	if err := c.apply(ctx, "services.yaml"); err != nil {
		t.Fatal(err)
	}
	s := &farServices{c: c, tn: newEgress(ctx, t, c, program), mode: "full", pods: make(map[string]string)}
	t.Cleanup(func() { s.tn.down(t) })
	s.run(ctx, t, []servicesStep{
		{"pods", s.start}, {"served", s.relayed},
		{"kills", func(ctx context.Context, t *testing.T) { newKills(t, s).run(ctx, t, lasts) }},
	})
}

// kills is the state of TestServicesKills.
type kills struct {
	*farServices
	log *testing.T

	mu       sync.Mutex   // held for a change of a Service
	exists   [comers]bool // whether the API server has the Service; guarded by mu
	changing atomic.Bool  // Services come and go

	ended         map[string]int // how often each process was killed
	calls, failed atomic.Int64   // of callers of Services that come and go
}

func newKills(t *testing.T, s *farServices) *kills {
	return &kills{farServices: s, log: t, ended: make(map[string]int)}
}

// run kills for a while, and checks the state once each minute.
func (k *kills) run(ctx context.Context, t *testing.T, lasts time.Duration) {
	for _, node := range k.c.nodes {
		k.serve(ctx, t, node)
		if err := k.c.apply(ctx, "kills.yaml", "NAME", "held-"+node, "ADDRESS", k.held(node), "NODE", node); err != nil {
			t.Fatal(err)
		}
	}
	calling, stop := context.WithCancel(ctx)
	var load sync.WaitGroup
	defer load.Wait()
	defer stop()
	for _, node := range k.c.nodes {
		eventually(ctx, t, settles, "the Service of "+node, func(ctx context.Context) error {
			return k.echoes(ctx, answers, node, "tcp", k.held(node), node)
		})
		for range heldConns {
			load.Go(func() { k.hold(calling, node) })
		}
		load.Go(func() { k.open(calling, node) })
		for i := range comers {
			load.Go(func() { k.call(calling, node, i) })
		}
	}
	load.Go(func() { k.change(calling) })

	for until := time.Now().Add(lasts); time.Now().Before(until) && !t.Failed(); {
		k.changing.Store(true)
		k.kill(ctx, t, time.Now().Add(roundTime))
		k.changing.Store(false)
		k.check(ctx, t)
	}
	t.Logf("killed: %v; %d calls of Services that come and go, of which %d failed", k.ended, k.calls.Load(),
		k.failed.Load())
	for _, process := range []string{"edge1", "edge2", "cloud", "apiserver"} {
		if lasts >= 5*time.Minute && k.ended[process] == 0 {
			t.Errorf("%s was never killed", process)
		}
	}
}

// held returns the address of the Service whose conns are held on a node.
func (k *kills) held(node string) string {
	return map[string]string{"edge1": "10.96.21.101", "edge2": "10.96.21.102"}[node]
}

// comer returns the address of the i-th Service that comes and goes, and the node of its endpoint.
func (k *kills) comer(i int) (addr, node string) {
	return fmt.Sprintf("10.96.21.%d", i+1), k.c.nodes[i%2]
}

// serve sends back what comes to echoPort of the pod of a node, behind the name of the node.
func (k *kills) serve(ctx context.Context, t *testing.T, node string) {
	netns := k.podNetwork(ctx, t, node)
	ln, err := openInside(netns, func() (net.Listener, error) { return net.Listen("tcp4", ":"+echoPort) })
	if err != nil {
		t.Fatal(err)
	}
	datagrams, err := openInside(netns, func() (net.PacketConn, error) { return net.ListenPacket("udp4", ":"+echoPort) })
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	k.log.Cleanup(func() { ln.Close(); datagrams.Close(); serving.Wait() })
	serving.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer conn.Close()
				for b := make([]byte, len(question)); ; {
					conn.SetDeadline(time.Now().Add(time.Minute)) // a caller of a killed process may be gone without a word
					if _, err := io.ReadFull(conn, b); err != nil {
						return
					}
					conn.Write(append([]byte(node), b...))
				}
			})
		}
	})
	serving.Go(func() {
		for b := make([]byte, 1500); ; {
			n, from, err := datagrams.ReadFrom(b)
			if err != nil {
				return
			}
			datagrams.WriteTo(append([]byte(node), b[:n]...), from)
		}
	})
}

// question is what callers send.
const question = "who?"

// ask sends the question, and wants it back behind the name of the node.
func ask(conn net.Conn, within time.Duration, node string) error {
	conn.SetDeadline(time.Now().Add(within))
	if _, err := io.WriteString(conn, question); err != nil {
		return err
	}
	answer := make([]byte, len(node)+len(question))
	if _, err := io.ReadFull(conn, answer); err != nil {
		return err
	}
	if string(answer) != node+question {
		return fmt.Errorf("the pod of %s: %w: %q", node, errWrong, answer)
	}
	return nil
}

// errWrong says that a pod has answered that is no endpoint of the Service.
var errWrong = errors.New("another pod answers")

// echoes has a process of a node call a Service, whose pod is on the node of.
func (k *kills) echoes(ctx context.Context, limit time.Duration, node, network, addr, of string) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	conn, err := dialInside(ctx, "/run/netns/te2e-"+node, network, addr+":"+echoPort)
	if err != nil {
		return err
	}
	defer conn.Close()
	return ask(conn, limit, of)
}

// hold keeps a conn from a process of a node to the pod of the node in use. Nothing may cut the conn.
func (k *kills) hold(ctx context.Context, node string) {
	conn, err := dialInside(ctx, "/run/netns/te2e-"+node, "tcp", k.held(node)+":"+echoPort)
	if err != nil {
		k.log.Errorf("a conn of %s to its own pod: %v", node, err)
		return
	}
	defer conn.Close()
	for began := time.Now(); ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		if err := ask(conn, 20*time.Second, node); err != nil {
			k.log.Errorf("a conn of %s to its own pod is cut after %v: %v", node, time.Since(began), err)
			return
		}
	}
}

// open opens conns from a process of a node to the pod of the node. All must succeed, also while the node's edge is
// away: the kernel has the rules.
func (k *kills) open(ctx context.Context, node string) {
	for ; ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
		// A lost packet alone costs a second or more.
		if err := k.echoes(ctx, 20*time.Second, node, "tcp", k.held(node), node); err != nil && ctx.Err() == nil {
			k.log.Errorf("a new conn of %s to its own pod: %v", node, err)
			return
		}
	}
}

// call has a process of a node call the i-th Service, also while the Service does not exist. Each conn of TCP is new.
// All datagrams come from one port.
func (k *kills) call(ctx context.Context, node string, i int) {
	addr, of := k.comer(i)
	flow, err := dialInside(ctx, "/run/netns/te2e-"+node, "udp", addr+":"+echoPort)
	if err != nil {
		k.log.Error(err)
		return
	}
	defer flow.Close()
	for ; ctx.Err() == nil; time.Sleep(200 * time.Millisecond) {
		k.calls.Add(1)
		err := errors.Join(k.echoes(ctx, answers, node, "tcp", addr, of), ask(flow, 100*time.Millisecond, of))
		switch {
		case errors.Is(err, errWrong):
			k.log.Errorf("from %s to %s: %v", node, addr, err)
		case err != nil:
			k.failed.Add(1)
		}
	}
}

// change has Services come and go.
func (k *kills) change(ctx context.Context) {
	for ; ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
		k.mu.Lock()
		if k.changing.Load() {
			k.changeOne(ctx)
		}
		k.mu.Unlock()
	}
}

// changeOne creates or deletes a Service. While the API server is away, it tries again: both can be repeated. The
// caller holds mu.
func (k *kills) changeOne(ctx context.Context) {
	i := rand.IntN(comers)
	for late := time.Now().Add(5 * time.Minute); ; time.Sleep(time.Second) {
		err := k.toggle(ctx, i)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			k.exists[i] = !k.exists[i]
			return
		case time.Now().After(late):
			k.log.Errorf("Service %d, which exists: %t: %v", i, k.exists[i], err)
			return
		}
	}
}

// toggle creates or deletes the i-th Service.
func (k *kills) toggle(ctx context.Context, i int) (err error) {
	name := fmt.Sprintf("comes-%d", i)
	if addr, node := k.comer(i); !k.exists[i] {
		return k.c.apply(ctx, "kills.yaml", "NAME", name, "ADDRESS", addr, "NODE", node)
	}
	_, err = k.c.kubectl(ctx, "delete", "service", name, "--ignore-not-found", "--request-timeout=10s")
	return err
}

// kill kills one process after the other, and starts it again. At the end all run.
func (k *kills) kill(ctx context.Context, t *testing.T, until time.Time) {
	time.Sleep(time.Second) // an edge that was just started may not yet end with the process that put it into its node
	wait := func(most time.Duration) { time.Sleep(time.Duration(rand.Int64N(int64(most)))) }
	for time.Now().Before(until) && !t.Failed() {
		wait(4 * time.Second)
		switch n := rand.IntN(10); {
		case n < 6:
			node := k.c.nodes[n%2]
			k.tn.edges[node].kill(t)
			k.ended[node]++
			wait(3 * time.Second)
			k.tn.startEdge(ctx, t, node)
		case n < 9:
			k.tn.cloud.kill(t)
			k.ended["cloud"]++
			wait(3 * time.Second)
			k.tn.startCloud(ctx, t)
		default:
			stopped := k.c.script(ctx, "apiserver.sh", "stop")
			k.ended["apiserver"]++
			wait(3 * time.Second)
			if err := errors.Join(stopped, k.c.script(ctx, "apiserver.sh", "kubelet-ca")); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// check waits until each node serves all Services that exist. A node must then have no rule for a deleted Service, and
// the kernel no flow of UDP to one.
func (k *kills) check(ctx context.Context, t *testing.T) {
	t.Helper()
	k.mu.Lock() // the last change has ended
	defer k.mu.Unlock()
	what := fmt.Sprintf("the state with the Services %v", k.exists)
	took := eventually(ctx, t, settles, what, func(ctx context.Context) error {
		for _, node := range k.c.nodes {
			if err := errors.Join(k.served(ctx, node), k.rules(ctx, node)); err != nil {
				return fmt.Errorf("%s: %w", node, err)
			}
		}
		return nil
	})
	t.Logf("%v: right after %v, killed so far: %v", k.exists, took.Round(time.Millisecond), k.ended)
}

// served asks all Services by TCP and UDP, at the same time. A Service that does not exist must not answer.
func (k *kills) served(ctx context.Context, node string) error {
	all := make(chan error, 2*comers) // capacity: one result for each call
	for i, exists := range k.exists {
		addr, of := k.comer(i)
		for _, network := range []string{"tcp", "udp"} {
			go func() {
				err := k.echoes(ctx, answers, node, network, addr, of)
				switch {
				case exists && err != nil:
					all <- fmt.Errorf("the Service %s by %s: %w", addr, network, err)
				case !exists && (err == nil || errors.Is(err, errWrong)):
					all <- fmt.Errorf("a Service that is deleted answers: %s by %s", addr, network)
				default:
					all <- nil
				}
			}()
		}
	}
	var errs []error
	for range cap(all) {
		errs = append(errs, <-all)
	}
	return errors.Join(errs...)
}

// A nameOfRule is the name of a chain or a set of the edge's table. It ends with an id: all that an edge makes at once
// has the same.
var nameOfRule = regexp.MustCompile(`(?m)^\s*(?:chain|set|map) \S+-([0-9.]+) \{`)

// rules looks at the rules of a node and at the flows that the kernel follows: they know the Services that exist, and
// no others. All rules are those of one process.
func (k *kills) rules(ctx context.Context, node string) error {
	table, err := k.c.inside(ctx, node, k.c.home+"/nodebin/nft", "list", "table", "inet",
		"tunnel-services").CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, table)
	}
	names := nameOfRule.FindAllSubmatch(table, -1)
	if len(names) == 0 {
		return fmt.Errorf("no rules: %.1000s", table)
	}
	for _, name := range names {
		if !bytes.Equal(name[1], names[0][1]) {
			return fmt.Errorf("rules of two processes, %s and %s", names[0][1], name[1])
		}
	}
	flows, err := k.c.inside(ctx, node, k.c.home+"/nodebin/conntrack", "-L", "-p", "udp").CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, flows)
	}
	for i, exists := range k.exists {
		addr, _ := k.comer(i)
		word := regexp.MustCompile(`\b` + regexp.QuoteMeta(addr) + `\b`)
		if found := word.Match(table); found != exists {
			return fmt.Errorf("the Service %s exists: %t; the table has it: %t", addr, exists, found)
		}
		// A flow that is led to an endpoint, or to the relay, has replies from there; any other has replies from addr.
		for _, flow := range regexp.MustCompile(`(?m)^.* dst=`+regexp.QuoteMeta(addr)+` .*$`).FindAll(flows, -1) {
			if led := !bytes.Contains(flow, []byte("src="+addr+" ")); led != exists {
				return fmt.Errorf("the Service %s exists: %t; a flow is led to an endpoint: %t: %s", addr, exists, led, flow)
			}
		}
	}
	return nil
}
