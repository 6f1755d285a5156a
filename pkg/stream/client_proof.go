package stream

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/dial"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// followToken reads the token once per tokenInterval until ctx is done. If the token is not the
// token that opened a session, followToken sends the new token on that session.
func (c *Client) followToken(ctx context.Context) {
	if c.cfg.Token == nil {
		return
	}
	ticker := time.NewTicker(tokenInterval)
	defer ticker.Stop()
	warnings := tunnel.Limiter{Every: time.Hour}
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		links := c.live()
		if len(links) == 0 {
			continue // the next join reads the token
		}
		token, err := auth.TokenOf(c.cfg.Token)
		if err != nil {
			if _, ok := warnings.Allow(); ok {
				c.log.Warn("cannot read the token; the session continues with the token that opened it", "err", err)
			}
			continue
		}
		sum := sha256.Sum256([]byte(token))
		for _, l := range links {
			// The edge sends its new token again every minute. The cloud sends no answer to the
			// token, and may learn of the token later than the edge.
			if sum != l.token || l.tokenSent {
				l.tokenSent = true
				l.post(message(typeCredential, "", &pb.Credential{AccessToken: auth.EncodeToken(string(c.cfg.Node), token)}))
			}
		}
	}
}

// live returns a copy of the list of live sessions.
func (c *Client) live() []*link {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.links)
}

// Renew asks the cloud to sign a request (PKCS #10, DER) for another certificate of this node. It
// asks on every live session, because each session has its own proof of the node. It returns the
// certificate chain (PEM, leaf first) of the newest session on which the cloud signed, and the time by the cloud's
// clock.
func (c *Client) Renew(ctx context.Context, request []byte) (chain []byte, now time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, signTimeout)
	defer cancel()
	links := c.live()
	if len(links) == 0 {
		return nil, now, fmt.Errorf("renewing the certificate: no session with %s", c.cfg.Address)
	}
	var trusts []string
	if c.cfg.Trusts != nil {
		trusts = c.cfg.Trusts()
	}
	answers, clouds, errs := make([]*pb.SignResponse, len(links)), make([]peer.Peer, len(links)), make([]error, len(links))
	var signing sync.WaitGroup
	for i, l := range links {
		signing.Go(func() {
			errs[i] = l.guard(func() error {
				var err error
				answers[i], err = l.certificates.Sign(ctx, &pb.SignRequest{Request: request, Trusts: trusts}, grpc.Peer(&clouds[i]))
				return err
			})
		})
	}
	signing.Wait()
	for i, l := range slices.Backward(links) {
		if errs[i] == nil {
			if c.cfg.Told != nil {
				c.cfg.Told(toldBy(answers[i]), shownBy(&clouds[i]))
			}
			return answers[i].GetChain(), time.UnixMilli(answers[i].GetTimeMs()), nil
		}
		errs[i] = fmt.Errorf("renewing the certificate with %s: %w", l.pub.Remote, errs[i])
	}
	return nil, now, errors.Join(errs...)
}

// toldBy returns what the cloud tells the edge in its answer to a request for a certificate.
func toldBy(answer *pb.SignResponse) auth.TellEdges {
	return auth.TellEdges{CloudCAs: answer.GetCloudCas(), Servers: answer.GetServers(), NodeCAs: answer.GetNodeCas()}
}

// shownBy returns the certificates that the cloud has shown in the TLS handshake.
func shownBy(cloud *peer.Peer) []*x509.Certificate {
	if info, ok := cloud.AuthInfo.(credentials.TLSInfo); ok {
		return info.State.PeerCertificates
	}
	return nil
}

// EnrollConfig configures [Enroll].
type EnrollConfig struct {
	Address  string // address of the cloud, host:port
	TLS      *tls.Config
	Node     tunnel.NodeName
	Token    auth.Secret // a join token
	Request  []byte      // PKCS #10, DER
	Software string      // name and version of this program, sent to the cloud

	// Dial connects to Address; nil: a net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Connect connects to the cloud in place of Dial, see ClientConfig.
	Connect func(ctx context.Context) (*dial.Conn, error)
}

// Enrolled is a node's first certificate.
type Enrolled struct {
	Chain []byte // PEM, leaf first
	Node  tunnel.NodeName
	Time  time.Time // when the cloud answered, by the cloud's clock
	Told  auth.TellEdges
	Cloud []*x509.Certificate // the certificates that the cloud has shown in the TLS handshake
}

// Enroll gets the first certificate of a node with a join token. It sends the token only after
// the TLS handshake has authenticated the cloud.
func Enroll(ctx context.Context, cfg EnrollConfig) (Enrolled, error) {
	ctx, cancel := context.WithTimeout(ctx, signTimeout)
	defer cancel()
	h := &handshake{}
	fail := func(err error) (Enrolled, error) {
		return Enrolled{}, explainEnroll(h.cause(fmt.Errorf("getting a certificate for node %s: %w", cfg.Node, err)))
	}
	raw, err := connectTo(ctx, cfg.Connect, cfg.Dial, cfg.Address)
	if err != nil {
		return fail(err)
	}
	cc, _, hangUp, err := connect(raw, cfg.Address, cfg.TLS, h, cfg.Software, farTrip, nil)
	if err != nil {
		return fail(err)
	}
	defer hangUp()
	proof := accessToken(auth.EncodeToken(string(cfg.Node), cfg.Token))
	request := &pb.SignRequest{Request: cfg.Request}
	var cloud peer.Peer
	answer, err := pb.NewCertificatesClient(cc).Sign(ctx, request, grpc.PerRPCCredentials(proof), grpc.Peer(&cloud))
	if err != nil {
		return fail(err)
	}
	if answer.GetNode() != string(cfg.Node) {
		return fail(fmt.Errorf("the cloud has made one for node %q", text(answer.GetNode())))
	}
	return Enrolled{
		Chain: answer.GetChain(), Node: cfg.Node, Time: time.UnixMilli(answer.GetTimeMs()),
		Told: toldBy(answer), Cloud: shownBy(&cloud),
	}, nil
}

// explainEnroll adds to an error of Enroll what a person can do about it.
func explainEnroll(err error) error {
	var hint string
	switch {
	case is[*dial.Error](err): // pkg/dial has said what to do
		return err
	case status.Code(err) == codes.Unauthenticated:
		hint = "the join token is wrong, has expired or was revoked: have `tunnel token create` make another one on the cloud"
	case status.Code(err) == codes.Unimplemented && reasonOf(err) != reasonNoIssuer:
		hint = "the cloud is of an older release, or another program answers at that address"
	case isOutOfDate(err):
		hint = dateHint(err)
	case isNotTLS(err):
		hint = "the address must be the cloud's grpcport, which speaks TLS; another program answers there"
	case errors.Is(err, syscall.ECONNREFUSED):
		hint = "is the cloud running, and is that its address?"
	default:
		return err
	}
	return fmt.Errorf("%w (%s)", err, hint)
}
