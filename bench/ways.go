package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"tunnel.example/tunnel/test/rig"
)

// way is one of the ways to a target behind an edge.
type way struct {
	id, name string
	version  func(b *bench) string // of what is not ours; nil: nothing to say
	start    func(b *bench, l *line) error
}

// ours is the way that the others are compared with.
const ours = "tunnel"

func ways() []way {
	return []way{
		{ours, "tunnel", nil, startOurs},
		{"tcp", "two TCP hops", nil, hops("none", "none")},
		{"tls", "TLS relay", nil, hops("out", "in")},
		{"yamux", "yamux over TLS", yamuxVersion, startYamux},
		{"ssh", "ssh -R", sshVersion, startSSH},
		{"konnectivity", "Konnectivity", konnectivityVersion, startKonnectivity},
	}
}

// direct is the way that others are compared with on a link: what the link itself gives.
const direct = "plain"

// linkWays are those that are measured over a link. Two hops are there what one is.
func linkWays() []way {
	all := slices.DeleteFunc(ways(), func(w way) bool { return w.id == "tcp" })
	return append([]way{{direct, "plain TCP", nil, startDirect}}, all...)
}

// startDirect has the client connect to the target.
func startDirect(_ *bench, l *line) error {
	l.dial = through(l.at.cloud.Network, l.at.edge.Address(portOf(l.target)))
	return nil
}

// line is a way that runs, in front of a target of its own.
type line struct {
	at     place
	target string                   // where the target itself listens, for the edge
	dial   func() (net.Conn, error) // to the target, by this way
	cloud  *rig.Process             // the end that clients connect to
	edge   *rig.Process             // the end that dials the target
	// carrier is the port at which the one end listens for the other.
	carrier int
	// https are the doors for HTTPS that ours has besides; nil: dial.
	passthrough, terminated *httpsDoor
	// logs tells what the ends have said.
	logs func() string

	all []*rig.Process
}

// open starts a way, and waits until a conn gets through. The place is the line's own from now on.
func (b *bench) open(w way, at place) (*line, error) {
	l := &line{at: at, logs: func() string { return "" }}
	target, err := b.peer(l, at.edge, "target", b.file("target.crt"), b.file("target.key"))
	if err == nil {
		l.target = loopback(target[0])
		err = w.start(b, l)
	}
	if err == nil {
		err = eventually(l.echo)
	}
	if err == nil {
		return l, nil
	}
	l.stop()
	return nil, fmt.Errorf("starting %s: %w\n%s", w.name, err, l.logs())
}

// run starts a program that belongs to the line.
func (l *line) run(host rig.Host, log *rig.Log, path string, args ...string) (*rig.Process, error) {
	p, err := rig.StartIn(host.Network, log, path, args...)
	if err == nil {
		l.all = append(l.all, p)
	}
	return p, err
}

// stop ends the processes, the last one first: what sshd has started for a client ends when
// that does. Then the line's place is gone, too.
func (l *line) stop() {
	for _, p := range slices.Backward(l.all) {
		p.Kill()
	}
	l.at.close()
}

// echo sends a byte there and back.
func (l *line) echo() error {
	c, err := l.call(order{Kind: orderEcho})
	if err != nil {
		return err
	}
	defer c.Close()
	return oneByte(c)
}

func oneByte(c net.Conn) error {
	b := make([]byte, 1)
	if _, err := c.Write(b); err != nil {
		return err
	}
	_, err := io.ReadFull(c, b)
	return err
}

// through dials a TCP address from within a network.
func through(n *rig.Network, addr string) func() (net.Conn, error) {
	d := &net.Dialer{Timeout: patience}
	return func() (c net.Conn, err error) {
		err = n.Do(func() (err error) {
			c, err = d.Dial("tcp", addr)
			return err
		})
		return c, err
	}
}

// loopback returns where a port of this machine is found by itself.
func loopback(port int) string { return rig.Host{}.Address(port) }

// peer starts this program as a target or a relay that belongs to the line, and returns
// the ports at which it listens.
func (b *bench) peer(l *line, host rig.Host, role string, args ...string) (ports []int, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return b.relay(l, host, self, append([]string{role}, args...)...)
}

// relay starts a program that belongs to the line, and returns the ports that its first line names.
func (b *bench) relay(l *line, host rig.Host, path string, args ...string) (ports []int, err error) {
	if host.Network != nil {
		args = append([]string{"-all"}, args...)
	}
	log := new(rig.Log)
	if _, err = l.run(host, log, path, args...); err != nil {
		return nil, err
	}
	return ports, eventually(func() error {
		said, _, ok := strings.Cut(log.String(), "\n")
		ports = nil
		for field := range strings.FieldsSeq(said) {
			if port, err := strconv.Atoi(field); err == nil {
				ports = append(ports, port)
			}
		}
		if !ok || len(ports) == 0 {
			return fmt.Errorf("%s %s does not say where it listens: %s", filepath.Base(path), args, log)
		}
		return nil
	})
}

// last is the process that was started last.
func (l *line) last() *rig.Process { return l.all[len(l.all)-1] }

// hops are two relays in front of a target: plain TCP, which is the floor, or a TLS
// connection for each conn, which is what could be had without a tunnel's one connection.
func hops(first, second string) func(b *bench, l *line) error {
	return func(b *bench, l *line) error {
		next, err := b.peer(l, l.at.edge, "relay", second, l.target, b.file("relay.crt"), b.file("relay.key"))
		if err != nil {
			return err
		}
		l.edge, l.carrier = l.last(), next[0]
		door, err := b.peer(l, l.at.cloud, "relay", first, l.at.edge.Address(l.carrier))
		if err != nil {
			return err
		}
		l.cloud, l.dial = l.last(), through(l.at.cloud.Network, loopback(door[0]))
		return nil
	}
}

// startYamux starts two relays with one TLS connection between them, which the edge dials.
func startYamux(b *bench, l *line) error {
	program, err := b.foreign("./yamux")
	if err != nil {
		return err
	}
	ports, err := b.relay(l, l.at.cloud, program, "cloud", b.file("relay.crt"), b.file("relay.key"))
	if err != nil {
		return err
	}
	if len(ports) != 2 {
		return fmt.Errorf("the relay listens at %d ports, want 2", len(ports))
	}
	l.cloud, l.carrier, l.dial = l.last(), ports[1], through(l.at.cloud.Network, loopback(ports[0]))
	if _, err = b.relay(l, l.at.edge, program, "edge", l.at.cloud.Address(l.carrier), l.target); err != nil {
		return err
	}
	l.edge = l.last()
	return nil
}

func yamuxVersion(b *bench) string { return b.versionOf("github.com/hashicorp/yamux") }

func portOf(addr string) int {
	tcp, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return 0 // none has it
	}
	return tcp.Port
}

// tunnel is a line that is ours.
type tunnel struct {
	*line
	pair *rig.Pair
}

func startOurs(b *bench, l *line) error {
	_, err := b.tunnel(l, false)
	return err
}

// startEdgeTLS starts a line that is ours, where the edge has the kubelet's client
// certificate.
func startEdgeTLS(b *bench, l *line) error {
	_, err := b.tunnel(l, true)
	return err
}

// startTunnel starts a line that is ours.
func (b *bench) startTunnel() (t *tunnel, err error) {
	_, err = b.open(way{id: ours, name: "tunnel", start: func(b *bench, l *line) error {
		var serr error
		t, serr = b.tunnel(l, false)
		return serr
	}}, place{})
	return t, err
}

// tunnel starts a cloud and an edge, with the limits that they have by default.
func (b *bench) tunnel(l *line, edgeTLS bool) (*tunnel, error) {
	dir, err := os.MkdirTemp(b.dir, "pair-")
	if err != nil {
		return nil, err
	}
	pair, err := rig.NewPair(rig.Config{
		Binary: b.program, Dir: dir, CA: b.ca, TCP: map[string]string{"target": l.target}, HTTPS: l.target, EdgeTLS: edgeTLS,
		CloudHost: l.at.cloud, EdgeHost: l.at.edge,
	})
	if err != nil {
		return nil, err
	}
	l.logs = func() string { return pair.CloudLog.String() + pair.EdgeLog.String() }
	here := l.at.cloud.Network
	l.dial, l.carrier = through(here, pair.Door("target")), portOf(pair.GRPC())
	l.passthrough = &httpsDoor{dial: through(here, pair.HTTPSDoor()), serverName: rig.Node}
	l.terminated = &httpsDoor{dial: through(here, pair.HTTPSDoor()), client: true}
	if l.cloud, err = pair.StartCloud(); err != nil {
		return nil, err
	}
	l.all = append(l.all, l.cloud)
	if l.edge, err = pair.StartEdge(); err != nil {
		return nil, err
	}
	l.all = append(l.all, l.edge)
	return &tunnel{l, pair}, nil
}

// eventually waits until f succeeds.
func eventually(f func() error) error {
	for late := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		err := f()
		if err == nil || time.Now().After(late) {
			return err
		}
	}
}
