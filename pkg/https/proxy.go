package https

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"regexp"
	"strings"
	"sync"
	"time"

	"tunnel/pkg/tunnel"
)

// copySize is one copy's buffer: two TLS records.
const copySize = 32 << 10

// proxy is the HTTP handler behind terminated connections.
//
// Towards the kubelet it speaks HTTP/1.1, one request at a time per conn. A conn
// through the tunnel has its own flow control, so a `logs -f` that nobody reads holds
// its own window; in one HTTP/2 connection it would hold up to 4 MiB of ours.
type proxy struct {
	// Set once.
	f    *FrontDoor
	dial dialHop
	pool pool
	// ask is probe; tests have kubelets without a network.
	ask func(ctx context.Context, n tunnel.NodeName, ref podRef, caller string) error

	finder   finder
	buffers  sync.Pool      // of []byte, copySize long
	handlers sync.WaitGroup // requests being served, hijacked ones too
	targets  sync.WaitGroup // conns to targets
}

// hop is where a request goes, and for whom: a pooled conn was opened for its caller.
type hop struct {
	node   tunnel.NodeName
	port   int // index of FrontDoor.ports
	caller string
}

// newProxy returns the handler. Its conns to targets end with live.
func newProxy(live context.Context, f *FrontDoor) *proxy {
	p := &proxy{f: f}
	p.ask = p.probe
	p.dial = func(ctx context.Context, h hop, ended func()) (net.Conn, error) {
		p.targets.Add(1)
		c, err := f.dialTarget(ctx, live, h)
		if err != nil {
			p.targets.Done()
			return nil, err
		}
		tc := &trackedConn{Conn: c}
		watching := make(chan struct{}) // closed when stop is set
		var stop func() bool
		tc.ended = func() {
			<-watching
			stop()
			ended()
			p.targets.Done()
		}
		stop = context.AfterFunc(live, func() { tc.Reset() }) //nolint:errcheck // it returns none
		close(watching)
		return tc, nil
	}
	p.pool.dial, p.pool.headers = p.dial, f.cfg.Limits.Headers
	return p
}

// clientTLS is how we meet the kubelet of a node. There is a certificate.
func (k *Kubelet) clientTLS(node tunnel.NodeName) *tls.Config {
	c := &tls.Config{
		MinVersion:         tls.VersionTLS12,
		Certificates:       []tls.Certificate{*k.Certificate()},
		ServerName:         string(node),
		InsecureSkipVerify: k.CA == nil, // validate made sure that the operator wants that
		NextProtos:         []string{"http/1.1"},
	}
	if k.CA != nil {
		c.RootCAs = k.CA()
	}
	return c
}

// dialTarget opens a conn for HTTP to a kubelet: TLS through the tunnel, or, without
// a client certificate of our own, through an edge that speaks TLS.
func (f *FrontDoor) dialTarget(ctx, live context.Context, h hop) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	defer context.AfterFunc(live, cancel)()

	r := tunnel.Request{Node: h.node, Category: Name, Network: "tcp", Addr: f.ports[h.port].target, Caller: h.caller}
	if f.cfg.Kubelet.Certificate == nil {
		r.Network = "tls"
	}
	conn, err := f.dialer.Dial(ctx, r)
	if err != nil {
		return nil, dialError(ctx, err)
	}
	if f.cfg.Kubelet.Certificate == nil {
		return conn, nil
	}
	tc := tls.Client(conn, f.cfg.Kubelet.clientTLS(h.node))
	if err := tc.HandshakeContext(ctx); err != nil {
		tunnel.Reset(conn)
		if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
			return nil, fmt.Errorf("certificate of %s on node %s: %w (see ca in [mode.cloud.https.kubelet])", r.Addr, h.node, err)
		}
		return nil, dialError(ctx, fmt.Errorf("TLS handshake with %s on node %s: %w", r.Addr, h.node, err))
	}
	return &tlsConn{Conn: tc, raw: conn}, nil
}

// wait returns when no request is being served and no conn to a target is left.
// Connections of callers have ended, and live, which resets those to targets, is done.
func (p *proxy) wait() {
	p.handlers.Wait()
	p.targets.Wait()
}

// ServeHTTP sends one request to the node that it names.
func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.handlers.Add(1)
	defer p.handlers.Done()
	defer func() {
		if v := recover(); v != nil {
			if v != http.ErrAbortHandler { //nolint:errorlint // net/http compares it so, too
				p.f.panicked(v)
			}
			panic(http.ErrAbortHandler) // net/http ends this request, or this connection
		}
	}()
	if r.ProtoMajor == 1 {
		// An answer may come before the request's body has ended.
		http.NewResponseController(w).EnableFullDuplex() //nolint:errcheck // net/http's own writer can
	}
	c := r.Context().Value(connKey{}).(*clientConn)
	body := newRequestBody(w, r, c)
	defer body.finish()
	if c.framed != nil && c.framed.frame.encoded {
		body.last = true // framedConn cannot see where the next one would start
		bad := ""
		switch {
		case c.framed.frame.both:
			bad = "the request has both Content-Length and Transfer-Encoding"
		case !r.ProtoAtLeast(1, 1):
			bad = "the request has Transfer-Encoding, which HTTP/1.0 does not know"
		}
		if bad != "" {
			body.closing()
			respond(w, r, http.StatusBadRequest, "", bad)
			return
		}
	}

	if headerSize(r) > p.f.cfg.Limits.Headers {
		p.f.cfg.Counters.Limited(tunnel.LimitHeaders)
		body.closing()
		respond(w, r, http.StatusRequestHeaderFieldsTooLarge, "", fmt.Sprintf("limit headers: the request's header has more than %d bytes", p.f.cfg.Limits.Headers))
		return
	}
	h, ok := p.route(w, r, c, body)
	if !ok {
		return
	}
	start := time.Now()
	log := p.f.log.With("module", Name, "node", string(h.node), "frontend", c.LocalAddr().String(), "target", c.target)
	p.forward(w, r, h, body, log)
	log.Debug("https request served", "dur", time.Since(start))
}

// route says where a request goes. If it goes nowhere, it has been answered.
func (p *proxy) route(w http.ResponseWriter, r *http.Request, c *clientConn, body *requestBody) (h hop, ok bool) {
	refuse := func(a *answer) (hop, bool) {
		body.closing()
		name := ""
		if a.code != 0 {
			name = a.code.String()
		}
		respond(w, r, a.status, name, a.text)
		return hop{}, false
	}
	sni, err := tunnel.ParseNodeName(c.sni)
	// In this mode a connection that names a node is meant to be passed through. This one
	// could not be when it came, and callers pool it.
	astray := p.f.cfg.Mode == Auto && err == nil
	// TLS has verified the certificate; whom it names is up to us.
	h.caller = callerOf(*r.TLS)
	may, class := p.f.may(h.caller), classOf(r.URL)
	switch {
	case len(may) == 0:
		body.last = true
		return refuse(p.stranger(r, c, sni, h.caller, astray))
	case !permits(may, class):
		p.f.warn(denyClass, "https request denied", "frontend", c.LocalAddr().String(),
			"err", fmt.Sprintf("%s: %q may send %v, and the path needs the class %s: see callers in [mode.cloud.https]", r.RemoteAddr, h.caller, may, class))
		return refuse(answerf(http.StatusForbidden, tunnel.Denied, "this caller may send %v, and this path needs the class %s (callers in [mode.cloud.https])", may, class))
	}
	node, a := p.whichNode(r, c, h.caller)
	// Its next one passes through: now if the node is back, else when it is. Requests in
	// flight are not harmed (see requestBody.closing).
	body.last = body.last || astray && (p.f.nodes.Holds(sni) || a != nil && a.code == tunnel.NoSuchNode)
	if a != nil {
		return refuse(a)
	}
	if r.Method == http.MethodConnect {
		return refuse(answerf(http.StatusMethodNotAllowed, 0, "CONNECT is not served here"))
	}
	if c.refused != nil && string(node) == c.sni {
		// It was tried when the connection came in; the caller's next one tries again.
		body.last = true
		code := tunnel.CodeOf(c.refused)
		return refuse(answerf(statusOf(code), code, "node %s: %v", node, c.refused))
	}
	h.node, h.port = node, c.port
	return h, true
}

// stranger answers a caller whose certificate is of clientca, but whose name may not call.
// Such callers are not only intruders: metrics-server's certificate is for kubelets,
// and its connections, which name a node by SNI, pass through while that node is
// connected. While it is not, they come here, and to speak of callers would send
// the operator to the wrong place. So one is told whether the node that it named itself
// is connected, which every ClientHello finds out, and nothing else: no node is looked
// for, and nothing is dialled.
func (p *proxy) stranger(r *http.Request, c *clientConn, sni tunnel.NodeName, caller string, astray bool) *answer {
	warn := func(why string) {
		p.f.warn(denyClientName, "https request denied", "frontend", c.LocalAddr().String(), "err", fmt.Sprintf("%s: %s", r.RemoteAddr, why))
	}
	switch {
	case astray && c.refused != nil:
		code := tunnel.CodeOf(c.refused)
		warn(fmt.Sprintf("its connection could not be passed through to node %s, and %q is not in callers of [mode.cloud.https]: %v", sni, caller, c.refused))
		return answerf(statusOf(code), code, "node %s cannot be reached: %v", sni, code)
	case astray && p.f.nodes.Holds(sni):
		return answerf(http.StatusServiceUnavailable, 0, "node %s was not connected when this connection came, and is now: open another", sni)
	case astray:
		warn(fmt.Sprintf("node %s, which its SNI names, is not connected, so it was not passed through; and %q is not in callers of [mode.cloud.https]", sni, caller))
		return p.noSuchNode("node %s is not connected", sni)
	default:
		warn(fmt.Sprintf("%q may not call, and the path needs the class %s: see callers in [mode.cloud.https]", caller, classOf(r.URL)))
		return answerf(http.StatusForbidden, tunnel.Denied, "the client certificate's common name %q may not call this port; this path needs the class %s (callers in [mode.cloud.https])", caller, classOf(r.URL))
	}
}

// scheme is that of the URLs of targets.
func (p *proxy) scheme() string {
	if p.f.cfg.Kubelet.Certificate == nil {
		return "http" // the edge speaks TLS
	}
	return "https"
}

// forward proxies r to h.
func (p *proxy) forward(w http.ResponseWriter, r *http.Request, h hop, body *requestBody, log *slog.Logger) {
	upgrade := upgradeOf(r)
	if upgrade != "" && r.ContentLength != 0 {
		body.closing()
		respond(w, r, http.StatusBadRequest, "", "an upgrade request with a body is not supported")
		return
	}
	var transport roundTripper
	if upgrade == "" {
		t, release := p.pool.acquire(h)
		defer release()
		transport = t.RoundTrip
	} else {
		transport = p.upgrader(h, upgrade)
	}
	rp := httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			out := pr.Out
			out.URL.Scheme = p.scheme()
			out.URL.Host = string(h.node)         // what dials does not ask
			out.URL.RawQuery = pr.In.URL.RawQuery // as it came, not as url.Values would have it
			if upgrade == "" {                    // of some other kind: it is ignored (RFC 9110 section 7.8)
				out.Header.Del("Connection")
				out.Header.Del("Upgrade")
			}
			body.passTrailers(out)
		},
		Transport: roundTripper(func(out *http.Request) (*http.Response, error) {
			res, err := transport(out)
			if err == nil && res.StatusCode == http.StatusSwitchingProtocols {
				res.Body.Close()
				return nil, errors.New("the target switched protocols without being asked to")
			}
			return res, err
		}),
		ModifyResponse: func(res *http.Response) error {
			body.closing()
			if _, ok := res.Header["Content-Type"]; !ok {
				w.Header()["Content-Type"] = nil // else net/http guesses one
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, out *http.Request, err error) {
			if s, ok := errors.AsType[*switched](err); ok {
				s.splice(w, out, log)
				return
			}
			p.failed(w, r, h, body, err)
			log.Debug("https request failed", "err", unquoted(err))
		},
		FlushInterval: -1, // a log line must not wait for the next
		BufferPool:    p,
		ErrorLog:      slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	in := r.WithContext(r.Context()) // a shallow copy
	if r.Body != nil && r.Body != http.NoBody {
		in.Body = body
	}
	rp.ServeHTTP(w, in)
}

// quotation is what errors quote of what they are about.
var quotation = regexp.MustCompile(`"([^"\\]|\\.)*"`)

// unquoted returns err for the log. When a target's answer is not HTTP, net/http repeats
// what it is, and that may be anything: it is for the caller, whom it was meant for.
func unquoted(err error) string {
	text := quotation.ReplaceAllString(err.Error(), `"…"`)
	const header = "malformed MIME header"
	if before, _, ok := strings.Cut(text, header); ok {
		return before + header
	}
	return text
}

// failed answers a request that did not get an answer from its target.
func (p *proxy) failed(w http.ResponseWriter, r *http.Request, h hop, body *requestBody, err error) {
	if r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // the caller has gone
	}
	body.closing()
	if rerr := body.failure(); rerr != nil {
		respond(w, r, http.StatusBadRequest, "", fmt.Sprintf("reading the request's body: %v", rerr))
		return
	}
	code := tunnel.CodeOf(err)
	if code == tunnel.Overloaded || code == tunnel.Draining {
		w.Header().Set("Retry-After", "1")
	}
	respond(w, r, statusOf(code), code.String(), fmt.Sprintf("node %s: %v", h.node, err))
}

// Get and Put make p the httputil.BufferPool of its requests.
func (p *proxy) Get() []byte {
	if b, ok := p.buffers.Get().(*[]byte); ok {
		return *b
	}
	return make([]byte, copySize)
}

// Put takes a buffer back.
func (p *proxy) Put(b []byte) { p.buffers.Put(&b) }

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
