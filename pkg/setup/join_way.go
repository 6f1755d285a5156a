package setup

import (
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/dial"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// stepTimeout is the longest time for one step on the way to the cloud.
	stepTimeout = 10 * time.Second
	// enrollTimeout is longer, since Kubernetes may sign the certificate.
	enrollTimeout = 60 * time.Second
	// clockSlack is the difference of two clocks above which Join prints advice.
	clockSlack = time.Minute
)

// way checks step by step whether this machine reaches the cloud. Each failure names its step. The methods send
// the token's secret only after all steps have succeeded.
type way struct {
	// Set once.
	token    auth.JoinToken
	software string // the name and version of this program, for the cloud
	ok       func(step, format string, args ...any)
	servers  []dial.Server
	dialer   *dial.Dialer
	proxies  dial.ProxyFunc // nil: no proxy
	noProxy  bool           // the operator forbids a proxy
	proxyCA  []byte         // content of JoinConfig.ProxyCA; nil: none

	used *dial.Proxy // check sets it to the proxy by which it reached the cloud; nil: no proxy
}

// newWay returns the way to the cloud that cfg describes. existing is the node's configuration; nil: there is none.
// The servers and the proxy of existing replace those of cfg.
func newWay(cfg JoinConfig, existing *conf.Edge, ok func(step, format string, args ...any)) (*way, error) {
	w := &way{token: cfg.Token, software: cfg.Host.Software, ok: ok}
	if existing != nil {
		cfg.Servers, cfg.Proxy, cfg.ProxyFile, cfg.ProxyCA =
			existing.Places(), existing.Proxy.Reveal(), existing.ProxyFile, existing.ProxyCA
	}
	places := cfg.Servers
	if len(places) == 0 {
		places = []string{cfg.Token.Address}
	}
	for _, place := range places {
		s, err := dial.ParseServer(place)
		if err != nil && len(cfg.Servers) == 0 {
			return nil, &stepError{
				step: "token", err: errors.New("the address in it is not host:port"),
				fix: "make another one with `tunnel token create`", kind: KindUsage,
			}
		}
		if err != nil {
			return nil, &Error{KindUsage, fmt.Errorf("--server: %w", err)}
		}
		w.servers = append(w.servers, s)
	}
	if err := w.chooseProxy(cfg, existing != nil); err != nil {
		return nil, err
	}
	config := dial.Config{
		Servers: w.servers, Proxy: w.proxies, UserAgent: w.software,
		Keys: dial.Keys{Servers: "--server", Proxy: "--proxy", ProxyFile: "--proxy-file", ProxyCA: "--proxy-ca"},
	}
	if cfg.ProxyCA != "" {
		var err error
		if w.proxyCA, err = os.ReadFile(cfg.ProxyCA); err != nil {
			return nil, &Error{KindUsage, fmt.Errorf("--proxy-ca: %w", err)}
		}
		certs, err := auth.ParseCertificates(w.proxyCA)
		switch {
		case err != nil:
			return nil, &Error{KindUsage, fmt.Errorf("--proxy-ca %s: %w", cfg.ProxyCA, err)}
		case len(certs) == 0:
			return nil, &Error{KindUsage, fmt.Errorf("--proxy-ca: %s holds no certificate in PEM form", cfg.ProxyCA)}
		}
		roots := x509.NewCertPool()
		for _, c := range certs {
			roots.AddCert(c)
		}
		config.Roots = func() *x509.CertPool { return roots }
	}
	var err error
	w.dialer, err = dial.New(config)
	return w, err
}

// chooseProxy sets proxies and noProxy. known is true if an existing edge.toml names the proxy, not the command line.
// Only then may the URL of the proxy hold a password, since other users can read a command line.
func (w *way) chooseProxy(cfg JoinConfig, known bool) error {
	switch cfg.Proxy {
	case conf.ProxyNone:
		w.noProxy = true
		return nil
	case "", "env":
		if cfg.ProxyFile != "" {
			w.proxies = dial.FromFile(cfg.ProxyFile, "--proxy-file")
		} else if cfg.Environment != nil {
			w.proxies = dial.FromEnvironment(cfg.Environment)
		}
	default:
		p, err := dial.ParseProxy(cfg.Proxy, "--proxy")
		switch {
		case err != nil:
			return &Error{KindUsage, err}
		case p.HasPassword() && !known:
			return &Error{KindUsage, errors.New("--proxy: a password on a command line is seen by every user of this " +
				"machine: write the URL into a file of yours with mode 600, and name it with --proxy-file")}
		}
		w.proxies = dial.Through(p)
	}
	if w.proxies == nil {
		return nil
	}
	for _, s := range w.servers {
		if _, err := w.proxies(s); err != nil {
			return &Error{KindUsage, err}
		}
	}
	return nil
}

// isDirect reports whether Join dials the cloud at one address, without a proxy or an ingress in between. Then check
// resolves, connects and handshakes itself, and prints a line for each of these steps.
func (w *way) isDirect() bool {
	if len(w.servers) > 1 || w.servers[0].IsWebSocket() {
		return false
	}
	if w.proxies == nil {
		return true
	}
	p, err := w.proxies(w.servers[0])
	return p == nil && err == nil
}

// enrolled is the cloud's answer to a join token, and the key that stays on this machine.
type enrolled struct {
	chain []byte // PEM, leaf first
	ca    []byte // PEM, the CA that signed the cloud's certificate
	key   *ecdsa.PrivateKey
	told  auth.TellEdges
	cloud []*x509.Certificate // the chain that the cloud has shown
}

// check resolves the cloud's name, connects, and makes a TLS handshake.
func (w *way) check(ctx context.Context) error {
	if !w.isDirect() {
		return w.checkServers(ctx)
	}
	host, port, err := net.SplitHostPort(w.servers[0].Addr())
	if err != nil {
		return err // unreachable: ParseServer has checked the address
	}
	ips, err := w.resolve(ctx, host)
	if err != nil {
		return err
	}
	conn, err := w.connect(ctx, ips, port)
	if err != nil {
		return err
	}
	defer conn.Close()
	return w.handshake(ctx, conn)
}

// checkServers connects to the cloud by any of the servers, and makes a TLS handshake. If another program than the
// cloud answers at a server, checkServers tries the next server.
func (w *way) checkServers(ctx context.Context) (err error) {
	for range w.servers {
		if err = w.tryServers(ctx); err == nil || ctx.Err() != nil {
			return err
		}
	}
	return err
}

// tryServers makes one attempt of checkServers.
func (w *way) tryServers(ctx context.Context) error {
	dctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	c, err := w.dialer.Dial(dctx)
	if err != nil {
		failed := &stepError{
			step: dial.StepTCP, err: oneLine(fmt.Errorf("no connection to the cloud: %w", err)),
			fix: "Check this machine's network, and the addresses of the cloud.",
		}
		// With several servers, the text of err holds the advice for each server.
		if e, ok := errors.AsType[*dial.Error](err); ok && len(w.servers) == 1 {
			failed.step, failed.err, failed.fix = e.Step, oneLine(e.Err), sentence(e.Hint)
		}
		return failed
	}
	defer c.Close()
	step := dial.StepTCP
	switch {
	case c.Server().IsWebSocket():
		step = dial.StepWebSocket
	case c.Proxy() != nil:
		step = dial.StepProxy
	}
	w.ok(step, "connected to %s", c.Route())
	if err := w.handshake(ctx, c); err != nil {
		c.Failed()
		return err
	}
	c.Worked()
	w.used = c.Proxy()
	return nil
}

// sentence returns a hint as a sentence.
func sentence(hint string) string { return strings.ToUpper(hint[:1]) + hint[1:] + "." }

func (w *way) resolve(ctx context.Context, host string) ([]string, error) {
	if net.ParseIP(host) != nil {
		w.ok("dns", "%s is an address: no lookup needed", host)
		return []string{host}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	ips, err := net.DefaultResolver.LookupHost(ctx, host)
	if err != nil {
		reason := err.Error()
		if e, ok := errors.AsType[*net.DNSError](err); ok {
			reason = e.Err
		}
		return nil, &stepError{
			step: "dns", err: fmt.Errorf("the cloud's name %s cannot be resolved: %s", host, reason),
			fix: "Check this machine's resolver (/etc/resolv.conf), or name the cloud in /etc/hosts; " +
				"the name comes from address in the cloud's [mode.cloud.join].",
		}
	}
	w.ok("dns", "%s is %s", host, strings.Join(ips, ", "))
	return ips, nil
}

func (w *way) connect(ctx context.Context, ips []string, port string) (net.Conn, error) {
	var errs []error
	for _, ip := range ips {
		dctx, cancel := context.WithTimeout(ctx, max(stepTimeout/time.Duration(len(ips)), 2*time.Second))
		conn, err := (&net.Dialer{}).DialContext(dctx, "tcp", net.JoinHostPort(ip, port))
		cancel()
		if err == nil {
			w.ok("tcp", "connected to %s", conn.RemoteAddr())
			return conn, nil
		}
		errs = append(errs, err)
	}
	err := errors.Join(errs...)
	fix := "Check this machine's network, and the address in the cloud's [mode.cloud.join]."
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		fix = "Nothing listens there: is `tunnel cloud` running, and is that its grpcport?"
	case errors.Is(err, context.DeadlineExceeded):
		fix = "Nothing answers: does a firewall between here and there let TCP port " + port + " through?"
	}
	return nil, &stepError{step: "tcp", err: fmt.Errorf("no connection to the cloud: %w", oneLine(err)), fix: fix}
}

// handshake checks that the other side is the cloud that made the token.
func (w *way) handshake(ctx context.Context, conn net.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	var cfg *tls.Config
	cfg, _ = auth.PinnedTLS(w.token)
	cfg.NextProtos = []string{"h2"}
	tc := tls.Client(conn, cfg)
	if err := tc.HandshakeContext(ctx); err != nil {
		return w.explain(err)
	}
	leaf := tc.ConnectionState().PeerCertificates[0]
	w.ok("tls", "it is the cloud that made the token: %s, authority sha256:%s…",
		w.token.ServerName, hex.EncodeToString(w.token.CA[:8]))
	w.ok("clock", "%s here, and the cloud's certificate is good until %s",
		when(time.Now()), leaf.NotAfter.UTC().Format(time.DateOnly))
	return nil
}

// explain turns the error of a TLS handshake into a stepError that says what to do. Up to this error, this machine
// has sent nothing but a ClientHello.
func (w *way) explain(err error) error {
	failed := &stepError{step: "tls", err: err}
	if cert, problem := stream.OutOfDate(err); cert != nil {
		failed.step = "clock"
		whose, fix := "the cloud's certificate", "replace the certificate on the cloud (cert and key in "+
			"[mode.cloud.stream.server]); this token stays good."
		if cert.IsCA {
			whose, fix = "the certificate of the cloud's CA", "replace the CA on the cloud, and make another token."
		}
		failed.err = fmt.Errorf("%s %s, and this machine's clock says %s", whose, problem, when(time.Now()))
		failed.fix = "If the clock is wrong, set it (timedatectl set-ntp true). If it is right, " + fix
		return failed
	}
	if e, ok := errors.AsType[x509.CertificateInvalidError](err); ok && e.Reason == x509.IncompatibleUsage {
		failed.err = fmt.Errorf("the cloud's certificate is not for servers: %w", e)
		failed.fix = "Replace it on the cloud (cert and key in [mode.cloud.stream.server]) by one with the " +
			"extended key usage serverAuth; this token stays good."
		return failed
	}
	if e, ok := errors.AsType[x509.HostnameError](err); ok {
		failed.err = fmt.Errorf("the certificate is not made out to %s: %w", w.token.ServerName, e)
		failed.fix = "The cloud's certificate and address in its [mode.cloud.join] must be for the same name; " +
			"correct one of them, and make another token."
		return failed
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		failed.err = errors.New("the server at that address does not speak TLS")
		failed.fix = "The port must be the cloud's grpcport, and nothing in between may end TLS."
		return failed
	}
	switch {
	case errors.Is(err, auth.ErrPin):
		failed.err = errors.New("the server at that address is not the cloud that made this token: " +
			"another authority signed its certificate")
		failed.fix = "Your secret has not been sent. Either the address leads to another server, " +
			"or a proxy in between ends TLS, or the cloud has a new authority: then make another token. " +
			"If the authority was replaced just now, run this again when all replicas have the new files."
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		failed.err = fmt.Errorf("the connection is open, but the other side does not speak TLS: %w", oneLine(err))
		failed.fix = "Is the port the cloud's grpcport? " +
			"A proxy or a firewall in between may accept connections in its place."
	default:
		failed.fix = "The port must be the cloud's grpcport, and nothing in between may end TLS."
	}
	return failed
}

// enroll sends the token, and receives a certificate. hasCert says that the node may have a certificate already.
func (w *way) enroll(ctx context.Context, hasCert bool) (*enrolled, error) {
	ctx, cancel := context.WithTimeout(ctx, enrollTimeout)
	defer cancel()
	key, request, err := auth.NewRequest(w.token.Node)
	if err != nil {
		return nil, err
	}
	cfg, ca := auth.PinnedTLS(w.token)
	answer, err := stream.Enroll(ctx, stream.EnrollConfig{
		Address: w.token.Address, Connect: w.dialer.Dial, TLS: cfg, Node: w.token.Node, Token: w.token.Secret,
		Request: request, Software: w.software,
	})
	if err != nil {
		return nil, refusedToken(w.token, err)
	}
	off := time.Since(answer.Time)
	// An old certificate may be in use, and Join replaces it: so the new one must be valid by the clock of this machine.
	// Without an old one, the clock of the cloud counts. Then a machine whose clock is wrong joins, and Join says so.
	now := answer.Time
	if hasCert {
		now = time.Now()
	}
	if _, err = auth.CheckIssued(answer.Chain, w.token.Node, key.Public(), now); err != nil {
		failed := &stepError{
			step: "token", err: fmt.Errorf("the certificate from the cloud cannot be used: %w", err),
			fix: "Read the cloud's log; [mode.cloud.join] there says what signs. Nothing was changed.",
		}
		if off.Abs() > clockSlack {
			failed.fix = fmt.Sprintf("This machine's clock is %s the cloud's: set it (timedatectl set-ntp true), and run "+
				"this again. Nothing was changed.", ahead(off))
		}
		return nil, failed
	}
	w.ok("token", "the cloud has made a certificate for node %s, which the edge renews", w.token.Node)
	if off.Abs() > clockSlack {
		w.ok("clock", "… but this machine's is %s the cloud's: set it (timedatectl set-ntp true)", ahead(off))
	}
	return &enrolled{chain: answer.Chain, ca: ca(), key: key, told: answer.Told, cloud: answer.Cloud}, nil
}

// refusedToken turns the cloud's refusal of a token, or its silence, into a stepError that says what to do.
func refusedToken(token auth.JoinToken, err error) error {
	failed := &stepError{step: "token", kind: KindRefused}
	s := statusOf(err)
	switch s.Code() {
	case codes.Unauthenticated:
		failed.err = fmt.Errorf("the cloud does not accept it for node %s: "+
			"it has expired, or was revoked, or is not in the token file (any more)", token.Node)
		failed.fix = "Make another one on the cloud: tunnel token create -c cloud.toml --node " + string(token.Node) +
			". The cloud's log says which it was. If the token was made within the last two minutes, and the cloud has its " +
			"tokens in a Secret, first run this again: a replica may not have it yet."
	case codes.AlreadyExists: // a token for several nodes
		failed.err = fmt.Errorf("the cloud does not accept it for node %s: %s", token.Node, said(s))
		failed.fix = "Make a token for this node on the cloud: tunnel token create -c cloud.toml --node " + string(token.Node)
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Unknown, codes.Internal:
		failed.kind = KindFailed
		failed.err = fmt.Errorf("the cloud could not answer now: %s", said(s))
		failed.fix = "Try again in a minute; the token stays good until it expires. The cloud's log says more."
	case codes.ResourceExhausted:
		failed.kind = KindFailed
		failed.err = fmt.Errorf("the cloud is busy: %s", said(s))
		failed.fix = "Try again in a minute."
	default:
		failed.err = fmt.Errorf("the cloud refused: %s", said(s))
		failed.fix = "Read its log, and [mode.cloud.join] in its configuration."
	}
	return failed
}

// statusOf returns the gRPC status in err, without the texts of the errors that wrap the status.
func statusOf(err error) *status.Status {
	if e, ok := errors.AsType[interface {
		error
		GRPCStatus() *status.Status
	}](err); ok {
		return e.GRPCStatus()
	}
	return status.New(codes.Unknown, err.Error())
}

// ahead spells the offset of this machine's clock from the cloud's clock.
func ahead(off time.Duration) string {
	if off < 0 {
		return Spell(-off) + " behind"
	}
	return Spell(off) + " ahead of"
}

// oneLine returns err with its text on one line, for the output of a step.
func oneLine(err error) error {
	return errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
}

// said returns the text of a cloud's refusal for a terminal: without control characters, and cut off.
func said(s *status.Status) string {
	text := s.Message()
	return tunnel.Printable(text[:min(len(text), 512)])
}
