package faults

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

// seenWithin is from a change of a certificate file to the first connection that meets it. One second is promised; the
// machine may be busy with other tests.
const seenWithin = 15 * time.Second

// mount puts files into the pair's folder as a kubelet puts a Secret into a pod: the
// files are links through ..data, and one rename of ..data replaces them all.
func (p *pair) mount(version string, files map[string][]byte) {
	p.t.Helper()
	must := func(err error) {
		p.t.Helper()
		if err != nil {
			p.t.Fatal(err)
		}
	}
	must(os.Mkdir(p.Path(version), 0o700))
	for name, content := range files {
		must(os.WriteFile(filepath.Join(p.Path(version), name), content, 0o600))
	}
	must(os.Symlink(version, p.Path("..data_tmp")))
	must(os.Rename(p.Path("..data_tmp"), p.Path("..data")))
	for name := range files {
		if _, err := os.Readlink(p.Path(name)); err != nil {
			must(os.Symlink(filepath.Join("..data", name), p.Path(name+".link")))
			must(os.Rename(p.Path(name+".link"), p.Path(name)))
		}
	}
}

// replace writes one file, whole.
func (p *pair) replace(name string, content []byte) {
	p.t.Helper()
	if err := errors.Join(os.WriteFile(p.Path(name+".new"), content, 0o600),
		os.Rename(p.Path(name+".new"), p.Path(name))); err != nil {
		p.t.Fatal(err)
	}
}

// edit replaces a text in a configuration file.
func (p *pair) edit(name, old, with string) {
	p.t.Helper()
	text, err := os.ReadFile(p.Path(name))
	if err != nil || !bytes.Contains(text, []byte(old)) {
		p.t.Fatalf("%s does not hold %q (%v)", name, old, err)
	}
	p.replace(name, bytes.ReplaceAll(text, []byte(old), []byte(with)))
}

// issue returns a new certificate and its key.
func issue(t *testing.T, ca *auth.CA, leaf auth.Leaf) (cert, key []byte) {
	t.Helper()
	cert, key, err := ca.Issue(leaf)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

// serialOf returns the number of a certificate in PEM.
func serialOf(t *testing.T, cert []byte) *big.Int {
	t.Helper()
	block, _ := pem.Decode(cert)
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return c.SerialNumber
}

// shows checks which certificate a port shows to a new connection.
func shows(address string, serial *big.Int) error {
	conn, err := net.DialTimeout("tcp", address, atOnce)
	if err != nil {
		return err
	}
	defer conn.Close()
	// Who it is of is not the question, and the server need not like us.
	tc := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	if err := tc.Handshake(); err != nil {
		return err
	}
	if got := tc.ConnectionState().PeerCertificates[0].SerialNumber; got.Cmp(serial) != 0 {
		return fmt.Errorf("%s shows certificate %x, want %x", address, got, serial)
	}
	return nil
}

// readyz returns the page of a health port.
func readyz(health string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), atOnce)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+health+"/readyz", nil)
	if err != nil {
		return "", err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("HTTP %d", resp.StatusCode)
	}
	return string(page), err
}

// TestRenewedCertificates swaps all certificates of the cloud in the middle of traffic,
// several times: nobody notices, and new connections see the new ones.
func TestRenewedCertificates(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	secret := func() map[string][]byte {
		files := make(map[string][]byte)
		for name, leaf := range map[string]auth.Leaf{
			"cloud":  rig.CloudLeaf(),
			"https":  {CommonName: "tunnel", DNSNames: []string{rig.Node}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Server: true},
			"client": {CommonName: "kube-apiserver-kubelet-client", Client: true},
		} {
			files[name+".crt"], files[name+".key"] = issue(t, p.CA(), leaf)
		}
		return files
	}
	p.mount("..0", secret())
	p.start()
	traffic := p.startTraffic()
	defer traffic.stop()
	began := time.Now()
	for i := range 3 {
		files := secret()
		p.mount(fmt.Sprintf("..%d", i+1), files)
		took := testkit.Within(t, seenWithin, "the new certificates are shown", func() error {
			return errors.Join(
				shows(p.GRPC(), serialOf(t, files["cloud.crt"])),
				shows(p.HTTPSDoor(), serialOf(t, files["https.crt"])))
		})
		t.Logf("seen %s after the swap", took.Round(time.Millisecond))
		for _, try := range []func(context.Context, func()) error{p.tryHTTPS(false), p.tryHTTPS(true)} {
			if err := try(t.Context(), nil); err != nil {
				t.Error(err)
			}
		}
	}
	for _, k := range traffic.kinds {
		for _, a := range k.since(began) {
			if a.err != nil && !errors.Is(a.err, rig.ErrLate) {
				t.Errorf("%s: %v", k.name, a.err)
			}
		}
	}
	traffic.stop()
	if n, err := metric(p.CloudHealth(), "tunnel_sessions_established_total"); err != nil || n != 1 {
		t.Errorf("there have been %v sessions (%v), want the one", n, err)
	}
	for _, use := range []string{"mode.cloud.stream.server", "mode.cloud.https", "mode.cloud.https clientca",
		"mode.cloud.https.kubelet", "mode.cloud.https.kubelet ca"} {
		until, err := metric(p.CloudHealth(), fmt.Sprintf("tunnel_certificate_expiration_timestamp_seconds{use=%q}", use))
		if left := time.Until(time.Unix(int64(until), 0)); err != nil || left < time.Hour {
			t.Errorf("%s: expires in %s, %v", use, left, err)
		}
	}
	p.edge.Kill()
	p.startEdge()
	p.waitReady(patience)
}

// TestAnotherAuthority changes the authority of the cloud's certificate, and then the
// one that the edge trusts. Neither starts again, except that the cloud ends the edge's
// session that way.
func TestAnotherAuthority(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.edit("edge.toml", `cert = "ca.crt"`, `cert = "trusted.crt"`)
	p.replace("trusted.crt", p.CA().CertPEM())
	p.start()
	other, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	cert, key := issue(t, other, rig.CloudLeaf())
	p.mount("..1", map[string][]byte{"cloud.crt": cert, "cloud.key": key})
	testkit.Within(t, seenWithin, "the new certificate is shown",
		func() error { return shows(p.GRPC(), serialOf(t, cert)) })
	if err = tryEcho(t.Context(), p.Door("echo")); err != nil {
		t.Errorf("the session that is there is not of that certificate, and does not go on: %v", err)
	}
	p.cloud.Kill()
	p.startCloud()
	testkit.Within(t, backWithin, "the edge does not trust it", func() error {
		if !strings.Contains(p.EdgeLog.String(), "certificate signed by unknown authority") {
			return errors.New("its log does not say so")
		}
		return nil
	})
	p.replace("trusted.crt", other.CertPEM())
	p.waitReady(20*time.Second + atOnce)
	if err := tryEcho(t.Context(), p.Door("echo")); err != nil {
		t.Error(err)
	}
}

// TestCallersOfAnotherAuthority changes clientca.
func TestCallersOfAnotherAuthority(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.edit("cloud.toml", `clientca = "ca.crt"`, `clientca = "callers.crt"`)
	p.replace("callers.crt", p.CA().CertPEM())
	p.start()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(p.CA().CertPEM())
	// A caller remembers TLS sessions, as kube-apiserver does.
	caller := func(ca *auth.CA) *tls.Config {
		pair := testca.CA{CA: ca}.Pair(t, auth.Leaf{CommonName: "kube-apiserver-kubelet-client", Client: true})
		return &tls.Config{
			// an address is never sent as SNI
			RootCAs: roots, ServerName: "127.0.0.1", ClientSessionCache: tls.NewLRUClientSessionCache(10),
			GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil },
		}
	}
	client := func(cfg *tls.Config) *http.Client {
		transport := &http.Transport{TLSClientConfig: cfg,
			DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, network, p.HTTPSDoor())
			}}
		t.Cleanup(transport.CloseIdleConnections)
		return &http.Client{Transport: transport, Timeout: hangs}
	}
	call := func(c *http.Client) error {
		resp, err := c.Get("https://" + rig.Node + "/")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err == nil && !bytes.Equal(body, page()) {
			err = fmt.Errorf("HTTP %d: %s", resp.StatusCode, body)
		}
		return err
	}
	other, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	old, next := caller(p.CA()), caller(other)
	open := client(old)
	if err := call(open); err != nil {
		t.Fatal(err)
	}
	if call(client(next)) == nil {
		t.Fatal("a caller of another authority is let in")
	}

	p.replace("callers.crt", other.CertPEM())
	testkit.Within(t, seenWithin, "the new caller is let in", func() error { return call(client(next)) })
	for range 3 {
		err := call(client(old))
		if err == nil {
			t.Error("the old caller is let in on a new connection")
		} else if !strings.Contains(err.Error(), "tls:") {
			t.Errorf("the old caller is told %v", err)
		}
	}
	if err := call(open); err != nil {
		t.Errorf("on the connection that was open before: %v", err)
	}
}

// TestBadCertificateFiles writes what cannot be used over a certificate that is in use.
func TestBadCertificateFiles(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.start()
	cert, err := os.ReadFile(p.Path("cloud.crt"))
	if err != nil {
		t.Fatal(err)
	}
	before, noted := serialOf(t, cert), "[~]certificates mode.cloud.stream.server: its files are bad"
	cert, key := issue(t, p.CA(), rig.CloudLeaf())
	faults := 0
	for what, content := range map[string][]byte{
		"a certificate before its key": cert, "half a certificate": cert[:len(cert)/2], "no certificate": key, "nothing": nil,
	} {
		p.replace("cloud.crt", content)
		faults++
		testkit.Within(t, atOnce, what+" is noted", func() error {
			page, err := readyz(p.CloudHealth())
			if err == nil && !strings.Contains(page, noted) {
				err = fmt.Errorf("/readyz says %q", page)
			}
			if n := strings.Count(p.CloudLog.String(), "certificate files are bad"); err == nil && n != faults {
				err = fmt.Errorf("%d lines in the log, want %d", n, faults)
			}
			return errors.Join(err, shows(p.GRPC(), before))
		})
	}
	p.edge.Kill()
	p.startEdge()
	p.waitReady(patience)

	p.replace("cloud.crt", cert)
	p.replace("cloud.key", key)
	testkit.Within(t, atOnce, "the pair that fits is in use", func() error {
		page, err := readyz(p.CloudHealth())
		if err == nil && strings.Contains(page, "[~]") {
			err = fmt.Errorf("/readyz says %q", page)
		}
		return errors.Join(err, shows(p.GRPC(), serialOf(t, cert)))
	})
	// once more while both were replaced
	if n := strings.Count(p.CloudLog.String(), "certificate files are bad"); n > faults+1 {
		t.Errorf("%d lines in the log about %d faults", n, faults)
	}
}
