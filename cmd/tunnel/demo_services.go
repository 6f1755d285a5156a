package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"tunnel/pkg/auth"
	"tunnel/pkg/reload"
)

// demoServices are the two services behind the edge. They run in the demo's own
// process, which is neither the cloud nor the edge.
type demoServices struct {
	page *http.Server
	echo net.Listener
	wg   sync.WaitGroup
}

// serve makes the authority and starts the services.
func (d *demo) serve() (*demoServices, error) {
	var err error
	if d.ca, err = auth.NewCA("tunnel demo", demoLifetime); err != nil {
		return nil, err
	}
	cert, key, err := d.ca.Issue(auth.Leaf{CommonName: demoNode, DNSNames: []string{demoNode}, Server: true})
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	page, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		page.Close()
		return nil, err
	}
	d.Page, d.Echo = page.Addr().String(), echo.Addr().String()
	s := &demoServices{echo: echo, page: &http.Server{
		Handler:           http.HandlerFunc(demoPage),
		TLSConfig:         &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}},
		ReadHeaderTimeout: 5 * time.Second,
	}}
	s.wg.Go(func() { s.page.ServeTLS(page, "", "") }) //nolint:errcheck // it ends when it is closed
	s.wg.Go(func() {
		for {
			c, err := echo.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.Copy(c, c) //nolint:errcheck // likewise
			}()
		}
	})
	return s, nil
}

func (s *demoServices) close() {
	s.page.Close() //nolint:errcheck // the demo ends
	s.echo.Close()
	s.wg.Wait()
}

func demoPage(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Trailer", "Demo-End")
	fmt.Fprintf(w, "hello from node %s, behind its NAT: %s %s\n", demoNode, r.Method, r.URL.Path)
	w.Header().Set("Demo-End", "all of it")
}

// demoCheck is one thing that the demo proves.
type demoCheck struct {
	name string
	run  func(ctx context.Context) error
}

// checkAll runs every check, prints a line for each, and returns how many failed.
func (d *demo) checkAll(ctx context.Context) (failed int) {
	checks := []demoCheck{
		{"tcp", d.checkTCP},
		{"https-passthrough", d.checkPassthrough},
		{"https-terminate", d.checkTerminate},
		{"https-caller-without-certificate-refused", d.checkStranger},
		{"unknown-node-refused", d.checkUnknownNode},
		{"wrong-token-refused", d.checkWrongToken},
		{"join-by-token", d.checkJoin},
	}
	if d.flags.target != "" {
		checks = append(checks, demoCheck{"own-target", d.checkOwn})
	}
	for _, c := range checks {
		cctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := c.run(cctx)
		cancel()
		if err != nil {
			failed++
			fmt.Fprintf(d.out, "FAIL %s: %v\n", c.name, err)
			continue
		}
		fmt.Fprintf(d.out, "ok %s\n", c.name)
	}
	return failed
}

// checkTCP sends a line to the TCP service, closes its side, and reads the line back.
func (d *demo) checkTCP(ctx context.Context) error {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", d.TCP))
	if err != nil {
		return err
	}
	defer c.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err = c.SetDeadline(deadline); err != nil {
			return err
		}
	}
	const line = "is anybody there?\n"
	if _, err = io.WriteString(c, line); err != nil {
		return err
	}
	if err = c.(*net.TCPConn).CloseWrite(); err != nil {
		return err
	}
	got, err := io.ReadAll(bufio.NewReader(c))
	if err != nil {
		return err
	}
	if string(got) != line {
		return fmt.Errorf("sent %q and got %q back", line, got)
	}
	return nil
}

// ownQuiet is how long a target of one's own must not reset a connection. It may be
// silent, so there may be nothing else to see.
const ownQuiet = 300 * time.Millisecond

// checkOwn connects to --target through the tunnel.
func (d *demo) checkOwn(ctx context.Context) error {
	unreachable := func(err error) error {
		return fmt.Errorf("%s cannot be reached from this machine: %w", d.flags.target, err)
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", d.Own))
	if err != nil {
		return unreachable(err) // a reset may be there before the connect has returned
	}
	defer c.Close()
	if err = c.SetDeadline(time.Now().Add(ownQuiet)); err != nil {
		return err
	}
	_, err = c.Read(make([]byte, 1))
	if err == nil || errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return unreachable(err)
}

// client returns an HTTP client for the HTTPS front door. With serverName its
// connections carry that name as SNI; without, none.
func (d *demo) client(serverName string, certificate bool) (*http.Client, error) {
	quiet := slog.New(slog.DiscardHandler) // nothing changes
	ca, err := reload.NewPool(d.path("ca.crt"), quiet)
	if err != nil {
		return nil, err
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: ca.Pool(), ServerName: serverName}
	if certificate {
		pair, err := reload.NewPair(d.path("client.crt"), d.path("client.key"), quiet)
		if err != nil {
			return nil, err
		}
		cfg.Certificates = []tls.Certificate{*pair.Certificate()}
	}
	door := fmt.Sprintf("127.0.0.1:%d", d.HTTPS)
	return &http.Client{Transport: &http.Transport{
		TLSClientConfig: cfg,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, door)
		},
		DisableKeepAlives: true,
	}}, nil
}

func (d *demo) checkPassthrough(ctx context.Context) error {
	client, err := d.client(demoNode, false)
	if err != nil {
		return err
	}
	return wantPage(get(ctx, client, fmt.Sprintf("https://%s:%d/", demoNode, d.HTTPS)))
}

func (d *demo) checkTerminate(ctx context.Context) error {
	client, err := d.client("127.0.0.1", true) // an address is never sent as SNI
	if err != nil {
		return err
	}
	return wantPage(get(ctx, client, fmt.Sprintf("https://%s:%d/", demoNode, d.HTTPS)))
}

func wantPage(body string, err error) error {
	const want = "hello from node " + demoNode
	if err != nil {
		return err
	}
	if len(body) < len(want) || body[:len(want)] != want {
		return fmt.Errorf("got %q, want %q…", body, want)
	}
	return nil
}

func (d *demo) checkStranger(ctx context.Context) error {
	client, err := d.client("127.0.0.1", false)
	if err != nil {
		return err
	}
	if body, err := get(ctx, client, fmt.Sprintf("https://%s:%d/", demoNode, d.HTTPS)); err == nil {
		return fmt.Errorf("a caller without a client certificate got %q", body)
	}
	return nil
}

func (d *demo) checkUnknownNode(ctx context.Context) error {
	client, err := d.client("127.0.0.1", true)
	if err != nil {
		return err
	}
	body, err := get(ctx, client, fmt.Sprintf("https://nobody:%d/", d.HTTPS))
	if answer, ok := errors.AsType[*statusError](err); ok && answer.code == http.StatusBadGateway {
		return nil
	}
	return errors.Join(fmt.Errorf("a node that is not connected gave %q, want 502", body), err)
}

// checkWrongToken joins with a token that the cloud does not know.
func (d *demo) checkWrongToken(ctx context.Context) error {
	err := d.joinWithWrongToken(ctx)
	if err == nil {
		return errors.New("the cloud let a node in with a wrong token")
	}
	if !isUnauthenticated(err) {
		return fmt.Errorf("the cloud refused for another reason: %w", err)
	}
	return nil
}

// statusError is an HTTP answer other than 200.
type statusError struct {
	code int
	body string
}

func (e *statusError) Error() string { return fmt.Sprintf("HTTP %d: %s", e.code, e.body) }

// get returns the body of a page, whole.
func get(ctx context.Context, client *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	if resp.StatusCode != http.StatusOK {
		return string(body), &statusError{resp.StatusCode, string(body)}
	}
	return string(body), nil
}
