package kube

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

func prefixes(all ...string) (ps []netip.Prefix) {
	for _, p := range all {
		ps = append(ps, netip.MustParsePrefix(p))
	}
	return ps
}

// newNode returns a Node with a network of pods and addresses. Each address is given as
// type=address.
func newNode(cidr string, addresses ...string) node {
	n := node{}
	if cidr != "" {
		n.podCIDRs = prefixes(cidr)
	}
	for _, a := range addresses {
		typ, address, _ := strings.Cut(a, "=")
		n.addresses = append(n.addresses, nodeAddress{typ, address})
	}
	return n
}

// A stolen node cannot attract the traffic of others by writing addresses into its own status.
func TestClaims(t *testing.T) {
	good := newNode("10.88.1.0/24", "InternalIP=10.0.0.1", "Hostname=good")
	cp := newNode("10.88.9.0/24", "InternalIP=192.168.7.1", "Hostname=cp")
	cp.controlPlane = true
	cp.podCIDRs = append(cp.podCIDRs, netip.MustParsePrefix("10.0.0.0/8")) // too wide to count
	services, api := prefixes("10.96.0.0/12", "fd00:96::/112"), "192.168.7.9"
	for _, c := range []struct {
		what string
		evil node
		want Reach  // of evil
		why  string // the first contested claim; "": none is contested
	}{
		{
			"itself",
			newNode("10.88.2.0/24",
				"InternalIP=10.0.0.2", "ExternalIP=203.0.113.2", "Hostname=evil", "InternalDNS=evil.internal"),
			Reach{[]string{"evil", "10.0.0.2", "203.0.113.2"}, prefixes("10.88.2.0/24"), []string{"evil.internal"}},
			"",
		},
		{
			"an address of its own pods' network", newNode("10.88.2.0/24", "InternalIP=10.88.2.1"),
			Reach{[]string{"evil", "10.88.2.1"}, prefixes("10.88.2.0/24"), nil},
			"",
		},
		// In the next three cases pkg/egress refuses the addresses that both nodes claim.
		{
			"a pod of another", newNode("", "InternalIP=10.88.1.7"),
			Reach{Hosts: []string{"evil", "10.88.1.7"}},
			"evil 10.88.1.7 it is in the network of the pods of good: neither node gets it",
		},
		{
			"the same, mapped", newNode("", "InternalIP=::ffff:10.88.1.7"),
			Reach{Hosts: []string{"evil", "::ffff:10.88.1.7"}},
			"evil ::ffff:10.88.1.7 it is in the network of the pods of good: neither node gets it",
		},
		{
			"another's address as its pod", newNode("10.0.0.0/24"),
			Reach{[]string{"evil"}, prefixes("10.0.0.0/24"), nil},
			"good 10.0.0.1 it is in the network of the pods of evil: neither node gets it",
		},
		{
			"half of the network as its pods", newNode("10.0.0.0/15"),
			Reach{Hosts: []string{"evil"}},
			"evil 10.0.0.0/15 it is wider than the pods of one Node can need: /16 at most",
		},
		{
			"everything as its pods", newNode("::/0"),
			Reach{Hosts: []string{"evil"}},
			"evil ::/0 it is wider than the pods of one Node can need: /48 at most",
		},
		{
			"a Service", newNode("", "InternalIP=10.96.0.10"),
			Reach{Hosts: []string{"evil"}},
			"evil 10.96.0.10 it is an address of Services",
		},
		{
			"a Service, IPv6", newNode("", "ExternalIP=fd00:96::a"),
			Reach{Hosts: []string{"evil"}},
			"evil fd00:96::a it is an address of Services",
		},
		{
			"the control plane", newNode("", "InternalIP=192.168.7.1"),
			Reach{Hosts: []string{"evil"}},
			"evil 192.168.7.1 it is an address of the control plane",
		},
		{
			"the API server", newNode("", "InternalIP=192.168.7.9"),
			Reach{Hosts: []string{"evil"}},
			"evil 192.168.7.9 it is an address of the control plane",
		},
		{
			"a pod of the control plane", newNode("", "InternalIP=10.88.9.7"),
			Reach{Hosts: []string{"evil"}},
			"evil 10.88.9.7 it is in the network of the pods of a control-plane Node",
		},
		{
			"pods of the control plane as its pods", newNode("10.88.8.0/23"),
			Reach{Hosts: []string{"evil"}},
			"evil 10.88.8.0/23 it overlaps the network of the pods of a control-plane Node",
		},
		{
			"link-local addresses as its pods", newNode("169.254.0.0/16"),
			Reach{Hosts: []string{"evil"}},
			"evil 169.254.0.0/16 pods have no such addresses",
		},
		{
			"every machine's", newNode("", "InternalIP=127.0.0.1"),
			Reach{Hosts: []string{"evil"}},
			"evil 127.0.0.1 every machine has such an address",
		},
		{
			"the cloud's metadata", newNode("", "InternalIP=169.254.169.254"),
			Reach{Hosts: []string{"evil"}},
			"evil 169.254.169.254 every machine has such an address",
		},
		{
			"its name in another spelling", newNode("", "Hostname=EVIL", "InternalDNS=evil."),
			Reach{Hosts: []string{"evil", "EVIL", "evil."}},
			"",
		},
		{
			"the name of another", newNode("", "Hostname=good"),
			Reach{Hosts: []string{"evil"}, Refused: []string{"good"}},
			"evil good it is not the name of the Node",
		},
		{
			"the same, with a dot", newNode("", "Hostname=good."),
			Reach{Hosts: []string{"evil"}, Refused: []string{"good."}},
			"evil good. it is not the name of the Node",
		},
		{
			"a Service, as if it were a name", newNode("", "InternalDNS=10.96.0.10."),
			Reach{Hosts: []string{"evil"}},
			"evil 10.96.0.10. it is an address of Services",
		},
		{
			"another name", newNode("", "ExternalDNS=evil.example.com"),
			Reach{Hosts: []string{"evil"}, Refused: []string{"evil.example.com"}},
			"",
		},
		{
			"a name of the cluster", newNode("", "InternalDNS=Kubernetes.default.svc."),
			Reach{Hosts: []string{"evil"}},
			"",
		},
		// In the next two cases pkg/egress refuses them, too.
		{
			"the address of another", newNode("", "InternalIP=10.0.0.1"),
			Reach{Hosts: []string{"evil", "10.0.0.1"}},
			"good 10.0.0.1 evil claims it as well: neither node gets it",
		},
		{
			"some pods of another", newNode("10.88.1.7/32"),
			Reach{[]string{"evil"}, prefixes("10.88.1.7/32"), nil},
			"evil 10.88.1.7/32 the network of the pods of good overlaps it: no node gets the addresses in both",
		},
		{
			"Services as its pods", newNode("10.96.0.0/24"),
			Reach{Hosts: []string{"evil"}},
			"evil 10.96.0.0/24 it holds addresses of Services",
		},
		{
			"the control plane as its pods", newNode("192.168.0.0/16"),
			Reach{Hosts: []string{"evil"}},
			"evil 192.168.0.0/16 it holds an address of the control plane",
		},
	} {
		s := resolveClaims(map[tunnel.NodeName]node{"good": good, "cp": cp, "evil": c.evil}, services, api)
		why := ""
		if len(s.contested) > 0 {
			why = fmt.Sprint(s.contested[0].node, " ", s.contested[0].address, " ", s.contested[0].reason)
		}
		// If both claim an address, either node may be the reported one.
		wrongWhy := why != c.why && !strings.HasSuffix(c.why, "neither node gets it") || (why == "") != (c.why == "")
		if got := s.reach["evil"]; !reflect.DeepEqual(got, c.want) || wrongWhy {
			t.Errorf("%s: %v, %q; want %v, %q", c.what, got, why, c.want, c.why)
		}
		wantGood := Reach{[]string{"good", "10.0.0.1"}, prefixes("10.88.1.0/24"), nil}
		if got := s.reach["good"]; !reflect.DeepEqual(got, wantGood) {
			t.Errorf("%s: good reaches %v", c.what, got)
		}
		if got := s.reach["cp"]; !reflect.DeepEqual(got, Reach{Hosts: []string{"cp", "192.168.7.1"}}) {
			t.Errorf("%s: the control plane reaches %v", c.what, got)
		}
	}
	// A node name that is an address is a claim like any other.
	s := resolveClaims(map[tunnel.NodeName]node{"10.88.1.7": {}, "10.0.0.3": {}, "good": good}, services, api)
	want := "map[10.0.0.3:{[10.0.0.3] [] []} 10.88.1.7:{[10.88.1.7] [] []} good:{[good 10.0.0.1] [10.88.1.0/24] []}]"
	if got := fmt.Sprint(s.reach); got != want {
		t.Error(got)
	}
}

// A Node with a great many addresses costs little time: only a few of them are accepted, and one
// log line says so.
func TestManyAddresses(t *testing.T) {
	evil := &nodeObject{ObjectMeta: metav1.ObjectMeta{Name: "evil"}}
	for i := range 40000 {
		ip := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		evil.Status.Addresses = append(evil.Status.Addresses, nodeAddress{"InternalIP", ip.String()})
	}
	var log testkit.Log
	var r *Reaches
	var hosts []string
	took := time.Hour
	for range 5 { // the shortest time counts: this machine may be busy
		log = testkit.Log{}
		r = (&Client{}).Reaches(slog.New(slog.NewTextHandler(&log, nil)))
		start := time.Now()
		if err := (*reachStore)(r).Add(evil); err != nil {
			t.Fatal(err)
		}
		hosts = r.All()["evil"].Hosts
		took = min(took, time.Since(start))
	}
	t.Logf("%d hosts after %v", len(hosts), took)
	if len(hosts) != 1+maxAddresses || hosts[maxAddresses] != "10.1.0.63" || took > time.Second {
		t.Errorf("%d hosts are accepted after %v, want the name and %d addresses at once", len(hosts), took, maxAddresses)
	}
	text := log.String()
	if n := r.Contested(); n != 1 || strings.Count(text, "\n") != 1 || !strings.Contains(text, "10.1.0.64") {
		t.Errorf("%d are contested: %s", n, text)
	}
	evil.Status.Addresses = evil.Status.Addresses[:maxAddresses]
	if err := (*reachStore)(r).Update(evil); err != nil {
		t.Fatal(err)
	}
	if n := r.Contested(); n != 0 {
		t.Errorf("%d are contested with as many addresses as a Node may have", n)
	}
}

func TestHostname(t *testing.T) {
	for host, want := range map[string]string{
		"https://10.96.0.1:443": "10.96.0.1", "https://api.example.com/k8s/c-1": "api.example.com",
		"https://[fd00::1]:6443": "fd00::1",
		"api.example.com:6443":   "api.example.com", "localhost": "localhost",
	} {
		if got := (&Client{host: host}).Hostname(); got != want {
			t.Errorf("%s: %q, want %q", host, got, want)
		}
	}
}

// The networks of Services are read from the cluster if it has them. Otherwise Reaches works
// without them.
func TestServiceCIDRs(t *testing.T) {
	for _, c := range []struct {
		what    string
		handler http.HandlerFunc
		hosts   string
		note    string
	}{
		{
			"1.33", text(200, `{"kind": "ServiceCIDRList", "items": [{"spec": {"cidrs": ["10.96.0.0/12", "fd00:96::/112"]}}]}`),
			"[edge1]", "",
		},
		{"before", refusal(404, "NotFound", ""), "[edge1 10.96.0.10]", ""},
		{"no right", refusal(403, "Forbidden", ""), "[edge1 10.96.0.10]", "deployment/cloud-rbac.yaml"},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		events := make(chan string)
		s := serve(t, nil)
		s.setHandler(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == serviceCIDRs {
				c.handler(w, r)
				return
			}
			listAndWatch(ctx, t, nodeListJSON(nodeJSON("edge1", "1", "10.96.0.10", "10.88.1.0/24")), events)(w, r)
		})
		r := s.Reaches(slog.New(slog.DiscardHandler))
		changed := r.Changed()
		done := make(chan struct{})
		go func() {
			defer close(done)
			r.Run(ctx)
		}()
		select {
		case <-changed:
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: nothing is known; %s", c.what, r.Note())
		}
		if got := fmt.Sprint(r.All()["edge1"].Hosts); got != c.hosts || !r.Known() {
			t.Errorf("%s: %s, want %s", c.what, got, c.hosts)
		}
		if n := r.Note(); (n == "") != (c.note == "") || !strings.Contains(n, c.note) {
			t.Errorf("%s: note %q", c.what, n)
		}
		if n := r.Contested(); (n == 1) != (c.what == "1.33") {
			t.Errorf("%s: %d contested", c.what, n)
		}
		cancel()
		<-done
	}
}
