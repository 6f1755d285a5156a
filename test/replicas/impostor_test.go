package replicas

import (
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

// TestCertificate starts a replica with certificates of the right authority that the
// other replicas would not accept. It says so, and what to do, and ends.
func TestCertificate(t *testing.T) {
	beside(t)
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	f, err := rig.NewFleet(rig.FleetConfig{Binary: program, Dir: t.TempDir(), CA: ca, Hosts: local(2),
		Nodes: []string{"edge0"}})
	if err != nil {
		t.Fatal(err)
	}
	good := rig.CloudLeaf()
	for name, c := range map[string]struct {
		change func(*auth.Leaf)
		says   []string
	}{
		"not for clients": {func(l *auth.Leaf) { l.Client = false },
			[]string{"mode.cloud.stream.peers", "as a client", "key usage"}},
		"not for servers": {func(l *auth.Leaf) { l.Server = false }, []string{"as a server", "key usage"}},
		"an edge's name": {func(l *auth.Leaf) { l.DNSNames = []string{"edge0"} },
			[]string{"mode.cloud.stream.peers", "as a client", "valid for edge0"}},
		"no name": {func(l *auth.Leaf) { l.DNSNames = nil }, []string{"mode.cloud.stream.peers", "as a client"}},
	} {
		t.Run(name, func(t *testing.T) {
			leaf := good
			c.change(&leaf)
			r := f.Replicas[0]
			if err := r.Certify(ca, leaf); err != nil {
				t.Fatal(err)
			}
			said := len(r.Log.String())
			p, err := r.Start()
			if err != nil {
				t.Fatal(err)
			}
			defer p.Kill()
			select {
			case <-p.Done():
			case <-time.After(hangs):
				t.Fatal("it runs")
			}
			if p.ExitCode() != 3 {
				t.Errorf("exit code %d, want 3, a wrong configuration", p.ExitCode())
			}
			log := r.Log.String()[said:]
			for _, want := range append(c.says, "would not accept", "signed by ca", good.DNSNames[0]) {
				if !strings.Contains(log, want) {
					t.Errorf("it does not say %q: %s", want, log)
				}
			}
		})
	}
}
