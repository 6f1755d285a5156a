package dial

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"

	"tunnel.example/tunnel/pkg/wsconn"
)

// Error is why the cloud cannot be reached, with the next step of the operator.
type Error struct {
	Err  error  // what failed
	Hint string // what to do
	// Step is the part of the way that failed: dns, tcp, proxy or websocket.
	Step string
}

// Error returns both texts.
func (e *Error) Error() string { return e.Err.Error() + " (" + e.Hint + ")" }

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// Steps of the way to a cloud.
const (
	StepDNS       = "dns"
	StepTCP       = "tcp"
	StepProxy     = "proxy"
	StepWebSocket = "websocket"
)

// Keys name the settings of a Dialer, for hints.
type Keys struct{ Servers, Proxy, ProxyFile, ProxyCA string }

// keysOfEdge are the keys of the configuration.
func keysOfEdge() Keys {
	const table = " in [mode.edge.stream.client]"
	return Keys{"servername" + table, "proxy" + table, "proxyfile" + table, "proxyca" + table}
}

// explainLookup adds a hint to the error of a name lookup. through is the proxy whose host was looked up; nil: the
// host is a server's.
func (d *Dialer) explainLookup(err error, host string, through *Proxy) error {
	keys := d.cfg.Keys
	if errors.Is(err, context.Canceled) {
		return err
	}
	if through != nil {
		return &Error{fmt.Errorf("%s: %w", through, err),
			"this machine cannot resolve the name of the proxy: check the name in " + through.source, StepProxy}
	}
	dns, ok := errors.AsType[*net.DNSError](err)
	if ok && dns.IsNotFound {
		return &Error{err, "check " + keys.Servers + "; where only a proxy resolves names, " +
			"give the proxy's URL: " + keys.Proxy, StepDNS}
	}
	return &Error{err, "this machine's resolver gives no answer for " + host + ": check /etc/resolv.conf; " +
		"where only a proxy resolves names, give the proxy's URL: " + keys.Proxy, StepDNS}
}

// explainDial adds a hint to the error of a TCP connection to addr. through is the proxy at addr; nil: addr is a
// server's.
func (d *Dialer) explainDial(err error, addr string, through *Proxy) error {
	keys := d.cfg.Keys
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case through != nil && errors.Is(err, syscall.ECONNREFUSED):
		return &Error{fmt.Errorf("%s: %w", through, err),
			"is the proxy running, and are host and port in " + through.source + " its own?", StepProxy}
	case through != nil && isTimeout(err):
		return &Error{fmt.Errorf("%s: %w", through, err),
			"the proxy does not answer: check host and port in " + through.source, StepProxy}
	case through != nil:
		return &Error{fmt.Errorf("%s: %w", through, err), "check " + through.source, StepProxy}
	case errors.Is(err, syscall.ECONNREFUSED):
		return &Error{err, "is the cloud running, and is " + keys.Servers + " its address?", StepTCP}
	case isTimeout(err):
		_, port, _ := net.SplitHostPort(addr)
		return &Error{err, "nothing answers there: does a firewall let TCP port " + port + " out? " +
			"Where only a proxy leads out, give its URL: " + keys.Proxy, StepTCP}
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH):
		return &Error{err, "this machine has no route there: check its network and its default route", StepTCP}
	}
	return err
}

// isTimeout reports whether an operation took too long.
func isTimeout(err error) bool {
	return errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, syscall.ETIMEDOUT) || isTimeoutError(err)
}

// isTimeoutError reports whether err says of itself that it is a timeout, as net.OpError does.
func isTimeoutError(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}

// explain returns an *Error of the step proxy.
func (p *Proxy) explain(err error, hint string) error {
	return &Error{fmt.Errorf("%s: %w", p, err), hint, StepProxy}
}

// explainTLS adds a hint to the error of a TLS handshake with an https:// proxy.
func (p *Proxy) explainTLS(err error, keys Keys) error {
	switch {
	case is[tls.RecordHeaderError](err):
		return p.explain(shortened(err), "the proxy does not speak TLS: write http:// in place of https:// in "+p.source)
	case is[x509.UnknownAuthorityError](err):
		return p.explain(shortened(err), "give the CA that signed the proxy's certificate: "+keys.ProxyCA)
	case is[x509.HostnameError](err):
		return p.explain(shortened(err), "write the name in the proxy's certificate as the host in "+p.source)
	case errors.Is(err, context.Canceled):
		return err
	}
	return p.explain(shortened(err), "is that port the proxy's TLS port? http:// is for proxies without TLS")
}

// explainConnect adds a hint to the error of a CONNECT that the proxy did not answer.
func (p *Proxy) explainConnect(err error, addr string) error {
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case isTimeout(err):
		return p.explain(fmt.Errorf("no answer to CONNECT %s: %w", addr, err),
			"the proxy does not reach "+addr+", or is no HTTP proxy: ask its owner, and check "+p.source)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		return p.explain(fmt.Errorf("it has closed the connection after CONNECT %s", addr),
			"is it an HTTP proxy? A proxy with TLS needs https:// in "+p.source+", a SOCKS proxy socks5://")
	}
	return p.explainNoHTTP(err)
}

// explainNoHTTP says that a proxy does not speak HTTP.
func (p *Proxy) explainNoHTTP(err error) error {
	return p.explain(fmt.Errorf("its answer to CONNECT is not HTTP: %w", shortened(err)),
		"it is no HTTP proxy: check host and port in "+p.source+"; a proxy with TLS needs https://, a SOCKS proxy socks5://")
}

// explainAnswer says what a proxy's refusal means.
func (p *Proxy) explainAnswer(answer *http.Response, addr string, keys Keys) error {
	said := "it answers CONNECT " + addr + " with " + printable(answer.Status)
	if why := answer.Header.Get("X-Squid-Error"); why != "" {
		said += ", " + printable(why)
	}
	err := errors.New(said)
	switch answer.StatusCode {
	case http.StatusProxyAuthRequired:
		schemes := answer.Header.Values("Proxy-Authenticate")
		switch {
		case len(schemes) > 0 && !offersBasic(schemes):
			return p.explain(err, "the proxy asks for "+printable(firstWords(schemes))+", and tunnel speaks Basic: "+
				"ask the proxy's owner for Basic, or for a rule without a password for this machine")
		case p.hasUser:
			return p.explain(err, "the proxy does not accept the user and password in "+p.source)
		}
		return p.explain(err, "the proxy wants a user and a password: write "+p.scheme+"://USER:PASSWORD@"+p.addr+
			" into a file that only this program may read, and name the file: "+keys.ProxyFile)
	case http.StatusForbidden, http.StatusMethodNotAllowed, http.StatusUnauthorized:
		return p.explain(err, "ask the proxy's owner to permit CONNECT to "+addr+
			"; many permit port 443 only, on which the cloud can listen as well")
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return p.explain(err, "the proxy cannot reach "+addr+": check the address, and ask the proxy's owner")
	case http.StatusBadRequest, http.StatusNotFound, http.StatusNotImplemented:
		return p.explain(err, "a web server answers there, not a proxy: check host and port in "+p.source)
	}
	return p.explain(err, "ask the proxy's owner what the answer means")
}

// offersBasic reports whether a proxy accepts Basic authentication.
func offersBasic(schemes []string) bool {
	for _, s := range schemes {
		for part := range strings.SplitSeq(s, ",") {
			if word, _, _ := strings.Cut(strings.TrimSpace(part), " "); strings.EqualFold(word, "Basic") {
				return true
			}
		}
	}
	return false
}

// firstWords joins the first word of each line.
func firstWords(lines []string) string {
	var words []string
	for _, l := range lines {
		word, _, _ := strings.Cut(l, " ")
		words = append(words, word)
	}
	return strings.Join(words, ", ")
}

// explainSOCKS adds a hint to the refusal of a SOCKS5 proxy. said holds the first bytes that the proxy has sent.
// explainSOCKS reads the codes there, because the errors of package proxy have only texts.
func (p *Proxy) explainSOCKS(err error, said []byte, addr string, keys Keys) error {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Err != nil {
		err = op.Err // without the addresses of both ends: our own one helps no reader
	}
	failed := fmt.Errorf("CONNECT %s: %w", addr, err)
	const version, none, byPassword, ruleset = 5, 0xff, 2, 2 // RFC 1928 sections 3 and 6
	answer := func(at int) (byte, bool) {
		if len(said) <= at {
			return 0, false
		}
		return said[at], true
	}
	first, answered := answer(0)
	method, chosen := answer(1)
	// reply is the index of the reply's code in said. If the proxy has asked for user and password (RFC 1929), its
	// answer to these comes before the reply.
	reply := 3
	status, checked := byte(0), false
	if method == byPassword {
		reply = 5
		status, checked = answer(3)
	}
	code, replied := answer(reply)
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case answered && first != version, !chosen && !isTimeout(err):
		return p.explain(failed, "it is no SOCKS5 proxy: an HTTP proxy needs http:// in "+p.source)
	case !replied && isTimeout(err):
		return p.explain(failed, "the proxy does not reach "+addr+", or is no SOCKS5 proxy: ask its owner, and check "+
			p.source)
	case method == none && !p.hasUser:
		return p.explain(failed, "the proxy wants a user and a password: write socks5://USER:PASSWORD@"+p.addr+
			" into a file that only this program may read, and name the file: "+keys.ProxyFile)
	case method == none:
		return p.explain(failed, "the proxy takes no user and password: remove both from "+p.source+
			", or ask its owner")
	case checked && status != 0, method == byPassword && !checked:
		return p.explain(failed, "the proxy does not accept the user and password in "+p.source)
	case replied && code == ruleset:
		return p.explain(failed, "ask the proxy's owner to permit connections to "+addr)
	case replied && code != 0:
		return p.explain(failed, "the proxy cannot reach "+addr+": check the address, and ask the proxy's owner")
	}
	return p.explain(failed, "check "+p.source)
}

// shortError is an error with a shorter text.
type shortError struct {
	text string
	err  error
}

func (e *shortError) Error() string { return e.text }
func (e *shortError) Unwrap() error { return e.err }

// explainOuterTLS adds a hint to the error of a TLS handshake with a WebSocket's server.
func explainOuterTLS(err error, s Server, keys Keys) error {
	failed := fmt.Errorf("TLS with %s: %w", s.addr, shortened(err))
	hint := "does " + s.addr + " speak TLS? ws:// is for servers that do not"
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case is[x509.UnknownAuthorityError](err):
		hint = "this machine does not know the CA: if the ingress, or a proxy that inspects TLS, has a CA of its own, " +
			"give its certificate: " + keys.ProxyCA
	case is[x509.HostnameError](err):
		hint = "the host of the URL must be a name in the certificate of the ingress"
	case is[x509.CertificateInvalidError](err):
		hint = "check this machine's clock, then the certificate of the ingress"
	}
	return &Error{failed, hint, StepWebSocket}
}

// explainWebSocket adds a hint to the error of a WebSocket's handshake.
func explainWebSocket(err error, s Server) error {
	failed := fmt.Errorf("WebSocket %s: %w", s.text, shortened(err))
	hint := "is that the URL of the ingress, and does the ingress pass WebSockets on?"
	answer, ok := errors.AsType[*wsconn.HandshakeError](err)
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case !ok && isTimeout(err):
		hint = "the ingress does not answer: check the URL, and that the cloud's websocket listener runs"
	case !ok:
	case answer.Status == http.StatusNotFound:
		hint = "the path is not the cloud's: the URL ends in /tunnel, and the ingress must pass that path on unchanged"
	case answer.Status == http.StatusUpgradeRequired, answer.Status == http.StatusBadRequest,
		answer.Status == http.StatusOK:
		hint = "the ingress does not pass the WebSocket on: nginx needs proxy_http_version 1.1 and the headers " +
			"Upgrade and Connection"
	case answer.Status == http.StatusUnauthorized, answer.Status == http.StatusForbidden:
		hint = "the ingress forbids the path: permit it without a login there, since the cloud authenticates edges itself"
	case answer.Status == http.StatusBadGateway, answer.Status == http.StatusServiceUnavailable,
		answer.Status == http.StatusGatewayTimeout:
		hint = "the ingress does not reach the cloud: its backend is websocket in [mode.cloud.stream.server]"
	case answer.Status >= 300 && answer.Status < 400:
		hint = "the server redirects: write the URL to which it leads"
	}
	return &Error{failed, hint, StepWebSocket}
}

// is reports whether err, or an error that err wraps, has the type E.
func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// maxSaid bounds what an error shows of another program's answer, in bytes.
const maxSaid = 120

// printable makes another program's text safe for logs: printable ASCII of at most maxSaid bytes.
func printable(s string) string {
	if len(s) > maxSaid {
		s = s[:maxSaid]
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
}

// shortened returns err with a printable text.
func shortened(err error) error { return &shortError{printable(err.Error()), err} }
