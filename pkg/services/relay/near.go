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
	// nearProtocol is the application protocol in the TLS handshake (ALPN, RFC 7301). A change of the lines that edges
	// send each other needs a new name.
	nearProtocol = "tunnel-near/1"
	// nearTimeout bounds how long a caller waits for a connection to another edge, before this edge asks the cloud.
	nearTimeout = 300 * time.Millisecond
	// After a failure, an edge is not tried for minNearPause. The pause doubles with each further failure, up to
	// maxNearPause.
	minNearPause = 10 * time.Second
	maxNearPause = 10 * time.Minute
	// maxNearAddrs bounds the addresses of another edge that this edge tries. It tries them all at once.
	maxNearAddrs = 4
	// maxNearDials bounds the attempts to one edge that have no answer yet. Further conns go through the cloud.
	maxNearDials = 128
	// maxNearPeers bounds the other edges whose failures this edge remembers.
	maxNearPeers = 4096
	// lookPause is how long the edge keeps the list of this machine's networks before it asks the kernel again.
	lookPause = 5 * time.Second
)

// NearConfig configures the shortcut between edges of one site.
type NearConfig struct {
	Listen netip.AddrPort // where this edge listens for other edges; all edges of a site use the same port
	// Certificate returns the certificate by which this node proves to other edges which node it is. Near calls it for
	// each connection.
	Certificate func() *tls.Certificate
	// Verify returns the node of a certificate chain, leaf first, or why the chain is not valid now. Certificates of nodes
	// are valid for both ends of a connection: for the edge that connects and for the edge that accepts.
	Verify  func(chain []*x509.Certificate) (tunnel.NodeName, error)
	Sockets *listen.Sockets // opens the listener; nil: nobody can take it over
}

// Near is the module of the shortcut between edges of one site. A conn to an endpoint on another node of the site goes
// over the local network, by TLS 1.3 with the certificates of both nodes. A conn for datagrams carries frames of
// package udp, as it does through the cloud. near.go is the edge that connects (Near.reach), nearserve.go the edge that
// accepts.
//
// A node is of this site if its Node has the zone of this node, or an InternalIP in a network of this machine. That is
// a guess. A wrong guess costs nearTimeout; only the certificate proves which node is there. The guess needs only the
// state, so the shortcut works without the cloud.
//
// If an attempt fails, the caller gets no error: the conn goes through the cloud.
type Near struct {
	// Set once.
	cfg      NearConfig
	relay    *Relay
	edge     *Edge
	log      *slog.Logger
	grace    time.Duration // how long conns of other edges may continue after Run's ctx is done
	silence  time.Duration // nearSilence
	timeout  time.Duration // nearTimeout
	dial     func(ctx context.Context, network, addr string) (net.Conn, error)
	networks func() []netip.Prefix // returns the networks of this machine's interfaces
	listened chan struct{}         // closed by Run when addr is set; nothing is sent
	addr     net.Addr              // of the listener; set before listened is closed

	handshakeTime time.Duration // nearHandshakeTime
	requestTime   time.Duration // nearRequestTime

	callers nearCallers // the other edges that have conns here
	counts  nearCounters
	denied  refusals       // targets that another edge has denied: the cloud is asked for them
	told    tunnel.Limiter // limits log lines about other edges

	mu     sync.Mutex // guards the following
	peers  map[string]*nearPeer
	onLink []netip.Prefix // what networks returned last
	looked time.Time      // when networks was called last; zero: never
}

var _ tunnel.Module = (*Near)(nil)

// nearPeer is what an edge remembers of one other edge. Near.mu guards it.
type nearPeer struct {
	addrs    []netip.AddrPort
	dialing  int           // attempts without an answer
	failures int           // failed attempts that began a pause
	pause    time.Duration // how long the last failure stops attempts; 0: the last attempt succeeded, or there was none
	until    time.Time     // the end of pause
}

// NewNear returns the module. Neither e nor its relay may run yet.
func NewNear(e *Edge, cfg NearConfig) *Near {
	n := &Near{
		handshakeTime: nearHandshakeTime, requestTime: nearRequestTime,
		cfg: cfg, relay: e.relay, edge: e, log: e.relay.log, grace: tunnel.GracePeriod, silence: nearSilence,
		timeout: nearTimeout, networks: ownNetworks,
		dial:     (&net.Dialer{Control: nearControl, KeepAliveConfig: nearKeepAlive()}).DialContext,
		listened: make(chan struct{}), peers: make(map[string]*nearPeer),
		denied: refusals{keep: refusalTime, max: maxRefusals},
	}
	n.told.Burst = 20
	e.relay.near = n
	return n
}

// nearKeepAlive finds a peer that vanishes while the conn is idle. nearConn finds a peer that vanishes while bytes are
// sent.
func nearKeepAlive() net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 4}
}

// nearControl is net.Dialer.Control of a dial to another edge.
func nearControl(network, addr string, c syscall.RawConn) error {
	return errors.Join(directControl(network, addr, c), boundSilence(network, addr, c))
}

// ownNetworks returns the networks of this machine's interfaces. It leaves out link-local networks, which are the same
// on all machines.
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

// reach connects to an endpoint on another node of this site. If answered is false, the relay should ask the cloud: the
// node is elsewhere, its edge cannot be reached, or its edge does not decide. n may be nil.
func (n *Near) reach(ctx context.Context, to way) (c net.Conn, answered bool, err error) {
	if n == nil || n.denied.get(to.target()) != nil {
		return nil, false, nil
	}
	node := services.Home(to.Endpoint)
	p, failures := n.enter(node)
	if p == nil {
		return nil, false, nil
	}
	made, refusal, err := n.open(ctx, tunnel.NodeName(node), p.addrs, to.target())
	gaveUp := err != nil && ctx.Err() != nil // such an end says nothing about the node
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

// enter counts an attempt to reach a node, and returns how many attempts have failed before. p is nil if this edge
// should not try that node now.
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
		p.until = now.Add(p.pause) // this caller tries; others do not try meanwhile
	}
	p.dialing++
	return p, p.failures
}

// leave ends an attempt that enter has counted, and notes its result. gaveUp says that the caller's time ended first,
// so that the result is unknown.
func (n *Near) leave(node string, p *nearPeer, failures int, err error, gaveUp bool) {
	n.mu.Lock()
	before := p.pause
	p.dialing--
	switch {
	case err == nil:
		p.pause = 0
	case !gaveUp && p.failures == failures: // else another attempt, made at the same time, has begun the pause
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
		n.log.Warn("an edge that seems to be in this site did not answer over the local network: "+
			"its conns go through the cloud",
			"peer", node, "err", err, "skipped", skipped)
	case ok:
		n.log.Info("conns to endpoints on a node of this site go there over the local network", "peer", node,
			"skipped", skipped)
	}
}

// addrsOf returns where the edge of a node listens for the edges of its site. It returns nothing if the node is of
// another site, or its edge serves no Services.
func (n *Near) addrsOf(name string) (all []netip.AddrPort) {
	r := n.relay
	r.mu.RLock()
	self, node := r.state.Node(string(r.cfg.Node)), r.state.Node(name)
	r.mu.RUnlock() // the values in a state never change
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

// linked returns the networks of this machine. If they have changed, linked forgets all failures: this machine may be
// in another place.
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

// open asks the edge of a node for a conn to a target. err says that the edge cannot be reached, or that its answer
// makes no sense.
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

// connect connects to all addresses at once, and returns the first connection whose peer proves to be the edge of the
// node.
func (n *Near) connect(ctx context.Context, node tunnel.NodeName, addrs []netip.AddrPort) (*nearConn, error) {
	ctx, cancel := context.WithTimeout(ctx, n.timeout)
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

// shakeHands connects to an address, and verifies that the edge of the node is there.
func (n *Near) shakeHands(ctx context.Context, node tunnel.NodeName, addr netip.AddrPort) (*nearConn, error) {
	raw, err := n.dial(ctx, "tcp", addr.String())
	if err != nil {
		return nil, err
	}
	conf := n.tls()
	conf.VerifyConnection = func(state tls.ConnectionState) error {
		named, err := n.verify(state)
		if err == nil && named != node {
			err = fmt.Errorf("the edge of node %s answered", named)
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

// tls returns the configuration that both ends of a TLS connection share. The caller sets VerifyConnection.
func (n *Near) tls() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{nearProtocol},
		Certificates: []tls.Certificate{*n.cfg.Certificate()},
		// The certificates of nodes have no names of hosts, and are for clients: VerifyConnection verifies them.
		InsecureSkipVerify: true, //nolint:gosec // as said above
		ClientAuth:         tls.RequireAnyClientCert, VerifyPeerCertificate: listen.CheckShown,
		GetConfigForClient: listen.CheckHello,
		// A resumed session would keep a certificate that has become invalid meanwhile.
		SessionTicketsDisabled: true, DynamicRecordSizingDisabled: true,
	}
}

// verify returns the node at the other end of a TLS connection.
func (n *Near) verify(state tls.ConnectionState) (tunnel.NodeName, error) {
	if state.NegotiatedProtocol != nearProtocol || len(state.PeerCertificates) == 0 {
		return "", errors.New("the peer is not an edge with near in [mode.edge.services]")
	}
	return n.cfg.Verify(state.PeerCertificates)
}

// wholeTLS is the TCP connection below TLS. crypto/tls also accepts an end without close_notify (RFC 8446 section 6.1),
// so somebody in the network could cut off a conn unnoticed. wholeTLS turns such an end into a reset.
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
	maxNear    = 1100 // bytes of a line, with its end; a target's path has at most maxPath bytes
	maxReason  = 512  // bytes of a text
)

// answerLine returns the answer to a request, with its end.
func answerLine(refusal error) string {
	if refusal == nil {
		return nearOpened + "\n"
	}
	text := "this edge cannot connect" // the details are only for the log of this edge
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

// readLine reads a line of maxNear bytes at most. It reads no byte after the line: that byte belongs to the conn.
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
