package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/tunnel"
)

// sink keeps the items that Services tells.
type sink struct {
	t      *testing.T
	mu     sync.Mutex // guards the following
	items  map[services.Path][]byte
	sets   int
	synced bool
}

func newSink(t *testing.T) *sink { return &sink{t: t, items: make(map[services.Path][]byte)} }

func (s *sink) Set(p services.Path, value []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.items[p] = value
	s.sets++
}

func (s *sink) Delete(p services.Path) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.items[p]; !ok {
		s.t.Errorf("%s is deleted, and was not there", p)
	}
	delete(s.items, p)
}

func (s *sink) Synced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.synced = true
}

// paths returns the paths of the items, sorted.
func (s *sink) paths() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.items))
}

func (s *sink) want(what string, paths ...string) {
	s.t.Helper()
	slices.Sort(paths)
	if got := s.paths(); !slices.Equal(got, paths) {
		s.t.Errorf("%s: the items are\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(paths, "\n"))
	}
}

// wantValue checks the fields of an item, which are given as JSON.
func wantValue[M proto.Message](t *testing.T, s *sink, p services.Path, got, want M, text string) {
	t.Helper()
	if err := protojson.Unmarshal([]byte(text), want); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := proto.Unmarshal(s.items[p], got); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(got, want) {
		t.Errorf("%s is\n%v\nwant\n%v", p, got, want)
	}
}

// aService returns a Service with a ClusterIP.
func aService(namespace, name string) *serviceObject {
	s := new(serviceObject)
	s.Namespace, s.Name = namespace, name
	s.Spec.Type, s.Spec.ClusterIP = "ClusterIP", "10.96.0.1"
	return s
}

// aSlice returns a slice of a Service.
func aSlice(namespace, service, name string, addresses ...string) *sliceObject {
	s := new(sliceObject)
	s.Namespace, s.Name, s.Labels, s.AddressType = namespace, name, map[string]string{serviceName: service}, "IPv4"
	if service == "" {
		s.Labels = nil
	}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, sliceEndpoint{Addresses: []string{a}})
	}
	return s
}

// Endpoints are told while their Service is, in whichever order the objects come.
func TestServicesTellEndpointsOfToldServices(t *testing.T) {
	got := newSink(t)
	s := new(Client).Services([]string{"shop"}, got, new(tunnel.Counters), slog.New(slog.DiscardHandler))
	svcs, slcs, nodes := s.serviceStore(), s.sliceStore(), s.nodeStore()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(slcs.Add(aSlice("shop", "web", "web-a", "10.0.0.1", "10.0.0.2")))
	must(slcs.Add(aSlice("bank", "web", "web-a", "10.0.0.9")))
	must(svcs.Add(aService("bank", "web")))
	got.want("only a slice, and another namespace")
	must(svcs.Add(aService("shop", "web")))
	const web, one, two = "service/shop/web", "endpoint/shop/web/web-a/10.0.0.1", "endpoint/shop/web/web-a/10.0.0.2"
	got.want("the Service comes", web, one, two)
	must(slcs.Update(aSlice("shop", "web", "web-a", "10.0.0.2", "10.0.0.3")))
	const three = "endpoint/shop/web/web-a/10.0.0.3"
	got.want("an address for another", web, two, three)
	before := got.sets
	must(slcs.Update(aSlice("shop", "web", "web-a", "10.0.0.2", "10.0.0.3")))
	if got.sets != before {
		t.Error("endpoints that have not changed are told")
	}
	must(slcs.Add(aSlice("shop", "web", "web-b", "10.0.0.2")))
	const again = "endpoint/shop/web/web-b/10.0.0.2"
	got.want("one address in two slices", web, two, three, again)
	must(slcs.Update(aSlice("shop", "api", "web-b", "10.0.0.2")))
	got.want("a slice changes its Service", web, two, three)
	must(slcs.Update(aSlice("shop", "", "web-b", "10.0.0.2")))
	must(slcs.Update(aSlice("shop", "web", "web-b", "10.0.0.2")))
	got.want("and changes it back", web, two, three, again)

	headless := aService("shop", "web")
	headless.Spec.ClusterIP = "None"
	must(svcs.Update(headless))
	got.want("the Service is made anew, headless: it has names", web, two, three, again)
	must(svcs.Update(aService("shop", "web")))
	got.want("and not", web, two, three, again)
	must(slcs.Delete(aSlice("shop", "web", "web-b")))
	got.want("a slice is deleted", web, two, three)
	must(svcs.Delete(aService("shop", "web")))
	got.want("the Service is deleted")
	if len(s.of) != 1 || len(s.slices) != 1 {
		t.Errorf("%d slices of %d Services are known", len(s.slices), len(s.of))
	}
	must(slcs.Delete(aSlice("shop", "web", "web-a")))
	if len(s.of)+len(s.slices)+len(s.services) != 0 {
		t.Error("something is left of what is gone")
	}

	// A list after a gap deletes what has gone.
	must(svcs.Replace([]any{aService("shop", "web"), aService("shop", "api")}, "1"))
	must(slcs.Replace([]any{aSlice("shop", "web", "web-a", "10.0.0.1"), aSlice("shop", "api", "api-a", "10.0.0.5")}, "1"))
	if got.synced {
		t.Error("everything is known before the Nodes are")
	}
	node := new(nodeObject)
	node.Name = "edge1"
	must(nodes.Replace([]any{node}, "1"))
	if !got.synced {
		t.Error("everything is known, and the sink is not told")
	}
	const api, five = "service/shop/api", "endpoint/shop/api/api-a/10.0.0.5"
	got.want("the first lists", web, one, api, five, "node/edge1")
	must(svcs.Replace([]any{aService("shop", "web")}, "2"))
	got.want("a list without a Service", web, one, "node/edge1")
	must(slcs.Replace([]any{aSlice("shop", "web", "web-a", "10.0.0.2")}, "2"))
	must(nodes.Replace(nil, "2"))
	got.want("other endpoints, and no Node", web, two)
}

// A load balancer is limited if a range of its callers leaves out an address.
func TestServicesSourceRanges(t *testing.T) {
	for _, c := range []struct {
		ranges []string
		want   bool
	}{
		{nil, false},
		{[]string{"192.0.2.0/24"}, true},
		{[]string{"192.0.2.0/24", " 0.0.0.0/0"}, false},
		{[]string{"0.0.0.0/0", "::/0"}, false},
		{[]string{"0.0.0.0/0", "2001:db8::/32"}, true},
		{[]string{"0.0.0.0/"}, true},
	} {
		o := aService("shop", "web")
		o.Spec.SourceRanges = c.ranges
		if got := o.item().GetLoadBalancerLimited(); got != c.want {
			t.Errorf("%q: limited: %t", c.ranges, got)
		}
	}
}

// emptied fails the test if a Service that has been told has no endpoint at some time.
type emptied struct{ *sink }

func (e emptied) check() {
	var service, endpoints bool
	for _, p := range e.paths() {
		of := services.ServiceOf(p) != ""
		service, endpoints = service || !of, endpoints || of
	}
	if service && !endpoints {
		e.t.Errorf("for a moment, the sink has only %v", e.paths())
	}
}

func (e emptied) Set(p services.Path, value []byte) { e.sink.Set(p, value); e.check() }
func (e emptied) Delete(p services.Path)            { e.sink.Delete(p); e.check() }

// While one change replaces all endpoints of a Service, edges never know it without any: they would refuse connections.
func TestServicesNeverWithoutEndpoints(t *testing.T) {
	got := emptied{newSink(t)}
	s := new(Client).Services(nil, got, new(tunnel.Counters), slog.New(slog.DiscardHandler))
	svcs, slcs := s.serviceStore(), s.sliceStore()
	for _, err := range []error{
		slcs.Add(aSlice("shop", "web", "web-a", "10.0.0.1", "10.0.0.2")), svcs.Add(aService("shop", "web")),
		slcs.Update(aSlice("shop", "web", "web-a", "10.0.0.3")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	got.want("in the end", "service/shop/web", "endpoint/shop/web/web-a/10.0.0.3")
}

// A Service with a ClusterIP gets no endpoints from an EndpointSlice with the label service.kubernetes.io/headless, as
// with kube-proxy. A headless Service does: Kubernetes gives its EndpointSlices this label.
func TestServicesHeadlessSlices(t *testing.T) {
	got := newSink(t)
	s := new(Client).Services(nil, got, new(tunnel.Counters), slog.New(slog.DiscardHandler))
	svcs, slcs := s.serviceStore(), s.sliceStore()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	service := func(clusterIP string) *serviceObject {
		o := aService("shop", "web")
		o.Spec.ClusterIP = clusterIP
		return o
	}
	labelled := func(addresses ...string) *sliceObject {
		o := aSlice("shop", "web", "web-a", addresses...)
		o.Labels[headlessLabel] = ""
		return o
	}
	const web, one, two = "service/shop/web", "endpoint/shop/web/web-a/10.0.0.1", "endpoint/shop/web/web-a/10.0.0.2"
	must(svcs.Add(service("10.96.0.7")))
	must(slcs.Add(aSlice("shop", "web", "web-a", "10.0.0.1")))
	got.want("without the label", web, one)
	must(slcs.Update(labelled("10.0.0.1")))
	got.want("the slice gets the label", web)
	must(slcs.Update(labelled("10.0.0.1", "10.0.0.2")))
	got.want("and an address", web)
	must(svcs.Update(service("None")))
	got.want("the Service is made anew, headless", web, one, two)
	must(slcs.Update(aSlice("shop", "web", "web-a", "10.0.0.1", "10.0.0.2")))
	must(slcs.Update(labelled("10.0.0.1", "10.0.0.2")))
	got.want("a headless Service has both kinds", web, one, two)
	must(svcs.Update(service("10.96.0.7")))
	got.want("the Service is made anew, with a ClusterIP", web)
	must(slcs.Update(aSlice("shop", "web", "web-a", "10.0.0.1", "10.0.0.2")))
	got.want("the slice loses the label", web, one, two)
	must(slcs.Update(labelled("10.0.0.1")))
	must(svcs.Delete(service("")))
	got.want("the Service is deleted")
	must(svcs.Add(service("10.96.0.7")))
	got.want("the Service comes again", web)
}

const servicesJSON = `{"kind": "ServiceList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": [
{"metadata": {"name": "web", "namespace": "shop", "resourceVersion": "1", "managedFields": [{"manager": "kubectl"}]},
	"spec": {"type": "NodePort", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "fd00::1"],
		"externalIPs": ["192.0.2.1"], "selector": {"app": "web"},
		"ports": [{"name": "http", "port": 80, "nodePort": 30080, "targetPort": "http"}, {"protocol": "UDP", "port": 53}],
		"internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local", "trafficDistribution": "PreferSameZone",
		"sessionAffinity": "ClientIP", "publishNotReadyAddresses": true},
	"status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}, {"ip": "203.0.113.2", "ipMode": "Proxy"},
		{"ip": "203.0.113.3", "ipMode": "VIP"}, {"hostname": "lb.example.com"}]}}},
{"metadata": {"name": "plain", "namespace": "shop"}, "spec": {"type": "ClusterIP", "clusterIP": "10.96.0.2",
	"externalTrafficPolicy": "Local", "sessionAffinity": "None", "ports": [{"protocol": "SCTP", "port": 1}]}},
{"metadata": {"name": "alias", "namespace": "shop"}, "spec": {"type": "ExternalName", "externalName": "example.com",
	"ports": [{"port": 80, "nodePort": 70000}], "healthCheckNodePort": -1}},
{"metadata": {"name": "headless", "namespace": "shop", "labels": {"k8s-app": "kube-dns"}},
	"spec": {"type": "ClusterIP", "clusterIP": "None", "clusterIPs": ["None"]}},
{"metadata": {"name": "other", "namespace": "shop", "labels": {"service.kubernetes.io/service-proxy-name": ""}},
	"spec": {"type": "ClusterIP", "clusterIP": "10.96.0.3"}},
{"metadata": {"name": "unproxied", "namespace": "shop", "labels": {"service.kubernetes.io/headless": "false"},
	"annotations": {"tunnel.example/spread": "true"}},
	"spec": {"type": "LoadBalancer", "clusterIP": "10.96.0.4", "healthCheckNodePort": 32000,
		"loadBalancerSourceRanges": ["192.0.2.0/24"]}},
{"metadata": {"name": "kube-dns", "namespace": "kube-system"},
	"spec": {"type": "ClusterIP", "clusterIP": "10.96.0.10"}},
{"metadata": {"name": "rke2-coredns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}},
	"spec": {"type": "ClusterIP", "clusterIP": "10.96.0.11"}},
{"metadata": {"name": "new", "namespace": "shop"}, "spec": {"type": "ClusterIP"}}]}`

const slicesJSON = `{"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1",
	"metadata": {"resourceVersion": "1"},
"items": [
{"metadata": {"name": "web-a", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
	"addressType": "IPv4", "ports": [{"name": "http", "port": 8080}, {"name": "", "port": 53, "protocol": "UDP"},
		{"port": 1}, {"name": "all"}, {"name": "large", "port": 70000}, {"name": "small", "port": -1}],
	"endpoints": [
		{"addresses": ["10.88.1.5", "10.88.1.6"], "nodeName": "edge1", "zone": "a", "hostname": "web-0",
			"hints": {"forZones": [{"name": "a"}, {"name": "b"}], "forNodes": [{"name": "edge1"}]}},
		{"addresses": ["10.88.1.7"], "conditions": {"ready": false, "serving": true, "terminating": true}},
		{"addresses": ["10.88.1.8"], "conditions": {"ready": false, "serving": false}},
		{"addresses": ["10.88.1.8"], "conditions": {"ready": true}, "nodeName": "edge2"},
		{"addresses": ["10.88.1.8"], "conditions": {"ready": false}},
		{"addresses": ["nonsense"]}, {"addresses": []}]},
{"metadata": {"name": "web-b", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
	"addressType": "IPv6", "endpoints": [{"addresses": ["fd00:0:0::5"]}]},
{"metadata": {"name": "web-c", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
	"addressType": "FQDN", "endpoints": [{"addresses": ["example.com"]}]}]}`

const oneNodeJSON = `{"kind": "NodeList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": [
{"metadata": {"name": "edge1", "labels": {"topology.kubernetes.io/zone": "a"}},
	"spec": {"podCIDRs": ["10.88.1.0/24"]},
	"status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.7"}, {"type": "Hostname", "address": "edge1"}]}}]}`

// An address has one form, whichever a slice has: edges tell families apart by it.
func TestServicesMappedAddress(t *testing.T) {
	s := sliceObject{AddressType: addressTypeIPv6, Endpoints: []sliceEndpoint{{Addresses: []string{"::ffff:10.88.1.9"}}}}
	if got := s.items(); len(got) != 1 || got[0].GetAddress() != "10.88.1.9" {
		t.Errorf("got %v", got)
	}
}

// The items are made from what an API server answers, and follow its events.
func TestServices(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	events := make(chan string) // of slices
	s := serve(t, nil)
	s.setHandler(func(w http.ResponseWriter, r *http.Request) {
		wantSelector := func(want string) {
			if got := r.URL.Query().Get("labelSelector"); got != want {
				t.Errorf("%s: the label selector is %q, want %q", r.URL.Path, got, want)
			}
		}
		switch r.URL.Path {
		case servicesPath:
			wantSelector("")
			listAndWatch(ctx, t, servicesJSON, nil)(w, r)
		case endpointSlicesPath:
			wantSelector("kubernetes.io/service-name")
			listAndWatch(ctx, t, slicesJSON, events)(w, r)
		case nodesPath:
			listAndWatch(ctx, t, oneNodeJSON, nil)(w, r)
		default:
			t.Errorf("a request for %s", r.URL.Path)
		}
	})
	got := newSink(t)
	follower := s.Services(nil, got, new(tunnel.Counters), slog.New(slog.DiscardHandler))
	done := make(chan struct{})
	go func() {
		defer close(done)
		follower.Run(ctx)
	}()
	isSynced := func() bool {
		got.mu.Lock()
		defer got.mu.Unlock()
		return got.synced
	}
	testkit.Eventually(t, "everything is known", isSynced)
	got.want("the lists", "service/shop/web", "service/shop/plain", "service/shop/alias", "service/shop/headless",
		"service/shop/other", "service/shop/unproxied", "service/kube-system/kube-dns",
		"service/kube-system/rke2-coredns", "node/edge1", "endpoint/shop/web/web-a/10.88.1.5",
		"endpoint/shop/web/web-a/10.88.1.7", "endpoint/shop/web/web-a/10.88.1.8", "endpoint/shop/web/web-b/fd00::5")
	service := func(p services.Path, text string) {
		t.Helper()
		wantValue(t, got, p, new(services.Service), new(services.Service), text)
	}
	service("service/shop/web", `{"clusterIps": ["10.96.0.1", "fd00::1"], "externalIps": ["192.0.2.1"],
		"ports": [{"name": "http", "protocol": "TCP", "port": 80, "nodePort": 30080}, {"protocol": "UDP", "port": 53}],
		"internalLocal": true, "externalLocal": true, "distribution": "PreferSameZone", "affinitySeconds": 10800,
		"publishNotReady": true, "loadBalancerIps": ["203.0.113.1", "203.0.113.3"]}`)
	service("service/shop/plain", `{"clusterIps": ["10.96.0.2"], "ports": [{"protocol": "SCTP", "port": 1}]}`)
	service("service/shop/alias", `{"externalName": "example.com"}`)
	service("service/shop/headless", `{"headless": true}`)
	service("service/shop/other", `{"clusterIps": ["10.96.0.3"], "otherProxy": true}`)
	service("service/shop/unproxied",
		`{"clusterIps": ["10.96.0.4"], "otherProxy": true, "spread": true, "healthCheckNodePort": 32000,
			"loadBalancerLimited": true}`)
	service("service/kube-system/kube-dns", `{"clusterIps": ["10.96.0.10"], "clusterDns": true}`)
	service("service/kube-system/rke2-coredns", `{"clusterIps": ["10.96.0.11"], "clusterDns": true}`)
	endpoint := func(p services.Path, text string) {
		t.Helper()
		wantValue(t, got, p, new(services.Endpoint), new(services.Endpoint), text)
	}
	const ports = `"ports": [{"name": "http", "protocol": "TCP", "port": 8080}, {"protocol": "UDP", "port": 53}]`
	endpoint("endpoint/shop/web/web-a/10.88.1.5", `{"address": "10.88.1.5", "node": "edge1", "zone": "a",
		"hostname": "web-0", "ready": true, "serving": true, "zoneHints": ["a", "b"], "nodeHints": ["edge1"], `+ports+`}`)
	endpoint("endpoint/shop/web/web-a/10.88.1.7",
		`{"address": "10.88.1.7", "serving": true, "terminating": true, "home": "edge1", `+ports+`}`)
	endpoint("endpoint/shop/web/web-a/10.88.1.8", `{"address": "10.88.1.8", "node": "edge2", "ready": true,
		"serving": true, `+ports+`}`)
	endpoint("endpoint/shop/web/web-b/fd00::5", `{"address": "fd00::5", "ready": true, "serving": true}`)
	wantValue(t, got, "node/edge1", new(services.Node), new(services.Node),
		`{"zone": "a", "podCidrs": ["10.88.1.0/24"], "internalIps": ["192.0.2.7"]}`)

	events <- `{"type": "DELETED", "object": {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1",
		"metadata": {"name": "web-a", "namespace": "shop", "resourceVersion": "2"}}}`
	testkit.Eventually(t, "the endpoints of a slice that is deleted are gone",
		func() bool { return len(got.paths()) == 10 })
	if n := follower.Note(); n != "" {
		t.Errorf("the note is %q", n)
	}
	cancel()
	<-done
}

// An endpoint whose slice names no node is on the Node in whose networks of pods it is, in whichever order the objects
// come. The API servers are on no node, whatever a Node claims.
func TestServicesHomes(t *testing.T) {
	got := newSink(t)
	s := new(Client).Services(nil, got, new(tunnel.Counters), slog.New(slog.DiscardHandler))
	svcs, slcs, nodes := s.serviceStore(), s.sliceStore(), s.nodeStore()
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	node := func(name string, networks ...string) *nodeObject {
		n := new(nodeObject)
		n.Name, n.Spec.PodCIDRs = name, networks
		return n
	}
	home := func(p services.Path, want string) {
		t.Helper()
		got.mu.Lock()
		defer got.mu.Unlock()
		var e services.Endpoint
		if err := proto.Unmarshal(got.items[p], &e); err != nil || e.GetHome() != want {
			t.Errorf("%s is at %q, want %q (%v)", p, e.GetHome(), want, err)
		}
	}
	const web, api = "endpoint/shop/web/web-a/10.88.1.5", "endpoint/default/kubernetes/kubernetes/10.88.1.9"
	do(svcs.Add(aService("shop", "web")))
	do(svcs.Add(aService("default", "kubernetes")))
	do(slcs.Add(aSlice("shop", "web", "web-a", "10.88.1.5")))
	do(slcs.Add(aSlice("default", "kubernetes", "kubernetes", "10.88.1.9")))
	home(web, "")
	do(nodes.Add(node("edge1", "10.88.1.0/24")))
	home(web, "edge1")
	home(api, "")
	do(nodes.Add(node("thief", "10.88.0.0/16")))
	home(web, "")
	do(nodes.Delete(node("thief")))
	home(web, "edge1")
	control := node("control")
	control.Labels = map[string]string{"node-role.kubernetes.io/control-plane": ""}
	control.Status.Addresses = []nodeAddress{{Type: "InternalIP", Address: "10.88.1.200"}}
	do(nodes.Add(control)) // so the network is no network of pods
	home(web, "")
	do(nodes.Delete(control))
	home(web, "edge1")
	do(slcs.Update(aSlice("shop", "web", "web-a", "10.88.1.5", "10.88.1.6")))
	home("endpoint/shop/web/web-a/10.88.1.6", "edge1")
	do(slcs.Delete(aSlice("shop", "web", "web-a")))
	if do(nodes.Update(node("edge1"))); len(s.nodeless) != 0 {
		t.Errorf("slices with such endpoints: %v, but none is left", s.nodeless)
	}
}

// An object that is too large for a batch is left out, and the log says so. Others stay.
func TestServicesTooLarge(t *testing.T) {
	var log testkit.Log
	got := newSink(t)
	s := new(Client).Services(nil, got, new(tunnel.Counters), slog.New(slog.NewTextHandler(&log, nil)))
	large := aSlice("shop", "web", "web-a", "10.0.0.1")
	for i := range 2000 {
		name := fmt.Sprintf("port-%d", i)
		large.Ports = append(large.Ports, slicePort{Name: &name, Port: portNumber(i + 1)})
	}
	if err := s.serviceStore().Add(aService("shop", "web")); err != nil {
		t.Fatal(err)
	}
	if err := s.sliceStore().Add(large); err != nil {
		t.Fatal(err)
	}
	got.want("a slice with 2,000 ports", "service/shop/web")
	if !strings.Contains(log.String(), "shop/web-a") {
		t.Errorf("the log is %q", log.String())
	}
}

// An edge in mode full has rules for each port of each external address, so it gets a bounded number of them.
func TestServicesWithTooManyAddresses(t *testing.T) {
	var log testkit.Log
	got := newSink(t)
	s := new(Client).Services(nil, got, new(tunnel.Counters), slog.New(slog.NewTextHandler(&log, nil)))
	store, web := s.serviceStore(), aService("shop", "web")
	for i := range services.MaxAddresses {
		web.Spec.ExternalIPs = append(web.Spec.ExternalIPs, fmt.Sprintf("203.0.113.%d", i))
	}
	if err := store.Add(web); err != nil {
		t.Fatal(err)
	}
	got.want("as many as it may have", "service/shop/web")
	if log.String() != "" {
		t.Errorf("the log is %q", log.String())
	}
	web.Spec.ExternalIPs = web.Spec.ExternalIPs[:60]
	var ingress []string
	for i := range 10 {
		ingress = append(ingress, fmt.Sprintf(`{"ip": "198.51.100.%d"}`, i))
	}
	status := `{"loadBalancer": {"ingress": [` + strings.Join(ingress, ", ") + `]}}`
	if err := json.Unmarshal([]byte(status), &web.Status); err != nil {
		t.Fatal(err)
	}
	if err := store.Update(web); err != nil {
		t.Fatal(err)
	}
	got.want("more than it may have", "service/shop/web")
	item := web.item()
	s.cutAddresses("shop/web", item)
	external, balancers := len(item.GetExternalIps()), len(item.GetLoadBalancerIps())
	if external != 60 || balancers != 4 || !strings.Contains(log.String(), "has=70 get=64") {
		t.Errorf("%d and %d addresses; the log is %q", external, balancers, log.String())
	}
}

// The endpoints of a Service and of a namespace have bounds. The sink does not get a slice that exceeds them. It gets
// the slice with its next change, if there is room by then.
func TestServicesBounds(t *testing.T) {
	var log testkit.Log
	got := newSink(t)
	s := new(Client).Services(nil, got, new(tunnel.Counters), slog.New(slog.NewTextHandler(&log, nil)))
	services, slcs := s.serviceStore(), s.sliceStore()
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	wide := func(service, name string, from byte) *sliceObject { // 250 endpoints of some 3 KiB
		one := aSlice("shop", service, name)
		for i := range 100 {
			port := fmt.Sprintf("a-port-with-a-long-name-%d", i)
			one.Ports = append(one.Ports, slicePort{Name: &port, Port: portNumber(i + 1)})
		}
		for i := range 250 {
			one.Endpoints = append(one.Endpoints, sliceEndpoint{Addresses: []string{fmt.Sprintf("10.0.%d.%d", from, i)}})
		}
		return one
	}
	do(services.Add(aService("shop", "web")))
	do(slcs.Add(wide("web", "web-a", 1)))
	do(slcs.Add(wide("web", "web-b", 2)))
	if n := len(got.paths()); n != 251 || !strings.Contains(log.String(), "shop/web-b") {
		t.Errorf("%d items, want one Service with the endpoints of one slice; the log is %q", n, log.String())
	}
	do(slcs.Delete(wide("web", "web-a", 1)))
	do(slcs.Update(wide("web", "web-b", 2)))
	if n := len(got.paths()); n != 251 {
		t.Errorf("%d items when there is room again", n)
	}
	do(slcs.Replace([]any{wide("web", "web-c", 3)}, "")) // a list after a gap, with another slice in its place
	if n := len(got.paths()); n != 251 {
		t.Errorf("%d items after a list", n)
	}
	do(slcs.Delete(wide("web", "web-c", 3)))
	do(slcs.Add(wide("web", "web-b", 2)))
	for i := range 30 {
		name := fmt.Sprint("other-", i)
		do(services.Add(aService("shop", name)))
		do(slcs.Add(wide(name, name, byte(i))))
	}
	if most := maxNamespaceSize / (250 * 3 << 10); len(got.paths()) > 31+250*(most+1) {
		t.Errorf("%d items of one namespace", len(got.paths()))
	}
	for i := range 30 {
		do(slcs.Delete(wide(fmt.Sprint("other-", i), fmt.Sprint("other-", i), byte(i))))
	}
	do(slcs.Delete(wide("web", "web-b", 2)))
	if len(s.sizes) != 0 {
		t.Errorf("sizes that are left: %v", s.sizes)
	}
}

// brittleSink panics for one item.
type brittleSink struct {
	*sink
	at services.Path
}

func (s brittleSink) Set(p services.Path, value []byte) {
	if p == s.at {
		panic("the test wants it")
	}
	s.sink.Set(p, value)
}

func (s brittleSink) Delete(p services.Path) {
	if p == "endpoint/shop/web/web-b/fd00::5" {
		panic("the test wants it")
	}
	s.sink.Delete(p)
}

// The code panics for one object of a list, and for one that comes as an event. The process goes on, and all other
// objects are handled.
func TestServicesPanic(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	events := make(chan string) // of slices
	s := serve(t, nil)
	s.setHandler(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case servicesPath:
			listAndWatch(ctx, t, servicesJSON, nil)(w, r)
		case endpointSlicesPath:
			listAndWatch(ctx, t, slicesJSON, events)(w, r)
		default:
			listAndWatch(ctx, t, oneNodeJSON, nil)(w, r)
		}
	})
	var log testkit.Log
	counters := new(tunnel.Counters)
	got := newSink(t)
	follower := s.Services(nil, brittleSink{got, "service/shop/plain"}, counters, slog.New(slog.NewTextHandler(&log, nil)))
	done := make(chan struct{})
	go func() {
		defer close(done)
		follower.Run(ctx)
	}()
	testkit.Eventually(t, "the other objects of the list are known", func() bool {
		got.mu.Lock()
		defer got.mu.Unlock()
		return got.synced
	})
	const others = 12 // TestServices lists them, and shop/plain
	if n := len(got.paths()); n != others || counters.Panics.Load() != 1 || !strings.Contains(log.String(), "shop/plain") {
		t.Errorf("%d items, %d panics, log:\n%s", n, counters.Panics.Load(), log.String())
	}
	for _, slice := range []string{"web-b", "web-a"} { // the sink panics for the first
		events <- `{"type": "DELETED", "object": {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1",
			"metadata": {"name": "` + slice + `", "namespace": "shop", "resourceVersion": "2"}}}`
	}
	testkit.Eventually(t, "the event after the panic is handled", func() bool { return len(got.paths()) == others-3 })
	if n := counters.Panics.Load(); n != 2 {
		t.Errorf("%d panics; want 2", n)
	}
	cancel()
	<-done
}

// Without a right, Note and the log say which objects cannot be read, and how to get the right.
func TestServicesForbidden(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var log testkit.Log
	s := serve(t, nil)
	s.setHandler(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case endpointSlicesPath:
			refusal(403, "Forbidden", "")(w, r)
		case servicesPath:
			listAndWatch(ctx, t, servicesJSON, nil)(w, r)
		default:
			listAndWatch(ctx, t, oneNodeJSON, nil)(w, r)
		}
	})
	got := newSink(t)
	follower := s.Services(nil, got, new(tunnel.Counters), slog.New(slog.NewTextHandler(&log, nil)))
	done := make(chan struct{})
	go func() {
		defer close(done)
		follower.Run(ctx)
	}()
	testkit.Within(t, 10*time.Second, "the note says what is missing", func() error {
		if n := follower.Note(); !strings.Contains(n, "EndpointSlices") || !strings.Contains(n, "cloud-rbac.yaml") {
			return fmt.Errorf("it is %q", n)
		}
		if len(got.paths()) != 9 {
			return fmt.Errorf("the items are %q", got.paths())
		}
		return nil
	})
	cancel()
	<-done
	if got.synced {
		t.Error("the sink is told that everything is known")
	}
	if n := strings.Count(log.String(), "EndpointSlices of the cluster cannot be read"); n != 1 {
		t.Errorf("the log says it %d times: %s", n, log.String())
	}
}
