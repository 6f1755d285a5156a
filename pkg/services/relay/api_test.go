package relay

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

// known returns a relay with a state, and a server of its paths.
func known(t *testing.T, changes ...*pb.Changes) (*Relay, *httptest.Server) {
	t.Helper()
	r, _ := newTestRelay(t, new(fake), newCloud())
	if _, _, err := r.applySeries(changes); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	for pattern, h := range r.Handlers() {
		mux.Handle(pattern, h)
	}
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	return r, srv
}

func get(t *testing.T, url string, v any) (status int) {
	t.Helper()
	answer, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if err := json.NewDecoder(answer.Body).Decode(v); err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode
}

// An operator sees who serves each port, and why each endpoint may be used or not.
func TestExplain(t *testing.T) {
	changes := shop(t)
	notReady := endpoint("10.88.2.6", "edge2")
	notReady.Ready = false
	withUDP := endpoint("10.88.3.5", "edge3")
	withUDP.Ports = append(withUDP.Ports, &services.Port{Name: "dns", Protocol: "UDP", Port: 53})
	elsewhere := endpoint("10.88.4.5", "server1")
	away := webService()
	away.ClusterIps = []string{"10.96.0.11"}
	changes.Set = append(changes.Set,
		item(t, services.EndpointPath("shop", "web", "web-a", "10.88.2.6"), notReady),
		item(t, other, withUDP),
		item(t, services.EndpointPath("shop", "web", "web-a", "10.88.4.5"), elsewhere),
		item(t, services.ServicePath("shop", "cloud"), away),
		item(t, services.EndpointPath("shop", "cloud", "c", "10.88.4.6"), endpoint("10.88.4.6", "server1")),
		item(t, services.ServicePath("shop", "empty"), &services.Service{ClusterIps: []string{"10.96.0.12"},
			Ports: []*services.Port{{Protocol: "TCP", Port: 1}}}),
	)
	r, srv := known(t, changes)
	var list List
	if status := get(t, srv.URL+"/v1/services", &list); status != http.StatusOK || len(list.Ports) != 7 {
		t.Fatalf("%d: %+v", status, list)
	}
	for i, want := range []Port{
		{Service: "shop/cloud", Protocol: "TCP", Served: ServedKubeProxy, Usable: 1, Known: 1},
		{Service: "shop/cloud", Protocol: "UDP", Served: ServedNobody, Known: 1},
		{Service: "shop/empty", Protocol: "TCP", Served: ServedNobody},
		{Service: "shop/web", Protocol: "TCP", Served: ServedRelay, Usable: 2, Known: 5},
		{Service: "shop/web", Protocol: "UDP", Served: ServedRelay, Usable: 1, Known: 5},
		{Service: "shop/web", Protocol: "TCP", Served: ServedRelay, Usable: 1, Known: 5},
		{Service: "shop/web", Protocol: "UDP", Served: ServedNobody, Known: 5},
	} {
		got := list.Ports[i]
		if got.Protocol != want.Protocol || got.Service != want.Service || got.Served != want.Served ||
			got.Usable != want.Usable || got.Known != want.Known {
			t.Errorf("port %d is %+v", i, got)
		}
	}
	if list.Stale == nil || !list.Stale.IsZero() {
		t.Errorf("stale since %v", list.Stale)
	}
	r.noteCurrent(false, explained(status.Error(codes.Unimplemented, "")))
	get(t, srv.URL+"/v1/services", &list)
	if !strings.Contains(list.Why, "write [mode.cloud.services]") {
		t.Errorf("stale because %q", list.Why)
	}
	r.noteCurrent(true, nil)
	var one List
	if status := get(t, srv.URL+"/v1/services/shop/web", &one); status != http.StatusOK || one.Stale != nil {
		t.Errorf("%d, stale since %v", status, one.Stale)
	}
	if len(one.Ports) != 4 || len(one.Ports[0].Endpoints) != 5 {
		t.Fatalf("explained: %+v", one.Ports)
	}
	why := make(map[string]Verdict)
	for _, v := range one.Ports[0].Endpoints {
		why[v.Address] = v
	}
	for address, want := range map[string]struct {
		usable bool
		why    string
	}{
		"10.88.2.5":    {true, "it is reachable through the tunnel"},
		"10.88.2.6":    {false, "it is not ready"},
		"fd00:88:2::5": {false, "it is of the other family"},
		"10.88.4.5": {false, `the tunnel does not lead to it: it is on no edge node, and [mode.cloud.services] allow ` +
			`has no "cluster"`},
	} {
		if got := why[address]; got.Usable != want.usable || got.Why != want.why {
			t.Errorf("%s: %+v", address, got)
		}
	}
	var refused map[string]string
	status := get(t, srv.URL+"/v1/services/shop/none", &refused)
	if status != http.StatusNotFound || refused["error"] == "" {
		t.Errorf("%d, %v", status, refused)
	}
}

// In place of kube-proxy, an operator sees external IPs and node ports as well, and what the rules do.
func TestExplainFull(t *testing.T) {
	r, _ := newTestRelay(t, new(fake), newCloud())
	r.planner.full = true
	service := webService()
	service.ClusterIps = service.ClusterIps[:1]
	service.Ports = append(service.Ports[:1], &services.Port{Name: "sctp", Protocol: "SCTP", Port: 9})
	service.Ports[0].NodePort, service.ExternalIps = 30080, []string{"203.0.113.5"}
	service.LoadBalancerIps = []string{"203.0.113.5", "203.0.113.6"} // the first one twice
	changes := shop(t)
	here := endpoint("10.88.1.5", "edge1")
	here.Ports = append(here.Ports, &services.Port{Name: "sctp", Protocol: "SCTP", Port: 9})
	changes.Set = append(changes.Set, item(t, web, service), item(t, other, here),
		item(t, services.ServicePath("shop", "away"), &services.Service{ClusterIps: []string{"10.96.0.11"},
			Ports: []*services.Port{{Name: "http", Protocol: "TCP", Port: 80}}}),
		item(t, services.EndpointPath("shop", "away", "a", "10.88.2.6"), endpoint("10.88.2.6", "edge2")),
		item(t, services.ServicePath("shop", "outside"), &services.Service{ClusterIps: []string{"10.96.0.12"},
			Ports: []*services.Port{{Name: "http", Protocol: "TCP", Port: 80}}}),
		item(t, services.EndpointPath("shop", "outside", "a", "198.51.100.7"), endpoint("198.51.100.7", "")),
	)
	if _, _, err := r.applySeries([]*pb.Changes{changes}); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range r.list("").Ports {
		got = append(got, fmt.Sprintf("%s %s %d %s: %s %d", p.Service, p.Address, p.Port, p.Protocol, p.Served, p.Usable))
	}
	want := []string{
		"shop/away 10.96.0.11 80 TCP: relay 1", "shop/outside 10.96.0.12 80 TCP: rules 1",
		"shop/web 10.96.0.10 80 TCP: rules 1", "shop/web 10.96.0.10 9 SCTP: rules 1",
		"shop/web 203.0.113.5 80 TCP: rules 1", "shop/web 203.0.113.5 9 SCTP: rules 1",
		"shop/web 203.0.113.6 80 TCP: rules 1", "shop/web 203.0.113.6 9 SCTP: rules 1",
		"shop/web 0.0.0.0 30080 TCP: rules 1",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if v := r.list("shop/outside").Ports[0].Endpoints[0]; !v.Usable || !strings.HasPrefix(v.Why, "the rules try it; ") {
		t.Errorf("an endpoint outside of the cluster: %+v", v)
	}
	for _, v := range r.list("shop/web").Ports[0].Endpoints {
		if v.Usable != (v.Address == "10.88.1.5") {
			t.Errorf("%+v", v)
		}
	}
	service.LoadBalancerLimited = true // not all callers may use them
	if _, _, err := r.applySeries([]*pb.Changes{{Set: []*pb.Item{item(t, web, service)}}}); err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(r.list("").Ports, func(p Port) bool { return p.Address == "203.0.113.6" }) {
		t.Error("addresses of load balancers with loadBalancerSourceRanges are served")
	}
}

// An operator sees changes as they come. An operator who reads too slowly is told how many lines were lost.
func TestWatchChanges(t *testing.T) {
	r, srv := known(t, shop(t))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, srv.URL+"/v1/services/watch", nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	r.watchers.tell(&services.Difference{Deleted: []string{far4}, Set: []*pb.Item{
		item(t, services.NodePath("a"), &services.Node{Edge: true}), {Path: "node/b", Value: []byte{0xff}}}})
	lines := bufio.NewScanner(answer.Body)
	for _, want := range []Line{{Path: far4, Deleted: true}, {Path: "node/a"}, {Path: "node/b"}} {
		var got Line
		if !lines.Scan() || json.Unmarshal(lines.Bytes(), &got) != nil || got.Path != want.Path ||
			got.Deleted != want.Deleted || (got.Value != nil) != (got.Path == "node/a") {
			t.Errorf("line %s, want %+v", lines.Bytes(), want)
		}
	}

	slow := r.watchers.add()
	defer r.watchers.remove(slow)
	for range cap(slow.lines) + 7 {
		slow.put(Line{})
	}
	if line, ok := slow.next(t.Context()); !ok || line.Lost != 7 {
		t.Errorf("the slow one gets %+v", line)
	}
	if line, ok := slow.next(t.Context()); !ok || line.Lost != 0 {
		t.Errorf("and then %+v", line)
	}
	for range maxWatchers - 2 {
		defer r.watchers.remove(r.watchers.add())
	}
	var refused map[string]string
	if status := get(t, srv.URL+"/v1/services/watch", &refused); status != http.StatusTooManyRequests {
		t.Errorf("one too many: %d", status)
	}
}
