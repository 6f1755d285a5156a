package check

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
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/dial"
	"tunnel.example/tunnel/pkg/setup"
	"tunnel.example/tunnel/pkg/stream"
)

// step is one step of the way from an edge to a cloud.
type step string

// The steps, in order. A way has either stepName and stepTCP, or stepBox.
const (
	stepName  step = "name"  // the name of the cloud resolves
	stepTCP   step = "tcp"   // its addresses answer
	stepBox   step = "box"   // a proxy or an ingress connects this machine to the cloud
	stepTLS   step = "tls"   // the cloud itself answers, not another program in between
	stepMTU   step = "mtu"   // large packets pass
	stepClock step = "clock" // this machine's clock is right
	stepJoin  step = "join"  // the cloud lets the node join
)

// way is one way to the cloud: one server, reached directly, through a proxy or through an ingress. Other goroutines
// may call its methods only after walk has returned.
type way struct {
	cfg    *EdgeConfig
	server dial.Server
	proxy  *dial.Proxy // nil: none
	err    error       // why the proxy is unknown

	results map[step]Result
	shown   bool           // the other side has shown a certificate: the cloud, or a program in between
	answer  *stream.Answer // the cloud's answer; nil: the cloud has not answered
}

// checkNetwork is the next step for an error that suggests no better one.
const checkNetwork = "check this machine's network, and the address of the cloud in " + table

// table begins the names of the keys that say how to reach the cloud.
const table = "[mode.edge.stream.client]"

func newWay(cfg *EdgeConfig, server dial.Server) *way {
	w := &way{cfg: cfg, server: server, results: make(map[step]Result)}
	if cfg.Dial.Proxy != nil {
		w.proxy, w.err = cfg.Dial.Proxy(server)
	}
	return w
}

// isDirect reports whether the edge's TCP connection ends at the cloud, not at a proxy or an ingress.
func (w *way) isDirect() bool { return w.proxy == nil && w.err == nil && !w.server.IsWebSocket() }

// steps returns the steps of this way.
func (w *way) steps() []step {
	if w.isDirect() {
		return []step{stepName, stepTCP, stepTLS, stepMTU, stepClock, stepJoin}
	}
	return []step{stepBox, stepTLS, stepClock, stepJoin}
}

// walk does the steps in order until one fails.
func (w *way) walk(ctx context.Context) {
	conn := w.connect(ctx)
	if conn == nil {
		return
	}
	defer conn.Close()
	if w.handshake(ctx, conn) {
		w.join(ctx)
	}
}

// result returns the result of a step. For a step that walk did not reach, it returns StateSkipped.
func (w *way) result(s step) Result {
	if r, ok := w.results[s]; ok {
		return r
	}
	for _, before := range w.steps() {
		if r, ok := w.results[before]; ok && r.State != StateOK {
			return Skipped("%s comes first", before)
		}
	}
	return Skipped("the check did not reach this step")
}

// forgive turns the failures of this way into warnings. because goes into their texts, and do before their next steps.
func (w *way) forgive(because, do string) {
	for s, r := range w.results {
		if r.State == StateFail {
			w.results[s] = Warn(do+r.Do, "%s (%s)", r.Text, because)
		}
	}
}

// dialer returns a dialer for one server, by the proxy that through names.
func (w *way) dialer(server dial.Server, through dial.ProxyFunc) (*dial.Dialer, error) {
	cfg := w.cfg.Dial
	cfg.Servers, cfg.Proxy = []dial.Server{server}, through
	return dial.New(cfg)
}

// connect opens a connection on which TLS with the cloud can begin. It returns nil if a step fails.
func (w *way) connect(ctx context.Context) net.Conn {
	if w.isDirect() {
		return w.connectDirect(ctx)
	}
	if w.err != nil {
		w.results[stepBox] = Fail("correct proxy or proxyfile in "+table+", or HTTPS_PROXY", "%v", w.err)
		return nil
	}
	c, err := w.dialAgain(ctx)
	if err != nil {
		w.results[stepBox] = failed(err, checkNetwork)
		return nil
	}
	r := OK("%s leads to the cloud's port", c.Route())
	if c := w.cfg.Conf; w.proxy != nil && c.Proxy == "" && c.ProxyFile == "" {
		r.Text += "; HTTPS_PROXY names the proxy here, and the environment of the edge must name it, too"
	}
	w.results[stepBox] = r
	return c
}

// connectDirect resolves the name of the server, and tries every address.
func (w *way) connectDirect(ctx context.Context) net.Conn {
	host, port, err := net.SplitHostPort(w.server.Addr())
	if err != nil {
		return nil // unreachable: dial.ParseServer has checked the address
	}
	ips := w.resolve(ctx, host)
	if ips == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	conns, errs := make([]*dial.Conn, len(ips)), make([]error, len(ips))
	var dialing sync.WaitGroup
	for i, ip := range ips {
		dialing.Go(func() { conns[i], errs[i] = w.connectTo(ctx, net.JoinHostPort(ip.String(), port)) })
	}
	dialing.Wait()
	var first *dial.Conn
	var good, bad []string
	for i, c := range conns {
		addr := net.JoinHostPort(ips[i].String(), port)
		switch {
		case errs[i] != nil:
			bad = append(bad, reason(errs[i]))
		case first == nil:
			first, good = c, append(good, addr)
		default:
			good = append(good, addr)
			c.Close()
		}
	}
	switch {
	case first == nil:
		r := failed(errs[0], checkNetwork)
		r.Text = strings.Join(bad, "; ")
		if p := w.proxyThatLeads(ctx); p != "" {
			r.Do = p
		}
		w.results[stepTCP] = r
		return nil
	case bad != nil:
		w.results[stepTCP] = Warn("correct the name of the cloud in DNS, or its firewall: the edge tries all addresses",
			"%s answers; %s", strings.Join(good, ", "), strings.Join(bad, "; "))
	default:
		w.results[stepTCP] = OK("%s answers", strings.Join(good, ", "))
	}
	return first
}

// resolve returns the addresses of the cloud; nil: there are none.
func (w *way) resolve(ctx context.Context, host string) []netip.Addr {
	if ip, err := netip.ParseAddr(host); err == nil {
		w.results[stepName] = OK("%s is an address, so no lookup is needed", host)
		return []netip.Addr{ip}
	}
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		r := Fail("correct servername in "+table+", or this machine's resolver (/etc/resolv.conf, /etc/hosts); "+
			"where only a proxy resolves names, write its URL as proxy in "+table, "%s does not resolve: %s", host, reason(err))
		if p := w.proxyThatLeads(ctx); p != "" {
			r.Do = p
		}
		w.results[stepName] = r
		return nil
	}
	var texts []string
	for i := range ips {
		ips[i] = ips[i].Unmap()
		texts = append(texts, ips[i].String())
	}
	w.results[stepName] = OK("%s is %s", host, strings.Join(texts, ", "))
	return ips
}

// connectTo connects to one address.
func (w *way) connectTo(ctx context.Context, addr string) (*dial.Conn, error) {
	server, err := dial.ParseServer(addr)
	if err != nil {
		return nil, err
	}
	d, err := w.dialer(server, nil)
	if err != nil {
		return nil, err
	}
	return d.Dial(ctx)
}

// proxyThatLeads tries the proxy that the operator's environment names. If the proxy leads to the cloud,
// proxyThatLeads returns the next step, else "". Call it only after an attempt without this proxy has failed.
func (w *way) proxyThatLeads(ctx context.Context) string {
	env := w.cfg.Environment
	if env == nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	for _, named := range []struct{ variable, url string }{
		{"HTTPS_PROXY", env.HTTPSProxy}, {"HTTP_PROXY", env.HTTPProxy},
	} {
		p, err := dial.ParseProxy(named.url, named.variable)
		if named.url == "" || err != nil {
			continue
		}
		d, err := w.dialer(w.server, dial.Through(p))
		if err != nil {
			continue
		}
		if c, err := d.Dial(ctx); err == nil {
			c.Close()
			return fmt.Sprintf("only the %s leads to the cloud (%s names it here): write its URL as proxy in %s, or with a "+
				"password into the file of proxyfile", p, named.variable, table)
		}
	}
	return ""
}

// handshake makes a TLS handshake with the program that answers, and verifies its certificate. It reports whether this
// program is the cloud.
func (w *way) handshake(ctx context.Context, conn net.Conn) bool {
	own := w.cfg.TLS()
	state, err := shake(ctx, conn, own.ServerName, "h2")
	if isAlert(err) {
		// A server that refuses the protocol h2 may show its certificate to a client that names no protocol.
		if again, dialErr := w.dialAgain(ctx); dialErr == nil {
			defer again.Close()
			if shown, shakeErr := shake(ctx, again, own.ServerName); shakeErr == nil {
				state, err = shown, nil
			}
		}
	}
	if err != nil {
		w.results[stepTLS] = w.noHandshake(err)
		if isTimeout(err) || isHungUp(err) { // the cloud hangs up if parts of the ClientHello do not arrive for some seconds
			w.tryShort(ctx, own.ServerName)
		}
		return false
	}
	w.shown = true
	if r := w.judge(state, own); r.State != StateOK {
		w.results[stepTLS] = r
		return false
	}
	leaf := state.PeerCertificates[0]
	w.results[stepTLS] = OK("the cloud answers, with a certificate %s, valid until %s", names(leaf), when(leaf.NotAfter))
	if w.isDirect() {
		w.results[stepMTU] = OK("a TLS handshake passes, whose packets are large")
		if mtu, segment, ok := pathMTU(conn); ok {
			w.results[stepMTU] = OK("the kernel knows a path of %d bytes, and sends segments of %d bytes", mtu, segment)
		}
	}
	w.results[stepClock] = OK("%s here, within the dates of the cloud's certificate", when(time.Now()))
	return true
}

// shake makes a TLS handshake without a client certificate. It accepts any certificate of the server.
func shake(ctx context.Context, conn net.Conn, name string, protocols ...string) (*tls.ConnectionState, error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	//nolint:gosec // judge verifies the certificate, so that it can also say whose it is
	tc := tls.Client(conn, &tls.Config{
		ServerName: name, InsecureSkipVerify: true, MinVersion: tls.VersionTLS12, NextProtos: protocols,
	})
	if err := tc.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	state := tc.ConnectionState()
	return &state, nil
}

// judge verifies the certificate of the program that answers, and says what is wrong with it.
func (w *way) judge(state *tls.ConnectionState, own *tls.Config) Result {
	leaf, between := state.PeerCertificates[0], x509.NewCertPool()
	for _, c := range state.PeerCertificates[1:] {
		between.AddCert(c)
	}
	options := x509.VerifyOptions{Roots: own.RootCAs, Intermediates: between}
	_, err := leaf.Verify(options)
	if invalid, ok := errors.AsType[x509.CertificateInvalidError](err); ok {
		if invalid.Reason == x509.Expired {
			return w.outOfDate(invalid.Cert)
		}
		return Fail("replace it on the cloud (cert and key in [mode.cloud.stream.server]) by one with the extended key "+
			"usage serverAuth", "the cloud's certificate is of no use: %v", err)
	}
	if err != nil {
		return Fail(fmt.Sprintf("if %q is a firewall or a proxy that inspects TLS, have it leave %s out, or try wss:// in "+
			"servers; if the cloud has a new CA, copy it to %s; else the address leads to another server: check where %s leads",
			leaf.Issuer, w.server, w.cfg.Conf.CA, w.server),
			"a CA that the edge does not trust signed the server's certificate: it is %s; the CAs of the cloud are in %s",
			names(leaf),
			w.cfg.caFiles())
	}
	if err = leaf.VerifyHostname(own.ServerName); err != nil {
		return Fail(fmt.Sprintf("dns in %s must be a name in the cloud's certificate; else the address leads to another "+
			"server: check where %s leads", table, w.server),
			"the certificate is not made out to %s: it is %s", own.ServerName, names(leaf))
	}
	if state.NegotiatedProtocol != "h2" {
		return Fail("have the balancer pass TCP through to the cloud (docs/network.md), or try wss:// in servers",
			"the server speaks TLS with a certificate that the edge trusts, but not HTTP/2: a balancer or a web server in "+
				"between terminates TLS; its certificate is %s", names(leaf))
	}
	return OK("")
}

// outOfDate explains why a certificate of the cloud is not valid now. It also sets the result of stepClock.
func (w *way) outOfDate(cert *x509.Certificate) Result {
	now := time.Now()
	whose, replace := "the cloud's certificate", "replace it on the cloud: cert and key in [mode.cloud.stream.server]"
	if cert.IsCA {
		whose, replace = "the certificate of the cloud's CA", "replace the CA on the cloud and on the edges"
	}
	if now.Before(cert.NotBefore) {
		w.results[stepClock] = Fail(setClock, "this machine's clock says %s, and %s begins on %s only", when(now), whose,
			when(cert.NotBefore))
		return Fail(setClock+"; if it is right, the clock of the cloud's CA is ahead", "%s is not valid before %s", whose,
			when(cert.NotBefore))
	}
	w.results[stepClock] = Warn("compare it with another clock; if it is wrong, "+setClock,
		"this machine's clock says %s, after the end of %s", when(now), whose)
	return Fail(replace+"; if this machine's clock is wrong, "+setClock,
		"%s expired on %s, and this machine's clock says %s", whose, when(cert.NotAfter), when(now))
}

// noHandshake explains a TLS handshake that failed before the server showed a certificate.
func (w *way) noHandshake(err error) Result {
	port := "servername in " + table + " must be the cloud's grpcport or listen"
	header, isHeader := errors.AsType[tls.RecordHeaderError](err)
	switch {
	case isHeader && strings.HasPrefix(string(header.RecordHeader[:]), "HTTP/"):
		return Fail(port+"; a web server has this port", "the server speaks HTTP without TLS")
	case isHeader:
		return Fail(port+"; another program has this port", "the server does not speak TLS")
	case isAlert(err):
		return Fail(port+"; a balancer in between must pass TCP through (docs/network.md)",
			"the server speaks TLS, and refuses HTTP/2 or the name: a web server, or a balancer that terminates TLS (%v)", err)
	case isTimeout(err):
		return Fail("the line mtu says whether large packets are lost; else the port may belong to another program, or a "+
			"firewall in between accepts connections in the cloud's place",
			"the connection is open, but the TLS handshake has no answer within %s", stepTimeout)
	case isHungUp(err):
		return Fail(port+"; does a balancer in front of it send the PROXY protocol? The cloud's log says more",
			"the server closed the connection before it showed a certificate")
	}
	return Fail(port, "the TLS handshake fails: %v", err)
}

// shortSegment is a size of TCP segments that every path takes, in bytes (RFC 791: a host accepts 576).
const shortSegment = 500

// tryShort repeats a failed handshake with short TCP segments. If the handshake succeeds now, the path loses large
// packets and sends no ICMP error: the MTU of the path is smaller than this machine believes.
func (w *way) tryShort(ctx context.Context, name string) {
	if !w.isDirect() || !canShorten {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 2*stepTimeout)
	defer cancel()
	short := net.Dialer{Control: shorten}
	conn, err := short.DialContext(ctx, "tcp", w.server.Addr())
	if err != nil {
		return
	}
	defer conn.Close()
	if _, err = shake(ctx, conn, name, "h2"); err == nil {
		w.results[stepTLS] = Fail("see the line mtu", "the TLS handshake has no answer in packets of the usual size")
		w.results[stepMTU] = largeLost()
	}
}

// largeLost returns the result for a path that loses large packets.
func largeLost() Result {
	return Fail("lower the MTU of this machine's uplink to that of the path: ip link set dev DEVICE mtu 1400, then less; "+
		"or let the router clamp the MSS, or pass ICMP \"fragmentation needed\"; sysctl net.ipv4.tcp_mtu_probing=1 on both "+
		"ends also helps",
		"large packets are lost on the path: a TLS handshake passes in segments of %d bytes, and not in those of the usual "+
			"size", shortSegment)
}

// whole returns a dialer for this way's server, by this way's proxy.
func (w *way) whole() (*dial.Dialer, error) {
	if w.proxy == nil {
		return w.dialer(w.server, nil)
	}
	return w.dialer(w.server, dial.Through(w.proxy))
}

// dialAgain connects to the cloud by this way.
func (w *way) dialAgain(ctx context.Context) (*dial.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	d, err := w.whole()
	if err != nil {
		return nil, err
	}
	return d.Dial(ctx)
}

// ask asks the cloud whether the node may join.
func (w *way) ask(ctx context.Context) (stream.Answer, error) {
	d, err := w.whole()
	if err != nil {
		return stream.Answer{}, err
	}
	client, err := stream.NewClient(stream.ClientConfig{
		Address: w.server.String(), Connect: d.Dial, TLS: w.cfg.TLS, Token: w.cfg.Token, Node: w.cfg.Conf.Node,
		Software: w.cfg.Software, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return stream.Answer{}, err
	}
	return client.Probe(ctx)
}

// join asks the cloud whether the node may join, and compares the clocks.
func (w *way) join(ctx context.Context) {
	answer, err := w.ask(ctx)
	if err != nil {
		w.results[stepJoin] = failed(err, "the cloud's log says more")
		if errors.Is(err, stream.ErrNoAnswer) && w.isDirect() {
			w.results[stepMTU] = Warn("if the cloud is not overloaded, large packets may be lost on the path: "+
				"try ip link set dev DEVICE mtu 1400", "small packets pass, and a question of 4 KiB has no answer")
		}
		return
	}
	w.answer = &answer
	if answer == (stream.Answer{}) {
		w.results[stepJoin] = OK(
			"the cloud accepts the proof of node %s; it is of an older release, which cannot be asked more", w.cfg.Conf.Node)
		return
	}
	w.results[stepJoin] = OK("the cloud lets node %s join (%s)", w.cfg.Conf.Node, answer.Software)
	if !answer.Time.IsZero() {
		w.results[stepClock] = clock(time.Since(answer.Time))
	}
}

// How far two clocks may differ before the check warns or fails. Some minutes do no harm: a certificate is valid from
// some minutes before it is made (auth.Backdate).
const (
	clockWarn = time.Minute
	clockFail = 5 * time.Minute
)

// clock returns a result for off, by which this machine's clock differs from the cloud's.
func clock(off time.Duration) Result {
	text := setup.Spell(off.Abs()) + " ahead of the cloud's"
	if off < 0 {
		text = setup.Spell(off.Abs()) + " behind the cloud's"
	}
	switch {
	case off.Abs() > clockFail:
		return Fail(setClock+"; compare both machines with another clock", "this machine's clock is %s", text)
	case off.Abs() > clockWarn:
		return Warn(setClock, "this machine's clock is %s", text)
	}
	return OK("%s here, as on the cloud", when(time.Now()))
}

// failed returns the result for an error of package dial or stream. The next step is the hint in the error; without a
// hint it is otherwise.
func failed(err error, otherwise string) Result {
	if e, ok := errors.AsType[*dial.Error](err); ok {
		return Fail(e.Hint, "%s", reason(e.Err))
	}
	if e, ok := errors.AsType[*stream.Hinted](err); ok {
		return Fail(e.Hint, "%s", reason(e.Err))
	}
	return Fail(otherwise, "%s", reason(err))
}

// reason returns the text of an error, without the words that gRPC puts around it, and without the hint.
func reason(err error) string {
	if e, ok := errors.AsType[*dial.Error](err); ok {
		err = e.Err
	}
	if e, ok := errors.AsType[interface {
		error
		GRPCStatus() *status.Status
	}](err); ok {
		return e.GRPCStatus().Message()
	}
	if e, ok := errors.AsType[*net.DNSError](err); ok {
		return e.Err
	}
	return strings.ReplaceAll(err.Error(), "\n", "; ")
}

// isAlert reports whether the other side has refused a TLS handshake with a TLS alert.
func isAlert(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "remote error" // as crypto/tls names it
}

// isHungUp reports whether the other side has closed the connection.
func isHungUp(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// isTimeout reports whether an operation took too long.
func isTimeout(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return errors.Is(err, context.DeadlineExceeded) || ok && timeout.Timeout()
}
