package setup

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
)

// This file checks the certificate files of a cloud against each other, before the cloud
// listens.

// readCertificates reads the certificates of a PEM file. Its errors begin with key, the key of
// the configuration that names the file.
func readCertificates(key, file string) ([]*x509.Certificate, error) {
	text, _, err := tunnel.ReadFile(file, tunnel.MaxFile)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	all, err := auth.ParseCertificates(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", key, file, err)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: %s holds no certificate: it must be PEM, with BEGIN CERTIFICATE", key, file)
	}
	return all, nil
}

// rootOf returns the CA of cas that a server's chain leads to. It fails if the chain is not valid for a server named
// host; host "" allows any name. A join token pins this CA.
func rootOf(chain, cas []*x509.Certificate, host string) (*x509.Certificate, error) {
	roots, between := x509.NewCertPool(), x509.NewCertPool()
	for _, c := range cas {
		roots.AddCert(c)
	}
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	chains, err := chain[0].Verify(x509.VerifyOptions{DNSName: host, Roots: roots, Intermediates: between})
	if err != nil {
		return nil, err
	}
	return chains[0][len(chains[0])-1], nil
}

// signerOf returns the CA of cas that a chain leads to by its signatures; nil if there is none. It ignores the dates
// and the usages of the certificates.
func signerOf(chain, cas []*x509.Certificate) *x509.Certificate {
	at, left := chain[0], slices.Clone(chain[1:])
	for {
		signs := func(ca *x509.Certificate) bool { return at.Equal(ca) || at.CheckSignatureFrom(ca) == nil }
		if i := slices.IndexFunc(cas, signs); i >= 0 {
			return cas[i]
		}
		i := slices.IndexFunc(left, signs)
		if i < 0 {
			return nil
		}
		at = left[i]
		left = slices.Delete(left, i, i+1)
	}
}

// rootProblem explains err, an error of rootOf: which file is wrong, and what to do. cert is the path of the chain, and
// ca is the path of the CAs. err must not be an x509.HostnameError.
func rootProblem(err error, cert, ca string) error {
	if late, problem := stream.OutOfDate(err); late != nil {
		whose, file := "the cloud's certificate", cert
		if late.IsCA {
			whose, file = "the certificate of the cloud's CA", ca
		}
		return fmt.Errorf("%s %s (%w): replace %s, or correct this machine's clock", whose, problem, err, file)
	}
	if e, ok := errors.AsType[x509.CertificateInvalidError](err); ok && e.Reason == x509.IncompatibleUsage {
		return fmt.Errorf("%s is not for servers (%w): replace it by one with the extended key usage serverAuth", cert, err)
	}
	return fmt.Errorf("%s is not signed by %s, which is cloudca in [mode.cloud.join] (%w): "+
		"name the CA that signed it", cert, ca, err)
}

// cloudRoot returns the CA that join tokens pin. An error says why no edge could join by a
// token.
func cloudRoot(c *conf.Cloud) (*x509.Certificate, error) {
	host, _, err := net.SplitHostPort(c.Join.Address)
	if err != nil {
		return nil, err // unreachable: conf has checked the address
	}
	chain, err := readCertificates("mode.cloud.stream.server: cert", c.Server.Cert)
	if err != nil {
		return nil, err
	}
	cas, err := readCertificates("mode.cloud.join: cloudca", c.Join.CloudCA)
	if err != nil {
		return nil, err
	}
	root, err := rootOf(chain, cas, host)
	if err == nil {
		return root, nil
	}
	if _, ok := errors.AsType[x509.HostnameError](err); ok {
		return nil, fmt.Errorf("%s is not made out to %s, which is address in [mode.cloud.join], "+
			"so no edge could join (%w): have it made out to that name, or correct address", c.Server.Cert, host, err)
	}
	return nil, fmt.Errorf("no edge could join: %w", rootProblem(err, c.Server.Cert, c.Join.CloudCA))
}

// CheckTrust refuses certificate authorities (CAs) that could sign more than they are for. With a certificate that the
// CA of the nodes has signed, nobody must pass for a replica or for a caller of a front door.
func CheckTrust(c *conf.Cloud) (warnings []string, err error) {
	j := c.Join
	if j.Address != "" && j.CloudCA != "" {
		if _, rootErr := cloudRoot(c); rootErr != nil {
			warnings = append(warnings, rootErr.Error())
		}
	}
	if j.CA == "" {
		return warnings, nil
	}
	nodes, err := readCertificates("mode.cloud.join: ca", j.CA)
	if err != nil {
		return nil, err
	}
	for _, ca := range nodes {
		if !ca.IsCA {
			return nil, fmt.Errorf("mode.cloud.join: ca: %s is not an authority's certificate (%s): "+
				"name the one that signs nodes' certificates", j.CA, ca.Subject)
		}
		if left := time.Until(ca.NotAfter); left < expiryWarning {
			warnings = append(warnings, fmt.Sprintf("%s, which signs nodes' certificates, ends at %s: "+
				"replace it before that, with the old one beside the new one in the file for a while",
				j.CA, ca.NotAfter.Format(time.DateOnly)))
		}
	}
	if err = checkPeersTrust(c, nodes); err != nil {
		return nil, err
	}
	httpsNames := slices.Clone(c.HTTPS.ClientNames)
	for _, caller := range c.HTTPS.Callers {
		httpsNames = append(httpsNames, caller.Name)
	}
	for _, door := range []callers{
		{c.HTTPS.Terminates(), "mode.cloud.https", c.HTTPS.ClientCA, httpsNames, "every kubelet"},
		{c.Egress.UsesTLS(), "mode.cloud.egress", c.Egress.ClientCA, c.Egress.ClientNames, "every node"},
	} {
		warning, err := door.checkTrust(c, nodes)
		if err != nil {
			return nil, err
		}
		if warning != "" {
			warnings = append(warnings, warning)
		}
	}
	return warnings, nil
}

// CheckTrust begins to warn expiryWarning before the nodes' CA expires.
const expiryWarning = 30 * 24 * time.Hour

// checkPeersTrust refuses a CA that signs both nodes and replicas.
func checkPeersTrust(c *conf.Cloud, nodes []*x509.Certificate) error {
	if !c.Peers.Configured() {
		return nil
	}
	peers, err := readCertificates("mode.cloud.stream.peers: ca", c.Peers.CA)
	if err != nil || !common(nodes, peers) {
		return err
	}
	return fmt.Errorf("mode.cloud.join: ca: %s signs the replicas' certificates as well "+
		"(ca in [mode.cloud.stream.peers]), and the authority of nodes must not be able to make replicas: "+
		"name an authority of its own, such as the nodes-ca.crt of tunnel init", c.Join.CA)
}

// callers are the callers of a front door that identifies them by a client certificate.
type callers struct {
	used            bool   // the front door is configured, with client certificates
	table, clientCA string // the table of the configuration, and its clientca
	clientNames     []string
	reach           string // what callers may call, for messages
}

// checkTrust refuses a clientname that is a node's if one CA signs nodes and callers. It warns
// if only names tell the callers of such a CA from nodes.
func (d callers) checkTrust(c *conf.Cloud, nodes []*x509.Certificate) (warning string, err error) {
	if !d.used {
		return "", nil
	}
	cas, err := readCertificates(d.table+": clientca", d.clientCA)
	if err != nil || !common(nodes, cas) {
		return "", err
	}
	isNode := func(name string) bool { return strings.HasPrefix(name, auth.NodePrefix) }
	if i := slices.IndexFunc(d.clientNames, isNode); i >= 0 {
		return "", fmt.Errorf("%s: clientnames, callers: %q is the name of a node, and its certificate comes from "+
			"clientca: a node could call %s; remove the name", d.table, d.clientNames[i], d.reach)
	}
	if c.Join.Kubernetes { // the cluster's CA signs for kube-apiserver, too, through another signer
		return "", nil
	}
	return fmt.Sprintf("%s signs nodes' certificates, and is clientca in [%s]: "+
		"with cakey this cloud could make callers of %s; name an authority of its own in [mode.cloud.join]",
		c.Join.CA, d.table, d.reach), nil
}

// common reports whether two lists share a CA. The key decides: a CA may have several
// certificates.
func common(a, b []*x509.Certificate) bool {
	return slices.ContainsFunc(a, func(x *x509.Certificate) bool {
		return slices.ContainsFunc(b, func(y *x509.Certificate) bool {
			return slices.Equal(x.RawSubjectPublicKeyInfo, y.RawSubjectPublicKeyInfo)
		})
	})
}
