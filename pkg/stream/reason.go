package stream

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// reason is a word of the protocol that says why the other side has refused a request or ended a session.
// A gRPC status carries it in a google.rpc.ErrorInfo, beside the code and a text for people. Programs
// decide by codes and reasons, never by texts.
type reason string

const (
	reasonRevoked  reason = "REVOKED"   // the credential of the node was revoked
	reasonExpired  reason = "EXPIRED"   // the credential of the node has expired
	reasonSelf     reason = "SELF"      // a replica has joined itself
	reasonNoIssuer reason = "NO_ISSUER" // the cloud issues no certificates
	reasonProbed   reason = "ASKED"     // the answer to an edge that asked whether its node may join: the node may
	reasonRefused  reason = "REFUSED"   // a Reach was refused; the fact codeFact is the code
)

// reasonDomain is the domain of our reasons: it keeps them apart from the reasons of other software.
const reasonDomain = "tunnel"

// codeFact is the key of the fact that holds the name of a refusal's code.
const codeFact = "code"

// withReason returns a gRPC error with a reason.
func withReason(code codes.Code, r reason, text string) error { return withFacts(code, r, text, nil) }

// withFacts is like withReason, and adds facts for programs.
func withFacts(code codes.Code, r reason, text string, facts map[string]string) error {
	s, err := status.New(code, text).WithDetails(
		&errdetails.ErrorInfo{Reason: string(r), Domain: reasonDomain, Metadata: facts})
	if err != nil {
		return status.Error(code, text) // never: WithDetails fails only for a detail that protobuf cannot encode
	}
	return s.Err()
}

// reasonOf returns the reason of a gRPC error; "": none, as from an older release.
func reasonOf(err error) reason { return reason(infoOf(err).GetReason()) }

// infoOf returns the reason of a gRPC error and its facts; nil: none.
func infoOf(err error) *errdetails.ErrorInfo {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetDomain() == reasonDomain {
			return info
		}
	}
	return nil
}

// isUnknownAuthority reports whether the other side's certificate is signed by a CA that is not ours.
func isUnknownAuthority(err error) bool { return is[x509.UnknownAuthorityError](err) }

// isOtherName reports whether the other side's certificate is for another name or address.
func isOtherName(err error) bool { return is[x509.HostnameError](err) }

// OutOfDate returns the certificate of the other side's chain whose dates have caused err. It returns nil if err
// has another cause. problem continues a sentence that begins with the certificate's name, such as
// "expired on 2026-11-22T10:00:00Z".
func OutOfDate(err error) (cert *x509.Certificate, problem string) {
	invalid, ok := errors.AsType[x509.CertificateInvalidError](err)
	if !ok || invalid.Reason != x509.Expired {
		return nil, ""
	}
	cert = invalid.Cert
	if time.Now().Before(cert.NotBefore) {
		return cert, "is not valid before " + cert.NotBefore.UTC().Format(time.RFC3339)
	}
	return cert, "expired on " + cert.NotAfter.UTC().Format(time.RFC3339)
}

// isOutOfDate reports whether a certificate of the other side has expired, or is not valid yet.
func isOutOfDate(err error) bool {
	cert, _ := OutOfDate(err)
	return cert != nil
}

// dateHint says which certificate of the cloud is out of date, and what a person can do about it.
func dateHint(err error) string {
	cert, problem := OutOfDate(err)
	if cert.IsCA {
		return "the certificate of the cloud's CA " + problem +
			": replace the CA on the cloud and on the edges, or correct this machine's clock"
	}
	return "the cloud's certificate " + problem +
		": replace it on the cloud (cert and key in [mode.cloud.stream.server]), or correct this machine's clock"
}

// isNotTLS reports whether the other side does not speak TLS.
func isNotTLS(err error) bool { return is[tls.RecordHeaderError](err) }

// isNoSuchHost reports whether DNS knows no such name.
func isNoSuchHost(err error) bool {
	dns, ok := errors.AsType[*net.DNSError](err)
	return ok && dns.IsNotFound
}

// is reports whether err, or an error that err wraps, has the type E.
func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}
