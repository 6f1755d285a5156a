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
//  1. begin makes the new CAs, and announce appends them to ca.crt and nodes-ca.crt. The old CAs still sign. Each edge
//     gets the new CA of the cloud with its next certificate.
//  2. sign begins when every node trusts the new CA of the cloud. This CA signs a new certificate of the cloud, for a
//     new key. From then on, the new CA of nodes signs the certificates of nodes.
//  3. finish begins when no node has a certificate of the old CA. It removes the old CAs.
//
// The files on the disk show which steps are done. While the file ca-next.crt exists, a rotation is under way: begin
// writes it after the other new files, and finish removes it when the other files are in place. Each file is replaced
// as a whole, so an operator can run an interrupted step again.

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
	// Look asks the running cloud which CAs and certificates its replicas and nodes have.
	Look func(context.Context) (*RotationView, error)
	// Renew asks all connected nodes to renew their certificates soon. When a node renews, it also tells the cloud
	// which CAs it trusts.
	Renew func(context.Context) error
	Out   io.Writer
}

// RotationView is what a running cloud knows of certificates.
type RotationView struct {
	Replicas   []RotationReplica
	Nodes      []RotationNode // with a certificate that has not ended
	Without    int            // nodes, connected or not, without a certificate that the cloud knows
	Incomplete []string       // reasons why Replicas or Nodes may lack some, such as a replica that did not answer
}

// RotationReplica is what a running cloud knows of the CAs of one replica.
type RotationReplica struct {
	Name     string
	CloudCAs []string // auth.CAID of each CA in its cloudca
	NodeCAs  []string // auth.CAID of each CA in its ca
	OwnBy    string   // name of the CA that signed its certificate
	Signer   string   // name of the CA by which it signs the certificates of nodes
}

// RotationNode is what a running cloud knows of the CAs of one node.
type RotationNode struct {
	Name   string
	Trusts []string // auth.CAID of each CA that the node trusts; empty: not known
	Signer string   // name of the CA that signed its certificate
}

// rotation is one run of RotateCA or RotationStatus. read fills it from the files.
type rotation struct {
	RotateConfig
	dir       string            // the folder of the file cloudca
	cloudCAs  *auth.CloudCAs    // the content of cloudca
	leaf      *x509.Certificate // the cloud's certificate
	next      *auth.CA          // the new CA of the cloud; nil: no rotation is under way
	nextNodes *auth.CA          // the new CA of nodes; nil: no rotation is under way, or the cluster signs for nodes
	nodesCAs  []*x509.Certificate
	signs     *auth.CA // the one of nodesCAs that signs now; nil: the cluster signs for nodes
}

// ErrNotReady says that nodes or replicas are not ready for the next step.
var ErrNotReady = errors.New("nodes or replicas are not ready for the next step; --force does it nevertheless")

// RotateCA finds out from the files which step of a rotation comes next, and does that step. If no rotation is under
// way, RotateCA begins one with step 1. It prints what it has done, and what the operator does next.
func RotateCA(ctx context.Context, cfg RotateConfig) error {
	r, err := newRotation(cfg)
	if err != nil {
		return err
	}
	err = r.step(ctx)
	// Also ask if some nodes are not ready: a node that joined or came back after the last step was not asked then.
	if err == nil || errors.Is(err, ErrNotReady) {
		if failed := cfg.Renew(ctx); failed != nil {
			fmt.Fprintf(cfg.Out,
				"Not all nodes were asked to renew their certificates (%v): tunnel cert renew --all does it.\n", failed)
		}
	}
	return err
}

// step does the next step. Meanwhile it holds the lock of the folder, so commands that change a token file in the
// same folder wait for step.
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
	case r.halfPair(): // no check: the interrupted step has checked, and a cloud without a valid pair may not run
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

// newRotation returns a rotation without the content of the files. It returns an error if the configuration does not
// permit a rotation.
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

// sameFile reports whether two paths lead to one file, by the same name or by a link.
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

// ownCA says what an operator does first if one CA signs both for the cloud and for nodes. A rotation needs two CAs:
// it writes a new CA for each, and with one file the second would overwrite the first.
const ownCA = `give nodes a CA of their own first; "Replace the nodes CA" in docs/certificates.md says how`

// path returns the path of a file of the rotation.
func (r *rotation) path(name string) string { return filepath.Join(r.dir, name) }

// read fills r from the files of the cloud and of a rotation that is under way.
func (r *rotation) read() error {
	j := r.Cloud.Join
	text, _, err := tunnel.ReadFile(j.CloudCA, tunnel.MaxFile)
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
	if !exists(key) { // finish was interrupted after it had moved the key
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

// exists reports whether a file exists. A file that this user may not look at counts, too.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// begin makes the new CAs, and writes them to files of their own.
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
	// The last file marks the rotation: if begin is interrupted before it, the next begin starts anew.
	files = append(files, newFile{name: nextCAFile, mode: publicFile, content: next.CertPEM()})
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

// halfPair reports whether step 2 was interrupted after it had replaced the cloud's key, and before it replaced the
// certificate. Then the old CA has signed the certificate, and the certificate is not for the key in the file. The
// key must have the form in which replacePair writes keys.
func (r *rotation) halfPair() bool {
	text, _, err := tunnel.ReadFile(r.Cloud.Server.Key, tunnel.MaxFile)
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

// replace gives a file that exists a new content. The mode and the owner of the file stay. After a power loss, no later
// file of a step is there without this one.
func (r *rotation) replace(path string, content []byte) error {
	info, err := os.Stat(path)
	if err == nil {
		err = replaceFile(path, content, info)
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
		text, _, err := tunnel.ReadFile(j.CA, tunnel.MaxFile)
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

// sign does step 2. It also makes a new key for the cloud, so that a stolen old key is useless after step 3. sign
// replaces the key first and the certificate second. So if the new CA has signed the certificate, both are replaced.
// A running cloud uses the old key and certificate until both are replaced.
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
		} else { // the operator keeps the old key somewhere else
			err = overwrite(r.CAKey, newFile{mode: secretFile, content: r.next.KeyPEM()})
		}
		if err != nil {
			return err
		}
	}
	// nextCAFile marks the rotation. After it is removed, read ignores nextNodesFile even if an interrupt leaves it.
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

// nameOf returns the name by which `tunnel cert status` shows a CA.
func nameOf(ca *auth.CA) string { return tunnel.CertificateOf(ca.Certificate()).Name }

// maxNamed is how many lines check and showTrustingOthers print at most about nodes and replicas.
const maxNamed = 20

// lookTimeout is how long a step waits at most for the cloud's answer. Meanwhile the step holds the lock. A command
// that revokes a token waits for the lock for lockTimeout at most, so lookTimeout must be shorter.
const lookTimeout = lockTimeout / 2

// check prints which nodes and replicas are not ready for the next step, as missing finds them. If any is not ready,
// check returns ErrNotReady, unless Force is set.
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

// notTrusting returns a line for each node and replica that is not ready for step 2: it does not trust the new CA yet.
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

// trustingOthers returns a line for each CA that a node trusts and that cloudca does not hold. Somebody who stole the
// key of an old CA may have made nodes trust such a CA.
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

// showTrustingOthers prints the lines of trustingOthers as notes. Before step 2, foreign CAs do not stop the rotation.
// A node that was away may still trust the old CA of the last rotation, and edges drop such CAs after step 2.
func (r *rotation) showTrustingOthers(ctx context.Context) {
	view, err := r.Look(ctx)
	if err != nil {
		return // if the step needs the cloud, check prints the error
	}
	for i, l := range r.trustingOthers(view) {
		if i == maxNamed {
			break
		}
		fmt.Fprintln(r.Out, "note: "+tunnel.Printable(l))
	}
}

// notRenewed returns a line for each node and replica that is not ready for step 3: it still uses an old CA.
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
	// If cloudca holds only the new CA, an interrupted step 3 has removed the old CA there. Then every node that still
	// trusts the old CA would look like a node that trusts a foreign CA.
	if len(r.cloudCAs.Certificates()) > 1 {
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
