// Command pki makes the certificates of a throwaway Kubernetes.
//
//	pki cluster -dir DIR -kubeconfigs DIR -address 10.77.0.1 -port 6443 -node edge1=192.168.7.2 -node edge2=192.168.8.2
//	pki leaf -dir DIR -ca ca -name cloud -cn tunnel-cloud -dns tunnel.example -server
//
// The first form writes two CAs (ca, front), a leaf for every component, the key of the service accounts, and a
// kubeconfig for each component that talks to kube-apiserver. The second adds one certificate of one of those CAs.
// Everything is valid for thirty days from an hour ago, and keys are readable by their owner only.
package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const lifetime = 30 * 24 * time.Hour

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "pki:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return errors.New("usage: pki cluster|leaf FLAGS")
	}
	switch args[0] {
	case "cluster":
		return cluster(args[1:])
	case "leaf":
		return oneLeaf(args[1:])
	default:
		return fmt.Errorf("unknown command %q: cluster or leaf", args[0])
	}
}

// list is a flag that may be given more than once.
type list []string

func (l *list) String() string     { return strings.Join(*l, ",") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

func cluster(args []string) error {
	fs := flag.NewFlagSet("cluster", flag.ExitOnError)
	d := fs.String("dir", "", "where certificates and keys go")
	configs := fs.String("kubeconfigs", "", "where kubeconfigs go")
	address := fs.String("address", "", "kube-apiserver's address")
	port := fs.String("port", "6443", "kube-apiserver's port")
	var nodes list
	fs.Var(&nodes, "node", "NAME=ADDRESS, once for each node")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *d == "" || *configs == "" || *address == "" {
		return errors.New("cluster: -dir, -kubeconfigs and -address are needed")
	}
	if err := os.MkdirAll(*d, 0o755); err != nil {
		return err
	}
	p := store(*d)
	if err := p.makeCA("ca", "e2e-ca"); err != nil {
		return err
	}
	if err := p.makeCA("front", "e2e-front-proxy-ca"); err != nil {
		return err
	}
	if err := p.makeServiceAccountKey("sa"); err != nil {
		return err
	}
	leaves := []leaf{
		{name: "apiserver", cn: "kube-apiserver", server: true, ips: []string{"127.0.0.1", *address, "10.96.0.1"},
			dns: []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
				"kubernetes.default.svc.cluster.local"}},
		{name: "apiserver-kubelet", cn: "kube-apiserver-kubelet-client", org: "system:masters", client: true},
		{name: "front-client", ca: "front", cn: "front-proxy-client", client: true},
		{name: "admin", cn: "admin", org: "system:masters", client: true},
		{name: "kcm", cn: "system:kube-controller-manager", client: true},
		{name: "sched", cn: "system:kube-scheduler", client: true},
	}
	callers := []string{"admin", "kcm", "sched"}
	for _, n := range nodes {
		name, ip, ok := strings.Cut(n, "=")
		if !ok {
			return fmt.Errorf("-node %s: want NAME=ADDRESS", n)
		}
		user := "system:node:" + name
		leaves = append(leaves,
			leaf{name: "kubelet-" + name, cn: user, org: "system:nodes", client: true},
			leaf{name: "kubelet-" + name + "-serving", cn: user, org: "system:nodes", server: true,
				dns: []string{name}, ips: []string{ip}})
		callers = append(callers, "kubelet-"+name)
	}
	for _, l := range leaves {
		if err := p.makeLeaf(l); err != nil {
			return err
		}
	}
	for _, c := range callers {
		file := filepath.Join(*configs, c+".kubeconfig")
		if err := os.WriteFile(file, []byte(p.kubeconfig("https://"+net.JoinHostPort(*address, *port), c)),
			0o600); err != nil {
			return err
		}
	}
	return nil
}

func oneLeaf(args []string) error {
	fs := flag.NewFlagSet("leaf", flag.ExitOnError)
	d := fs.String("dir", "", "where the CA is and the certificate goes")
	var l leaf
	fs.StringVar(&l.ca, "ca", "ca", "which CA signs")
	fs.StringVar(&l.name, "name", "", "file name, without .crt and .key")
	fs.StringVar(&l.cn, "cn", "", "common name")
	fs.StringVar(&l.org, "org", "", "organisation: a group, to Kubernetes")
	fs.BoolVar(&l.server, "server", false, "for servers")
	fs.BoolVar(&l.client, "client", false, "for clients")
	fs.Var((*list)(&l.dns), "dns", "DNS name, may be repeated")
	fs.Var((*list)(&l.ips), "ip", "address, may be repeated")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *d == "" || l.name == "" || l.cn == "" || !l.server && !l.client {
		return errors.New("leaf: -dir, -name, -cn and one of -server, -client are needed")
	}
	return store(*d).makeLeaf(l)
}

// A store is a directory of NAME.crt and NAME.key.
type store string

func (s store) path(file string) string { return filepath.Join(string(s), file) }

type leaf struct {
	ca, name       string // file names; an empty ca is "ca"
	cn, org        string
	dns, ips       []string
	server, client bool
}

func (s store) makeCA(name, cn string) error {
	t := template(cn)
	t.IsCA, t.BasicConstraintsValid = true, true
	t.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	return s.write(name, t, t, key, key)
}

func (s store) makeLeaf(l leaf) error {
	if l.ca == "" {
		l.ca = "ca"
	}
	ca, caKey, err := s.readCA(l.ca)
	if err != nil {
		return err
	}
	t := template(l.cn)
	if l.org != "" {
		t.Subject.Organization = []string{l.org}
	}
	t.BasicConstraintsValid = true
	t.KeyUsage = x509.KeyUsageDigitalSignature
	if l.server {
		t.ExtKeyUsage = append(t.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	if l.client {
		t.ExtKeyUsage = append(t.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
	}
	t.DNSNames = l.dns
	for _, a := range l.ips {
		ip := net.ParseIP(a)
		if ip == nil {
			return fmt.Errorf("%s: %q is not an address", l.name, a)
		}
		t.IPAddresses = append(t.IPAddresses, ip)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	return s.write(l.name, t, ca, key, caKey)
}

func template(cn string) *x509.Certificate {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		panic(err) // crypto/rand never fails on a system that runs Kubernetes
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: cn},
		NotBefore:    now.Add(-time.Hour),
		NotAfter:     now.Add(lifetime),
	}
}

func (s store) readCA(name string) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	der, err := s.read(name + ".crt")
	if err != nil {
		return nil, nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, fmt.Errorf("%s.crt: %w", name, err)
	}
	if der, err = s.read(name + ".key"); err != nil {
		return nil, nil, err
	}
	key, err := x509.ParseECPrivateKey(der)
	if err != nil {
		return nil, nil, fmt.Errorf("%s.key: %w", name, err)
	}
	return cert, key, nil
}

func (s store) read(file string) ([]byte, error) {
	b, err := os.ReadFile(s.path(file))
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(b)
	if block == nil {
		return nil, fmt.Errorf("%s holds no PEM block", s.path(file))
	}
	return block.Bytes, nil
}

func (s store) write(name string, t, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) error {
	der, err := x509.CreateCertificate(rand.Reader, t, parent, key.Public(), signer)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if err := s.writePEM(name+".crt", "CERTIFICATE", der, 0o644); err != nil {
		return err
	}
	return s.writePEM(name+".key", "EC PRIVATE KEY", keyDER, 0o600)
}

func (s store) writePEM(file, kind string, der []byte, mode os.FileMode) error {
	return os.WriteFile(s.path(file), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), mode)
}

// makeServiceAccountKey writes the pair that signs service account tokens. RSA: every client can verify RS256.
func (s store) makeServiceAccountKey(name string) error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	pub, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	if err := s.writePEM(name+".key", "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(key), 0o600); err != nil {
		return err
	}
	return s.writePEM(name+".pub", "PUBLIC KEY", pub, 0o644)
}

func (s store) kubeconfig(server, user string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: e2e, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: user, user: {client-certificate: %q, client-key: %q}}]
contexts: [{name: e2e, context: {cluster: e2e, user: user}}]
current-context: e2e
`, server, s.path("ca.crt"), s.path(user+".crt"), s.path(user+".key"))
}
