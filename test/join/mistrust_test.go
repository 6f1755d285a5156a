package join

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestMistrust: files that would let the wrong one in, or nobody.
func TestMistrust(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	config := s.path("cloud.toml")
	text := string(s.file("cloud.toml"))
	const (
		ours = "ca = \"nodes-ca.crt\"\ncakey = \"nodes-ca.key\""
		same = "ca = \"ca.crt\"\ncakey = \"ca.key\""
		door = "[mode.cloud.https]\ncert = \"cloud.crt\"\nkey = \"cloud.key\"\nclientca = \"ca.crt\"\n"
		dial = "[mode.cloud.egress]\nhttpconnect = [\"tls://127.0.0.1:8090\"]\ncert = \"cloud.crt\"\nkey = \"cloud.key\"\n"
		addr = "[mode.cloud.https.addr]\n\"10250\" = \"127.0.0.1:10250\"\n"
	)
	for i, tt := range []struct {
		join, more string // in place of ours; behind everything
		code       int
		want       string
	}{
		{same, "[mode.cloud.stream.peers]\naddresses = [\"10.0.0.2:9000\"]\nca = \"ca.crt\"\nservername = \"127.0.0.1\"\n",
			3, "the authority of nodes must not be able to make replicas"},
		{same, door + "clientnames = [\"tunnel:node:edge1\"]\n" + addr, 3, "a node could call every kubelet"},
		{same, door + addr, 0, "could make callers of every kubelet"},
		{ours, door + addr, 0, "ok (cloud)"},
		{ours, dial + "clientca = \"nodes-ca.crt\"\n", 3, "clientnames: missing"},
		{ours, dial + "clientca = \"nodes-ca.crt\"\nclientnames = [\"tunnel:node:edge1\"]\n", 3,
			"a node could call every node"},
		{ours, dial + "clientca = \"nodes-ca.crt\"\nclientnames = [\"kube-apiserver\"]\n", 0,
			"could make callers of every node"},
		{ours, dial + "clientca = \"ca.crt\"\nclientnames = [\"kube-apiserver\"]\n", 0, "ok (cloud)"},
		{"ca = \"cloud.crt\"\ncakey = \"cloud.key\"", "", 3, "not an authority's certificate"},
		{"ca = \"nodes-ca.crt\"\ncakey = \"ca.key\"", "", 3, "mode.cloud.join"},
	} {
		other := s.path(strconv.Itoa(i) + ".toml")
		if err := os.WriteFile(other, []byte(strings.Replace(text, ours, tt.join, 1)+tt.more), 0o600); err != nil {
			t.Fatal(err)
		}
		s.want(tt.code, s.tunnel("", "config", "check", "-c", other), tt.want)
	}
	// No edge could join: said at the start, and an error where a token would be made.
	for change, want := range map[[2]string]string{
		{"address = \"" + s.address, "address = \"tunnel.example.com:9000"}: "not made out to tunnel.example.com",
		{`cloudca = "ca.crt"`, `cloudca = "nodes-ca.crt"`}:                  "not signed by",
	} {
		if err := os.WriteFile(config, []byte(strings.Replace(text, change[0], change[1], 1)), 0o600); err != nil {
			t.Fatal(err)
		}
		s.want(0, s.tunnel("", "config", "check", "-c", config), want)
		s.want(3, s.tunnel("", "token", "create", "-c", config, "--node", "edge1"), want)
	}
	// A key that others can read.
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(s.path("nodes-ca.key"), 0o644); err != nil {
		t.Fatal(err)
	}
	s.want(0, s.tunnel("", "config", "check", "-c", config), "cakey", "chmod 600")
}

// TestSecretVolume: the files of a mounted Secret, as the kubelet writes them for a pod with an fsGroup. They
// are root's, the group of the process may read them, and nobody is told to change that.
func TestSecretVolume(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root may give files to root and to another group")
	}
	s := newSite(t, "127.0.0.1")
	for _, dir := range []string{s.dir, filepath.Dir(s.dir), filepath.Dir(filepath.Dir(s.dir))} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	secrets := []string{"cloud.key", "nodes-ca.key", "tokens"}
	mount := func(mode os.FileMode, group int) answer {
		t.Helper()
		for _, name := range secrets {
			if err := errors.Join(os.Chown(s.path(name), 0, group), os.Chmod(s.path(name), mode)); err != nil {
				t.Fatal(err)
			}
		}
		return s.want(0, s.asNobody("", "config", "check", "-c", s.path("cloud.toml")), "ok (cloud)")
	}
	if a := mount(0o440, nobody); strings.Contains(a.out+a.notes, "can be read by others") {
		t.Errorf("%s\nit warns of the group that reads the Secret", a)
	}
	for _, a := range []answer{mount(0o444, nobody), mount(0o460, nobody)} {
		for _, name := range secrets {
			s.want(0, a, s.path(name)+" can be read by others")
		}
	}
}

// TestAnotherNodesCertificate: an edge does not start with a certificate that is not its
// own.
func TestAnotherNodesCertificate(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	s.start()
	_, token := s.create("edge1")
	dir := filepath.Join(t.TempDir(), "edge")
	s.want(0, s.join(token, dir))
	config := filepath.Join(dir, "edge.toml")
	edit(t, config, `node = "edge1"`, `node = "edge2"`)
	s.want(3, s.tunnel("", "edge", "-c", config), "is of node edge1, and this is node edge2")
}
