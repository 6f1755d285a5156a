package https

import (
	"cmp"
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

	"tunnel.example/tunnel/pkg/tunnel"
)

// copySize is the size of a copy buffer in bytes: two TLS records.
const copySize = 32 << 10

// proxy is the HTTP handler behind terminated connections.
//
// It speaks HTTP/1.1 to the kubelet, one request at a time per conn. A conn through the tunnel has
// its own flow control, so a `logs -f` that the caller does not read fills only its own window. In
// a shared HTTP/2 connection it would occupy up to 4 MiB of our memory.
type proxy struct {
	// Set once.
	f    *FrontDoor
	dial dialHop
	pool pool
	// probeNode is probe; tests replace it to simulate kubelets without a network.
	probeNode func(ctx context.Context, n tunnel.NodeName, ref podRef, caller string) error

	finder   finder
	buffers  sync.Pool      // of []byte, each copySize long
	handlers sync.WaitGroup // requests being served, including hijacked ones
	targets  sync.WaitGroup // conns to targets
}

// hop is the target of a request and its caller. A pooled conn serves only the caller that it was
// opened for.
type hop struct {
	node   tunnel.NodeName
	port   int // index of FrontDoor.ports
	caller string
}

// newProxy returns the handler. Its conns to targets are reset when live is done.
func newProxy(live context.Context, f *FrontDoor) *proxy {
	p := &proxy{f: f}
	p.probeNode = p.probe
	p.dial = func(ctx context.Context, h hop, onClose func()) (net.Conn, error) {
		p.targets.Add(1)
		var c net.Conn
		// net/http dials in a goroutine of its own, which recovers nothing.
		err := tunnel.Guard(f.log, f.cfg.Counters, "the request ends", func() (err error) {
			c, err = f.dialTarget(ctx, live, h)
			return err
		})
		if err != nil {
			p.targets.Done()
			return nil, err
		}
		tc := &trackedConn{Conn: c}
		stopSet := make(chan struct{}) // closed when stop is set
		var stop func() bool
		tc.onClose = func() {
			<-stopSet
			stop()
			onClose()
			p.targets.Done()
		}
		stop = context.AfterFunc(live, func() { tc.Reset() })
		close(stopSet)
		return tc, nil
	}
	p.pool.dial, p.pool.headers = p.dial, f.cfg.Limits.Headers
	return p
}

// clientTLS returns the TLS configuration for the next conn to the kubelet of node. k.Certificate
// must be set.
func (k *Kubelet) clientTLS(node tunnel.NodeName) *tls.Config {
	c := &tls.Config{
		MinVersion:         tls.VersionTLS12,
		Certificates:       []tls.Certificate{*k.Certificate()},
		ServerName:         string(node),
		InsecureSkipVerify: k.CA == nil, // validate has checked that the operator wants this
		NextProtos:         []string{"http/1.1"},
	}
	if k.CA != nil {
		c.RootCAs = k.CA()
	}
	return c
}

// dialTarget opens a conn for HTTP to a kubelet: with TLS through the tunnel or, without a client
// certificate of our own, through an edge that speaks TLS.
func (f *FrontDoor) dialTarget(ctx, live context.Context, h hop) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	defer context.AfterFunc(live, cancel)()

	r := tunnel.Request{
		Node: h.node, Category: Name, Network: "tcp", Addr: f.ports[h.port].target, Caller: h.caller, Trace: traceIn(ctx),
	}
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
			return nil, fmt.Errorf("certificate of %s on node %s: %w (see ca in [mode.cloud.https.kubelet])",
				r.Addr, h.node, err)
		}
		return nil, dialError(ctx, fmt.Errorf("TLS handshake with %s on node %s: %w", r.Addr, h.node, err))
	}
	return &tlsConn{Conn: tc, raw: conn}, nil
}

// wait returns when no request is being served and no conn to a target is left. The callers'
// connections must have ended, and live, which resets the conns to targets, must be done.
func (p *proxy) wait() {
	p.handlers.Wait()
	p.targets.Wait()
}

// ServeHTTP sends one request to the node that it names.
func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.handlers.Add(1)
	defer p.handlers.Done()
	var e *entry // nil: not made yet
	defer func() {
		v := recover()
		isBug := v != nil && v != http.ErrAbortHandler //nolint:errorlint // net/http compares it in the same way
		if isBug {
			p.f.panicked(v)
		}
		if e != nil {
			e.end(isBug)
		}
		if v != nil {
			panic(http.ErrAbortHandler) // net/http ends this request or this connection
		}
	}()
	if r.ProtoMajor == 1 {
		// The response may start before the request's body has ended.
		http.NewResponseController(w).EnableFullDuplex() //nolint:errcheck // net/http's own writer supports it
	}
	c := r.Context().Value(connKey{}).(*clientConn)
	e = p.f.newEntry(w, r, c)
	w = e
	body := newRequestBody(w, r, c)
	body.received = &e.received
	defer body.finish()
	if c.framed != nil && c.framed.frame.encoded {
		body.closeAfter = true // framedConn cannot find the start of the next request
		problem := ""
		switch {
		case c.framed.frame.both:
			problem = "the request has both Content-Length and Transfer-Encoding"
		case !r.ProtoAtLeast(1, 1):
			problem = "the request has Transfer-Encoding, which HTTP/1.0 does not know"
		}
		if problem != "" {
			body.markLast()
			respond(w, r, http.StatusBadRequest, "", problem)
			return
		}
	}

	if headerSize(r) > p.f.cfg.Limits.Headers {
		p.f.cfg.Counters.Limited(tunnel.LimitHeaders)
		body.markLast()
		respond(w, r, http.StatusRequestHeaderFieldsTooLarge, "",
			fmt.Sprintf("limit headers: the request's header has more than %d bytes", p.f.cfg.Limits.Headers))
		return
	}
	h, ok := p.route(e, r, c, body)
	if !ok {
		return
	}
	p.forward(e, r, h, body)
}

// route returns the hop for a request. If ok is false, it has already answered the request.
func (p *proxy) route(e *entry, r *http.Request, c *clientConn, body *requestBody) (h hop, ok bool) {
	refuse := func(a *answer) (hop, bool) {
		body.markLast()
		name := ""
		if a.code != 0 {
			name = a.code.String()
		}
		respond(e, r, a.status, name, a.text)
		e.refuse(a.code, cmp.Or(a.log, a.text))
		if e.node == "" {
			e.node = a.node
		}
		e.denied = a.denied
		return hop{}, false
	}
	sni, err := tunnel.ParseNodeName(c.sni)
	// In Auto mode the front door passes a connection through if its SNI names a connected node. The
	// node was not connected when this connection came, and the caller keeps the connection in its pool.
	missedPassthrough := p.f.cfg.Mode == Auto && err == nil
	// TLS has verified the certificate; we check whether its name may call.
	h.caller = e.caller
	classes, class := p.f.classesOf(h.caller), classOf(r.URL)
	switch {
	case len(classes) == 0:
		body.closeAfter = true
		e.visit.Told = missedPassthrough && c.passTold
		return refuse(p.denyCaller(r, c, sni, h.caller, missedPassthrough))
	case !permits(classes, class):
		a := answerf(http.StatusForbidden, tunnel.Denied,
			"this caller may send %v, and this path needs the class %s (callers in [mode.cloud.https])",
			classes, class)
		a.denied = denyClass
		a.log = fmt.Sprintf("%q may send %v, and the path needs the class %s: see callers in [mode.cloud.https]",
			h.caller, classes, class)
		return refuse(a)
	}
	node, a := p.whichNode(r, c, h.caller)
	e.node = node
	if a != nil && a.node == "" {
		a.node = namedBy(sni, r)
	}
	// Close this connection, since the front door can pass the caller's next connection through, as soon
	// as the node is connected again. Closing does not harm requests in flight (see requestBody.markLast).
	body.closeAfter = body.closeAfter || missedPassthrough &&
		(p.f.nodes.Holds(sni) || a != nil && a.code == tunnel.NoSuchNode)
	if a != nil {
		return refuse(a)
	}
	if r.Method == http.MethodConnect {
		return refuse(answerf(http.StatusMethodNotAllowed, 0, "CONNECT is not served here"))
	}
	if c.passErr != nil && string(node) == c.sni {
		// The front door tried to pass the connection through when it came. It tries again with the
		// caller's next connection.
		body.closeAfter = true
		e.visit.Told = c.passTold
		code := tunnel.CodeOf(c.passErr)
		return refuse(answerf(statusOf(code), code, "node %s: %v", node, c.passErr))
	}
	h.node, h.port = node, c.port
	return h, true
}

// denyCaller returns the answer for a caller with a certificate of clientca whose name may not
// call. Not all such callers are intruders. metrics-server's certificate is for kubelets; its
// connections name a node by SNI and are passed through while that node is connected. Otherwise
// they come here, and an answer about allowed callers would mislead the operator. So the caller
// learns whether the node in its SNI is connected, which every ClientHello can find out. It learns
// nothing else: no node is searched, and nothing is dialled.
func (p *proxy) denyCaller(r *http.Request, c *clientConn, sni tunnel.NodeName, caller string,
	missedPassthrough bool) *answer {
	var a *answer
	switch {
	case missedPassthrough && c.passErr != nil:
		code := tunnel.CodeOf(c.passErr)
		a = answerf(statusOf(code), code, "node %s cannot be reached: %v", sni, code)
		a.log = fmt.Sprintf("its connection could not be passed through to node %s, "+
			"and %q is not in callers of [mode.cloud.https]: %v", sni, caller, c.passErr)
	case missedPassthrough && p.f.nodes.Holds(sni):
		a = answerf(http.StatusServiceUnavailable, 0,
			"node %s was not connected when this connection was opened, and is now: open another one", sni)
	case missedPassthrough:
		a = p.noSuchNode("node %s is not connected", sni)
		a.log = fmt.Sprintf("node %s, which its SNI names, is not connected, so it was not passed through; "+
			"and %q is not in callers of [mode.cloud.https]", sni, caller)
	default:
		a = answerf(http.StatusForbidden, tunnel.Denied,
			"the client certificate's common name %q may not call this port; "+
				"this path needs the class %s (callers in [mode.cloud.https])", caller, classOf(r.URL))
		a.log = fmt.Sprintf("%q may not call, and the path needs the class %s: see callers in [mode.cloud.https]",
			caller, classOf(r.URL))
	}
	a.denied = denyClientName
	if missedPassthrough {
		a.node = sni
	}
	return a
}

// scheme is the URL scheme for targets.
func (p *proxy) scheme() string {
	if p.f.cfg.Kubelet.Certificate == nil {
		return "http" // the edge speaks TLS
	}
	return "https"
}

// forward proxies r to h.
func (p *proxy) forward(w *entry, r *http.Request, h hop, body *requestBody) {
	upgrade := upgradeOf(r)
	if upgrade != "" && r.ContentLength != 0 {
		body.markLast()
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
			p.rewrite(pr, h, upgrade)
			passTrace(pr, w.visit.Trace())
			body.passTrailers(pr.Out)
		},
		Transport: refuseSwitch(transport),
		ModifyResponse: func(res *http.Response) error {
			body.markLast()
			if _, ok := res.Header["Content-Type"]; !ok {
				w.Header()["Content-Type"] = nil // otherwise net/http guesses a type
			}
			return nil
		},
		ErrorHandler: func(_ http.ResponseWriter, out *http.Request, err error) {
			if s, ok := errors.AsType[*switched](err); ok {
				s.splice(w, out)
				return
			}
			p.respondError(w, r, h, body, err)
		},
		FlushInterval: -1, // flush at once: a log line must not wait for the next one
		BufferPool:    p,
		ErrorLog:      slog.NewLogLogger(p.f.log.Handler(), slog.LevelDebug),
	}
	in := r.WithContext(withTrace(r.Context(), w.visit.Trace())) // a shallow copy
	if r.Body != nil && r.Body != http.NoBody {
		in.Body = body
	}
	rp.ServeHTTP(w, in)
}

// rewrite makes pr.Out the request to the target of h. upgrade is the protocol that the request upgrades
// to; "": none.
func (p *proxy) rewrite(pr *httputil.ProxyRequest, h hop, upgrade string) {
	out := pr.Out
	out.URL.Scheme = p.scheme()
	out.URL.Host = string(h.node)         // not used for dialling
	out.URL.RawQuery = pr.In.URL.RawQuery // unchanged; url.Values would re-encode it
	// An upgrade to some other protocol is ignored (RFC 9110 section 7.8).
	if upgrade == "" {
		out.Header.Del("Connection")
		out.Header.Del("Upgrade")
	}
}

// refuseSwitch returns next, except that a response with status 101 becomes an error. A transport that
// was asked for an upgrade returns *switched instead of such a response.
func refuseSwitch(next roundTripper) roundTripper {
	return func(out *http.Request) (*http.Response, error) {
		res, err := next(out)
		if err == nil && res.StatusCode == http.StatusSwitchingProtocols {
			res.Body.Close()
			return nil, errors.New("the target switched protocols without being asked to")
		}
		return res, err
	}
}

// quotation matches what an error message quotes.
var quotation = regexp.MustCompile(`"([^"\\]|\\.)*"`)

// unquoted returns err's text for the log, without quotations. If a target's response is not HTTP,
// net/http quotes it, and it may be anything. Only the caller, to whom it was sent, may see it.
func unquoted(err error) string {
	text := quotation.ReplaceAllString(err.Error(), `"…"`)
	const header = "malformed MIME header"
	if before, _, ok := strings.Cut(text, header); ok {
		return before + header
	}
	return text
}

// respondError answers a request for which the target gave no response.
func (p *proxy) respondError(w *entry, r *http.Request, h hop, body *requestBody, err error) {
	if r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // the caller has gone
	}
	body.markLast()
	if rerr := body.failure(); rerr != nil {
		respond(w, r, http.StatusBadRequest, "", fmt.Sprintf("reading the request's body: %v", rerr))
		return
	}
	code := tunnel.CodeOf(err)
	if code == tunnel.Overloaded || code == tunnel.Draining {
		w.Header().Set("Retry-After", "1")
	}
	respond(w, r, statusOf(code), code.String(), fmt.Sprintf("node %s: %v", h.node, err))
	w.refuse(code, unquoted(err))
}

// Get returns a buffer. Get and Put make p the httputil.BufferPool of its requests.
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
