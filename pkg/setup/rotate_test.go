package setup

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// rotating is a cloud whose CAs are replaced, with one node. The node has what the files said when it renewed last.
type rotating struct {
	t       *testing.T
	dir     string
	conf    *conf.Cloud
	trusts  *auth.CloudCAs
	signer  string
	planted []string // ids of CAs that the node trusts besides
	second  string   // the CA by which the second replica signs; "": as the first one
	renewed int
	away    error // why the cloud does not answer
}

func newRotating(t *testing.T) *rotating {
	dir, c := newSite(t)
	r := &rotating{t: t, dir: dir, conf: c}
	r.renew()
	return r
}

// renew has the node renew its certificate.
func (r *rotating) renew() {
	r.t.Helper()
	told, err := auth.ParseCloudCAs(r.read("ca.crt"))
	if err != nil {
		r.t.Fatal(err)
	}
	if r.trusts == nil {
		r.trusts = told
	}
	chain, err := auth.ParseCertificates(r.read("cloud.crt"))
	if err != nil {
		r.t.Fatal(err)
	}
	host := chain[0].DNSNames[0]
	if _, err = chain[0].Verify(x509.VerifyOptions{DNSName: host, Roots: r.trusts.Pool()}); err != nil {
		r.t.Fatalf("the node no longer reaches the cloud: %v", err)
	}
	if r.trusts, _, err = r.trusts.Adopt(told, chain, host, chain[0].NotBefore.Add(auth.Backdate)); err != nil {
		r.t.Fatal(err)
	}
	ca, err := auth.ReadCA(r.conf.Join.CA, r.conf.Join.CAKey)
	if err != nil {
		r.t.Fatal(err)
	}
	r.signer = nameOf(ca)
}

func (r *rotating) read(name string) []byte {
	r.t.Helper()
	text, err := os.ReadFile(filepath.Join(r.dir, name))
	if err != nil {
		r.t.Fatal(err)
	}
	return text
}

// view is what the cloud knows.
func (r *rotating) view(ctx context.Context) (*RotationView, error) {
	held, err := tryLock(r.dir)
	if err == nil {
		held.Close()
	} else if late, ok := ctx.Deadline(); !ok || time.Until(late) > lockTimeout-time.Second {
		r.t.Errorf("the cloud may take until %v, and the lock is held: %v", late, err)
	}
	if r.away != nil {
		return nil, r.away
	}
	ids := func(name string) (all []string) {
		certs, err := auth.ParseCertificates(r.read(name))
		if err != nil {
			r.t.Fatal(err)
		}
		for _, c := range certs {
			all = append(all, auth.CAID(c))
		}
		return all
	}
	own, err := auth.ParseCertificates(r.read("cloud.crt"))
	if err != nil {
		return nil, err
	}
	signs, err := auth.ReadCA(r.conf.Join.CA, r.conf.Join.CAKey)
	if err != nil {
		return nil, err
	}
	cloud := RotationReplica{
		Name: "cloud-0", CloudCAs: ids("ca.crt"), NodeCAs: ids("nodes-ca.crt"), OwnBy: tunnel.CertificateOf(own[0]).Signer,
		Signer: nameOf(signs),
	}
	second := cloud
	if second.Name = "cloud-1"; r.second != "" {
		second.Signer = r.second
	}
	return &RotationView{
		Replicas: []RotationReplica{cloud, second},
		Nodes:    []RotationNode{{Name: "edge1", Trusts: append(r.trusts.IDs(), r.planted...), Signer: r.signer}},
	}, nil
}

// rotate does the next step, and returns what it prints.
func (r *rotating) rotate(force bool) (string, error) {
	var out strings.Builder
	err := RotateCA(r.t.Context(), RotateConfig{
		Cloud: r.conf, Force: force, Look: r.view, Out: &out,
		Renew: func(context.Context) error {
			r.renewed++
			held, err := tryLock(r.dir)
			if err != nil {
				r.t.Errorf("tunnel token revoke could not go on while nodes are asked to renew: %v", err)
				return nil
			}
			return held.Close()
		},
	})
	return out.String(), err
}

// must is rotate without an error.
func (r *rotating) must(want string) {
	r.t.Helper()
	if out, err := r.rotate(false); err != nil || !strings.Contains(out, want) {
		r.t.Fatalf("want %q: %v\n%s", want, err, out)
	}
}

// Each step waits until the node is ready for it. No step cuts the node off.
func TestRotateCA(t *testing.T) {
	r := newRotating(t)
	before := r.trusts.IDs()[0]
	r.must("Step 1 of 3")
	if out, err := r.rotate(false); !errors.Is(err, ErrNotReady) || !strings.Contains(out, "node edge1 does not trust") {
		t.Fatalf("step 2, too early: %v\n%s", err, out)
	}
	r.renew()
	if len(r.trusts.IDs()) != 2 {
		t.Fatalf("the node trusts %v", r.trusts.IDs())
	}
	r.away = errors.New("nobody answers")
	if out, err := r.rotate(false); !errors.Is(err, ErrNotReady) || !strings.Contains(out, "nobody answers") {
		t.Fatalf("step 2, without the cloud: %v\n%s", err, out)
	}
	r.away = nil
	key := r.read("cloud.key")
	r.must("Step 2 of 3")
	if string(r.read("cloud.key")) == string(key) {
		t.Error("the cloud has its old key, which may be stolen")
	}
	if _, err := tls.LoadX509KeyPair(filepath.Join(r.dir, "cloud.crt"), filepath.Join(r.dir, "cloud.key")); err != nil {
		t.Error(err)
	}
	out, err := r.rotate(false)
	if !errors.Is(err, ErrNotReady) || !strings.Contains(out, "node edge1 has a certificate") {
		t.Fatalf("step 3, too early: %v\n%s", err, out)
	}
	r.renew()
	r.must("Step 3 of 3")
	r.renew()
	if ids := r.trusts.IDs(); len(ids) != 1 || ids[0] == before {
		t.Errorf("the node trusts %v, and before %s", ids, before)
	}
	if r.renewed != 6 { // after each step, and whenever a step was too early: nodes may have come since
		t.Errorf("nodes were asked %d times to renew", r.renewed)
	}
	if _, err := cloudRoot(r.conf); err != nil {
		t.Errorf("no node could join: %v", err)
	}
	if warnings, err := CheckTrust(r.conf); err != nil || len(warnings) > 0 {
		t.Errorf("%q, %v", warnings, err)
	}
	r.must("Step 1 of 3") // another rotation
}

// With --force a step goes on without its nodes.
func TestRotateCAForce(t *testing.T) {
	r := newRotating(t)
	r.must("Step 1 of 3")
	out, err := r.rotate(true)
	if err != nil || !strings.Contains(out, "Step 2 of 3") || !strings.Contains(out, "not ready") {
		t.Errorf("%v\n%s", err, out)
	}
}

// A cloud that forgets nodes when it restarts cannot say that all of them are ready.
func TestRotateCAForgetful(t *testing.T) {
	r := newRotating(t)
	r.conf.Inventory = ""
	r.must("Step 1 of 3")
	for _, step := range []string{"2", "3"} {
		r.renew()
		if out, err := r.rotate(false); !errors.Is(err, ErrNotReady) || !strings.Contains(out, "set inventory") {
			t.Errorf("step %s: %v\n%s", step, err, out)
		}
		if out, err := r.rotate(true); err != nil || !strings.Contains(out, "Step "+step+" of 3") {
			t.Errorf("step %s with --force: %v\n%s", step, err, out)
		}
	}
}

// A step that was interrupted behind any of its files is done again, and ends as if it was never interrupted.
func TestRotateCAInterrupted(t *testing.T) {
	r := newRotating(t)
	ca, nodes, cert, nodesKey := r.read("ca.crt"), r.read("nodes-ca.crt"), r.read("cloud.crt"), r.read("nodes-ca.key")
	put := func(name string, text []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(r.dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(nextCAKeyFile, []byte("of a rotation that was never begun"))
	r.must("Step 1 of 3")
	put("ca.crt", ca)
	r.must("Step 1 of 3")
	put("ca.crt", ca)
	put("nodes-ca.crt", nodes)
	r.must("Step 1 of 3")
	r.renew()
	r.must("Step 2 of 3")
	put("nodes-ca.key", nodesKey)
	r.must("Step 2 of 3")
	// Between the key and the certificate: the cloud does not start, and so cannot be asked.
	put("cloud.crt", cert)
	r.away = errors.New("nobody answers")
	r.must("Step 2 of 3")
	r.away = nil
	if _, err := tls.LoadX509KeyPair(filepath.Join(r.dir, "cloud.crt"), filepath.Join(r.dir, "cloud.key")); err != nil {
		t.Error(err)
	}
	r.renew()
	crt, caKey, oldKey := r.read(nextCAFile), r.read(nextCAKeyFile), r.read("ca.key")
	nextNodes, both := r.read(nextNodesFile), r.read("ca.crt")
	r.must("Step 3 of 3")
	// The marker and all behind it are left.
	put(nextCAFile, crt)
	put(nextNodesFile, nextNodes)
	r.must("Step 3 of 3")
	// The CAs and the key are left, too.
	put(nextCAFile, crt)
	put(nextNodesFile, nextNodes)
	put(nextCAKeyFile, caKey)
	put("ca.key", oldKey)
	put("ca.crt", both)
	r.must("Step 3 of 3")
	r.renew()
	if len(r.trusts.IDs()) != 1 {
		t.Errorf("the node trusts %v", r.trusts.IDs())
	}
}

// The old CA of nodes stays while another replica signs by it.
func TestRotateCAOtherSigner(t *testing.T) {
	r := newRotating(t)
	r.second = r.signer
	for _, step := range []string{"1", "2"} {
		r.must("Step " + step + " of 3")
		r.renew()
	}
	out, err := r.rotate(false)
	if !errors.Is(err, ErrNotReady) || !strings.Contains(out, "replica cloud-1 does not sign") {
		t.Errorf("step 3, too early: %v\n%s", err, out)
	}
	r.second = ""
	r.must("Step 3 of 3")
}

// If a crash left the file of the new CA empty, the error tells the operator to remove that file. A complete rotation
// keeps the file mode of ca.key. A rotation refuses a ca.key that is a symbolic link.
func TestRotateCAFiles(t *testing.T) {
	r := newRotating(t)
	marker, key := filepath.Join(r.dir, nextCAFile), filepath.Join(r.dir, "ca.key")
	if err := os.WriteFile(marker, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := r.rotate(false); err == nil || !strings.Contains(err.Error(), "remove "+marker) {
		t.Errorf("an empty file: %v", err)
	}
	if err := os.Remove(marker); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(key, 0o640); err != nil {
		t.Fatal(err)
	}
	for _, step := range []string{"1", "2", "3"} {
		r.must("Step " + step + " of 3")
		r.renew()
	}
	if info, err := os.Stat(key); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("the key: %v, %v", info, err)
	}
	if err := os.Rename(key, key+".real"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(key+".real", key); err != nil {
		t.Fatal(err)
	}
	if _, err := r.rotate(true); !errors.Is(err, errMounted) {
		t.Errorf("a link as key: %v", err)
	}
}

// A node that trusts a CA which nobody has announced is named, and keeps the old CA from being removed.
func TestRotateCAPlanted(t *testing.T) {
	r := newRotating(t)
	r.planted = []string{"0123456789abcdef"}
	status := func() (string, error) {
		var out strings.Builder
		err := RotationStatus(t.Context(), RotateConfig{Cloud: r.conf, Look: r.view, Out: &out})
		return out.String(), err
	}
	const want = "node edge1 trusts the CA 0123456789abcdef"
	if out, err := status(); err != nil || !strings.Contains(out, want) {
		t.Errorf("before: %v\n%s", err, out)
	}
	r.must("Step 1 of 3")
	if out, err := status(); !errors.Is(err, ErrNotReady) || !strings.Contains(out, "tunnel cert renew --all") {
		t.Errorf("before the node has renewed: %v\n%s", err, out)
	}
	r.renew()
	if out, err := status(); err != nil || !strings.Contains(out, want) {
		t.Errorf("after step 1: %v\n%s", err, out)
	}
	r.must("Step 2 of 3")
	r.renew()
	if out, err := r.rotate(false); !errors.Is(err, ErrNotReady) || !strings.Contains(out, want) {
		t.Errorf("step 3: %v\n%s", err, out)
	}
	r.planted = nil
	r.must("Step 3 of 3")
}

// A certificate and its key may be in one file.
func TestRotateCAOneFile(t *testing.T) {
	r := newRotating(t)
	one := filepath.Join(r.dir, "cloud.crt")
	if err := os.WriteFile(one, append(r.read("cloud.crt"), r.read("cloud.key")...), 0o600); err != nil {
		t.Fatal(err)
	}
	r.conf.Server.Key = one
	r.must("Step 1 of 3")
	r.renew()
	r.must("Step 2 of 3")
	if _, err := tls.LoadX509KeyPair(one, one); err != nil {
		t.Error(err)
	}
	r.renew()
	r.must("Step 3 of 3")
}

// Files that the command cannot replace, or a cloud without such CAs: it changes nothing.
func TestRotateCARefused(t *testing.T) {
	r := newRotating(t)
	if err := os.Remove(filepath.Join(r.dir, "ca.key")); err != nil {
		t.Fatal(err)
	}
	if _, err := r.rotate(true); err == nil || !strings.Contains(err.Error(), "--ca-key") {
		t.Errorf("without the key: %v", err)
	}
	path := filepath.Join(r.dir, "nodes-ca.crt")
	if err := os.Rename(path, path+".real"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path+".real", path); err != nil {
		t.Fatal(err)
	}
	if _, err := r.rotate(true); !errors.Is(err, errMounted) {
		t.Errorf("a mounted file: %v", err)
	}
	r.conf.Join.CloudCA = ""
	if _, err := r.rotate(true); kindOf(err) != KindConfig {
		t.Errorf("without cloudca: %v", err)
	}
}

// One CA for the cloud and for nodes: the new CA of nodes would be lost. The command changes no file.
func TestRotateCAShared(t *testing.T) {
	link := func(t *testing.T, from, to string) {
		t.Helper()
		if err := os.Remove(to); err != nil {
			t.Fatal(err)
		}
		if err := os.Link(from, to); err != nil {
			t.Fatal(err)
		}
	}
	write := func(t *testing.T, path string, content []byte) {
		t.Helper()
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	tests := map[string]func(t *testing.T, r *rotating, j *conf.Join) (caKey string){
		"one file for each": func(_ *testing.T, r *rotating, j *conf.Join) string {
			j.CA, j.CAKey = r.dir+"//ca.crt", filepath.Join(r.dir, "ca.key")
			return ""
		},
		"two files with one CA, and one key": func(t *testing.T, r *rotating, j *conf.Join) string {
			write(t, j.CA, r.read("ca.crt"))
			j.CAKey = filepath.Join(r.dir, "ca.key")
			return ""
		},
		"two files with one CA, and a copy of the key": func(t *testing.T, r *rotating, j *conf.Join) string {
			write(t, j.CA, r.read("ca.crt"))
			write(t, j.CAKey, r.read("ca.key"))
			return ""
		},
		"the CA of the cloud among those of nodes": func(t *testing.T, r *rotating, j *conf.Join) string {
			write(t, j.CA, append(r.read("nodes-ca.crt"), r.read("ca.crt")...))
			return ""
		},
		"links to one file, and the cluster signs": func(t *testing.T, _ *rotating, j *conf.Join) string {
			link(t, j.CloudCA, j.CA)
			j.CAKey, j.Kubernetes = "", true
			return ""
		},
		"one file of CAs, and the cluster signs": func(_ *testing.T, _ *rotating, j *conf.Join) string {
			j.CA, j.CAKey, j.Kubernetes = j.CloudCA, "", true
			return ""
		},
		"the key of the CA of nodes as --ca-key": func(_ *testing.T, _ *rotating, j *conf.Join) string {
			return j.CAKey
		},
	}
	for name, share := range tests {
		t.Run(name, func(t *testing.T) {
			r := newRotating(t)
			caKey := share(t, r, &r.conf.Join)
			before := contents(t, r.dir)
			err := RotateCA(t.Context(), RotateConfig{
				Cloud: r.conf, CAKey: caKey, Force: true, Look: r.view, Out: io.Discard,
				Renew: func(context.Context) error { return nil },
			})
			if kindOf(err) != KindConfig || !strings.Contains(err.Error(), "CA of their own") {
				t.Errorf("want a refusal that says what to do: %v", err)
			}
			if after := contents(t, r.dir); !maps.Equal(after, before) {
				t.Errorf("the files have changed: %v, before %v", slices.Sorted(maps.Keys(after)),
					slices.Sorted(maps.Keys(before)))
			}
		})
	}
}

// A --ca-key that names the key of nodes' CA is refused in the last step, too: it would be overwritten.
func TestRotateCAKeyOfNodes(t *testing.T) {
	r := newRotating(t)
	for _, step := range []string{"1", "2"} {
		r.must("Step " + step + " of 3")
		r.renew()
	}
	before := contents(t, r.dir)
	err := RotateCA(t.Context(), RotateConfig{
		Cloud: r.conf, CAKey: r.conf.Join.CAKey, Look: r.view, Out: io.Discard,
		Renew: func(context.Context) error { return nil },
	})
	if kindOf(err) != KindConfig || !maps.Equal(contents(t, r.dir), before) {
		t.Errorf("want a refusal that changes no file: %v", err)
	}
}

// contents returns the files of a folder.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]string)
	for _, e := range entries {
		if e.Type().IsRegular() {
			text, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				t.Fatal(err)
			}
			all[e.Name()] = string(text)
		}
	}
	return all
}

// The command does not replace a certificate that replicas have for each other alone, so it does not remove its CA.
func TestRotateCAPeers(t *testing.T) {
	r := newRotating(t)
	server := r.conf.Server
	r.conf.Peers = conf.Peers{Service: "peers:9000", CA: r.conf.Join.CloudCA, Cert: server.Cert, Key: server.Key}
	r.must("Step 1 of 3")
	r.conf.Peers.Cert, r.conf.Peers.Key = filepath.Join(r.dir, "peers.crt"), filepath.Join(r.dir, "peers.key")
	out, err := r.rotate(true)
	if kindOf(err) != KindConfig || !strings.Contains(err.Error(), "peers.crt") || out != "" {
		t.Errorf("a certificate of its own: %v\n%s", err, out)
	}
}
