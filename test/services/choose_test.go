package services

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"tunnel.example/tunnel/internal/testkit/choices"
	"tunnel.example/tunnel/pkg/services"
)

// TestCases shows that kube-proxy gives the answers of the table by which pkg/services is tested.
func TestCases(t *testing.T) {
	for _, c := range choices.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			q := question{c.Service, c.Endpoints, c.Self}
			want := answer{sorted(c.Cluster), sorted(c.Local), sorted(c.Reachable), c.Anywhere}
			got, known := askKubeProxy(q, c.Port, c.At.Is6())
			if !known || !reflect.DeepEqual(got, want) {
				t.Errorf("kube-proxy answers %+v, %t; the table says %+v", got, known, want)
			}
			compare(t, q)
		})
	}
}

// TestRandom compares both answers for Services, endpoints and nodes at random.
func TestRandom(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("the seed is %#x", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 20_000 {
		compare(t, generate(randomBytes(random)))
		if t.Failed() {
			return
		}
	}
}

// FuzzChoose does the same with the bytes of a fuzzer.
func FuzzChoose(f *testing.F) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 100 { // the fuzzer makes others of these; from nothing, it would take long to make a Service with endpoints
		f.Add(randomBytes(random))
	}
	f.Fuzz(func(t *testing.T, b []byte) { compare(t, generate(b)) })
}

func randomBytes(r *rand.Rand) []byte {
	b := make([]byte, 256)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// compare asks both about every port of the Service, in both families. Choose also gets only the endpoints that the
// cloud sends to the node.
func compare(t *testing.T, q question) {
	t.Helper()
	given := slices.Clone(q.endpoints)
	sent := question{svc: q.svc, self: q.self}
	for _, i := range services.ViewOf(q.svc, q.endpoints).For(q.self) {
		sent.endpoints = append(sent.endpoints, q.endpoints[i])
	}
	for _, port := range q.svc.GetPorts() {
		for _, ip := range q.svc.GetClusterIps() {
			at := netip.MustParseAddr(ip)
			want, known := askKubeProxy(q, port, at.Is6())
			if !known {
				t.Fatalf("kube-proxy does not know port %v at %s\n%s", port, ip, q)
			}
			got := askChoose(q, port, at)
			if !reflect.DeepEqual(got, want) {
				t.Errorf("port %v at %s:\nChoose answers     %+v\nkube-proxy answers %+v\n%s", port, ip, got, want, q)
			}
			if got = askChoose(sent, port, at); !reflect.DeepEqual(got, want) {
				t.Errorf("port %v at %s, with the endpoints that the node is sent:\nChoose answers     %+v\n"+
					"kube-proxy answers %+v\n%s\nsent: %s", port, ip, got, want, q, sent)
			}
		}
	}
	if !slices.Equal(given, q.endpoints) {
		t.Error("Choose has changed the endpoints that it got")
	}
}

func askChoose(q question, port *services.Port, at netip.Addr) answer {
	c := services.Choose(q.svc, port, at, q.endpoints, q.self)
	list := func(l []services.Named) []string { return sorted(choices.Places(l, port)) }
	return answer{list(c.Cluster), list(c.Local), list(c.Reachable), c.Anywhere}
}

func sorted(list []string) []string {
	list = slices.Clone(list)
	slices.Sort(list)
	return list
}
