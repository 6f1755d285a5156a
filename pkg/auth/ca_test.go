package auth

import (
	"crypto/x509"
	"net"
	"testing"
	"time"
)

func TestCA(t *testing.T) {
	ca, err := NewCA("test", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca.CertPEM()) {
		t.Fatal("CertPEM is no certificate")
	}
	issue := func(l Leaf) *x509.Certificate {
		t.Helper()
		return pairOf(t, ca, l).Leaf
	}
	server := issue(Leaf{
		CommonName: "cloud", DNSNames: []string{"tunnel.cloud.io"}, IPs: []net.IP{net.IPv6loopback},
		Server: true, TTL: time.Minute,
	})
	client := issue(Leaf{CommonName: "caller", Organization: []string{"system:masters"}, Client: true})

	for _, name := range []string{"tunnel.cloud.io", "::1"} {
		if _, err := server.Verify(x509.VerifyOptions{Roots: roots, DNSName: name}); err != nil {
			t.Errorf("server certificate for %s: %v", name, err)
		}
	}
	asClient := x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	if _, err := client.Verify(asClient); err != nil {
		t.Errorf("client certificate: %v", err)
	}
	if _, err := server.Verify(asClient); err == nil {
		t.Error("a server's certificate serves a client")
	}
	if _, err := client.Verify(x509.VerifyOptions{Roots: roots}); err == nil {
		t.Error("a client's certificate serves a server")
	}
	if server.SerialNumber.Cmp(client.SerialNumber) == 0 || server.SerialNumber.BitLen() < 64 {
		t.Error("serials are not random")
	}
	if !server.NotBefore.Before(time.Now().Add(-30 * time.Second)) {
		t.Error("a slow clock would not accept the certificate yet")
	}
	if server.NotAfter.After(time.Now().Add(time.Minute)) || !client.NotAfter.Equal(ca.cert.NotAfter) {
		t.Errorf("lifetimes: server until %v, client until %v", server.NotAfter, client.NotAfter)
	}
	if long := issue(Leaf{Server: true, TTL: 100 * time.Hour}); long.NotAfter.After(ca.cert.NotAfter) {
		t.Error("a certificate outlives its CA")
	}
	if _, _, err := ca.Issue(Leaf{CommonName: "anything"}); err == nil {
		t.Error("a certificate without a usage was issued")
	}
}
