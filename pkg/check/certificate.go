package check

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/setup"
	"tunnel.example/tunnel/pkg/tunnel"
)

// setClock is the next step if a clock is wrong.
const setClock = "set the clock: timedatectl set-ntp true"

// when returns a time for people.
func when(t time.Time) string { return t.UTC().Format("2006-01-02 15:04 UTC") }

// readCertificates returns the certificates of a PEM file, or why there are none.
func readCertificates(file string) ([]*x509.Certificate, Result) {
	text, _, err := tunnel.ReadFile(file, tunnel.MaxFile)
	if err != nil {
		do := "create the file, or correct the path in the configuration"
		if errors.Is(err, fs.ErrPermission) {
			do = "run this as the user of the daemon, such as with sudo"
		}
		return nil, Fail(do, "%v", err)
	}
	certs, err := auth.ParseCertificates(text)
	if err == nil && len(certs) == 0 {
		err = errors.New("it holds no certificate in PEM form")
	}
	if err != nil {
		return nil, Fail("replace the file", "%s: %v", file, err)
	}
	return certs, Result{}
}

// renewal says who replaces a certificate before it expires. Its value is a fraction of the certificate's lifetime: if
// less than this fraction is left, the certificate should have been replaced.
type renewal float64

const (
	byItself renewal = 1. / 6 // a program renews the certificate after two thirds of its lifetime
	byHand   renewal = 1. / 4 // an operator renews the certificate
)

// soon is the longest time before the end of a certificate at which validity warns.
const soon = 30 * 24 * time.Hour

// validity checks the dates of a certificate, which its texts call what. do is the next step when it expires.
func validity(what string, cert *x509.Certificate, by renewal, do string) Result {
	now := time.Now()
	left := cert.NotAfter.Sub(now)
	life := float64(cert.NotAfter.Sub(cert.NotBefore))
	switch {
	case now.Before(cert.NotBefore):
		return Fail(setClock+"; if it is right, the certificate was made by a machine whose clock is ahead",
			"%s is not valid before %s, and this machine's clock says %s", what, when(cert.NotBefore), when(now))
	case left < 0:
		return Fail(do+"; if this machine's clock is wrong, "+setClock, "%s expired on %s, and this machine's clock says %s",
			what, when(cert.NotAfter), when(now))
	case left < min(soon, time.Duration(life*float64(by))) && by == byItself:
		return Warn("the program that renews it has failed: read its log; else "+do,
			"%s ends in %s, on %s", what, setup.Spell(left.Truncate(time.Minute)), when(cert.NotAfter))
	case left < min(soon, time.Duration(life*float64(by))):
		return Warn(do, "%s ends in %s, on %s", what, setup.Spell(left.Truncate(time.Minute)), when(cert.NotAfter))
	}
	return OK("%s is valid until %s", what, when(cert.NotAfter))
}

// bundle checks the dates of all CAs in a file.
func bundle(file, do string) Result {
	certs, r := readCertificates(file)
	if certs == nil {
		return r
	}
	return anyValid(file, certs, do)
}

// anyValid checks the dates of certs, the CAs of a file. One valid CA is enough: after a replacement, the old CA may
// stay in the file beside the new one.
func anyValid(file string, certs []*x509.Certificate, do string) Result {
	var best Result
	var texts []string
	for i, c := range certs {
		r := validity(fmt.Sprintf("CA %q", c.Subject), c, byHand, do)
		texts = append(texts, r.Text)
		if i == 0 || rank(r.State) < rank(best.State) {
			best = r
		}
	}
	best.Text = file + ": " + strings.Join(texts, "; ")
	return best
}

// rank orders states, the best first.
func rank(s State) int {
	switch s {
	case StateOK:
		return 0
	case StateWarn:
		return 1
	}
	return 2
}
