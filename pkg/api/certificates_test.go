package api

import (
	"context"
	"crypto/tls"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/peers"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A node's newest certificate counts, whether it shows it or got it before. They are sorted by their end. A node
// without a certificate is counted, also while it is away, unless only Kubernetes knows it.
func TestCertificates(t *testing.T) {
	r := newRig()
	at := time.Now().Truncate(time.Second).UTC()
	r.cfg.Certificates = func() Held {
		return Held{Own: &Certificate{Name: "cloud"}, NodeCAs: []Certificate{{Name: "ca"}}, Signer: "ca"}
	}
	shows := func(node, serial string, starts, ends time.Time) *tunnel.Session {
		s := r.attach(node)
		s.Certificate.Store(&tunnel.Certificate{Name: node, Signer: "ca", Serial: serial, Starts: starts, Ends: ends})
		return s
	}
	r.attach("by-token")
	r.dir.Detach(r.attach("away-by-token"))
	r.cfg.Expected = func() ([]tunnel.NodeName, bool) { return []tunnel.NodeName{"never"}, true }
	shows("later", "2", at, at.Add(2*time.Hour))
	r.dir.Detach(shows("away", "1", at, at.Add(time.Hour)))
	list, err := r.client(t).Certificates(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Processes) != 1 || list.Processes[0].Replica != "cloud-0" || list.Processes[0].Own.Name != "cloud" ||
		list.Without != 2 || len(list.Nodes) != 2 || list.Incomplete != nil {
		t.Fatalf("%+v", list)
	}
	first, second := list.Nodes[0], list.Nodes[1]
	if first.Node != "away" || first.State != Missing || first.Serial != "1" || first.Signer != "ca" ||
		!first.Ends.Equal(at.Add(time.Hour)) || !first.Starts.Equal(at) {
		t.Errorf("the first is %+v", first)
	}
	if second.Node != "later" || second.State != Connected || second.Serial != "2" {
		t.Errorf("the second is %+v", second)
	}
}

// A configured replica that cannot be joined makes the list incomplete: its certificates are not known.
func TestCertificatesOfAReplicaThatIsDown(t *testing.T) {
	r := newRig()
	ca := testca.New(t, "replicas")
	conf := &tls.Config{
		Certificates: []tls.Certificate{ca.Pair(t, auth.Leaf{
			CommonName: "replica", DNSNames: []string{"replicas"}, Server: true, Client: true,
		})},
		RootCAs: ca.Pool(), ServerName: "replicas",
	}
	down := testkit.FreeAddress(t)
	var err error
	r.cfg.Peers, err = peers.New(peers.Config{
		Addresses: []string{down}, TLS: func() *tls.Config { return conf }, Server: conf, Log: r.cfg.Log,
	}, r.dir)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Run(t, r.cfg.Peers.Run)
	testkit.Eventually(t, "the replica cannot be joined", func() bool { return r.cfg.Peers.Note() != "" })
	list, err := r.client(t).Certificates(t.Context())
	if err != nil || len(list.Incomplete) != 1 || !strings.Contains(list.Incomplete[0], down) {
		t.Errorf("%+v, %v", list, err)
	}
}

// Of what two replicas know of a node, the newer certificate stays.
func TestNewestCertificate(t *testing.T) {
	old, now := &Certificate{Serial: "1", Starts: time.Unix(1, 0)}, &Certificate{Serial: "2", Starts: time.Unix(2, 0)}
	for _, pair := range [][2]*Certificate{{old, now}, {now, old}, {nil, now}, {now, nil}} {
		if got := newest(pair[0], pair[1]); got != now {
			t.Errorf("%v: %v", pair, got)
		}
	}
	if newest(nil, nil) != nil {
		t.Error("a certificate out of nothing")
	}
}

// An edge shows its own certificate, and lists no nodes.
func TestCertificatesOfAnEdge(t *testing.T) {
	r := newRig()
	r.cfg.Mode, r.cfg.Node = "edge", "edge1"
	r.cfg.Certificates = func() Held { return Held{Own: &Certificate{Name: "tunnel:node:edge1"}} }
	list, err := r.client(t).Certificates(t.Context())
	if err != nil || list.Mode != "edge" || list.Node != "edge1" || list.Nodes != nil ||
		list.Processes[0].Own.Name != "tunnel:node:edge1" {
		t.Errorf("%+v, %v", list, err)
	}
}

// A cloud asks the edges that can renew their certificates, and says which nodes it did not ask, and why.
func TestRenew(t *testing.T) {
	r := newRig()
	certified := &tunnel.Certificate{Serial: "1", Ends: time.Now().Add(time.Hour)}
	for node, renews := range map[string]bool{"edge1": true, "edge2": true, "old": false} {
		s := r.attach(node)
		s.Certificate.Store(certified)
		s.Renews = renews
	}
	r.attach("by-token").Renews = true
	asked := make(map[tunnel.NodeName]time.Duration)
	r.cfg.AskToRenew = func(s *tunnel.Session, within time.Duration) error {
		asked[s.Node] = within
		return nil
	}
	answer, err := r.client(t).Renew(t.Context(), nil)
	if err != nil || len(answer.Asked) != 2 || len(answer.NotAsked) != 2 || answer.Away != nil || len(asked) != 2 {
		t.Errorf("all: %+v, %v, %v", answer, err, asked)
	}
	clear(asked)
	answer, err = r.client(t).Renew(t.Context(), []string{"edge1", "old", "away"})
	if err != nil || !slices.Equal(answer.Asked, []string{"edge1"}) || len(answer.NotAsked) != 1 ||
		answer.NotAsked[0].Node != "old" || !slices.Equal(answer.Away, []string{"away"}) || len(asked) != 1 {
		t.Errorf("some: %+v, %v, %v", answer, err, asked)
	}
	for n := range 300 {
		s := r.attach(fmt.Sprintf("many%d", n))
		s.Certificate.Store(certified)
		s.Renews = true
	}
	clear(asked)
	answer, err = r.client(t).Renew(t.Context(), nil)
	if err != nil || answer.WithinSeconds != 30 || asked["edge1"] != 30*time.Second {
		t.Errorf("304 nodes: within %d s, %v", answer.WithinSeconds, err)
	}
}

// An edge renews its own certificate, if it has one.
func TestRenewOwn(t *testing.T) {
	r := newRig()
	r.cfg.Mode = "edge"
	if _, err := r.client(t).RenewOwn(t.Context()); err == nil {
		t.Error("an edge without a certificate has renewed it")
	}
	renewed := 0
	r.cfg.RenewNow = func(context.Context) error { renewed++; return nil }
	if list, err := r.client(t).RenewOwn(t.Context()); err != nil || list.Mode != "edge" || renewed != 1 {
		t.Errorf("%+v, %v", list, err)
	}
}
