package demo

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
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/reload"
	"tunnel.example/tunnel/pkg/stream"
)

// check is one proof that the tunnel works. Its name is part of the output of demo --once.
type check struct {
	name string
	run  func(ctx context.Context) error
}

// checkAll runs every check, prints a line for each, and returns how many failed.
func (d *demo) checkAll(ctx context.Context) (failed int) {
	checks := []check{
		{"tcp", d.checkTCP},
		{"https-passthrough", d.checkPassthrough},
		{"https-terminate", d.checkTerminate},
		{"https-caller-without-certificate-refused", d.checkStranger},
		{"unknown-node-refused", d.checkUnknownNode},
		{"wrong-token-refused", d.checkWrongToken},
		{"join-by-token", d.checkJoin},
	}
	if d.flags.Target != "" {
		checks = append(checks, check{"own-target", d.checkOwn})
	}
	for _, c := range checks {
		cctx, cancel := context.WithTimeout(ctx, 30*time.Second)
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
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", d.tcp))
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

// ownQuiet is how long a connection to --target must stay open. A target may be silent, so
// a reset within this time is the only sign of a target that the edge cannot reach.
const ownQuiet = 3 * time.Second

// checkOwn connects to --target through the tunnel.
func (d *demo) checkOwn(ctx context.Context) error {
	unreachable := func(err error) error {
		return fmt.Errorf("%s cannot be reached from this machine: %w", d.flags.Target, err)
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", d.own))
	if err != nil {
		return unreachable(err) // a reset may arrive before connect returns
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

// client returns an HTTP client whose connections all go to the HTTPS front door. A
// serverName that is a DNS name is sent as SNI; an IP address never is (RFC 6066 section 3).
// With certificate the client shows the certificate of kube-apiserver.
func (d *demo) client(serverName string, certificate bool) (*http.Client, error) {
	quiet := slog.New(slog.DiscardHandler) // the files do not change
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
	door := fmt.Sprintf("127.0.0.1:%d", d.https)
	return &http.Client{Transport: &http.Transport{
		TLSClientConfig: cfg,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, door)
		},
		DisableKeepAlives: true,
	}}, nil
}

// checkPassthrough sends the node's name as SNI, so the cloud passes TLS through to the service.
func (d *demo) checkPassthrough(ctx context.Context) error {
	client, err := d.client(nodeName, false)
	if err != nil {
		return err
	}
	return wantPage(get(ctx, client, fmt.Sprintf("https://%s:%d/", nodeName, d.https)))
}

// checkTerminate calls without SNI, as kube-apiserver does for exec and attach.
func (d *demo) checkTerminate(ctx context.Context) error {
	client, err := d.client("127.0.0.1", true) // no SNI, so the cloud terminates TLS
	if err != nil {
		return err
	}
	return wantPage(get(ctx, client, fmt.Sprintf("https://%s:%d/", nodeName, d.https)))
}

func wantPage(body string, err error) error {
	const want = "hello from node " + nodeName
	if err != nil {
		return err
	}
	if len(body) < len(want) || body[:len(want)] != want {
		return fmt.Errorf("got %q, want %q…", body, want)
	}
	return nil
}

// checkStranger calls without SNI and without a client certificate. The cloud must refuse.
func (d *demo) checkStranger(ctx context.Context) error {
	client, err := d.client("127.0.0.1", false)
	if err != nil {
		return err
	}
	if body, err := get(ctx, client, fmt.Sprintf("https://%s:%d/", nodeName, d.https)); err == nil {
		return fmt.Errorf("a caller without a client certificate got %q", body)
	}
	return nil
}

// checkUnknownNode asks for a node that has no session.
func (d *demo) checkUnknownNode(ctx context.Context) error {
	client, err := d.client("127.0.0.1", true)
	if err != nil {
		return err
	}
	body, err := get(ctx, client, fmt.Sprintf("https://nobody:%d/", d.https))
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

// get returns the whole body of a page.
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

// joinWithWrongToken tries to join as the demo's node with a new token, until the cloud has
// answered once.
func (d *demo) joinWithWrongToken(ctx context.Context) error {
	ca, err := reload.NewPool(d.path("ca.crt"), slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	conf := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: ca.Pool(), ServerName: cloudName}
	client, err := stream.NewClient(stream.ClientConfig{
		Address: fmt.Sprintf("127.0.0.1:%d", d.grpc),
		TLS:     func() *tls.Config { return conf },
		Node:    nodeName,
		Token:   auth.StaticToken(auth.NewToken()),
		Log:     slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		client.Run(ctx) //nolint:errcheck // Ready returns the reason
	}()
	defer func() {
		cancel()
		<-ended
	}()
	for {
		err := client.Ready()
		if err == nil || isUnauthenticated(err) || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func isUnauthenticated(err error) bool { return status.Code(err) == codes.Unauthenticated }
