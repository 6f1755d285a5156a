package https

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// For each new conn to a target the edge uses the certificate that is in its files at that time.
func TestEdgeCertificateChanges(t *testing.T) {
	ca := newCA(t, "ca")
	target := tlsTarget(t, "127.0.0.1:0", &tls.Config{
		Certificates: []tls.Certificate{*ca.issue("edge1", "edge1")},
		ClientAuth:   tls.RequireAnyClientCert,
	})
	cert := changingFrom(ca.issue("first"))
	e := NewEdge(dialTCP, cert.Load, nil)
	for _, name := range []string{"first", "second"} {
		cert.Store(ca.issue(name))
		c, err := e.Dial(t.Context(), tunnel.Request{Node: "edge1", Network: "tls", Addr: target})
		must(t, err)
		c.SetDeadline(time.Now().Add(patience))
		_, err = io.WriteString(c, "hello")
		must(t, err)
		must(t, c.(interface{ CloseWrite() error }).CloseWrite())
		if b, err := io.ReadAll(c); err != nil || string(b) != name+" hello" {
			t.Errorf("the target has met %q (%v), want %q", b, err, name)
		}
		c.Close()
	}
}

// changing is a certificate or a pool that the test replaces.
type changing[T any] struct{ atomic.Pointer[T] }

func changingFrom[T any](v *T) *changing[T] {
	c := new(changing[T])
	c.Store(v)
	return c
}

// A CA is removed from clientca, and the certificates are renewed. Open connections continue. New
// ones use the new state, even if the caller tries to resume an old session.
func TestCertificatesChange(t *testing.T) {
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		t.Run(tls.VersionName(version), func(t *testing.T) {
			var cert, kubelet *changing[tls.Certificate]
			var clientCA *changing[x509.CertPool]
			h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				io.WriteString(w, r.TLS.PeerCertificates[0].Subject.CommonName)
			})
			r := newRig(t, h, func(_ *rig, c *Config) {
				cert, clientCA = changingFrom(c.Certificate()), changingFrom(c.ClientCA())
				kubelet = changingFrom(c.Kubelet.Certificate())
				c.ClientNames = []string{DefaultClientName, "new caller"}
				c.Certificate, c.ClientCA, c.Kubelet.Certificate = cert.Load, clientCA.Load, kubelet.Load
			}).start()
			other := newCA(t, "other clients")
			caller := func(ca *testCA) *tls.Config {
				cfg := r.caller("127.0.0.1")
				cfg.Certificates = nil
				own := ca.issue(DefaultClientName)
				cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
					return own, nil
				}
				cfg.MinVersion, cfg.MaxVersion = version, version
				cfg.ClientSessionCache = tls.NewLRUClientSessionCache(10)
				return cfg
			}
			old := caller(r.clientCA)
			open := r.keep(old)
			res, body := open.ask("edge1", "/")
			wantStatus(t, res, body, 200, "tunnel-cloud")

			renewed := r.frontCA.issue("renewed", "127.0.0.1")
			cert.Store(renewed)
			clientCA.Store(other.pool)
			kubelet.Store(r.clientCA.issue("tunnel-cloud-renewed"))

			res, body = open.ask("edge1", "/")
			wantStatus(t, res, body, 200, "tunnel-cloud")
			refused := func() error {
				c := tls.Client(r.tcp(), old)
				if _, err := fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: edge1\r\n\r\n"); err != nil {
					return err
				}
				_, err := c.Read(make([]byte, 1))
				return err
			}
			for range 2 {
				if refused() == nil {
					t.Error("a caller of an authority that has left clientca is let in")
				}
			}
			cfg := caller(other)
			cfg.VerifyConnection = func(s tls.ConnectionState) error {
				if s.DidResume || s.PeerCertificates[0].Subject.CommonName != "renewed" {
					return fmt.Errorf("resumed %v, certificate %v", s.DidResume, s.PeerCertificates[0].Subject)
				}
				return nil
			}
			// Another name is another hop, and so gets a new conn to the kubelet.
			certs := other.issue("new caller")
			cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return certs, nil }
			for range 2 {
				res, body = get(t, r.client(cfg, false), "https://edge1/")
				wantStatus(t, res, body, 200, "tunnel-cloud-renewed")
			}
		})
	}
}
