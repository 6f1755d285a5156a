package main

import (
	"crypto/x509"
	"os"
	"os/exec"
	"testing"
)

// TestPublicCAs: on a machine without a file of CAs, such as the container image, the program trusts the public CAs
// that it holds: a server wss:// or a proxy https:// with a public certificate needs no configuration.
func TestPublicCAs(t *testing.T) {
	if os.Getenv("TUNNEL_TEST_NO_CAS") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestPublicCAs$")
		cmd.Env = append(os.Environ(), "TUNNEL_TEST_NO_CAS=1", "SSL_CERT_FILE=/dev/null", "SSL_CERT_DIR=/dev/null")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		t.Fatal(err)
	}
	if pool.Equal(x509.NewCertPool()) {
		t.Error("the program trusts no CA")
	}
}
