package mirror

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/egress"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/services/hub"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

const (
	first, last = 20000, 20003
	cloud       = "tunnel-system"
)

// election is an Election that the test decides.
type election struct {
	elected chan struct{} // closed when this replica is the leader
	err     error
}

func (e *election) Err() error { return e.err }

func (e *election) Run(ctx context.Context, lead func(context.Context)) {
	select {
	case <-e.elected:
		lead(ctx)
	case <-ctx.Done():
	}
}

// replica is a replica of the cloud.
type replica struct {
	*Mirror
	writer   *Writer
	election *election
	log      *testkit.Log
	running  *testkit.Running // of writer and mirror

	mu   sync.Mutex        // guards the following
	at   map[uint16]string // the address of each open port
	busy bool              // ports cannot be opened
}

// listener forgets its address when it is closed.
type listener struct {
	net.Listener
	close func()
}

func (l listener) Close() error {
	l.close()
	return l.Listener.Close()
}

// start starts a replica. Its callers get the address of their target as answer, unless serve is given.
func start(t *testing.T, a *apiServer, leads bool, serve func(context.Context, net.Conn, string)) *replica {
	t.Helper()
	log, text := testkit.NewLog()
	r := &replica{log: text, election: &election{elected: make(chan struct{})}, at: make(map[uint16]string)}
	if serve == nil {
		serve = func(_ context.Context, c net.Conn, addr string) {
			io.WriteString(c, addr)
			c.Close()
		}
	}
	objects := a.client().Mirrors(kube.MirrorsConfig{
		Annotation: Annotation, Label: Label, Value: cloud, Namespace: cloud, Service: "cloud",
	}, new(tunnel.Counters), log)
	r.Mirror = New(Config{
		Objects: objects, Owner: cloud, First: first, Last: last, Namespaces: []string{"shop", "bank"}, Serve: serve,
		Log: log,
	})
	r.listen = func(ctx context.Context, port uint16) (net.Listener, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.busy {
			return nil, errors.New("address already in use")
		}
		ln, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		r.at[port] = ln.Addr().String()
		return listener{ln, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			delete(r.at, port)
		}}, nil
	}
	r.writer = NewWriter(r.Mirror, r.election)
	r.writer.interval = 0
	if leads {
		close(r.election.elected)
	}
	r.running = testkit.Run(t, func(ctx context.Context) error { return tunnel.Run(ctx, r.Mirror, r.writer) })
	testkit.Eventually(t, "the replica is ready", func() bool { return r.Ready() == nil })
	return r
}

// ports returns the open ports.
func (r *replica) ports() (all []uint16) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for port := range r.at {
		all = append(all, port)
	}
	slices.Sort(all)
	return all
}

// dial waits until a port is open, and connects to it. It fails if the port is closed meanwhile.
func (r *replica) dial(t *testing.T, port uint16) (net.Conn, error) {
	t.Helper()
	var at string
	testkit.Eventually(t, fmt.Sprintf("port %d is open", port), func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		at = r.at[port]
		return at != ""
	})
	return net.Dial("tcp", at)
}

// leadsTo checks what callers of a port are connected to.
func (r *replica) leadsTo(t *testing.T, port uint16, want string) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("port %d leads to %s", port, want), func() bool {
		c, err := r.dial(t, port)
		if err != nil {
			return false
		}
		defer c.Close()
		got, _ := io.ReadAll(c)
		return string(got) == want
	})
}

// twinObject is what tests read of a twin.
type twinObject struct {
	Metadata struct {
		UID             string
		Labels          map[string]string
		OwnerReferences []struct{ Kind, Name, UID string }
	}
	Spec struct {
		IPFamilyPolicy string
		Selector       map[string]string
		Ports          []kube.ServicePort
	}
}

// sliceObject is what tests read of an EndpointSlice.
type sliceObject struct {
	Metadata struct {
		Labels          map[string]string
		OwnerReferences []struct{ UID string }
	}
	AddressType string
	Ports       []kube.ServicePort
	Endpoints   []struct {
		Addresses  []string
		Conditions struct{ Ready bool }
		NodeName   string
	}
}

// endpoints returns the addresses in the EndpointSlice of a twin; "none" if there is no EndpointSlice.
func (a *apiServer) endpoints(namespace, slice string) string {
	var s sliceObject
	if !a.get("endpointslices", namespace, slice, &s) {
		return "none"
	}
	var all []string
	for _, e := range s.Endpoints {
		if !e.Conditions.Ready {
			a.t.Errorf("%s is not ready", e.Addresses)
		}
		all = append(all, e.Addresses...)
	}
	return strings.Join(all, " ")
}

// target returns the port of the cloud for a port of a twin.
func (a *apiServer) target(namespace, twin string, port uint16) (target uint16) {
	a.t.Helper()
	testkit.Eventually(a.t, fmt.Sprintf("%s/%s:%d has a port of the cloud", namespace, twin, port), func() bool {
		var s twinObject
		a.get("services", namespace, twin, &s)
		for _, p := range s.Spec.Ports {
			if p.Port == port {
				target = p.Target
			}
		}
		return target != 0
	})
	return target
}

// mirrored creates or changes a Service with the annotation, and one TCP port.
func (a *apiServer) mirrored(namespace, name, value string, port int) {
	a.put("services", namespace, name, fmt.Sprintf(`{"metadata": {"annotations": {%q: %q}}, "spec": {"type": "ClusterIP",
		"clusterIP": "10.96.0.1", "ports": [{"name": "web", "port": %d, "targetPort": "web"}]}}`, Annotation, value, port))
}

// replicas says which addresses the cloud has.
func (a *apiServer) replicas(addresses ...string) {
	var list []string
	for _, at := range addresses {
		list = append(list, fmt.Sprintf(`{"addresses": [%q], "nodeName": "n1"}`, at))
	}
	a.put("endpointslices", cloud, "cloud-1", fmt.Sprintf(`{
		"metadata": {"labels": {"kubernetes.io/service-name": "cloud"}}, "addressType": "IPv4",
		"ports": [{"name": "", "port": 9000}], "endpoints": [%s]}`, strings.Join(list, ", ")))
}

// A Service with the annotation gets a twin whose endpoints are the replicas that are ready. All replicas open the same
// ports.
func TestTwin(t *testing.T) {
	a := newAPIServer(t)
	leader := start(t, a, true, nil)
	other := start(t, a, false, nil)
	a.put("endpointslices", cloud, "cloud-1", `{"metadata": {"labels": {"kubernetes.io/service-name": "cloud"}},
		"addressType": "IPv4", "ports": [{"name": "", "port": 9000}], "endpoints": [
		{"addresses": ["10.0.0.2"], "conditions": {"ready": true, "serving": true}},
		{"addresses": ["10.0.0.1"], "nodeName": "n1"},
		{"addresses": ["10.0.0.3"], "conditions": {"ready": true, "serving": false}},
		{"addresses": ["10.0.0.4"], "conditions": {"ready": false, "serving": true, "terminating": true}}]}`)
	a.put("endpointslices", cloud, "cloud-2", `{"metadata": {"labels": {"kubernetes.io/service-name": "cloud"}},
		"addressType": "IPv6", "ports": [], "endpoints": [{"addresses": ["fd00::1"]}]}`)
	a.put("services", "shop", "web", `{"metadata": {"annotations": {"tunnel.example/mirror": "true"}}, "spec": {
		"type": "ClusterIP", "clusterIP": "10.96.0.1", "selector": {"app": "web"}, "ports": [
		{"name": "http", "port": 80, "targetPort": 8080}, {"name": "dns", "port": 53, "protocol": "UDP"},
		{"name": "https", "port": 443, "protocol": "TCP", "targetPort": "https"}]}}`)
	http, https := a.target("shop", "web-tunnel", 80), a.target("shop", "web-tunnel", 443)
	if http == https || min(http, https) < first || max(http, https) > last {
		t.Errorf("the ports are %d and %d", http, https)
	}
	testkit.Eventually(t, "the ready replicas are endpoints", func() bool {
		return a.endpoints("shop", "web-tunnel-ipv4") == "10.0.0.1 10.0.0.2" &&
			a.endpoints("shop", "web-tunnel-ipv6") == "fd00::1"
	})
	var twin twinObject
	a.get("services", "shop", "web-tunnel", &twin)
	owner := twin.Metadata.OwnerReferences
	if len(owner) != 1 || owner[0].UID != a.uid("shop", "web") || owner[0].Kind != "Service" || owner[0].Name != "web" ||
		len(twin.Spec.Selector) != 0 || len(twin.Spec.Ports) != 2 || twin.Spec.IPFamilyPolicy != "PreferDualStack" {
		t.Errorf("the twin is %+v", twin)
	}
	var slice sliceObject
	a.get("endpointslices", "shop", "web-tunnel-ipv4", &slice)
	if slice.AddressType != "IPv4" || slice.Metadata.Labels["kubernetes.io/service-name"] != "web-tunnel" ||
		len(slice.Metadata.OwnerReferences) != 1 || slice.Metadata.OwnerReferences[0].UID != twin.Metadata.UID ||
		slice.Endpoints[0].NodeName != "n1" || !slices.Equal(slice.Ports, []kube.ServicePort{
		{Name: "http", Protocol: "TCP", Port: http}, {Name: "https", Protocol: "TCP", Port: https},
	}) {
		t.Errorf("the EndpointSlice is %+v", slice)
	}
	for _, r := range []*replica{leader, other} {
		r.leadsTo(t, http, "web.shop.svc:80")
		r.leadsTo(t, https, "web.shop.svc:443")
	}
	testkit.Eventually(t, "the leader logs what the twin lacks", func() bool {
		return len(leader.log.Lines("target=shop/web", "has no complete twin", "only its TCP ports")) > 0
	})
	if len(leader.log.Lines("has no complete twin")) != 1 || len(other.log.Lines("has no complete twin")) != 0 {
		t.Errorf("the logs are\n%s\n%s", leader.log, other.log)
	}

	// A port of the original changes; its name stays, and so does the port of the cloud.
	a.put("services", "shop", "web", `{"metadata": {"annotations": {"tunnel.example/mirror": "true"}}, "spec": {
		"type": "ClusterIP", "clusterIP": "10.96.0.1", "ports": [{"name": "http", "port": 8000}]}}`)
	leader.leadsTo(t, http, "web.shop.svc:8000")
	testkit.Eventually(t, "the other port is closed", func() bool {
		return slices.Equal(leader.ports(), []uint16{http}) && slices.Equal(other.ports(), []uint16{http})
	})
	if got := a.target("shop", "web-tunnel", 8000); got != http {
		t.Errorf("the port of the cloud is %d, was %d", got, http)
	}
	testkit.Eventually(t, "nothing is wrong", func() bool {
		var v4, v6 sliceObject
		a.get("endpointslices", "shop", "web-tunnel-ipv4", &v4)
		a.get("endpointslices", "shop", "web-tunnel-ipv6", &v6)
		return len(v4.Ports) == 1 && len(v6.Ports) == 1 && leader.writer.Note() == "" && leader.Note() == ""
	})
	// Nothing changes, so nothing is written.
	a.written()
	a.put("services", "shop", "other", `{"metadata": {"annotations": {"tunnel.example/mirror": "false"}}, "spec": {}}`)
	a.mirrored("home", "web", "true", 80) // not in namespaces
	a.mirrored("shop", "api", "true", 80)
	a.target("shop", "api-tunnel", 80)
	testkit.Eventually(t, "the last twin is complete", func() bool {
		return a.endpoints("shop", "api-tunnel-ipv4") == "10.0.0.1 10.0.0.2" &&
			a.endpoints("shop", "api-tunnel-ipv6") == "fd00::1"
	})
	for _, w := range a.written() {
		if !strings.HasSuffix(w, "/shop/services") && !strings.Contains(w, "/shop/endpointslices") ||
			strings.Contains(w, "web") {
			t.Errorf("wrote %s", w)
		}
	}
}

// A twin goes with the annotation and with its original. Another twin does not get its port at once.
func TestTwinGoes(t *testing.T) {
	a := newAPIServer(t)
	r := start(t, a, true, nil)
	a.replicas("10.0.0.1")
	a.mirrored("shop", "web", "true", 80)
	port := a.target("shop", "web-tunnel", 80)
	r.leadsTo(t, port, "web.shop.svc:80")
	gone := func(why, namespace, twin string) {
		t.Helper()
		testkit.Eventually(t, why, func() bool {
			return !a.get("services", namespace, twin, new(twinObject)) && a.endpoints(namespace, twin+"-ipv4") == "none"
		})
	}
	a.put("services", "shop", "web", `{"spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}}`)
	gone("the twin goes with the annotation", "shop", "web-tunnel")
	testkit.Eventually(t, "the port is closed", func() bool { return len(r.ports()) == 0 })

	a.mirrored("shop", "api", "front", 80)
	second := a.target("shop", "front", 80)
	a.mirrored("shop", "api", "back", 80)
	gone("the twin goes with its name", "shop", "front")
	third := a.target("shop", "back", 80)
	a.mirrored("bank", "web", "true", 80)
	fourth := a.target("bank", "web-tunnel", 80)
	if port == second || port == third || port == fourth || fourth == second || fourth == third {
		t.Errorf("ports are used again at once: %d, then %d, %d, %d", port, second, third, fourth)
	}
	testkit.Eventually(t, "the twin is complete", func() bool { return a.endpoints("shop", "back-ipv4") == "10.0.0.1" })
	a.remove("services", "shop", "api")
	gone("the twin goes with its original", "shop", "back")
	// Three of the four ports have had a twin just now. Only one is free.
	a.mirrored("bank", "api", "true", 80)
	a.mirrored("shop", "third", "true", 80)
	testkit.Eventually(t, "no port is free", func() bool { return strings.Contains(r.writer.Note(), "no port is free") })

	// The same name, and another original.
	var before, now twinObject
	a.get("services", "bank", "web-tunnel", &before)
	a.remove("services", "bank", "web")
	a.mirrored("bank", "web", "true", 8080)
	testkit.Eventually(t, "the new original has a new twin, or none while no port is free", func() bool {
		exists := a.get("services", "bank", "web-tunnel", &now)
		return !exists || now.Metadata.UID != before.Metadata.UID
	})
}

// The cloud never changes a Service that it has not made.
func TestForeignService(t *testing.T) {
	const plain = `{"spec": {"type": "ClusterIP", "clusterIP": "10.96.0.9", "ports": [{"port": 1}]}}`
	const others = `{"metadata": {"labels": {"tunnel.example/mirrored-by": "another", "tunnel.example/mirror-of": "api"},
		"annotations": {"tunnel.example/mirror": "true"}}, "spec": {"clusterIP": "10.96.0.9", "ports": [{"port": 1}]}}`
	a := newAPIServer(t)
	a.replicas("10.0.0.1")
	a.put("services", "shop", "web-tunnel", plain)
	a.put("services", "shop", "api-tunnel", others)
	r := start(t, a, true, nil)
	a.mirrored("shop", "web", "true", 80)
	a.mirrored("shop", "api", "true", 80)
	for _, name := range []string{"web", "api"} {
		testkit.Eventually(t, "the log says so", func() bool {
			return len(r.log.Lines("level=WARN", "target=shop/"+name, "this cloud has not made it")) == 1
		})
	}
	a.mirrored("bank", "web", "true", 80) // a reconciliation later
	a.target("bank", "web-tunnel", 80)
	for _, w := range a.written() {
		if strings.Contains(w, "-tunnel") && !strings.Contains(w, "/bank/") {
			t.Errorf("wrote %s", w)
		}
	}
	a.remove("services", "shop", "web-tunnel")
	a.mirrored("shop", "web", "true", 81)
	a.target("shop", "web-tunnel", 81)
}

// The cloud never changes an EndpointSlice that it has not made. The log names the EndpointSlice, and not the Service.
func TestForeignSlice(t *testing.T) {
	a := newAPIServer(t)
	a.replicas("10.0.0.1")
	a.put("endpointslices", "shop", "web-tunnel-ipv4", `{"metadata": {"labels": {
		"kubernetes.io/service-name": "web-tunnel"}}, "addressType": "IPv4", "endpoints": [], "ports": []}`)
	r := start(t, a, true, nil)
	a.mirrored("shop", "web", "true", 80)
	testkit.Eventually(t, "the log says so", func() bool {
		return len(r.log.Lines("level=WARN", "target=shop/web",
			"the EndpointSlice web-tunnel-ipv4 exists, and this cloud has not made it")) == 1
	})
	if len(r.log.Lines("the Service web-tunnel")) != 0 {
		t.Errorf("the log is\n%s", r.log)
	}
	a.remove("endpointslices", "shop", "web-tunnel-ipv4")
	a.mirrored("shop", "web", "true", 81)
	testkit.Eventually(t, "the twin is complete", func() bool {
		return a.endpoints("shop", "web-tunnel-ipv4") == "10.0.0.1"
	})
}

// An EndpointSlice of a twin whose labels a user has changed is made again.
func TestRelabelledSlice(t *testing.T) {
	for _, label := range []string{labelOf, "kubernetes.io/service-name"} {
		a := newAPIServer(t)
		a.replicas("10.0.0.1")
		r := start(t, a, true, nil)
		a.mirrored("shop", "web", "true", 80)
		r.leadsTo(t, a.target("shop", "web-tunnel", 80), "web.shop.svc:80")
		const name = "web-tunnel-ipv4"
		testkit.Eventually(t, "the replica is an endpoint", func() bool { return a.endpoints("shop", name) == "10.0.0.1" })
		a.mu.Lock()
		old := a.objects["endpointslices/shop/"+name]
		changed := map[string]any{"metadata": map[string]any{"labels": map[string]any{label: "other"}}}
		a.putLocked("endpointslices", "shop", name, merge(old.fields, changed).(map[string]any))
		a.mu.Unlock()
		testkit.Eventually(t, "the slice has the label again", func() bool {
			var s sliceObject
			return a.get("endpointslices", "shop", name, &s) && s.Metadata.Labels[labelOf] == "web" &&
				s.Metadata.Labels["kubernetes.io/service-name"] == "web-tunnel" && a.endpoints("shop", name) == "10.0.0.1"
		})
		testkit.Eventually(t, "the port leads to the Service", func() bool { return len(r.ports()) == 1 })
		r.leadsTo(t, a.target("shop", "web-tunnel", 80), "web.shop.svc:80")
	}
}

// The addresses of a stopped replica leave the EndpointSlices. Another leader continues, with the same ports.
func TestReplicaLeaves(t *testing.T) {
	a := newAPIServer(t)
	a.replicas("10.0.0.1", "10.0.0.2")
	leader, other := start(t, a, true, nil), start(t, a, false, nil)
	a.mirrored("shop", "web", "true", 80)
	port := a.target("shop", "web-tunnel", 80)
	both := func() bool { return a.endpoints("shop", "web-tunnel-ipv4") == "10.0.0.1 10.0.0.2" }
	testkit.Eventually(t, "both replicas are endpoints", both)
	leader.running.Stop()
	a.replicas("10.0.0.2")
	close(other.election.elected)
	testkit.Eventually(t, "the replica that is gone is no endpoint", func() bool {
		return a.endpoints("shop", "web-tunnel-ipv4") == "10.0.0.2"
	})
	other.leadsTo(t, port, "web.shop.svc:80")
	if got := a.target("shop", "web-tunnel", 80); got != port {
		t.Errorf("the port is %d, was %d", got, port)
	}
	a.replicas()
	testkit.Eventually(t, "no replica is ready", func() bool { return a.endpoints("shop", "web-tunnel-ipv4") == "" })
	a.remove("endpointslices", cloud, "cloud-1")
	testkit.Eventually(t, "the cloud's Service is gone", func() bool {
		return strings.Contains(other.writer.Note(), "has no EndpointSlice")
	})
	a.replicas("10.0.0.1", "10.0.0.2")
	testkit.Eventually(t, "both replicas are endpoints again", both)
}

// A new leader whose watch does not show yet what the leader before has written leaves the twins' ports as they are.
func TestLeaderWithALateWatch(t *testing.T) {
	a := newAPIServer(t)
	a.replicas("10.0.0.1")
	r := start(t, a, false, nil)
	a.mu.Lock()
	a.late = true
	a.mu.Unlock()
	a.mirrored("shop", "web", "true", 80)
	a.put("services", "shop", "web-tunnel", fmt.Sprintf(`{"metadata": {"labels": {%q: %q, %q: "web"},
		"ownerReferences": [{"uid": %q}]}, "spec": {"ports": [{"name": "web", "port": 80, "protocol": "TCP",
		"targetPort": %d}]}}`, Label, cloud, labelOf, a.uid("shop", "web"), last))
	a.put("endpointslices", "shop", "web-tunnel-ipv4", fmt.Sprintf(`{"metadata": {"labels": {%q: %q, %q: "web",
		"kubernetes.io/service-name": "web-tunnel"}, "ownerReferences": [{"uid": %q}]}, "addressType": "IPv4",
		"endpoints": [], "ports": [{"name": "web", "protocol": "TCP", "port": %d}]}`,
		Label, cloud, labelOf, a.uid("shop", "web-tunnel"), last))
	close(r.election.elected)
	a.mirrored("shop", "zoo", "true", 80) // the leader writes this twin after the other
	if port := a.target("shop", "zoo-tunnel", 80); port == last {
		t.Errorf("two twins have the port %d", port)
	}
	for _, write := range a.written() {
		if strings.HasPrefix(write, "PATCH /api/v1/") {
			t.Error(write)
		}
	}
	if port := a.target("shop", "web-tunnel", 80); port != last {
		t.Errorf("the port is %d, was %d", port, last)
	}
}

// Of two EndpointSlices that claim a port, the older one counts. The other gets another port. No port outside of the
// range is opened, whatever an EndpointSlice claims, and what a user makes of a twin does not count.
func TestClaims(t *testing.T) {
	a := newAPIServer(t)
	a.replicas("10.0.0.1")
	r := start(t, a, true, nil)
	a.mirrored("shop", "web", "true", 80)
	port := a.target("shop", "web-tunnel", 80)
	r.leadsTo(t, port, "web.shop.svc:80")
	claim := func(port uint16) {
		a.put("endpointslices", "bank", "claim", fmt.Sprintf(`{"metadata": {"labels": {%q: %q, %q: "web",
			"kubernetes.io/service-name": "web-tunnel"}}, "addressType": "IPv4", "endpoints": [],
			"ports": [{"name": "web", "port": %d}]}`, Label, cloud, labelOf, port))
	}
	a.mirrored("bank", "web", "true", 80)
	second := a.target("bank", "web-tunnel", 80)
	r.leadsTo(t, second, "web.bank.svc:80")
	claim(port)
	claim(last + 1)
	a.mirrored("shop", "api", "true", 80) // a change later
	third := a.target("shop", "api-tunnel", 80)
	r.leadsTo(t, third, "api.shop.svc:80")
	r.leadsTo(t, port, "web.shop.svc:80")
	if got := r.ports(); len(got) != 3 || got[2] > last {
		t.Errorf("the ports %d are open", got)
	}
	// The slice of the second twin claims the port of the first.
	a.remove("endpointslices", "bank", "claim")
	a.put("endpointslices", "bank", "web-tunnel-ipv4", fmt.Sprintf(`{"metadata": {"labels": {%q: %q, %q: "web",
		"kubernetes.io/service-name": "web-tunnel"}}, "addressType": "IPv4", "endpoints": [],
		"ports": [{"name": "web", "protocol": "TCP", "port": %d}]}`, Label, cloud, labelOf, port))
	testkit.Eventually(t, "the second twin has another port", func() bool {
		got := a.target("bank", "web-tunnel", 80)
		var s sliceObject
		return got != port && a.get("endpointslices", "bank", "web-tunnel-ipv4", &s) && s.Ports[0].Port == got
	})
	r.leadsTo(t, port, "web.shop.svc:80")
	// A user changes the twin.
	a.put("services", "shop", "web-tunnel", fmt.Sprintf(`{"metadata": {"labels": {%q: %q, %q: "web"},
		"ownerReferences": [{"uid": %q}]}, "spec": {"ports": [{"name": "web", "port": 80, "protocol": "TCP",
		"targetPort": %d}]}}`, Label, cloud, labelOf, a.uid("shop", "web"), third))
	testkit.Eventually(t, "the twin is as it was", func() bool { return a.target("shop", "web-tunnel", 80) == port })
	r.leadsTo(t, third, "api.shop.svc:80")
}

func (a *apiServer) uid(namespace, service string) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.objects["services/"+namespace+"/"+service].text("uid")
}

// While Kubernetes refuses changes, or a port cannot be opened, /readyz and the log say so. Both heal.
func TestFailures(t *testing.T) {
	a := newAPIServer(t)
	a.replicas("10.0.0.1")
	a.deny = true
	r := start(t, a, true, nil)
	r.mu.Lock()
	r.busy = true
	r.mu.Unlock()
	a.mirrored("shop", "web", "true", 80)
	testkit.Eventually(t, "the note and one line of the log say so", func() bool {
		return strings.Contains(r.writer.Note(), "the twins cannot be written") &&
			len(r.log.Lines("level=WARN", "the twins cannot be written")) == 1
	})
	a.mu.Lock()
	a.deny = false
	a.mu.Unlock()
	port := a.target("shop", "web-tunnel", 80)
	testkit.Eventually(t, "the port cannot be opened", func() bool {
		return strings.Contains(r.Note(), fmt.Sprintf("the port %d of the twin of web.shop.svc:80 cannot be opened", port))
	})
	r.mu.Lock()
	r.busy = false
	r.mu.Unlock()
	a.mirrored("shop", "api", "true", 80) // a change ends the pause
	r.leadsTo(t, port, "web.shop.svc:80")
	testkit.Eventually(t, "nothing is wrong", func() bool { return r.Note() == "" && r.writer.Note() == "" })
	r.election.err = errors.New("gone")
	if got := r.writer.Note(); got != "the Lease tunnel-mirror cannot be used: gone" {
		t.Errorf("the note is %q", got)
	}
}

// The names of twins.
func TestOriginals(t *testing.T) {
	service := func(name, value string, ports ...kube.ServicePort) kube.Service {
		return kube.Service{Object: kube.Object{Namespace: "shop", Name: name}, Annotation: value, Ports: ports}
	}
	tcp, udp := kube.ServicePort{Protocol: "TCP", Port: 80}, kube.ServicePort{Protocol: "UDP", Port: 80}
	alias, twin := service("a", "true"), service("a", "true", tcp)
	alias.Alias, twin.Labels = true, map[string]string{Label: "x"}
	for _, c := range []struct {
		service       kube.Service
		want, problem string
	}{
		{service("a", "true", tcp), "a-tunnel", ""},
		{service("a", "b", tcp, udp), "b", "the twin has only its TCP ports"},
		{service("a", "b", udp), "", "no TCP port"},
		{service("a", "", tcp), "", ""},
		{service("a", "false", tcp), "", ""},
		{service("a", "a", tcp), "", "needs another name"},
		{service("a", "1b", tcp), "", "not a name"},
		{service("a", "B", tcp), "", "not a name"},
		{service("a", "b.c", tcp), "", "not a name"},
		{service(strings.Repeat("a", 57), "true", tcp), "", "not a name"},
		{service(strings.Repeat("a", 56), "true", tcp), strings.Repeat("a", 56) + "-tunnel", ""},
		{alias, "", "alias"},
		{twin, "", ""},
	} {
		all, problems := Config{}.originals(kube.MirrorView{Services: []kube.Service{c.service}})
		o, ok := all["shop/"+c.want]
		if ok != (c.want != "") || ok && o.Name != c.service.Name ||
			!strings.Contains(problems["shop/"+c.service.Name], c.problem) ||
			(c.problem == "") != (len(problems) == 0) {
			t.Errorf("%s with %q: %v, %v", c.service.Name, c.service.Annotation, all, problems)
		}
	}
	all, problems := Config{}.originals(kube.MirrorView{Services: []kube.Service{
		service("a", "c", tcp), service("b", "c", tcp),
	}})
	if all["shop/c"].Name != "a" || !strings.Contains(problems["shop/b"], "the Service a has a twin of the same name") {
		t.Errorf("two of one name: %v, %v", all, problems)
	}
}

// The users of one namespace leave ports for other namespaces, and a Service with too many ports gets no twin.
func TestPortsOfANamespace(t *testing.T) {
	service := func(namespace string, ports int) kube.Service {
		s := kube.Service{Object: kube.Object{Namespace: namespace, Name: "web"}, Annotation: "true"}
		for i := range ports {
			s.Ports = append(s.Ports, kube.ServicePort{Name: fmt.Sprint(i), Protocol: "TCP", Port: uint16(i + 1)})
		}
		return s
	}
	cfg := Config{First: 20000, Last: 20009}
	term := term{m: &Mirror{cfg: cfg, freed: make(map[uint16]time.Time)}, given: make(map[string]uint16)}
	v := kube.MirrorView{Services: []kube.Service{service("all", maxPorts+1), service("many", 20), service("one", 1)}}
	for range 2 { // the second time, with the ports of the first
		originals, problems := cfg.originals(v)
		ports, err := term.assign(v, originals, problems)
		if err != nil || len(ports["many/web-tunnel"]) != 5 || len(ports["one/web-tunnel"]) != 1 {
			t.Errorf("ports %v, %v", ports, err)
		}
		if len(problems) != 2 || !strings.Contains(problems["many/web"], "half of those") ||
			!strings.Contains(problems["all/web"], "100 at most") {
			t.Errorf("problems %v", problems)
		}
	}
}

// nodes are the nodes of a front door for egress. Each dials the target in place of every address.
type nodes struct {
	target string
	mu     sync.Mutex // guards asked
	asked  []string
}

func (n *nodes) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	n.mu.Lock()
	n.asked = append(n.asked, string(r.Node)+" "+r.Addr)
	n.mu.Unlock()
	r.Chose()
	return new(net.Dialer).DialContext(ctx, "tcp", n.target)
}

func (n *nodes) Holds(node tunnel.NodeName) bool { return node == "edge1" }
func (n *nodes) Connected() []tunnel.NodeName    { return []tunnel.NodeName{"edge1"} }
func (n *nodes) Known() bool                     { return true }
func (n *nodes) Changed() <-chan struct{}        { return nil }

func (n *nodes) Identifiers() map[tunnel.NodeName]konnectivity.Identifiers {
	return map[tunnel.NodeName]konnectivity.Identifiers{
		"edge1": {Networks: []netip.Prefix{netip.MustParsePrefix("10.88.1.0/24")}},
		"edge2": {Networks: []netip.Prefix{netip.MustParsePrefix("10.88.2.0/24")}},
	}
}

// A caller at a port of the cloud reaches an endpoint of the original, through the node that has it.
func TestConn(t *testing.T) {
	a := newAPIServer(t)
	a.replicas("10.0.0.1")
	quiet := slog.New(slog.DiscardHandler)
	h := hub.New(hub.Config{Domain: "cluster.local", Log: quiet})
	services := a.client().Services(nil, h, new(tunnel.Counters), quiet)
	testkit.Run(t, services.Run)
	n := &nodes{target: testkit.Serve(t, testkit.Echo)}
	seen := new(testkit.Trail[tunnel.Event])
	door, err := egress.New(egress.Config{
		Identifiers: n, Kubernetes: true, Sink: tunnel.Sink{Audit: seen.Record},
		Services: func(addr string) (all []egress.Endpoint, err error) {
			found, err := h.Endpoints(strings.TrimSuffix(addr, ":80"), 80)
			for _, e := range found {
				all = append(all, egress.Endpoint{Addr: e.Addr.String(), Node: e.Node})
			}
			return all, err
		},
	}, n, n, quiet)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Run(t, door.Run)
	r := start(t, a, true, door.Serve)
	a.mirrored("shop", "web", "true", 80)
	port := a.target("shop", "web-tunnel", 80)
	testkit.Eventually(t, "the port is open, and the cloud knows the Service", func() bool {
		_, err := h.Endpoints("web.shop.svc", 80)
		return len(r.ports()) == 1 && tunnel.CodeOf(err) == tunnel.Refused
	})
	r.mu.Lock()
	at := r.at[port]
	r.mu.Unlock()
	if refused, err := net.Dial("tcp", at); err == nil { // else it was reset before Dial has returned
		if got, err := io.ReadAll(refused); err == nil {
			t.Errorf("without an endpoint, the caller reads %q and no error", got)
		}
		refused.Close()
	}
	a.put("endpointslices", "shop", "web-x", `{"metadata": {"labels": {"kubernetes.io/service-name": "web"}},
		"addressType": "IPv4", "ports": [{"name": "web", "port": 8080}], "endpoints": [
		{"addresses": ["10.88.1.5"], "nodeName": "edge1"}, {"addresses": ["10.88.2.5"], "nodeName": "edge2"}]}`)
	testkit.Eventually(t, "the cloud knows the endpoint", func() bool {
		found, _ := h.Endpoints("web.shop.svc", 80)
		return len(found) == 2
	})
	c, err := r.dial(t, port)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	io.WriteString(c, "ping")
	c.(*net.TCPConn).CloseWrite()
	if got, err := io.ReadAll(c); string(got) != "ping" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
	testkit.Eventually(t, "two events", func() bool { return len(seen.All()) == 2 })
	e := seen.All()[1]
	if e.Kind != tunnel.EventEgress || e.Door != "mirror" || e.Node != "edge1" || e.Target != "10.88.1.5:8080" ||
		e.Path != "web.shop.svc:80" || e.Caller != c.LocalAddr().String() || e.Sent != 4 || e.Received != 4 {
		t.Errorf("the event is %+v", e)
	}
	if e := seen.All()[0]; e.Result != tunnel.Refused.String() || e.Door != "mirror" {
		t.Errorf("the event of the refusal is %+v", e)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !slices.Equal(n.asked, []string{"edge1 10.88.1.5:8080"}) {
		t.Errorf("the nodes were asked %q", n.asked)
	}
}
