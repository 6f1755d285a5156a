package setup

import (
	"context"
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// This file replaces the CAs of a cloud, in three steps, while nodes stay connected.
//
//  1. announce: there is a new CA. ca.crt and nodes-ca.crt have both, the old ones sign. Edges take the new
//     CA of the cloud with their next certificates.
//  2. sign: every node trusts the new CA. It signs another certificate of the cloud, for a new key. The new CA of
//     nodes signs those of nodes.
//  3. finish: no node has a certificate of the old CA. The old CAs are removed.
//
// The files say which step was done. The file ca-next.crt marks a rotation: announce makes it after the other new
// files, and finish removes it when everything else is in place. Each file is replaced as a whole, so a step that was
// interrupted is run again.

// Names of the files of a rotation, beside cloudca.
const (
	nextCAFile       = "ca-next.crt"
	nextCAKeyFile    = "ca-next.key"
	nextNodesFile    = "nodes-ca-next.crt"
	nextNodesKeyFile = "nodes-ca-next.key"
)

// RotateConfig says how to replace the CAs of a cloud.
type RotateConfig struct {
	Cloud *conf.Cloud
	CAKey string // file with the key of the cloud's CA; "": ca.key beside cloudca
	Force bool   // do the next step even if nodes or replicas are not ready for it
	// Look asks the running cloud what its replicas and nodes have.
	Look func(context.Context) (*RotationView, error)
	// Renew has all connected nodes renew their certificates soon, and so say which CAs they trust.
	Renew func(context.Context) error
	Out   io.Writer
}

// RotationView is what a running cloud knows of certificates.
type RotationView struct {
	Replicas   []RotationReplica
	Nodes      []RotationNode // with a certificate that has not ended
	Without    int            // nodes, connected or not, without a certificate that the cloud knows
	Incomplete []string       // why more may be missing
}

// RotationReplica is what a replica has.
type RotationReplica struct {
	Name     string
	CloudCAs []string // ids
	NodeCAs  []string // ids
	OwnBy    string   // name of the CA that signed its certificate
	Signer   string   // name of the CA by which it signs the certificates of nodes
}

// RotationNode is what a node has.
type RotationNode struct {
	Name   string
	Trusts []string // ids of CAs; empty: not known
	Signer string   // name of the CA that signed its certificate
}

// rotation is a rotation, as the files have it.
type rotation struct {
	RotateConfig
	dir      string         // of cloudca
	cloudCAs *auth.CloudCAs // of cloudca
	leaf     *x509.Certificate
	// next and nextNodes are the new CAs; nil: there is no rotation, or the cluster signs for nodes.
	next, nextNodes *auth.CA
	nodesCAs        []*x509.Certificate
	signs           *auth.CA // of nodesCAs; nil: the cluster signs
}

// ErrNotReady says that nodes or replicas are not ready for the next step.
var ErrNotReady = errors.New("nodes or replicas are not ready for the next step; --force does it nevertheless")

// RotateCA does the next step of a rotation. It prints what it has done, and what comes next.
func RotateCA(ctx context.Context, cfg RotateConfig) error {
	r, err := newRotation(cfg)
	if err != nil {
		return err
	}
	err = r.step(ctx)
	// A node that has joined or come back since the last step was not asked then. So a step that waits asks again.
	if err == nil || errors.Is(err, ErrNotReady) {
		if failed := cfg.Renew(ctx); failed != nil {
			fmt.Fprintf(cfg.Out,
				"Not all nodes were asked to renew their certificates (%v): tunnel cert renew --all does it.\n", failed)
		}
	}
	return err
}

// step does the next step. It holds the lock of the folder, which a command that changes the token file may wait for.
func (r *rotation) step(ctx context.Context) error {
	held, err := lock(r.dir, lockTimeout)
	if err != nil {
		return err
	}
	defer held.Close() // releases the lock
	if err = r.read(); err != nil {
		return err
	}
	if r.next == nil {
		if err = r.begin(); err != nil {
			return err
		}
	}
	switch {
	case !r.announced():
		return r.announce()
	case r.halfPair(): // the nodes were checked before, and a cloud that cannot start cannot be asked
		return r.sign()
	case !r.signing():
		if err = r.check(ctx, r.notTrusting); err == nil {
			err = r.sign()
		}
	default:
		if err = r.check(ctx, r.notRenewed); err == nil {
			err = r.finish()
		}
	}
	return err
}

// RotationStatus prints which step of a rotation comes next, and what is missing for it. It changes nothing.
func RotationStatus(ctx context.Context, cfg RotateConfig) error {
	r, err := newRotation(cfg)
	if err != nil {
		return err
	}
	if err = r.read(); err != nil {
		return err
	}
	switch {
	case r.next == nil:
		fmt.Fprintln(cfg.Out, "no rotation is under way; step 1 makes new CAs and tells them")
		r.showTrustingOthers(ctx)
		return nil
	case !r.announced():
		fmt.Fprintln(cfg.Out, "step 1 was interrupted: run it again")
		return nil
	case r.halfPair():
		fmt.Fprintln(cfg.Out, "step 2 was interrupted: run it again before the cloud restarts")
		return nil
	case !r.signing():
		fmt.Fprintln(cfg.Out, "step 1 is done: edges are told the new CA")
		r.showTrustingOthers(ctx)
		err = r.check(ctx, r.notTrusting)
	default:
		fmt.Fprintln(cfg.Out, "step 2 is done: the new CAs sign")
		err = r.check(ctx, r.notRenewed)
	}
	if err == nil {
		fmt.Fprintln(cfg.Out, "the next step may be done")
	} else if errors.Is(err, ErrNotReady) {
		fmt.Fprintln(cfg.Out, "tunnel cert renew --all asks the connected nodes again to renew their certificates")
	}
	return err
}

// newRotation checks the configuration.
func newRotation(cfg RotateConfig) (*rotation, error) {
	j := cfg.Cloud.Join
	if j.CloudCA == "" || !j.Signs() {
		return nil, configError(errors.New("this cloud has no cloudca, or signs no certificates for nodes, in " +
			"[mode.cloud.join]: nodes that join by other proofs have the CA in a file, which you replace"))
	}
	if p := cfg.Cloud.Peers; p.Configured() && filepath.Clean(p.CA) != filepath.Clean(j.CloudCA) {
		return nil, configError(fmt.Errorf("ca of [mode.cloud.stream.peers] is %s, and cloudca of [mode.cloud.join] is %s: "+
			"name one file in both, so that replicas and edges verify the cloud by the same CAs", p.CA, j.CloudCA))
	}
	if cert, key := cfg.Cloud.Pair(); cfg.Cloud.Peers.Configured() &&
		(filepath.Clean(cert) != filepath.Clean(cfg.Cloud.Server.Cert) ||
			filepath.Clean(key) != filepath.Clean(cfg.Cloud.Server.Key)) {
		return nil, configError(fmt.Errorf("[mode.cloud.stream.peers] has a cert and a key of its own, %s and %s, which "+
			"this command does not replace: without the old CA, the replicas would refuse each other. Remove both keys, "+
			"so that replicas use those of [mode.cloud.stream.server], or replace the CA by hand: docs/certificates.md "+
			"says how", cert, key))
	}
	r := &rotation{RotateConfig: cfg, dir: filepath.Dir(j.CloudCA)}
	if r.CAKey == "" {
		r.CAKey = filepath.Join(r.dir, "ca.key")
	}
	for _, path := range []string{j.CloudCA, cfg.Cloud.Server.Cert, cfg.Cloud.Server.Key, j.CA, j.CAKey, r.CAKey} {
		if info, err := os.Lstat(path); err == nil && info.Mode()&fs.ModeSymlink != 0 {
			return nil, fmt.Errorf("%s cannot be replaced: %w; docs/certificates.md says how to replace a CA there",
				path, errMounted)
		}
	}
	if sameFile(j.CA, j.CloudCA) {
		return nil, configError(fmt.Errorf("ca and cloudca of [mode.cloud.join] are one file, %s, and this command "+
			"replaces two CAs: %s", j.CA, ownCA))
	}
	if sameFile(j.CAKey, r.CAKey) {
		return nil, configError(fmt.Errorf("cakey of [mode.cloud.join] and the key of the cloud's CA are one file, %s: "+
			"name the cloud's own key with --ca-key; if there is one CA, %s", j.CAKey, ownCA))
	}
	return r, nil
}

// sameFile reports whether two paths name one file, also by a link.
func sameFile(a, b string) bool {
	if a == "" || b == "" {
		return false
	}
	if filepath.Clean(a) == filepath.Clean(b) {
		return true
	}
	infoA, errA := os.Stat(a)
	infoB, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(infoA, infoB)
}

// ownCA is what to do if one CA signs for the cloud and for nodes. The new CA of one would overwrite that of the other.
const ownCA = `give nodes a CA of their own first; "Replace the nodes CA" in docs/certificates.md says how`

// path returns the path of a file of the rotation.
func (r *rotation) path(name string) string { return filepath.Join(r.dir, name) }

// read reads the files.
func (r *rotation) read() error {
	j := r.Cloud.Join
	text, err := os.ReadFile(j.CloudCA)
	if err == nil {
		r.cloudCAs, err = auth.ParseCloudCAs(text)
	}
	if err != nil {
		return err
	}
	chain, err := readCertificates("mode.cloud.stream.server: cert", r.Cloud.Server.Cert)
	if err != nil {
		return err
	}
	r.leaf = chain[0]
	if j.CAKey != "" {
		if r.nodesCAs, err = readCertificates("mode.cloud.join: ca", j.CA); err != nil {
			return err
		}
		if r.signs, err = auth.ReadCA(j.CA, j.CAKey); err != nil {
			return err
		}
		if common(r.nodesCAs, r.cloudCAs.Certificates()) {
			return configError(fmt.Errorf("%s and %s, ca and cloudca of [mode.cloud.join], have a CA in common, and this "+
				"command replaces two CAs: %s", j.CA, j.CloudCA, ownCA))
		}
	}
	if !exists(r.path(nextCAFile)) {
		return nil
	}
	key := r.path(nextCAKeyFile)
	if !exists(key) { // finish has moved it
		key = r.CAKey
	}
	if r.next, err = auth.ReadCA(r.path(nextCAFile), key); err == nil && j.CAKey != "" {
		if key = r.path(nextNodesKeyFile); !exists(key) {
			key = j.CAKey
		}
		r.nextNodes, err = auth.ReadCA(r.path(nextNodesFile), key)
	}
	if err != nil {
		return fmt.Errorf("the new CAs cannot be read: %w; if step 1 was never done, remove %s and do step 1 again, "+
			"else restore the file", err, r.path(nextCAFile))
	}
	return nil
}

// exists reports whether there is a file, also one that cannot be read.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// begin makes the new CAs.
func (r *rotation) begin() error {
	if _, err := r.old(); err != nil {
		return err
	}
	next, err := auth.NewCA("tunnel cloud CA", caLifetime)
	if err != nil {
		return err
	}
	var files []newFile
	secret := func(name string, content []byte) {
		files = append(files, newFile{name: name, mode: secretFile, content: content})
	}
	secret(nextCAKeyFile, next.KeyPEM())
	if r.Cloud.Join.CAKey != "" {
		if r.nextNodes, err = auth.NewCA("tunnel nodes CA", caLifetime); err != nil {
			return err
		}
		secret(nextNodesKeyFile, r.nextNodes.KeyPEM())
		files = append(files, newFile{name: nextNodesFile, mode: publicFile, content: r.nextNodes.CertPEM()})
	}
	files = append(files, newFile{name: nextCAFile, mode: publicFile, content: next.CertPEM()}) // the marker
	for _, f := range files {
		if err = overwrite(r.path(f.name), f); err != nil {
			return notWritable(r.dir, err)
		}
	}
	r.next = next
	return nil
}

// old returns the CA that has signed the cloud's certificate, with its key.
func (r *rotation) old() (*auth.CA, error) {
	old, err := auth.ReadCA(r.Cloud.Join.CloudCA, r.CAKey)
	if err != nil {
		return nil, fmt.Errorf("%w: the key of the cloud's CA is needed; --ca-key names its file", err)
	}
	if r.leaf.CheckSignatureFrom(old.Certificate()) != nil {
		return nil, fmt.Errorf("%s is not signed by the CA whose key is %s", r.Cloud.Server.Cert, r.CAKey)
	}
	return old, nil
}

// announced reports whether step 1 is done.
func (r *rotation) announced() bool {
	return slices.ContainsFunc(r.cloudCAs.Certificates(), r.next.Certificate().Equal) &&
		(r.nextNodes == nil || slices.ContainsFunc(r.nodesCAs, r.nextNodes.Certificate().Equal))
}

// signing reports whether step 2 is done.
func (r *rotation) signing() bool {
	return r.leaf.CheckSignatureFrom(r.next.Certificate()) == nil &&
		(r.nextNodes == nil || r.signs.Certificate().Equal(r.nextNodes.Certificate()))
}

// halfPair reports whether step 2 was interrupted between the key of the cloud and its certificate: the old CA has
// signed the certificate, and the key is another one, in the form in which replacePair writes it.
func (r *rotation) halfPair() bool {
	text, err := os.ReadFile(r.Cloud.Server.Key)
	if err != nil || r.leaf.CheckSignatureFrom(r.next.Certificate()) == nil {
		return false
	}
	block, _ := pem.Decode(text)
	if block == nil || block.Type != "PRIVATE KEY" {
		return false
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return false
	}
	private, ok := key.(crypto.Signer)
	if !ok {
		return false
	}
	public, ok := private.Public().(interface{ Equal(crypto.PublicKey) bool })
	return ok && !public.Equal(r.leaf.PublicKey)
}

// replace replaces a file that exists. Mode and owner stay.
func (r *rotation) replace(path string, content []byte) error {
	info, err := os.Stat(path)
	if err == nil {
		err = replaceFile(path, content, info)
	}
	if err == nil {
		err = auth.SyncFolder(filepath.Dir(path)) // the next file must not be on the disk before this one
	}
	if err != nil {
		return fmt.Errorf("replacing %s: %w", path, reasonOf(err))
	}
	return nil
}

// announce does step 1.
func (r *rotation) announce() error {
	j := r.Cloud.Join
	if r.nextNodes != nil && !slices.ContainsFunc(r.nodesCAs, r.nextNodes.Certificate().Equal) {
		text, err := os.ReadFile(j.CA)
		if err != nil {
			return err
		}
		both := strings.TrimRight(string(text), "\n") + "\n" + string(r.nextNodes.CertPEM())
		if err = r.replace(j.CA, []byte(both)); err != nil {
			return err
		}
	}
	if !slices.ContainsFunc(r.cloudCAs.Certificates(), r.next.Certificate().Equal) {
		old, err := r.old()
		if err != nil {
			return err
		}
		both, err := r.cloudCAs.Succeed(old, r.next.Certificate())
		if err != nil {
			return err
		}
		if err = r.replace(j.CloudCA, both.PEM()); err != nil {
			return err
		}
	}
	fmt.Fprintf(r.Out, "Step 1 of 3 is done: edges are told the new CA %s with their next certificates.\n"+
		"If the cloud has other replicas, copy %s and %s to each.\n"+
		"The next step: when tunnel cert rotate-ca --status shows that all nodes trust the new CA, run this again.\n",
		nameOf(r.next), j.CloudCA, j.CA)
	return nil
}

// sign does step 2. The cloud gets a new key, so that a stolen old one is good for nothing after step 3. The key is
// replaced first: a certificate of the new CA means that both are. A running cloud keeps the old pair until then.
func (r *rotation) sign() error {
	j := r.Cloud.Join
	if r.leaf.CheckSignatureFrom(r.next.Certificate()) != nil {
		if err := r.replacePair(); err != nil {
			return err
		}
	}
	if r.nextNodes != nil && !r.signs.Certificate().Equal(r.nextNodes.Certificate()) {
		if err := r.replace(j.CAKey, r.nextNodes.KeyPEM()); err != nil {
			return err
		}
	}
	fmt.Fprintf(r.Out, "Step 2 of 3 is done: the new CAs sign. Join tokens from before are no longer good: make others.\n"+
		"If the cloud has other replicas, copy %s and %s to those that share them, and sign another certificate by %s "+
		"for each of the rest.\n"+
		"The next step: when tunnel cert rotate-ca --status shows that no node has a certificate of the old CA, "+
		"run this again.\n", r.Cloud.Server.Cert, r.Cloud.Server.Key, r.path(nextCAKeyFile))
	if r.nextNodes != nil {
		fmt.Fprintf(r.Out, "Copy %s to every other replica.\n", j.CAKey)
	}
	return nil
}

// replacePair replaces the key and the certificate of the cloud.
func (r *rotation) replacePair() error {
	s := r.Cloud.Server
	cert, key, err := r.next.Reissue(r.leaf)
	if err != nil {
		return err
	}
	if filepath.Clean(s.Key) == filepath.Clean(s.Cert) { // both are in one file
		return r.replace(s.Cert, append(cert, key...))
	}
	if err = r.replace(s.Key, key); err != nil {
		return err
	}
	if err = r.replace(s.Cert, cert); err != nil {
		return fmt.Errorf("%w; before the cloud restarts, run this step again: %s does not match the certificate now",
			err, s.Key)
	}
	return nil
}

// finish does step 3.
func (r *rotation) finish() error {
	j := r.Cloud.Join
	if r.nextNodes != nil {
		if err := r.replace(j.CA, r.nextNodes.CertPEM()); err != nil {
			return err
		}
	}
	newest := r.cloudCAs.Only(r.next.Certificate().Equal)
	if err := r.replace(j.CloudCA, newest.PEM()); err != nil {
		return err
	}
	if exists(r.path(nextCAKeyFile)) {
		var err error
		if exists(r.CAKey) {
			err = r.replace(r.CAKey, r.next.KeyPEM())
		} else { // the operator keeps it somewhere else
			err = overwrite(r.CAKey, newFile{mode: secretFile, content: r.next.KeyPEM()})
		}
		if err != nil {
			return err
		}
	}
	// Without the marker, what is left of nextNodesFile means nothing.
	for _, name := range []string{nextCAKeyFile, nextNodesKeyFile, nextCAFile, nextNodesFile} {
		if err := os.Remove(r.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	fmt.Fprintf(r.Out, "Step 3 of 3 is done: the old CAs are removed.\n"+
		"If the cloud has other replicas, copy %s and %s to each. Keep %s somewhere else.\n"+
		"An edge drops the old CA when it renews its certificate in a session that began after step 2. "+
		"To have all do so now, restart the cloud, and then run tunnel cert renew --all.\n",
		j.CloudCA, j.CA, r.CAKey)
	return nil
}

// nameOf names a CA as tunnel cert status does.
func nameOf(ca *auth.CA) string { return tunnel.CertificateOf(ca.Certificate()).Name }

// maxNamed is how many missing nodes are named.
const maxNamed = 20

// lookTimeout bounds how long a step asks the cloud. Meanwhile the step holds the lock, for which a revocation of a
// token waits lockTimeout at most.
const lookTimeout = lockTimeout / 2

// check prints who is not ready for the next step. It returns ErrNotReady if anybody is not, unless Force is set.
func (r *rotation) check(ctx context.Context, missing func(*RotationView) []string) error {
	looking, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	view, err := r.Look(looking)
	var lines []string
	if err != nil {
		lines = []string{"the cloud cannot be asked: " + err.Error()}
	} else {
		lines = append(missing(view), view.Incomplete...)
	}
	if r.Cloud.Inventory == "" {
		lines = append(lines, "the cloud knows no node that was away when it started: set inventory in [mode.cloud.admin], "+
			"restart it, and wait until every node has connected")
	}
	if len(lines) == 0 {
		return nil
	}
	for i, l := range lines {
		if i == maxNamed {
			fmt.Fprintf(r.Out, "and %d more\n", len(lines)-i)
			break
		}
		fmt.Fprintln(r.Out, "not ready: "+tunnel.Printable(l))
	}
	if r.Force {
		return nil
	}
	return ErrNotReady
}

// notTrusting says who is not ready for step 2.
func (r *rotation) notTrusting(view *RotationView) (lines []string) {
	id := auth.CAID(r.next.Certificate())
	for _, p := range view.Replicas {
		if !slices.Contains(p.CloudCAs, id) {
			lines = append(lines, fmt.Sprintf("replica %s does not have the new CA in its cloudca", p.Name))
		}
		if r.nextNodes != nil && !slices.Contains(p.NodeCAs, auth.CAID(r.nextNodes.Certificate())) {
			lines = append(lines, fmt.Sprintf("replica %s does not have the new CA of nodes in its ca", p.Name))
		}
	}
	for _, n := range view.Nodes {
		if !slices.Contains(n.Trusts, id) {
			lines = append(lines, fmt.Sprintf("node %s does not trust the new CA yet, as far as the cloud knows", n.Name))
		}
	}
	if view.Without > 0 {
		lines = append(lines, fmt.Sprintf("%d nodes have no certificate that the cloud knows, and cannot be told: "+
			"append %s to the file that they have of the CA, and use --force; tunnel forget removes nodes that are gone",
			view.Without, r.path(nextCAFile)))
	}
	return lines
}

// trustingOthers says which nodes trust a CA that is none of the cloud's. A thief of the old CA's key may have planted
// it.
func (r *rotation) trustingOthers(view *RotationView) (lines []string) {
	ours := r.cloudCAs.IDs()
	for _, n := range view.Nodes {
		for _, id := range n.Trusts {
			if !slices.Contains(ours, id) {
				lines = append(lines, fmt.Sprintf("node %s trusts the CA %s, which is not in %s: "+
					"docs/certificates.md says what to do", n.Name, id, r.Cloud.Join.CloudCA))
			}
		}
	}
	return lines
}

// showTrustingOthers prints what trustingOthers says. Before step 2 it is no obstacle: step 2 has edges drop such CAs,
// and nodes that were away may still trust the CA of the last rotation.
func (r *rotation) showTrustingOthers(ctx context.Context) {
	view, err := r.Look(ctx)
	if err != nil {
		return // check says so, if a step needs the cloud
	}
	for i, l := range r.trustingOthers(view) {
		if i == maxNamed {
			break
		}
		fmt.Fprintln(r.Out, "note: "+tunnel.Printable(l))
	}
}

// notRenewed says who is not ready for step 3.
func (r *rotation) notRenewed(view *RotationView) (lines []string) {
	for _, p := range view.Replicas {
		if p.OwnBy != nameOf(r.next) {
			lines = append(lines, fmt.Sprintf("replica %s has a certificate of the old CA", p.Name))
		}
		if r.nextNodes != nil && p.Signer != nameOf(r.nextNodes) {
			lines = append(lines, fmt.Sprintf("replica %s does not sign by the new CA of nodes: copy %s there",
				p.Name, r.Cloud.Join.CAKey))
		}
	}
	if len(r.cloudCAs.Certificates()) > 1 { // else step 3 was interrupted, and nodes still trust the old CA
		lines = append(lines, r.trustingOthers(view)...)
	}
	if r.nextNodes == nil {
		return lines
	}
	for _, n := range view.Nodes {
		if n.Signer != nameOf(r.nextNodes) {
			lines = append(lines, fmt.Sprintf("node %s has a certificate of the old CA", n.Name))
		}
	}
	return lines
}
