package stream

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/auth"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Issuer issues certificates to nodes. auth.Issuer implements it.
type Issuer interface {
	// First issues the node's first certificate for a join token. For a bad token it returns
	// auth.ErrUnauthenticated without asking the signer: at once, or within two seconds if the token file has
	// just changed. While the node's first certificate is being issued, it returns auth.ErrSigning at once.
	// auth.ErrNoUse says why a good token for several nodes does not permit this node.
	First(ctx context.Context, c auth.Credential, request []byte) (node tunnel.NodeName, chain []byte, err error)
	// Again issues another certificate for the node that holds the certificate in c. A certificate
	// that is no longer good is refused in the same way as a bad token.
	Again(ctx context.Context, c auth.Credential, request []byte) (chain []byte, err error)
}

var _ Issuer = (*auth.Issuer)(nil)

// maxRequest is the longest request for a certificate, in bytes.
const maxRequest = 16 << 10

// certificatesService is the service Certificates. Its one call is served as a stream of one
// message each way, which is the same on the wire. So the server checks the caller before it reads
// the message, and intercept guards the call like every stream.
func certificatesService() *grpc.ServiceDesc {
	return &grpc.ServiceDesc{
		ServiceName: pb.Certificates_ServiceDesc.ServiceName,
		HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{
			StreamName:    "Sign",
			Handler:       func(s any, stream grpc.ServerStream) error { return s.(*Server).sign(stream) },
			ServerStreams: true, // otherwise grpc-go would not intercept the call
		}},
		Metadata: pb.Certificates_ServiceDesc.Metadata,
	}
}

// sign has a certificate issued for the caller. On a session's own connection, this is another certificate of
// the node; on any other connection, it is the node's first certificate.
func (s *Server) sign(stream grpc.ServerStream) error {
	ctx, cancel := context.WithTimeout(stream.Context(), signTimeout)
	defer cancel()
	t, err := transportOf(ctx)
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	var answer *pb.SignResponse
	var refusal *refusedJoin
	if cs := t.session.Load(); cs != nil {
		answer, refusal = s.signAgain(ctx, cs, stream)
	} else {
		answer, refusal = s.signFirst(ctx, t, stream)
		defer t.refuse() // after any answer, the connection has no other use
	}
	if refusal != nil {
		refusal.what = certificateRefused
		s.refused(ctx, t, refusal)
		return refusal.told
	}
	return stream.SendMsg(answer)
}

// signFirst has a node's first certificate issued for a join token.
func (s *Server) signFirst(
	ctx context.Context, t *transport, stream grpc.ServerStream,
) (*pb.SignResponse, *refusedJoin) {
	switch {
	case s.stopping.Load():
		return nil, &refusedJoin{told: status.Error(codes.Unavailable, "this replica is stopping")}
	case len(metadata.ValueFromIncomingContext(ctx, "authorization")) == 0:
		return nil, &refusedJoin{told: uniform(), err: errors.New("it shows no token, and has not joined")}
	}
	c, err := auth.DecodeToken(bearer(ctx))
	if err != nil {
		return nil, &refusedJoin{told: uniform(), err: fmt.Errorf("no usable token: %w", err)}
	}
	if s.cfg.Issuer == nil {
		return nil, &refusedJoin{node: c.Node, told: errNoIssuer}
	}
	if t.joining.Swap(true) { // one call per connection, because each call may wait for a message that never ends
		return nil, &refusedJoin{node: c.Node, told: errOneProof}
	}
	request, _, refusal := s.receiveRequest(stream)
	if refusal != nil {
		refusal.node = c.Node
		return nil, refusal
	}
	t.conn.extend(signTimeout) // Kubernetes may sign slowly, and the connection ends after this call
	node, chain, err := s.cfg.Issuer.First(ctx, c, request)
	if err == nil && string(node) != c.Node {
		err = fmt.Errorf("%w: the proof is that of node %s", auth.ErrUnauthenticated, node)
	}
	if err != nil {
		return nil, notSigned(c.Node, request, err)
	}
	return s.signed(t, node, chain, tunnel.EventIssue)
}

// signAgain has another certificate issued for the node of a session. That certificate becomes the
// session's proof. The current proof must be a certificate, too: a token that is good for a session
// is not good for a certificate that outlives the session.
func (s *Server) signAgain(
	ctx context.Context, cs *cloudSession, stream grpc.ServerStream,
) (*pb.SignResponse, *refusedJoin) {
	node := string(cs.pub.Node)
	p := cs.proof.Load()
	if err := cs.reason(); err != nil {
		return nil, &refusedJoin{node: node, told: errSessionOver, err: err}
	}
	if !p.certificate {
		return nil, &refusedJoin{node: node, told: status.Error(codes.PermissionDenied,
			"the node has joined without a certificate; it gets its first one by a join token (tunnel join)")}
	}
	if s.cfg.Issuer == nil {
		return nil, &refusedJoin{node: node, told: errNoIssuer}
	}
	if cs.signing.Swap(true) {
		return nil, &refusedJoin{node: node, told: errOneAtATime}
	}
	defer cs.signing.Store(false)
	if _, ok := cs.signatures.Allow(); !ok {
		return nil, &refusedJoin{node: node, told: status.Errorf(codes.ResourceExhausted,
			"%d certificates in %s are the limit; try again later", renewBurst, renewInterval)}
	}
	request, trusts, refusal := s.receiveRequest(stream)
	if refusal != nil {
		refusal.node = node
		return nil, refusal
	}
	chain, err := s.cfg.Issuer.Again(ctx, auth.Credential{Node: node, Chain: p.chain}, request)
	if over := cs.reason(); over != nil {
		return nil, &refusedJoin{node: node, told: errSessionOver, err: over}
	}
	if err != nil {
		return nil, notSigned(node, request, err)
	}
	// The edge must not keep a certificate that it cannot join with, or one that was revoked
	// meanwhile.
	certificates, err := parseChain(chain)
	if err != nil {
		return nil, notSigned(node, request, err)
	}
	next, refusal := cs.prove(auth.Credential{Node: node, Chain: certificates})
	if refusal != nil {
		return nil, refusal
	}
	if err := cs.reason(); err != nil {
		return nil, &refusedJoin{node: node, told: errSessionOver, err: err}
	}
	cs.standOn(next)
	if s.cfg.Trusts != nil {
		s.cfg.Trusts(cs.pub.Node, trusts)
	}
	return s.signed(cs.transport, cs.pub.Node, chain, tunnel.EventRenew)
}

// signed logs the new certificate, and returns the answer that holds it.
func (s *Server) signed(
	t *transport, node tunnel.NodeName, chain []byte, kind tunnel.EventKind,
) (*pb.SignResponse, *refusedJoin) {
	remote := t.conn.RemoteAddr().String()
	s.log.Info("certificate issued", "node", node, "remote", remote)
	s.cfg.Audit.Record(tunnel.Event{Kind: kind, Result: tunnel.ResultOK, Node: node, Remote: remote})
	answer := &pb.SignResponse{Chain: chain, Node: string(node), TimeMs: time.Now().UnixMilli()}
	if s.cfg.Tell != nil {
		tell := s.cfg.Tell()
		answer.CloudCas, answer.Servers, answer.NodeCas = tell.CloudCAs, tell.Servers, tell.NodeCAs
	}
	return answer, nil
}

// Errors that refuse a certificate.
var (
	errNoIssuer = withReason(codes.Unimplemented, reasonNoIssuer,
		"this cloud issues no certificates: set ca and cakey in [mode.cloud.join] there")
	errSessionOver = status.Error(codes.Unavailable, "the session has ended")
	errOneAtATime  = status.Error(codes.ResourceExhausted, "one certificate at a time")
)

// receiveRequest reads the request for a certificate. trusts are the CAs by which the edge says it verifies the cloud.
func (s *Server) receiveRequest(stream grpc.ServerStream) (request []byte, trusts []string, refusal *refusedJoin) {
	var in pb.SignRequest
	switch err := stream.RecvMsg(&in); {
	case status.Code(err) == codes.ResourceExhausted: // gRPC's own error: the message is longer than any message may be
		s.cfg.Counters.Limited(tunnel.LimitMessage)
		return nil, nil, &refusedJoin{told: err}
	case err != nil:
		return nil, nil, &refusedJoin{told: status.Errorf(codes.InvalidArgument, "the request for a certificate: %v", err)}
	}
	if n := len(in.GetRequest()); n > maxRequest {
		return nil, nil, &refusedJoin{told: status.Errorf(codes.InvalidArgument,
			"the request for a certificate is %d bytes long; %d are allowed", n, maxRequest)}
	}
	for _, id := range in.GetTrusts()[:min(len(in.GetTrusts()), maxTrusts)] {
		if len(id) <= maxTrust {
			trusts = append(trusts, text(id))
		}
	}
	return in.GetRequest(), trusts, nil
}

// notSigned returns the refusal for err, the reason why there is no certificate.
func notSigned(node string, request []byte, err error) *refusedJoin {
	if errors.Is(err, auth.ErrNoNode) { // the edge has proven that it has the token
		return &refusedJoin{node: node, err: err, told: status.Errorf(codes.FailedPrecondition,
			"Kubernetes has no node %s yet: join again when `kubectl get nodes` shows it; the token stays good", text(node))}
	}
	if errors.Is(err, auth.ErrUnauthenticated) {
		return &refusedJoin{node: node, told: uniform(), err: err}
	}
	if errors.Is(err, auth.ErrSigning) {
		return &refusedJoin{node: node, told: errOneAtATime}
	}
	if errors.Is(err, auth.ErrNoUse) { // the edge has proven that it has the token
		return &refusedJoin{node: node, told: status.Error(codes.AlreadyExists, text(err.Error()))}
	}
	if _, bad := auth.ParseRequest(tunnel.NodeName(node), request); bad != nil {
		return &refusedJoin{node: node, told: status.Errorf(codes.InvalidArgument, "the request for a certificate: %v", bad)}
	}
	return &refusedJoin{node: node, told: status.Error(codes.Unavailable, "the cloud cannot sign certificates now"),
		err: fmt.Errorf("cannot sign certificates now: %w", err)}
}

// parseChain reads certificates in PEM form, leaf first.
func parseChain(text []byte) ([]*x509.Certificate, error) {
	chain, err := auth.ParseCertificates(text)
	if err != nil {
		return nil, fmt.Errorf("the new certificate: %w", err)
	}
	if len(chain) == 0 {
		return nil, errors.New("the new certificate: the signer's answer holds none")
	}
	return chain, nil
}
