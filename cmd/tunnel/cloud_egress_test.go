package main

import (
	"crypto/tls"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/reload"
)

// The egress front door admits a caller over TLS whose certificate clientca has signed, if
// clientnames has its name.
func TestEgressCallers(t *testing.T) {
	ca, otherCA := testca.New(t, "callers"), testca.New(t, "callers")
	dir := t.TempDir()
	cert, key, err := ca.Issue(auth.Leaf{CommonName: "egress", Server: true})
	if err != nil {
		t.Fatal(err)
	}
	path := make(map[string]string)
	for name, pem := range map[string][]byte{"ca": ca.CertPEM(), "cert": cert, "key": key} {
		path[name] = filepath.Join(dir, name)
		if err := os.WriteFile(path[name], pem, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	caller := func(ca testca.CA, name string) []tls.Certificate {
		return []tls.Certificate{ca.Pair(t, auth.Leaf{CommonName: name, Client: true})}
	}
	for name, tc := range map[string]struct {
		names  []string // clientnames
		caller []tls.Certificate
		may    bool
	}{
		"named":                {[]string{"x", "kube-apiserver"}, caller(ca, "kube-apiserver"), true},
		"another name":         {[]string{"kube-apiserver"}, caller(ca, "another"), false},
		"a part of the name":   {[]string{"kube-apiserver"}, caller(ca, "kube"), false},
		"no name":              {[]string{"kube-apiserver"}, caller(ca, ""), false},
		"named, of another CA": {[]string{"kube-apiserver"}, caller(otherCA, "kube-apiserver"), false},
		"no certificate":       {[]string{"kube-apiserver"}, nil, false},
		"nobody is named":      {nil, caller(ca, "another"), false},
	} {
		server, err := egressCallers(conf.Egress{
			Cert: path["cert"], Key: path["key"], ClientCA: path["ca"],
		}, func() []string { return tc.names }, reload.NewFiles(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		here, there := net.Pipe()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			defer there.Close()
			cfg := &tls.Config{InsecureSkipVerify: true, Certificates: tc.caller} // only the caller matters
			c := tls.Client(there, cfg)
			if c.Handshake() == nil {
				c.Read(make([]byte, 1)) // the server's verdict, or its end
			}
		}()
		s := tls.Server(here, server)
		err = s.Handshake()
		here.Close()
		<-ended
		if (err == nil) != tc.may {
			t.Errorf("%s: %v", name, err)
		}
	}
}
