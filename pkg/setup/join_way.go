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
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/stream"
)

const (
	// stepTimeout is the longest time for one step on the way to the cloud.
	stepTimeout = 10 * time.Second
	// enrollTimeout is longer, since Kubernetes may sign the certificate.
	enrollTimeout = 60 * time.Second
	// clockSlack is the difference of two clocks above which Join prints advice.
	clockSlack = time.Minute
)

// way checks the way to the cloud step by step, so that each failure names its step. It sends
// the token's secret only after every step has succeeded.
type way struct {
	token    auth.JoinToken
	software string // how this program names itself
	ok       func(step, format string, args ...any)
}

// enrolled is the cloud's answer to a join token, and the key that stays on this machine.
type enrolled struct {
	chain []byte // PEM, leaf first
	ca    []byte // PEM, the CA that signed the cloud's certificate
	key   *ecdsa.PrivateKey
}

// check resolves the cloud's name, connects, and makes a TLS handshake.
func (w *way) check(ctx context.Context) error {
	host, port, err := net.SplitHostPort(w.token.Address)
	if err != nil {
		return &stepError{
			step: "token", err: errors.New("the address in it is not host:port"),
			fix: "make another one with `tunnel token create`", kind: KindUsage,
		}
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

// explain makes advice of a failed handshake. This machine has sent nothing but a ClientHello.
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
			"or a proxy in between ends TLS, or the cloud has a new authority: then make another token."
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		failed.err = fmt.Errorf("the connection is open, but the other side does not speak TLS: %w", oneLine(err))
		failed.fix = "Is the port the cloud's grpcport? " +
			"A proxy or a firewall in between may accept connections in its place."
	default:
		failed.fix = "The port must be the cloud's grpcport, and nothing in between may end TLS."
	}
	return failed
}

// enroll sends the token, and receives a certificate.
func (w *way) enroll(ctx context.Context) (*enrolled, error) {
	ctx, cancel := context.WithTimeout(ctx, enrollTimeout)
	defer cancel()
	key, request, err := auth.NewRequest(w.token.Node)
	if err != nil {
		return nil, err
	}
	cfg, ca := auth.PinnedTLS(w.token)
	answer, err := stream.Enroll(ctx, stream.EnrollConfig{
		Address: w.token.Address, TLS: cfg, Node: w.token.Node, Token: w.token.Secret,
		Request: request, Software: w.software,
	})
	if err != nil {
		return nil, refusedToken(w.token, err)
	}
	w.ok("token", "the cloud has made a certificate for node %s, which the edge renews", w.token.Node)
	if off := time.Since(answer.Time); off.Abs() > clockSlack {
		w.ok("clock", "… but this machine's is %s the cloud's: set it (timedatectl set-ntp true)", ahead(off))
	}
	return &enrolled{chain: answer.Chain, ca: ca(), key: key}, nil
}

// refusedToken makes advice of the cloud's refusal, or of its silence.
func refusedToken(token auth.JoinToken, err error) error {
	failed := &stepError{step: "token", kind: KindRefused}
	s := statusOf(err)
	switch s.Code() {
	case codes.Unauthenticated:
		failed.err = fmt.Errorf("the cloud does not accept it for node %s: "+
			"it has expired, or was revoked, or is not in the token file (any more)", token.Node)
		failed.fix = "Make another one on the cloud: tunnel token create -c cloud.toml --node " + string(token.Node) +
			". The cloud's log says which it was."
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Unknown, codes.Internal:
		failed.kind = KindFailed
		failed.err = fmt.Errorf("the cloud could not answer now: %s", s.Message())
		failed.fix = "Try again in a minute; the token stays good until it expires. The cloud's log says more."
	case codes.ResourceExhausted:
		failed.kind = KindFailed
		failed.err = fmt.Errorf("the cloud is busy: %s", s.Message())
		failed.fix = "Try again in a minute."
	default:
		failed.err = fmt.Errorf("the cloud refused: %s", s.Message())
		failed.fix = "Read its log, and [mode.cloud.join] in its configuration."
	}
	return failed
}

// statusOf returns the gRPC status in err, without the texts that wrap it.
func statusOf(err error) *status.Status {
	if e, ok := errors.AsType[interface {
		error
		GRPCStatus() *status.Status
	}](err); ok {
		return e.GRPCStatus()
	}
	return status.New(codes.Unknown, err.Error())
}

// ahead spells the offset of this machine's clock from the cloud's.
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
