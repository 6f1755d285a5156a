package dial

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/net/http/httpproxy"
	"golang.org/x/net/proxy"
)

// ProxyFunc returns the proxy that leads to a server; nil: the server is reached without one.
type ProxyFunc func(Server) (*Proxy, error)

// Proxy is a proxy that makes TCP connections for its clients.
type Proxy struct {
	scheme   string // http, https or socks5
	addr     string // host:port
	user     string
	password string
	hasUser  bool
	source   string // where its URL stands, for hints
}

// Schemes of proxies. socks5h is another name for socks5: the proxy resolves the names in both.
const (
	schemeHTTP  = "http"
	schemeHTTPS = "https"
	schemeSOCKS = "socks5"
)

// ParseProxy parses the URL of a proxy, or its host:port, which means http://host:port. source says where the
// URL stands. The URL may have a password, so no error shows any part of it.
func ParseProxy(text, source string) (*Proxy, error) {
	bad := fmt.Errorf("%s is not the URL of a proxy: write http://HOST:PORT, https://HOST:PORT or socks5://HOST:PORT; "+
		"USER:PASSWORD@ may stand before HOST, with %%40 for @, %%3A for : and %%2F for / in them", source)
	text = strings.TrimSpace(text)
	if !strings.Contains(text, "://") {
		text = schemeHTTP + "://" + text
	}
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "" {
		return nil, bad
	}
	p := &Proxy{scheme: u.Scheme, source: source}
	port := u.Port()
	switch u.Scheme {
	case schemeHTTP:
		port = or(port, "80")
	case schemeHTTPS:
		port = or(port, "443")
	case schemeSOCKS, "socks5h":
		p.scheme, port = schemeSOCKS, or(port, "1080")
	default:
		return nil, bad
	}
	if !isPort(port) {
		return nil, bad
	}
	p.addr = net.JoinHostPort(u.Hostname(), port)
	if u.User != nil {
		p.hasUser, p.user = true, u.User.Username()
		p.password, _ = u.User.Password()
	}
	if p.scheme == schemeSOCKS && p.hasUser && !(isSOCKSWord(p.user) && isSOCKSWord(p.password)) {
		return nil, fmt.Errorf("%s: a SOCKS5 proxy takes a user and a password of 1 to 255 bytes each", source)
	}
	return p, nil
}

// isSOCKSWord reports whether s can be a user or a password of SOCKS5 (RFC 1929 section 2).
func isSOCKSWord(s string) bool { return len(s) > 0 && len(s) <= 255 }

// or returns s, or the default if s is empty.
func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// String names the proxy, without user and password.
func (p *Proxy) String() string {
	if p.scheme == schemeHTTP {
		return "proxy " + p.addr
	}
	return "proxy " + p.scheme + "://" + p.addr
}

// HasPassword reports whether the URL of the proxy is a secret.
func (p *Proxy) HasPassword() bool { return p.hasUser }

// URL returns the URL of the proxy, with user and password.
func (p *Proxy) URL() string {
	u := url.URL{Scheme: p.scheme, Host: p.addr}
	if p.hasUser {
		u.User = url.UserPassword(p.user, p.password)
	}
	return u.String()
}

// Through returns a ProxyFunc that always returns p.
func Through(p *Proxy) ProxyFunc { return func(Server) (*Proxy, error) { return p, nil } }

// maxProxyFile bounds a file with the URL of a proxy, in bytes.
const maxProxyFile = 4 << 10

// FromFile returns a ProxyFunc for a file that holds only the URL of a proxy. The ProxyFunc reads the file each
// time, so that the password may change.
func FromFile(path, source string) ProxyFunc {
	return func(Server) (*Proxy, error) {
		f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", source, err)
		}
		defer f.Close()
		// A named pipe without a writer would be an empty file, and a device may be endless.
		if info, failed := f.Stat(); failed != nil || !info.Mode().IsRegular() {
			return nil, fmt.Errorf("%s: %s is not a regular file", source, path)
		}
		text, err := io.ReadAll(io.LimitReader(f, maxProxyFile))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", source, err)
		}
		return ParseProxy(string(text), source+" "+path)
	}
}

// FromEnvironment returns a ProxyFunc for HTTPS_PROXY and NO_PROXY, as the environment has set them. Like other
// programs it uses no proxy for loopback.
func FromEnvironment(env *httpproxy.Config) ProxyFunc {
	// httpproxy decides who needs a proxy. Its errors would show the proxy's password, so it gets another URL.
	needs := (&httpproxy.Config{HTTPSProxy: "http://proxy.invalid", NoProxy: env.NoProxy}).ProxyFunc()
	return func(s Server) (*Proxy, error) {
		if env.HTTPSProxy == "" {
			return nil, nil
		}
		// Whatever its URL, each server counts as https, since the edge speaks TLS with all of them.
		u, err := needs(&url.URL{Scheme: schemeHTTPS, Host: s.addr})
		if err != nil || u == nil {
			return nil, err
		}
		return ParseProxy(env.HTTPSProxy, "HTTPS_PROXY")
	}
}

// maxAnswer bounds the header of a proxy's answer to CONNECT, in bytes.
const maxAnswer = 16 << 10

// connect makes a connection through the proxy to a host:port. trip is how long the proxy took to make it.
func (p *Proxy) connect(ctx context.Context, d *Dialer, addr string) (c net.Conn, trip time.Duration, err error) {
	raw, err := d.direct(ctx, p.addr, p)
	if err != nil {
		return nil, 0, err
	}
	c = raw
	if p.scheme == schemeHTTPS {
		host, _, _ := net.SplitHostPort(p.addr)
		if c, err = d.wrap(ctx, raw, host); err != nil {
			raw.Close()
			return nil, 0, p.explainTLS(err, d.cfg.Keys)
		}
	}
	began := time.Now()
	if p.scheme == schemeSOCKS {
		err = p.socks(ctx, c, addr, d.cfg.Keys)
	} else {
		c, err = p.askConnect(ctx, c, addr, d.cfg)
	}
	if err != nil {
		raw.Close()
		return nil, 0, err
	}
	return c, time.Since(began), nil
}

// wrap makes a TLS handshake with a box in between: a proxy, or the server of a WebSocket.
func (d *Dialer) wrap(ctx context.Context, raw net.Conn, host string) (*tls.Conn, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: host, NextProtos: []string{"http/1.1"}}
	if d.cfg.Roots != nil {
		conf.RootCAs = d.cfg.Roots()
	}
	c := tls.Client(raw, conf)
	return c, c.HandshakeContext(ctx)
}

// bounded calls f, which reads and writes c. When ctx is done, bounded interrupts f by a deadline of c.
func bounded(ctx context.Context, c net.Conn, f func() error) error {
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		c.SetDeadline(time.Unix(1, 0))
	})
	err := f()
	if !stop() {
		<-interrupted
		return context.Cause(ctx)
	}
	return err
}

// askConnect asks an HTTP proxy for a connection (RFC 9110 section 9.3.6). The returned connection first
// returns the bytes that came right behind the answer.
func (p *Proxy) askConnect(ctx context.Context, c net.Conn, addr string, cfg Config) (net.Conn, error) {
	request := &http.Request{
		Method: http.MethodConnect, URL: &url.URL{Opaque: addr}, Host: addr,
		Header: http.Header{"User-Agent": {cfg.UserAgent}},
	}
	if p.hasUser {
		basic := base64.StdEncoding.EncodeToString([]byte(p.user + ":" + p.password)) // RFC 7617
		request.Header.Set("Proxy-Authorization", "Basic "+basic)
	}
	limit := &io.LimitedReader{R: c, N: maxAnswer}
	from := bufio.NewReader(limit)
	var answer *http.Response
	err := bounded(ctx, c, func() (err error) {
		if err = request.Write(c); err == nil {
			//nolint:bodyclose // the owner of c closes it, and an answer to CONNECT has no body
			answer, err = http.ReadResponse(from, request)
		}
		return err
	})
	switch {
	case err != nil && limit.N <= 0:
		return nil, p.explainNoHTTP(fmt.Errorf("the header of its answer is longer than %d bytes", maxAnswer))
	case err != nil:
		return nil, p.explainConnect(err, addr)
	case answer.StatusCode < 200 || answer.StatusCode > 299:
		return nil, p.explainAnswer(answer, addr, cfg.Keys)
	}
	// The answer to CONNECT has no body: what follows the header is from the cloud.
	first := make([]byte, from.Buffered())
	if _, err = io.ReadFull(from, first); err != nil {
		return nil, err // never: the bytes are there
	}
	if len(first) == 0 {
		return c, nil
	}
	return &prefixed{Conn: c, first: bytes.NewReader(first)}, nil
}

// prefixed is a connection of which some bytes have been read already.
type prefixed struct {
	net.Conn
	first *bytes.Reader // owned by Read
}

// Read implements net.Conn.
func (c *prefixed) Read(b []byte) (int, error) {
	if c.first.Len() > 0 {
		return c.first.Read(b)
	}
	return c.Conn.Read(b)
}

// NetConn returns the connection below.
func (c *prefixed) NetConn() net.Conn { return c.Conn }

// socks asks a SOCKS5 proxy for a connection (RFC 1928, RFC 1929).
func (p *Proxy) socks(ctx context.Context, c net.Conn, addr string, keys Keys) error {
	var user *proxy.Auth
	if p.hasUser {
		user = &proxy.Auth{User: p.user, Password: p.password}
	}
	connected := &given{Conn: c}
	dialer, err := proxy.SOCKS5("tcp", p.addr, user, connected)
	if err != nil {
		return err
	}
	byContext, ok := dialer.(proxy.ContextDialer)
	if !ok {
		return errors.New("package proxy has no ContextDialer for SOCKS5")
	}
	if _, err = byContext.DialContext(ctx, "tcp", addr); err != nil {
		return p.explainSOCKS(err, connected.said, addr, keys)
	}
	return nil
}

// maxSOCKSSaid is how many bytes given keeps: the codes that explainSOCKS needs are in the first six.
const maxSOCKSSaid = 6

// given is a dialer for package proxy that makes no connection: it returns itself, a connection to the proxy. It
// keeps the first bytes that the proxy sends.
type given struct {
	net.Conn
	said []byte // owned by Read until the dialer has returned
}

// Read implements net.Conn.
func (g *given) Read(b []byte) (int, error) {
	n, err := g.Conn.Read(b)
	g.said = append(g.said, b[:min(n, maxSOCKSSaid-len(g.said))]...)
	return n, err
}

// Dial implements proxy.Dialer.
func (g *given) Dial(string, string) (net.Conn, error) { return g, nil }

// DialContext implements proxy.ContextDialer.
func (g *given) DialContext(context.Context, string, string) (net.Conn, error) { return g, nil }
