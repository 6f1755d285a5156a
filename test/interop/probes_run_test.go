package interop

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"tunnel.example/tunnel/test/rig"
)

// look holds a probe against a stack that works.
func (p probe) look(t *testing.T, s *stack) error {
	t.Helper()
	if err := roundTrip(s.dial, s.echo); err != nil {
		t.Fatalf("before anything is provoked: %v", err)
	}
	return p.run(s)
}

// Ours has none of the faults, whatever the way to dial.
func TestProbes(t *testing.T) {
	back := serving(t, echo)
	control := start(t)
	for _, way := range wayNames {
		t.Run(way, func(t *testing.T) {
			o := start(t)
			s := &stack{echo: back, second: func() { o.startTwin(t) },
				control: &stack{dial: ways(t, control.grpc, control.connect)[way], echo: back}}
			for _, p := range probes {
				if p.by(way) == cannot {
					continue
				}
				t.Run(p.name, func(t *testing.T) {
					// When nobody has read a conn for 10 s, the stock client ends its connection to the server,
					// with all conns of that connection. A probe leaves such conns behind.
					s.dial = ways(t, o.grpc, o.connect)[way]
					if err := p.look(t, s); err != nil {
						t.Error(err)
					}
				})
			}
		})
	}
}

// startTwin starts another edge of the same node, with which the first will take turns.
func (o *ours) startTwin(t *testing.T) {
	t.Helper()
	b, err := os.ReadFile(o.pair.Path("edge.toml"))
	if err != nil {
		t.Fatal(err)
	}
	twin := o.pair.Path("twin.toml")
	b = regexp.MustCompile(`logport = \d+`).ReplaceAll(b, fmt.Appendf(nil, "logport = %d", port(t)))
	if err := os.WriteFile(twin, b, 0o600); err != nil {
		t.Fatal(err)
	}
	log := new(rig.Log)
	p, err := rig.Start(log, o.pair.Path("tunnel"), "edge", "-c", twin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	until(t, "it has joined", log.String, func() bool { return strings.Contains(log.String(), "session started") })
}

// Konnectivity has the faults that the table claims, and no other of them. When a fault has gone,
// this fails: the table and docs/migrating-from-konnectivity.md are to be put right then.
//
// A stack that hangs stays so, and some keep a processor busy: each probe has one of its own,
// one after the other.
func TestProbesStock(t *testing.T) {
	back := serving(t, echo)
	programs := map[string]string{"server": stock(t, "server"), "agent": stock(t, "agent")}
	pair, err := rig.NewPair(rig.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	o := &ours{pair: pair} // for its certificates
	for _, way := range wayNames {
		t.Run(way, func(t *testing.T) {
			control := o.startStock(t, programs, way, back)
			for _, p := range probes {
				if p.by(way) == cannot {
					continue
				}
				t.Run(p.name, func(t *testing.T) {
					k := o.startStock(t, programs, way, back)
					k.control = &control.stack
					err := p.look(t, &k.stack)
					switch {
					case err == nil && p.by(way) == fails:
						t.Error("Konnectivity has not got this fault any more")
					case errors.As(err, new(fault)) && p.by(way) == passes:
						t.Errorf("Konnectivity has this fault, too: %v", err)
					case err != nil && !errors.As(err, new(fault)):
						t.Errorf("%v\n%s", err, k.logs())
					case err != nil:
						t.Log(err)
					}
				})
			}
		})
	}
}

// stockStack is a stock server and its agents.
type stockStack struct {
	stack

	server *server
	agents []*rig.Log
}

func (k *stockStack) logs() string {
	all := k.server.log.String()
	for _, log := range k.agents {
		all += log.String()
	}
	return all
}

func (o *ours) startStock(t *testing.T, programs map[string]string, way, back string) *stockStack {
	t.Helper()
	k := new(stockStack)
	more := []string{"--proxy-strategies=destHost,default", "-v=2"} // it says who joins and who drains
	if way == "CONNECT" {
		k.server = o.startServer(t, programs["server"], "http-connect", "one", 1, port(t), more...)
		k.dial = ways(t, "", k.server.socket)[way]
	} else {
		k.server = o.startServer(t, programs["server"], "grpc", "one", 1, port(t), more...)
		k.dial = ways(t, k.server.socket, "")[way]
	}
	k.echo = back
	first := o.joinStock(t, k, programs["agent"])
	// Another agent joins, and the first one drains: its conns go on, and dials go to the other.
	// It says that it drains when a packet has come.
	k.second = func() {
		o.joinStock(t, k, programs["agent"])
		first.Signal(syscall.SIGTERM)
		until(t, "the agent drains", k.logs, func() bool {
			return roundTrip(k.dial, back) == nil && strings.Contains(k.server.log.String(), "marked backend as draining")
		})
	}
	return k
}

// joinStock starts an agent of the node and waits until the server knows it.
func (o *ours) joinStock(t *testing.T, k *stockStack, binary string) *rig.Process {
	t.Helper()
	const joined = "Register backend for agent"
	before := strings.Count(k.server.log.String(), joined)
	log := new(rig.Log)
	k.agents = append(k.agents, log)
	agent, err := rig.Start(log, binary, "--agent-id="+rig.Node, "--agent-identifiers=ipv4=127.0.0.1",
		"--agent-cert="+o.pair.Path("client.crt"), "--agent-key="+o.pair.Path("client.key"),
		"--ca-cert="+o.pair.Path("ca.crt"),
		"--proxy-server-host=127.0.0.1", "--proxy-server-port="+strconv.Itoa(k.server.agentPort),
		"--health-server-port="+strconv.Itoa(port(t)), "--admin-server-port="+strconv.Itoa(port(t)), "-v=0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(agent.Kill)
	until(t, "the agent has joined, for both strategies", k.logs,
		func() bool { return strings.Count(k.server.log.String(), joined) == before+2 })
	return agent
}
