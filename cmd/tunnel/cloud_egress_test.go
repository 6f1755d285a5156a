package main

import (
	"crypto/tls"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tunnel/conf"
	"tunnel/pkg/auth"
	"tunnel/pkg/reload"
)

// The egress front door admits a caller over TLS whose certificate clientca has signed, if
// clientnames has its name.
func TestEgressCallers(t *testing.T) {
	var cas [2]*auth.CA
	for i := range cas {
		var err error
		if cas[i], err = auth.NewCA("callers", time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	issue := func(ca *auth.CA, l auth.Leaf) (cert, key []byte) {
		cert, key, err := ca.Issue(l)
		if err != nil {
			t.Fatal(err)
		}
		return cert, key
	}
	dir := t.TempDir()
	cert, key := issue(cas[0], auth.Leaf{CommonName: "egress", Server: true})
	path := make(map[string]string)
	for name, pem := range map[string][]byte{"ca": cas[0].CertPEM(), "cert": cert, "key": key} {
		path[name] = filepath.Join(dir, name)
		if err := os.WriteFile(path[name], pem, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	caller := func(ca *auth.CA, name string) []tls.Certificate {
		pair, err := tls.X509KeyPair(issue(ca, auth.Leaf{CommonName: name, Client: true}))
		if err != nil {
			t.Fatal(err)
		}
		return []tls.Certificate{pair}
	}
	for name, tc := range map[string]struct {
		names  []string // clientnames
		caller []tls.Certificate
		may    bool
	}{
		"named":                {[]string{"x", "kube-apiserver"}, caller(cas[0], "kube-apiserver"), true},
		"another name":         {[]string{"kube-apiserver"}, caller(cas[0], "another"), false},
		"a part of the name":   {[]string{"kube-apiserver"}, caller(cas[0], "kube"), false},
		"no name":              {[]string{"kube-apiserver"}, caller(cas[0], ""), false},
		"named, of another CA": {[]string{"kube-apiserver"}, caller(cas[1], "kube-apiserver"), false},
		"no certificate":       {[]string{"kube-apiserver"}, nil, false},
		"nobody is named":      {nil, caller(cas[0], "another"), false},
	} {
		server, err := egressCallers(conf.Egress{
			Cert: path["cert"], Key: path["key"], ClientCA: path["ca"], ClientNames: tc.names,
		}, reload.NewFiles(slog.New(slog.DiscardHandler)))
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
