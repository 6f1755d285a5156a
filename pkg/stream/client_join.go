package stream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/dial"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// dialFunc makes a TCP connection.
type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// dialSame makes another connection to a cloud that was reached before.
type dialSame = func(ctx context.Context) (net.Conn, error)

// connect connects to the cloud. It fails after joinTimeout.
func (cfg *ClientConfig) connect(ctx context.Context) (net.Conn, error) {
	return connectTo(ctx, cfg.Connect, cfg.Dial, cfg.Address)
}

// connectTo connects with byRoute, or with dialer if byRoute is nil, or with a net.Dialer if both are nil.
func connectTo(
	ctx context.Context, byRoute func(context.Context) (*dial.Conn, error), dialer dialFunc, address string,
) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	if byRoute == nil {
		return dialCloud(ctx, dialer, address)
	}
	c, err := byRoute(ctx)
	if err != nil {
		return nil, fmt.Errorf("dialing the cloud: %w", err)
	}
	return c, nil
}

// connect makes the ClientConn around raw, the one connection of a session. The ClientConn never
// reconnects: a second connection could reach another replica, while the session lives on the first
// replica.
//
// hangUp closes the connection and the ClientConn. gRPC by itself closes only a connection that gRPC
// has dialled, and gRPC dials at the first call. If the round trip is at least trip, the link to the
// cloud counts as far. If the TLS handshake fails, h gets its error.
func connect(
	raw net.Conn, address string, conf *tls.Config, h *handshake, software string, trip time.Duration,
	control *Congestion,
) (cc *grpc.ClientConn, own *carrier, hangUp func(), err error) {
	if route, ok := raw.(*dial.Conn); ok {
		address = route.Server().Addr()
	}
	own, isFar := carry(raw, trip, control)
	var once sync.Once
	dial := func(context.Context, string) (conn net.Conn, err error) {
		err = errors.New("the session's connection has closed")
		once.Do(func() { conn, err = own, nil })
		return conn, err
	}
	opts := append(dialOptions(isFar, own.total()),
		grpc.WithContextDialer(dial),
		grpc.WithTransportCredentials(handshakeCredentials{credentials.NewTLS(conf), h}),
		grpc.WithUserAgent(software),
	)
	cc, err = grpc.NewClient("passthrough:///"+address, opts...)
	if err != nil {
		raw.Close()
		return nil, nil, nil, err
	}
	return cc, own, func() {
		cc.Close()
		raw.Close()
	}, nil
}

// dialCloud makes a TCP connection to the cloud. If dialer is nil, dialCloud uses a net.Dialer.
func dialCloud(ctx context.Context, dialer dialFunc, address string) (net.Conn, error) {
	if dialer == nil {
		dialer = (&net.Dialer{}).DialContext
	}
	raw, err := dialer(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("dialing the cloud: %w", err)
	}
	return raw, nil
}

// join opens the control stream and exchanges hellos. It fails when ctx is done or after
// joinTimeout. The stream lives until sctx is done.
func (c *Client) join(
	ctx, sctx context.Context, cc *grpc.ClientConn, own *carrier, credential credentials.PerRPCCredentials,
) (*edgeSession, error) {
	sctx, abandon := context.WithCancelCause(sctx)
	late := time.AfterFunc(joinTimeout, func() { abandon(ErrNoAnswer) })
	stopped := context.AfterFunc(ctx, func() { abandon(context.Canceled) })
	fail := func(err error) (*edgeSession, error) {
		late.Stop()
		stopped()
		if cause := context.Cause(sctx); cause != nil {
			err = cause
		}
		abandon(err)
		return nil, fmt.Errorf("joining as %s: %w", c.as, err)
	}
	s, err := c.newSession(sctx, cc, own, credential)
	if err != nil {
		return fail(err)
	}
	s.abandon = abandon
	err = s.write(message(typeHello, "", c.ownHello()))
	if err != nil && !errors.Is(err, io.EOF) { // after io.EOF, Recv returns the reason
		return fail(err)
	}
	hello, err := receiveHello(s.stream)
	if err != nil {
		return fail(err)
	}
	if hello.GetVersion() != Version {
		return fail(status.Errorf(codes.FailedPrecondition,
			"the cloud speaks version %d of the protocol and this edge version %d: install the release of the cloud (%s) here",
			hello.GetVersion(), Version, text(hello.GetSoftware())))
	}
	if !late.Stop() {
		return fail(ErrNoAnswer)
	}
	if !stopped() {
		return fail(context.Canceled)
	}
	s.joined(hello)
	c.cfg.Counters.Sessions.Add(1)
	return s, nil
}

// newSession opens the control stream of a session. The stream lives until sctx is done.
func (c *Client) newSession(
	sctx context.Context, cc *grpc.ClientConn, own *carrier, credential credentials.PerRPCCredentials,
) (*edgeSession, error) {
	client := pb.NewStreamClient(cc)
	stream, err := client.TunnelStreaming(sctx, grpc.PerRPCCredentials(credential))
	if err != nil {
		return nil, err
	}
	s := &edgeSession{client: client, certificates: pb.NewCertificatesClient(cc), calls: cc, owner: c, ctx: sctx}
	s.reaching = make(chan struct{}, maxReaching)
	s.pub = &tunnel.Session{Node: c.cfg.Node, Remote: c.cfg.Address, Link: s, Paths: own.Paths}
	s.again = func(ctx context.Context) (net.Conn, error) {
		return dialCloud(ctx, c.cfg.Dial, own.RemoteAddr().String())
	}
	if route, ok := own.Conn.(*dial.Conn); ok {
		s.pub.Remote = route.Route()
		s.again = func(ctx context.Context) (net.Conn, error) { return route.Again(ctx) }
	}
	s.router, s.counters, s.blocks, s.tracer = c.router, c.cfg.Counters, c.blocks, c.cfg.Tracer
	s.way = s
	s.stream, s.unknown, s.hangUp, s.own = stream, s.nobody, stream.CloseSend, own
	s.init()
	// On a narrow link the edge closes idle data connections. Otherwise the cloud would open conns
	// on them.
	s.pacer.began = s.dropUnused
	return s, nil
}

// ownHello returns the first message of a session.
func (c *Client) ownHello() *pb.Hello {
	hello := &pb.Hello{
		Version: Version, Software: c.cfg.Software, Instance: c.instance, All: c.cfg.All, Reach: c.cfg.Reach,
		Connections:  uint32(c.cfg.Connections - 1), //nolint:gosec // a few
		Capabilities: capabilities(), Succeeds: c.cfg.Succeeds != nil && c.cfg.Succeeds(),
	}
	if c.cfg.AskedToRenew != nil {
		hello.Capabilities = append(hello.Capabilities, capabilityRenew)
	}
	if c.cfg.Services {
		hello.Capabilities = append(hello.Capabilities, capabilityServices)
	}
	c.as.hello(hello)
	return hello
}

// joined stores what the cloud's hello says about the session.
func (s *edgeSession) joined(hello *pb.Hello) {
	s.pub.Instance = hello.GetInstance()
	s.ordered = slices.Contains(hello.GetCapabilities(), capabilityAbort)
	s.pub.Services = slices.Contains(hello.GetCapabilities(), capabilityServices)
	s.pub.ID, s.pub.Since = text(hello.GetSession()), time.Now()
	s.pub.Software = text(hello.GetSoftware())
	// The cloud keeps to its own limit of conns. The edge allows more than twice that limit: conns
	// that have ended at the cloud may still be ending at the edge when the cloud opens their
	// successors.
	s.maxConns = 2*int64(hello.GetMaxConns()) + 128
	// The edge's own limit bounds the topics, too. The factor 3 leaves room for opens that wait
	// for that limit, because each of them has a topic.
	if most := 3 * int64(s.owner.cfg.Limits.Conns); hello.GetMaxConns() == 0 || s.maxConns > most {
		s.maxConns = most
	}
	s.log = s.owner.log.With("session", s.pub.ID)
	if s.pub.Instance != "" { // a cloud without other replicas has none
		s.log = s.log.With("replica", text(s.pub.Instance))
	}
}

// errNoCertificate is the error of an edge that has no token and no certificate. Such an edge does
// not connect.
var errNoCertificate = errors.New("this node has neither a token nor a certificate to join with")

// nodeClaim names the node. The certificate of the connection proves the name.
type nodeClaim tunnel.NodeName

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (n nodeClaim) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{nodeKey: string(n)}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (nodeClaim) RequireTransportSecurity() bool { return true }

// accessToken sends an OAuth2 access token with a call (RFC 6750 section 2.1). The package
// credentials/oauth of grpc does the same, but depends on Google's client libraries.
type accessToken auth.Secret

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (t accessToken) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + auth.Secret(t).Reveal()}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (accessToken) RequireTransportSecurity() bool { return true }

// ErrNoAnswer is the error of a join, or of a Probe, that took longer than joinTimeout.
var ErrNoAnswer = fmt.Errorf(
	"the cloud did not answer within %s: is that address the tunnel's gRPC port?", joinTimeout)

// explain adds to err what a person can do about it. h may be nil.
func (c *Client) explain(err error, h *handshake) error { return c.as.explain(h.cause(err), h) }

// endsTLS is the hint for a balancer that ends TLS itself, with the cloud's certificate or another one that the edge
// accepts.
const endsTLS = "a balancer or a proxy in between ends TLS: have it pass TCP through to the cloud (docs/network.md), " +
	"or try wss:// in servers"

// explain adds to the error of an edge what a person can do about it.
func explain(err error) error {
	var hint string
	switch {
	case err == nil, is[*dial.Error](err): // pkg/dial has said what to do
		return err
	case errors.Is(err, errNoCertificate):
		hint = "set token, tokenfile or nodecert in [mode.edge.stream.client]; `tunnel join` gets a certificate"
	case status.Code(err) == codes.Unauthenticated && reasonOf(err) == reasonExpired:
		hint = "replace this node's token; a tokenfile is read again every minute"
	case status.Code(err) == codes.Unauthenticated:
		hint = "check that this node's line in the cloud's token file matches the token here"
	case status.Code(err) == codes.Aborted:
		hint = "is another edge running with this node's name and token, or certificate?"
	case isUnknownAuthority(err):
		hint = "cert in [mode.edge.stream.client] must be the CA that signed the cloud's certificate" + issuer(err)
	case isOtherName(err):
		hint = "dns in [mode.edge.stream.client] must be a name in the cloud's certificate"
	case isOutOfDate(err):
		hint = dateHint(err)
	case isNotTLS(err):
		hint = "servername in [mode.edge.stream.client] must be the cloud's grpcport, which speaks TLS; " +
			"something else answers there"
	case isHungUp(err):
		hint = "the server there ended the connection before it showed a certificate: is that the cloud's port, " +
			"and does a balancer in front of it send the PROXY protocol? The cloud's log says more"
	case errors.Is(err, syscall.ECONNREFUSED):
		hint = "is the cloud running, and is servername in [mode.edge.stream.client] its address?"
	case isNoSuchHost(err):
		hint = "check servername in [mode.edge.stream.client]"
	case status.Code(err) == codes.Internal:
		hint = "the cloud's log says why; if it does not, " + endsTLS
	case errors.Is(err, errNoHTTP2):
		hint = endsTLS
	default:
		return err
	}
	return &Hinted{err, hint}
}

// Hinted is an error with a hint for a person: what to do next.
type Hinted struct {
	Err  error  // what failed
	Hint string // what to do
}

// Error returns both texts.
func (e *Hinted) Error() string { return e.Err.Error() + " (" + e.Hint + ")" }

// Unwrap returns Err.
func (e *Hinted) Unwrap() error { return e.Err }

// isHungUp reports whether the other side has ended the connection in the TLS handshake, without an alert.
func isHungUp(err error) bool {
	failed, ok := errors.AsType[*handshakeError](err)
	return ok && (errors.Is(failed.cause, io.EOF) || errors.Is(failed.cause, io.ErrUnexpectedEOF) ||
		errors.Is(failed.cause, syscall.ECONNRESET))
}

// issuer names the CA that signed the certificate that err is about. A box in between that ends TLS uses a CA of
// its own, so the name helps to find the box.
func issuer(err error) string {
	unknown, ok := errors.AsType[x509.UnknownAuthorityError](err)
	if !ok || unknown.Cert == nil {
		return ""
	}
	return fmt.Sprintf("; the certificate that came is signed by %q: if that is a firewall or a proxy here, "+
		"it ends TLS, and must leave this address out, or else try wss:// in servers",
		text(unknown.Cert.Issuer.String()))
}

// noteRoute tells the dialer whether a connection has led to the cloud. err is why the join failed; nil: it did not.
// After a refusal the server counts as working, since the cloud has answered. If the cloud refuses a second session,
// the dialer tries others first. After another failure behind the TLS handshake, the order of the servers stays: a
// replica that stops, or that cannot check who joins, is still the cloud.
func noteRoute(route *dial.Conn, h *handshake, err error) {
	switch {
	case route == nil:
	case isSecond(err), errors.Is(err, ErrTwice):
		route.Second()
	case err == nil, isRefusal(err):
		route.Worked()
	case !errors.Is(err, context.Canceled) && !h.done.Load():
		route.Failed()
	}
}

// explainCut adds a hint to the error of a session that a box in between may have cut off. route is how the session
// reached the cloud; nil: directly.
func (s *edgeSession) explainCut(err error, route *dial.Conn) error {
	if route == nil || s.announced.Load() || status.Code(err) != codes.Unavailable {
		return err
	}
	switch _, indirect := route.IsIndirect(); {
	case !indirect:
		return err
	case route.Server().IsWebSocket():
		return fmt.Errorf("%w (the WebSocket was closed in between: does the ingress, or a proxy, limit how long a "+
			"WebSocket may live or be silent? nginx has proxy_read_timeout, HAProxy timeout tunnel)", err)
	}
	return fmt.Errorf("%w (%s: does the proxy limit how long a connection may live?)", err, route.Route())
}
