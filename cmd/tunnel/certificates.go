package main

import (
	"cmp"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/dial"
	"tunnel.example/tunnel/pkg/setup"
	"tunnel.example/tunnel/pkg/tunnel"
)

// readCAs describes the CAs of a file; "": there are none.
func readCAs(file string) ([]api.Certificate, error) {
	if file == "" {
		return nil, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	certs, err := auth.ParseCertificates(text)
	if err != nil {
		err = fmt.Errorf("%s: %w", file, err)
	}
	var all []api.Certificate
	for _, c := range certs {
		all = append(all, describeCA(c))
	}
	return all, err
}

// describeCA describes a CA.
func describeCA(c *x509.Certificate) api.Certificate {
	out := api.NewCertificate(tunnel.CertificateOf(c))
	out.ID = auth.CAID(c)
	return out
}

// tell returns what the cloud tells edges with each certificate.
func (w *cloudWiring) tell() auth.TellEdges {
	var t auth.TellEdges
	if servers := w.doors.servers.Load(); servers != nil {
		t.Servers = *servers
	}
	t.CloudCAs = w.readToTell(w.conf.Join.CloudCA, func(text []byte) ([]byte, error) {
		cas, err := auth.ParseCloudCAs(text)
		if err != nil {
			return nil, err
		}
		return cas.PEM(), nil
	})
	t.NodeCAs = w.readToTell(w.conf.Join.CA, func(text []byte) ([]byte, error) {
		cas, err := auth.ParseNodeCAs(text)
		return cas.PEM(), err
	})
	return t
}

// readToTell reads the CAs of a file for edges. The file may also have a key, so only what parse returns is told.
// Without a file, or if an edge would not accept it, readToTell returns nil.
func (w *cloudWiring) readToTell(file string, parse func([]byte) ([]byte, error)) []byte {
	if file == "" {
		return nil
	}
	text, err := os.ReadFile(file)
	if err == nil {
		text, err = parse(text)
	}
	if err != nil {
		w.log.Error("edges are not told the CAs of a file", "target", file, "err", err)
		return nil
	}
	return text
}

// trusts records in the inventory by which CAs a node verifies the cloud. cas are values of auth.CAID.
func (w *cloudWiring) trusts(node tunnel.NodeName, cas []string) {
	if w.inventory != nil {
		w.inventory.Trusts(node, cas)
	}
}

// held returns the certificates of this replica.
func (w *cloudWiring) held() api.Held {
	j, own := w.conf.Join, api.NewCertificate(tunnel.CertificateOf(w.pair.Certificate().Leaf))
	h := api.Held{Own: &own}
	var errs [3]error
	h.CloudCAs, errs[0] = readCAs(j.CloudCA)
	h.NodeCAs, errs[1] = readCAs(j.CA)
	switch {
	case j.Kubernetes:
		h.Signer = "Kubernetes, " + cmp.Or(j.SignerName, "kubernetes.io/kube-apiserver-client")
	case j.CAKey != "":
		var signer *auth.CA
		if signer, errs[2] = auth.ReadCA(j.CA, j.CAKey); errs[2] == nil {
			h.Signer = tunnel.CertificateOf(signer.Certificate()).Name
		}
	}
	if err := errors.Join(errs[:]...); err != nil {
		h.Err = err.Error()
	}
	return h
}

// held returns the certificates of this edge.
func (w *edgeWiring) held() api.Held {
	var h api.Held
	if w.proof.pair != nil {
		leaf := w.proof.pair.Certificate().Leaf
		// Right after a renewal, the pair has not read the file yet.
		if w.renewal != nil {
			if c := w.renewal.Current(); c != nil && !c.NotBefore.Before(leaf.NotBefore) {
				leaf = c
			}
		}
		own := api.NewCertificate(tunnel.CertificateOf(leaf))
		h.Own = &own
	}
	if w.renewal != nil {
		h.RenewAt = w.renewal.At().UTC()
	}
	if w.told != nil {
		for _, ca := range w.told.Trusted() {
			h.CloudCAs = append(h.CloudCAs, describeCA(ca))
		}
		for _, ca := range w.told.NodeCAs() {
			h.NodeCAs = append(h.NodeCAs, describeCA(ca))
		}
		return h
	}
	var err error
	if h.CloudCAs, err = readCAs(w.conf.CA); err != nil {
		h.Err = err.Error()
	}
	return h
}

// toldFile returns the path of the file in which an edge keeps what it has accepted from its cloud: auth.Told.
func toldFile(e *conf.Edge) string { return filepath.Join(filepath.Dir(e.NodeCert), setup.ToldFile) }

// trusts returns the CAs by which this edge verifies the cloud.
func (w *edgeWiring) trusts() []string {
	if w.told != nil {
		return w.told.IDs()
	}
	var ids []string
	cas, _ := readCAs(w.conf.CA) // after an error, the edge tells the cloud no CAs
	for _, ca := range cas {
		ids = append(ids, ca.ID)
	}
	return ids
}

// take stores the CAs and the addresses that the cloud told with a certificate. After a change of the CAs, the edge
// renews its certificate once more, because with that request it tells the cloud which CAs it trusts.
func (w *edgeWiring) take(told auth.TellEdges, chain []*x509.Certificate) {
	is, err := w.told.Take(told, chain, w.dialer.WorksAsConfigured())
	if err != nil {
		w.log.Error("the edge cannot store what the cloud has told", "err", err)
	}
	if is.CAs {
		w.log.Info("the CAs of the cloud have changed", "cas", strings.Join(w.told.IDs(), " "))
		w.renewal.Soon(0)
	}
	if is.NodeCAs {
		w.log.Info("the CAs of nodes have changed")
	}
	if is.Servers {
		now, takenBack := w.told.Servers()
		text := "the cloud has other addresses"
		if takenBack {
			text = "the cloud has taken its addresses back; the edge tries them last, until its own work"
		}
		w.log.Info(text, "cloud", strings.Join(now, ", "))
		preferTold(w.dialer, w.told)
	}
}

// preferTold makes the dialer try the addresses that the cloud has told before the addresses of the configuration. If
// the cloud has withdrawn its addresses, the dialer tries them last.
func preferTold(d *dial.Dialer, told *auth.Told) {
	servers, takenBack := told.Servers()
	d.Prefer(parseServers(servers), takenBack)
}

// toldServers returns the addresses that the cloud has told.
func toldServers(told *auth.Told) []dial.Server {
	servers, _ := told.Servers()
	return parseServers(servers)
}

// parseServers parses the addresses of a Told.
func parseServers(texts []string) (all []dial.Server) {
	for _, text := range texts {
		if s, err := dial.ParseServer(text); err == nil { // there is never an error, since Told has checked the address
			all = append(all, s)
		}
	}
	return all
}
