package stream

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// reason says in a word of the protocol why the other side refused or ended something. It stands
// beside the gRPC code and a text for people, as the reason of a google.rpc.ErrorInfo. Programs decide
// by codes and reasons, never by texts.
type reason string

const (
	reasonRevoked  reason = "REVOKED"   // the credential of the node was revoked
	reasonExpired  reason = "EXPIRED"   // the credential of the node has expired
	reasonSelf     reason = "SELF"      // a replica has joined itself
	reasonNoIssuer reason = "NO_ISSUER" // the cloud issues no certificates
)

// reasonDomain is the domain of our reasons: it keeps them apart from the reasons of other software.
const reasonDomain = "tunnel"

// withReason returns a gRPC error with a reason.
func withReason(code codes.Code, r reason, text string) error {
	s, err := status.New(code, text).WithDetails(&errdetails.ErrorInfo{Reason: string(r), Domain: reasonDomain})
	if err != nil {
		return status.Error(code, text) // never: WithDetails fails only for a detail that protobuf cannot encode
	}
	return s.Err()
}

// reasonOf returns the reason of a gRPC error; "": none, as from an older release.
func reasonOf(err error) reason {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetDomain() == reasonDomain {
			return reason(info.GetReason())
		}
	}
	return ""
}

// isUnknownAuthority reports whether the other side's certificate is signed by a CA that is not ours.
func isUnknownAuthority(err error) bool { return is[x509.UnknownAuthorityError](err) }

// isOtherName reports whether the other side's certificate is for another name or address.
func isOtherName(err error) bool { return is[x509.HostnameError](err) }

// isOutOfDate reports whether the other side's certificate has expired, or is not valid yet.
func isOutOfDate(err error) bool {
	invalid, ok := errors.AsType[x509.CertificateInvalidError](err)
	return ok && invalid.Reason == x509.Expired
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
