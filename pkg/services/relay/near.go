package relay

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// nearProtocol is the application protocol in the TLS handshake (RFC 7301). It changes with the lines below it.
	nearProtocol = "tunnel-near/1"
	// nearTimeout bounds how long a caller waits for a connection to another edge, before the cloud is asked.
	nearTimeout = 300 * time.Millisecond
	// After a failure, an edge is not tried for minNearPause. The pause doubles with each further failure, up to
	// maxNearPause.
	minNearPause = 10 * time.Second
	maxNearPause = 10 * time.Minute
	// maxNearAddrs bounds the addresses of an edge that are tried, all at once.
	maxNearAddrs = 4
	// maxNearDials bounds the attempts to one edge that have no answer yet. Further conns go through the cloud.
	maxNearDials = 128
	// maxNearPeers bounds the edges that are remembered.
	maxNearPeers = 4096
	// lookPause is how long the list of this machine's networks is kept. An interface has no part in most changes.
	lookPause = 5 * time.Second
)

// NearConfig configures the shortcut between edges of one site.
type NearConfig struct {
	Listen netip.AddrPort // where other edges connect. All edges of a site have the same port.
	// Certificate returns the certificate of this node. It proves the node to other edges, and is asked for each time.
	Certificate func() *tls.Certificate
	// Verify returns the node of a certificate chain, leaf first, or why the chain is not valid now. It does not
	// distinguish between the edge that connects and the one that accepts: both have the certificate of a node.
	Verify  func(chain []*x509.Certificate) (tunnel.NodeName, error)
	Sockets *listen.Sockets // opens the listener; nil: nobody can take it over
}

// Near is the module of the shortcut between edges of one site: a conn to an endpoint on a node of this site goes there
// over the local network, by TLS 1.3 with the certificates of both nodes. In this direction it is [Near.reach]; near.go
// has it. nearserve.go has the other one.
//
// A node is of this site if its Node has the zone of this node, or an InternalIP in a network of this machine. That is
// a guess, which costs nearTimeout if it is wrong: only the certificate decides who is there. All of it comes from the
// state, so the shortcut works without the cloud, too.
//
// An attempt that fails is no error of the caller: the conn goes through the cloud.
type Near struct {
	// Set once.
	cfg      NearConfig
	relay    *Relay
	edge     *Edge
	log      *slog.Logger
	grace    time.Duration // how long conns of other edges may go on after Run's ctx is done
	silence  time.Duration // nearSilence
	dial     func(ctx context.Context, network, addr string) (net.Conn, error)
	networks func() []netip.Prefix // of this machine's interfaces
	listened chan struct{}         // closed by Run when addr is set; nothing is sent
	addr     net.Addr              // of the listener; set before listened is closed

	callers nearCallers // other edges
	counts  nearCounters
	denied  refusals       // targets that other edges leave to the cloud
	told    tunnel.Limiter // of log lines about other edges

	mu     sync.Mutex // guards the following
	peers  map[string]*nearPeer
	onLink []netip.Prefix // the last answer of networks
	looked time.Time      // when that was; zero: never
}

var _ tunnel.Module = (*Near)(nil)

// nearPeer is what an edge remembers of another one. Near.mu guards it.
type nearPeer struct {
	addrs    []netip.AddrPort
	dialing  int           // attempts without an answer
	failures int           // pauses so far
	pause    time.Duration // after the last failure; 0: the last attempt has succeeded, or there was none
	until    time.Time     // the end of pause
}

// NewNear returns the module. e and its relay must not run yet.
func NewNear(e *Edge, cfg NearConfig) *Near {
	n := &Near{
		cfg: cfg, relay: e.relay, edge: e, log: e.relay.log, grace: tunnel.GracePeriod, silence: nearSilence,
		networks: ownNetworks,
		dial:     (&net.Dialer{Control: nearControl, KeepAliveConfig: nearKeepAlive()}).DialContext,
		listened: make(chan struct{}), peers: make(map[string]*nearPeer),
	}
	n.told.Burst = 20
	e.relay.near = n
	return n
}

// nearKeepAlive finds a peer that has vanished while nothing is sent. nearConn finds the others.
func nearKeepAlive() net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 4}
}

// nearControl is net.Dialer.Control of a dial to another edge.
func nearControl(network, addr string, c syscall.RawConn) error {
	return errors.Join(directControl(network, addr, c), boundSilence(network, addr, c))
}

// ownNetworks returns the networks of this machine's interfaces. Link-local ones are the same everywhere.
func ownNetworks() (all []netip.Prefix) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().IsGlobalUnicast() && !p.IsSingleIP() {
			all = append(all, p.Masked())
		}
	}
	return all
}

// reach connects to an endpoint on another node of this site. answered is false if the cloud is to be asked: the node
// is elsewhere, or its edge cannot be reached, or it does not decide. n may be nil.
func (n *Near) reach(ctx context.Context, to way) (c net.Conn, answered bool, err error) {
	if n == nil || to.protocol != protocolTCP || n.denied.get(to.target()) != nil {
		return nil, false, nil
	}
	node := to.GetNode()
	p, failures := n.enter(node)
	if p == nil {
		return nil, false, nil
	}
	made, refusal, err := n.open(ctx, tunnel.NodeName(node), p.addrs, to.target())
	gaveUp := err != nil && ctx.Err() != nil // says nothing about the node
	n.leave(node, p, failures, err, gaveUp)
	switch {
	case gaveUp:
		return nil, true, tunnel.Refusef(tunnel.Timeout, "the edge of node %s did not answer in time", node)
	case err != nil:
		return nil, false, nil
	case refusal == nil:
		return made, true, nil
	case refusal.Code == tunnel.Denied: // the other edge knows less than the cloud
		n.denied.put(to.target(), refusal)
		return nil, false, nil
	case refusal.Code == tunnel.Overloaded, refusal.Code == tunnel.Draining: // the next conn may find room
		return nil, false, nil
	}
	return nil, true, refusal
}

// enter counts an attempt to reach a node, and returns how many have failed before. p is nil if there is to be no
// attempt now.
func (n *Near) enter(node string) (p *nearPeer, failures int) {
	addrs := n.addrsOf(node)
	if len(addrs) == 0 {
		return nil, 0
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	p = n.peers[node]
	if p == nil || !slices.Equal(p.addrs, addrs) {
		if len(n.peers) >= maxNearPeers {
			clear(n.peers)
		}
		p = &nearPeer{addrs: addrs}
		n.peers[node] = p
	}
	now := time.Now()
	if p.dialing >= maxNearDials || p.pause > 0 && now.Before(p.until) {
		return nil, 0
	}
	if p.pause > 0 {
		p.until = now.Add(p.pause) // one caller tries, and the others do not wait for it
	}
	p.dialing++
	return p, p.failures
}

// leave undoes enter, and notes how the attempt has ended. gaveUp: the caller did not wait for that.
func (n *Near) leave(node string, p *nearPeer, failures int, err error, gaveUp bool) {
	n.mu.Lock()
	before := p.pause
	p.dialing--
	switch {
	case err == nil:
		p.pause = 0
	case !gaveUp && p.failures == failures: // else another attempt has noted it
		p.failures++
		p.pause = min(max(2*before, minNearPause), maxNearPause)
		p.until = time.Now().Add(p.pause)
	}
	now := p.pause
	n.mu.Unlock()
	if err != nil && !gaveUp {
		n.counts.failed.Add(1)
	}
	if (before == 0) == (now == 0) {
		return
	}
	switch skipped, ok := n.told.Allow(); {
	case ok && now > 0:
		n.log.Warn("the edge of a node that seems to be of this site cannot be reached over the local network: conns to "+
			"endpoints there go through the cloud", "target", node, "err", err, "skipped", skipped)
	case ok:
		n.log.Info("conns to endpoints on a node of this site go there over the local network", "target", node,
			"skipped", skipped)
	}
}

// addrsOf returns where the edge of a node listens for the edges of its site; none: the node is of another site, or
// its edge serves no Services.
func (n *Near) addrsOf(name string) (all []netip.AddrPort) {
	r := n.relay
	r.mu.RLock()
	self, node := r.state.Node(string(r.cfg.Node)), r.state.Node(name)
	r.mu.RUnlock() // values of the state do not change
	if !node.GetEdge() || name == string(r.cfg.Node) {
		return nil
	}
	sameZone := node.GetZone() != "" && node.GetZone() == self.GetZone()
	onLink := n.linked()
	for _, text := range node.GetInternalIps() {
		addr, err := netip.ParseAddr(text)
		addr = addr.Unmap()
		if err != nil || !addr.IsGlobalUnicast() || slices.Contains(self.GetInternalIps(), text) {
			continue
		}
		if sameZone || slices.ContainsFunc(onLink, func(p netip.Prefix) bool { return p.Contains(addr) }) {
			all = append(all, netip.AddrPortFrom(addr, n.cfg.Listen.Port()))
		}
	}
	return all[:min(len(all), maxNearAddrs)]
}

// linked returns the networks of this machine. If they have changed, all nodes may be tried again.
func (n *Near) linked() []netip.Prefix {
	n.mu.Lock()
	defer n.mu.Unlock()
	if now := time.Now(); n.looked.IsZero() || now.Sub(n.looked) >= lookPause {
		now, before := n.networks(), n.onLink
		if !slices.Equal(now, before) {
			n.onLink = now
			clear(n.peers)
		}
		n.looked = time.Now()
	}
	return n.onLink
}

// open asks the edge of a node for a conn to a target. err: the edge cannot be reached, or its answer makes no sense.
func (n *Near) open(
	ctx context.Context, node tunnel.NodeName, addrs []netip.AddrPort, target string,
) (c net.Conn, refusal *tunnel.Refusal, err error) {
	made, err := n.connect(ctx, node, addrs)
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { made.Reset() }) //nolint:errcheck // the conn is given up
	if _, err = io.WriteString(made, target+"\n"); err == nil {
		refusal, err = readAnswer(made)
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil && refusal == nil {
		made.carry()
		return made, nil, nil
	}
	made.Reset() //nolint:errcheck // the conn is given up
	if err != nil {
		return nil, nil, err
	}
	switch refusal.Code {
	case tunnel.Refused, tunnel.Unreachable, tunnel.Timeout, tunnel.Denied, tunnel.Overloaded, tunnel.Draining:
		return nil, refusal, nil
	}
	return nil, nil, fmt.Errorf("the edge of node %s: %w", node, refusal)
}

// connect connects to the first address that proves to be the edge of a node.
func (n *Near) connect(ctx context.Context, node tunnel.NodeName, addrs []netip.AddrPort) (*nearConn, error) {
	ctx, cancel := context.WithTimeout(ctx, nearTimeout)
	defer cancel()
	type result struct {
		c   *nearConn
		err error
	}
	results := make(chan result, len(addrs)) // each goroutine sends one
	for _, addr := range addrs {
		go func() {
			var one result
			one.err = tunnel.Guard(n.log, n.relay.cfg.Counters, "the attempt ends", func() (err error) {
				one.c, err = n.shakeHands(ctx, node, addr)
				return err
			})
			results <- one
		}()
	}
	var first *nearConn
	var errs []error
	for range addrs {
		switch one := <-results; {
		case one.err != nil:
			errs = append(errs, one.err)
		case first == nil:
			first = one.c
			cancel()
		default:
			one.c.Reset() //nolint:errcheck // the conn is given up
		}
	}
	if first == nil {
		return nil, errors.Join(errs...)
	}
	return first, nil
}

// shakeHands connects to an address, and verifies that the edge of a node is there.
func (n *Near) shakeHands(ctx context.Context, node tunnel.NodeName, addr netip.AddrPort) (*nearConn, error) {
	raw, err := n.dial(ctx, "tcp", addr.String())
	if err != nil {
		return nil, err
	}
	conf := n.tls()
	conf.VerifyConnection = func(state tls.ConnectionState) error {
		named, err := n.verify(state)
		if err == nil && named != node {
			err = fmt.Errorf("the edge of node %s is there", named)
		}
		return err
	}
	c := tls.Client(wholeTLS{raw}, conf)
	if err := c.HandshakeContext(ctx); err != nil {
		tunnel.Reset(raw)
		return nil, fmt.Errorf("%s: %w", addr, err)
	}
	tcp := raw.(*net.TCPConn) //nolint:forcetypeassert // it dials by "tcp"
	return &nearConn{Conn: c, tcp: tcp, asked: true, silence: n.silence}, nil
}

// tls returns what both ends of a TLS connection have in common. The caller sets VerifyConnection.
func (n *Near) tls() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{nearProtocol},
		Certificates: []tls.Certificate{*n.cfg.Certificate()},
		// The certificates of nodes have no names of hosts, and are for clients: VerifyConnection verifies them.
		InsecureSkipVerify: true, //nolint:gosec // as said above
		ClientAuth:         tls.RequireAnyClientCert,
		// A resumed session would keep a certificate that is not valid any more.
		SessionTicketsDisabled: true, DynamicRecordSizingDisabled: true,
	}
}

// verify returns the node at the other end of a TLS connection.
func (n *Near) verify(state tls.ConnectionState) (tunnel.NodeName, error) {
	if state.NegotiatedProtocol != nearProtocol || len(state.PeerCertificates) == 0 {
		return "", errors.New("no edge is there that has near in [mode.edge.services]")
	}
	return n.cfg.Verify(state.PeerCertificates)
}

// wholeTLS is a connection below TLS. crypto/tls ends cleanly, too, if there is no close_notify before the end of the
// connection (RFC 8446 section 6.1): somebody in the network could cut off a conn, so such an end is a reset.
type wholeTLS struct{ net.Conn }

// Read implements net.Conn.
func (c wholeTLS) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if errors.Is(err, io.EOF) {
		err = tunnel.ErrReset
	}
	return n, err
}

// The edge that connects sends one line, a services.Target. The edge that accepts answers with one line: nearOpened, or
// the name of a code, a space and a text. After nearOpened, both directions carry the bytes of the conn.
const (
	nearOpened = "opened"
	maxNear    = 1100 // bytes of a line, with its end; a path has maxPath at most
	maxReason  = 512  // bytes of a text
)

// answerLine returns the answer to a request, with its end.
func answerLine(refusal error) string {
	if refusal == nil {
		return nearOpened + "\n"
	}
	text := "this edge cannot connect" // what the error says is for the log of this edge alone
	if r, ok := errors.AsType[*tunnel.Refusal](refusal); ok {
		text = tunnel.Printable(r.Text[:min(len(r.Text), maxReason)])
	}
	line := tunnel.CodeOf(refusal).String() + " " + text
	return line[:min(len(line), maxNear-1)] + "\n"
}

// readAnswer reads the answer to a request. refusal is nil if the conn is open.
func readAnswer(r io.Reader) (refusal *tunnel.Refusal, err error) {
	line, err := readLine(r)
	if err != nil || line == nearOpened {
		return nil, err
	}
	name, text, _ := strings.Cut(line, " ")
	for _, code := range tunnel.Codes() {
		if code.String() == name {
			return tunnel.Refusef(code, "%s", tunnel.Printable(text)), nil
		}
	}
	return nil, fmt.Errorf("%.40q is no answer", line)
}

// readLine reads a line of maxNear bytes at most, and no byte behind it.
func readLine(r io.Reader) (string, error) {
	line := make([]byte, 0, maxNear)
	for len(line) < cap(line) {
		end := line[len(line) : len(line)+1]
		if _, err := io.ReadFull(r, end); err != nil {
			return "", err
		}
		if end[0] == '\n' {
			return string(line), nil
		}
		line = line[:len(line)+1]
	}
	return "", fmt.Errorf("the line has no end within %d bytes", maxNear)
}

// parseNear returns the target of a request.
func parseNear(line string) (services.Target, error) {
	t, err := services.ParseTarget(line)
	if err == nil && t.Protocol != protocolTCP {
		err = fmt.Errorf("the shortcut between edges has no %s", t.Protocol)
	}
	if err != nil {
		return t, tunnel.Refusef(tunnel.Denied, "%v", err)
	}
	return t, nil
}
