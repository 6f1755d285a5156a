package stream

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/listen"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// refusedJoin is a refused join, or another refused request that needs a proof.
type refusedJoin struct {
	what string // the text of the log line, such as certificateRefused; "": "join refused"
	node string // the claimed or proven node; "": not known
	told error  // the error that the edge gets, a gRPC status
	err  error  // the error for the log; nil: the same as told
	// again: the peer already has a session with this replica, or only asks whether it may join. A load
	// balancer chooses the replica, so that is normal. Such a refusal is neither counted nor logged as a warning.
	again bool
}

// refused counts and logs a refused join, credential or certificate. Strangers control how many refusals
// there are, so the log gets only some of them. Connections that the server closes before they send a byte
// are counted and logged by tooMany.
func (s *Server) refused(ctx context.Context, t *transport, r *refusedJoin) {
	what := cmp.Or(r.what, "join refused")
	if r.again {
		s.log.Debug(what, "remote", t.conn.RemoteAddr().String(), "node", text(r.node), "err", r.told)
		return
	}
	s.cfg.Counters.JoinsRefused.Add(1)
	s.auditRefused(t, r)
	skipped, ok := s.joinWarnings.Allow()
	if !ok {
		return
	}
	level, err := slog.LevelWarn, r.err
	switch {
	case err == nil:
		err = r.told
	case status.Code(r.told) == codes.Unavailable:
		level = slog.LevelError // the fault is the cloud's
	}
	s.log.Log(ctx, level, what, // the error may quote a certificate of the stranger
		"remote", t.conn.RemoteAddr().String(), "node", text(r.node), "err", text(err.Error()), "skipped", skipped)
}

// auditRefused records a refused join or certificate, up to auditedRefusals a minute. The node in the event is the
// claimed one.
func (s *Server) auditRefused(t *transport, r *refusedJoin) {
	if s.cfg.Audit == nil {
		return
	}
	kind, result, limit := tunnel.EventJoin, tunnel.Denied.String(), &s.auditedJoins
	if r.what == certificateRefused {
		kind, limit = tunnel.EventIssue, &s.auditedIssues
	}
	switch status.Code(r.told) {
	case codes.Unavailable:
		result, limit = tunnel.Internal.String(), &s.auditedFaults
		if s.stopping.Load() {
			result = tunnel.Draining.String()
		}
	case codes.ResourceExhausted:
		result = tunnel.Overloaded.String()
	case codes.InvalidArgument, codes.FailedPrecondition:
		result = tunnel.ResultInvalid
	}
	skipped, ok := limit.Allow()
	if !ok {
		return
	}
	s.cfg.Audit.Record(tunnel.Event{
		Kind: kind, Result: result, Remote: t.conn.RemoteAddr().String(), Caller: text(r.node),
		Err: text(cmp.Or(r.err, r.told).Error()), Skipped: skipped,
	})
}

// certificateRefused is what the log says about a node that gets no certificate.
const certificateRefused = "certificate refused"

// metadataFits counts and refuses metadata longer than Limits.Metadata. gRPC already resets streams
// with more than twice Limits.Metadata.
func (s *Server) metadataFits(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	size := 0
	for k, values := range md {
		for _, v := range values {
			size += len(k) + len(v) + 32 // RFC 9113 section 10.5.1
		}
	}
	if size <= s.cfg.Limits.Metadata {
		return nil
	}
	s.cfg.Counters.Limited(tunnel.LimitMetadata)
	return limitErrorf(tunnel.LimitMetadata, "the metadata has %d bytes; %d are allowed", size, s.cfg.Limits.Metadata)
}

// join turns a control stream into a session, or refuses it.
func (s *Server) join(stream pb.Stream_TunnelStreamingServer, t *transport) (*cloudSession, *refusedJoin) {
	ctx := stream.Context()
	if s.stopping.Load() {
		return nil, &refusedJoin{told: status.Error(codes.Unavailable, "this replica is stopping")}
	}
	if t.joining.Swap(true) {
		return nil, &refusedJoin{told: errOneProof}
	}
	role := s.roleOf(ctx)
	proven, refusal := role.prove(ctx, t)
	if refusal != nil {
		return nil, refusal
	}
	node := proven.grant.Node
	hello, err := s.helloOf(stream, t, node)
	if err != nil {
		return nil, &refusedJoin{node: string(node), told: err, again: reasonOf(err) == reasonProbed}
	}
	if err := role.again(hello); err != nil {
		return nil, &refusedJoin{node: string(node), told: err, again: true}
	}
	if node != "" && !s.quotas.mayJoin(node) {
		s.cfg.Counters.Limited(tunnel.LimitJoins)
		return nil, &refusedJoin{node: string(node), told: limitErrorf(tunnel.LimitJoins,
			"this node has joined more than %d times in a few seconds", burstJoins)}
	}
	cs := s.newSession(stream, t, node, hello)
	cs.role = role
	role.equip(cs)
	cs.standOn(proven)
	t.session.Store(cs)
	t.conn.joined()

	// The cloud's hello is the first message in the outbox. The directory and the live sessions get cs only
	// afterwards, so neither an open nor a drain can overtake the hello.
	cs.post(message(typeHello, "", s.ownHello(cs)))
	s.mu.Lock()
	s.live[cs] = struct{}{}
	s.mu.Unlock()
	role.attach(cs, hello)
	return cs, nil
}

// helloOf receives the hello of a peer, and checks it. node is the proven node, "" for a replica.
func (s *Server) helloOf(stream controlStream, t *transport, node tunnel.NodeName) (*pb.Hello, error) {
	hello, err := receiveHello(stream)
	switch {
	case err != nil:
		return nil, status.Errorf(codes.InvalidArgument, "joining: %v", err)
	case hello.GetVersion() == probeVersion && node != "":
		return nil, s.answerProbe(t, node)
	case hello.GetVersion() != Version:
		return nil, status.Errorf(codes.FailedPrecondition,
			"this edge speaks version %d of the protocol and the cloud version %d: "+
				"install the release of the cloud (%s) on node %s",
			hello.GetVersion(), Version, s.cfg.Software, node)
	case len(hello.GetInstance()) > maxInstance: // the cloud passes the instance id on to the other replicas
		return nil, status.Errorf(codes.InvalidArgument, "joining: an instance has %d bytes at most", maxInstance)
	case len(hello.GetReach()) > MaxReach: // the cloud passes the list on to the other replicas
		return nil, status.Errorf(codes.InvalidArgument,
			"joining: the identifiers of an edge have %d bytes at most", MaxReach)
	}
	return hello, nil
}

// newSession makes a session of any role.
func (s *Server) newSession(
	stream pb.Stream_TunnelStreamingServer, t *transport, node tunnel.NodeName, hello *pb.Hello,
) *cloudSession {
	ctx := stream.Context()
	cs := &cloudSession{
		transport: t, proven: make(chan struct{}, 1), spareWait: spareWait, handOverTime: s.cfg.handOverTime,
	}
	cs.pub = &tunnel.Session{
		ID: uuid.NewString(), Node: node, Remote: t.conn.RemoteAddr().String(), Since: time.Now(), Reach: hello.GetReach(),
		Link: cs, Dialer: cs, Instance: text(hello.GetInstance()), All: hello.GetAll(),
		Software: text(hello.GetSoftware()), Renews: slices.Contains(hello.GetCapabilities(), capabilityRenew),
		Services: slices.Contains(hello.GetCapabilities(), capabilityServices),
	}
	cs.blocks, cs.unknown, cs.stream, cs.tracer = s.blocks, misdirected, stream, s.cfg.Tracer
	cs.ordered = slices.Contains(hello.GetCapabilities(), capabilityAbort)
	cs.own = t.conn.Conn.(*carrier) //nolint:forcetypeassert // joinListener wraps every connection in a carrier
	cs.pub.Paths = cs.own.Paths
	cs.tickets, cs.connections = &s.tickets, int(min(MaxConnections-1, hello.GetConnections()))
	cs.authenticate = func(c auth.Credential) (*proof, *refusedJoin) { return s.authenticate(ctx, c) }
	cs.ignored = func(r *refusedJoin) {
		r.what = "new credential ignored"
		s.refused(ctx, t, r)
	}
	cs.signatures.Every, cs.signatures.Burst = renewInterval, renewBurst
	cs.credentials.Every, cs.credentials.Burst = renewInterval, renewBurst
	cs.init()
	return cs
}

// ownHello returns the cloud's hello, the answer to the hello of the peer.
func (s *Server) ownHello(cs *cloudSession) *pb.Hello {
	hello := &pb.Hello{
		Version: Version, Software: s.cfg.Software, Session: cs.pub.ID, Capabilities: capabilities(),
		MaxConns: uint32(cs.maxConns), //nolint:gosec // a few thousand
	}
	if s.cfg.Reach != nil {
		hello.Capabilities = append(hello.Capabilities, capabilityServices)
	}
	if s.cfg.Replicas != nil {
		hello.Instance = s.cfg.Replicas.ID()
	}
	return hello
}

// errOneProof refuses a second request with a proof on one connection. A request with a proof is a
// control stream, or a call for the first certificate of a node.
var errOneProof = status.Error(codes.AlreadyExists, "this connection has a session already, or is about to")

// uniform returns the error that a stranger gets. It does not say what was wrong with the proof, so that no stranger
// can learn from it how to guess credentials.
func uniform() error { return status.Error(codes.Unauthenticated, auth.ErrUnauthenticated.Error()) }

// authenticateNode checks the proof of a joining node: the access token of the call, or else the
// certificate of the connection.
func (s *Server) authenticateNode(ctx context.Context, t *transport) (*proof, *refusedJoin) {
	claims := metadata.ValueFromIncomingContext(ctx, nodeKey)
	var c auth.Credential
	var err error
	switch {
	case len(metadata.ValueFromIncomingContext(ctx, "authorization")) > 0:
		if c, err = auth.DecodeToken(bearer(ctx)); err != nil {
			return nil, &refusedJoin{told: uniform(), err: fmt.Errorf("no usable token: %w", err)}
		}
	case len(claims) == 0:
		return nil, &refusedJoin{told: uniform(), err: errors.New("it shows no token, and does not say which node it is")}
	case len(t.State.PeerCertificates) == 0:
		err = errors.New("it shows neither a token nor a certificate")
		if !s.requestsCertificates() {
			err = errors.New("it shows no token, and certificates are not asked for: there is no ca in [mode.cloud.join]")
		}
		return nil, &refusedJoin{node: claims[0], told: uniform(), err: err}
	default:
		c = auth.Credential{Node: claims[0], Chain: t.State.PeerCertificates}
	}
	if len(claims) > 1 || len(claims) == 1 && claims[0] != c.Node {
		return nil, &refusedJoin{node: c.Node, told: uniform(), err: errors.New("it claims to be two nodes")}
	}
	c.From = listen.AddrOf(t.conn.RemoteAddr())
	return s.authenticate(ctx, c)
}

// authenticate has Auth check a credential. The grant lives as long as ctx.
func (s *Server) authenticate(ctx context.Context, c auth.Credential) (*proof, *refusedJoin) {
	// The grant lives as long as its context. So JoinTimeout is not a deadline of that context.
	ctx, release := context.WithCancel(ctx)
	late := time.AfterFunc(s.cfg.Limits.JoinTimeout, release)
	grant, err := s.cfg.Auth.Authenticate(ctx, c)
	if !late.Stop() && err == nil {
		err = context.DeadlineExceeded
	}
	if err == nil && string(grant.Node) != c.Node {
		err = fmt.Errorf("%w: the proof is that of node %s", auth.ErrUnauthenticated, grant.Node)
	}
	switch {
	case errors.Is(err, auth.ErrUnauthenticated):
		release()
		return nil, &refusedJoin{node: c.Node, told: uniform(), err: err}
	case err != nil:
		release()
		return nil, &refusedJoin{
			node: c.Node,
			told: status.Error(codes.Unavailable, "the cloud cannot check who joins now"),
			err:  fmt.Errorf("cannot check who joins now: %w", err),
		}
	}
	p := &proof{grant: grant, release: release, certificate: c.Token == ""}
	if p.certificate {
		p.chain = c.Chain
	} else {
		p.token = sha256.Sum256([]byte(c.Token))
	}
	return p, nil
}

// bearer returns the OAuth2 access token of a call (RFC 6750 section 2.1), or "".
func bearer(ctx context.Context) string {
	const scheme = "Bearer "
	values := metadata.ValueFromIncomingContext(ctx, "authorization")
	if len(values) != 1 || len(values[0]) < len(scheme) || values[0][:len(scheme)] != scheme {
		return ""
	}
	return values[0][len(scheme):]
}

// receiveHello reads the first message of a session.
func receiveHello(stream controlStream) (*pb.Hello, error) {
	m, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	if m.GetCategory() != category || m.GetType() != typeHello {
		return nil, fmt.Errorf("the first message is %s/%s, not %s/%s",
			text(m.GetCategory()), text(m.GetType()), category, typeHello)
	}
	var hello pb.Hello
	if err := proto.Unmarshal(m.GetData(), &hello); err != nil {
		return nil, fmt.Errorf("hello: %w", err)
	}
	return &hello, nil
}
