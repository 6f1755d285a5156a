package replicas

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// TestAuthority replaces the authority of the replicas' certificates as an operator
// does: both are trusted for a while, then every replica gets a certificate of the new
// one, then the old one goes. No replica is restarted for it; they are killed in
// between so that new connections are made, in both directions.
func TestAuthority(t *testing.T) {
	beside(t)
	f := newFleet(t, size{replicas: local(2), edges: 2})
	next, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	changes := 0
	change := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		changes++
		for _, r := range f.Replicas {
			testkit.Within(t, atOnce, r.Name+" has read "+what, func() error {
				if n := strings.Count(r.Log.String(), "certificate files read again"); n < changes {
					return fmt.Errorf("it has read %d changes, want %d", n, changes)
				}
				return nil
			})
		}
	}
	again := func(replica int) {
		t.Helper()
		m := &f.Replicas[replica].Member
		f.kill(m)
		f.start(m)
		f.joined(1)
		f.reachable(readyWithin)
	}
	change("both authorities", f.Trust(f.CA(), next))
	change("its new certificate",
		errors.Join(f.Replicas[0].Certify(next, rig.CloudLeaf()), f.Replicas[1].Certify(next, rig.CloudLeaf())))
	again(0)
	change("the new authority", f.Trust(next))
	again(1)
}
