package hub

import (
	"slices"
	"strings"
	"testing"

	"tunnel.example/tunnel/pkg/services"
)

// text returns endpoints in order, with their nodes, and with "cloud" if the cloud may dial them.
func text(all []Endpoint) string {
	var s []string
	for _, e := range all {
		one := string(e.Node) + " " + e.Addr.String()
		if e.Cloud {
			one += " cloud"
		}
		s = append(s, one)
	}
	slices.Sort(s)
	return strings.Join(s, ", ")
}

func TestEndpoints(t *testing.T) {
	h := newHub(Config{Domain: "cluster.local"})
	http := &services.Port{Name: "http", Protocol: "TCP", Port: 80}
	target := &services.Port{Name: "http", Protocol: "TCP", Port: 8080}
	dns := &services.Port{Name: "dns", Protocol: "UDP", Port: 53}
	set := func(name string, s *services.Service, endpoints ...*services.Endpoint) {
		h.Set(services.ServicePath("shop", name), marshal(t, s))
		for _, e := range endpoints {
			h.Set(services.EndpointPath("shop", name, name+"-a", e.GetAddress()), marshal(t, e))
		}
	}
	pod := func(node, address string) *services.Endpoint {
		return &services.Endpoint{
			Address: address, Node: node, Ready: true, Serving: true, Ports: []*services.Port{target, dns},
		}
	}
	starting, named, loopback := pod("edge2", "10.88.2.2"), pod("edge2", "10.88.2.3"), pod("edge2", "127.0.0.1")
	starting.Ready, starting.Serving, named.Hostname = false, false, "DB-0"
	_, err := h.Endpoints("web.shop.svc", 80)
	if err == nil || !strings.Contains(err.Error(), "does not know the Services yet") {
		t.Errorf("before the first objects: %v", err)
	}
	if found, err := h.Endpoints("10.96.0.1", 80); found != nil || err != nil {
		t.Errorf("an address before the first objects: %v, %v", found, err)
	}
	set("web", &services.Service{ClusterIps: []string{"10.96.0.1", "fd00:96::1"}, Ports: []*services.Port{http, dns}},
		pod("edge1", "10.88.1.1"), pod("edge2", "10.88.2.1"), pod("edge2", "fd00:88::1"), starting, loopback)
	set("db", &services.Service{Headless: true}, pod("edge1", "10.88.1.9"), named, starting)
	set("near", &services.Service{ClusterIps: []string{"10.96.0.2"}, Ports: []*services.Port{http}, InternalLocal: true},
		pod("edge1", "10.88.1.8"))
	set("alias", &services.Service{ExternalName: "example.com"})
	set("other", &services.Service{ClusterIps: []string{"10.96.0.3"}, OtherProxy: true})
	set("gone", &services.Service{ClusterIps: []string{"10.96.0.4"}, Ports: []*services.Port{http}},
		pod("edge1", "10.88.1.7"))
	h.Synced()
	h.Delete(services.ServicePath("shop", "gone"))
	for _, c := range []struct {
		host string
		port uint16
		want string // the endpoints, or a part of the refusal; "": no Service
	}{
		{"web.shop.svc.cluster.local", 80, "edge1 10.88.1.1:8080, edge2 10.88.2.1:8080, edge2 [fd00:88::1]:8080"},
		{"WEB.shop.svc.", 80, "edge1 10.88.1.1:8080, edge2 10.88.2.1:8080, edge2 [fd00:88::1]:8080"},
		{"10.96.0.1", 80, "edge1 10.88.1.1:8080, edge2 10.88.2.1:8080"},
		{"::ffff:10.96.0.1", 80, "edge1 10.88.1.1:8080, edge2 10.88.2.1:8080"},
		{"fd00:96::1", 80, "edge2 [fd00:88::1]:8080"},
		{"web.shop.svc", 53, "refused: the Service web.shop.svc has no TCP port 53"},
		{"db.shop.svc", 8080, "edge1 10.88.1.9:8080, edge2 10.88.2.3:8080"},
		{"db-0.db.shop.svc", 8080, "edge2 10.88.2.3:8080"},
		{"10-88-1-9.db.shop.svc.cluster.local", 8080, "edge1 10.88.1.9:8080"},
		{"10-88-2-2.db.shop.svc", 8080, "refused: no endpoint"},
		{"db.shop.svc", 22, "refused: no endpoint"},
		{"near.shop.svc", 80, "refused: only callers on the nodes of its endpoints may use"},
		{"alias.shop.svc", 80, "unreachable: the Service alias.shop.svc is an alias: connect to example.com"},
		{"other.shop.svc", 80, "unreachable: no edge serves the Service other.shop.svc"},
		{"10.96.0.3", 80, ""},
		{"10.96.0.2", 80, ""},
		{"10-88-1-1.web.shop.svc", 80, "unreachable: only a headless Service has names of endpoints"},
		{"gone.shop.svc", 80, "unreachable: there is no Service gone.shop.svc"},
		{"10.96.0.4", 80, ""},
		{"10.88.1.1", 8080, ""},
		{"edge1", 22, ""},
		{"web.shop.svc.example.com", 80, ""},
		{"shop.svc", 80, ""},
		{"a.b.web.shop.svc", 80, ""},
		{".web.shop.svc", 80, ""},
	} {
		found, err := h.Endpoints(c.host, c.port)
		got := text(found)
		if err != nil {
			got = err.Error()
		}
		if got != c.want && (err == nil || c.want == "" || !strings.Contains(got, c.want)) {
			t.Errorf("%s:%d: %q, want %q", c.host, c.port, got, c.want)
		}
	}
}

// Endpoints that the cloud may dial itself are marked, and a deleted endpoint is not found.
func TestEndpointsOfCluster(t *testing.T) {
	h := newHub(Config{Domain: "k8s.example", Cluster: true})
	port := &services.Port{Protocol: "TCP", Port: 80}
	h.Set(services.ServicePath("shop", "web"),
		marshal(t, &services.Service{ClusterIps: []string{"10.96.0.1"}, Ports: []*services.Port{port}}))
	first := setEndpoint(t, h, "10.244.0.5", "worker1", port)
	setEndpoint(t, h, "192.0.2.1", "", port)
	h.Synced()
	found, err := h.Endpoints("web.shop.svc.k8s.example", 80)
	if text(found) != " 192.0.2.1:80 cloud, worker1 10.244.0.5:80 cloud" {
		t.Errorf("%s, %v", text(found), err)
	}
	h.Set(services.NodePath("worker1"), nil)
	h.Joined("worker1") // its edge serves Services: the cloud does not dial its endpoints by itself
	if found, err = h.Endpoints("10.96.0.1", 80); text(found) != " 192.0.2.1:80 cloud, worker1 10.244.0.5:80" {
		t.Errorf("%s, %v", text(found), err)
	}
	h.Delete(first)
	if found, err := h.Endpoints("10.96.0.1", 80); text(found) != " 192.0.2.1:80 cloud" {
		t.Errorf("after a deletion: %s, %v", text(found), err)
	}
	// The ClusterIP of a deleted Service belongs to the next one, whatever the order of the two changes.
	h.Set(services.ServicePath("shop", "new"),
		marshal(t, &services.Service{ClusterIps: []string{"10.96.0.1"}, Ports: []*services.Port{port}}))
	h.Delete(services.ServicePath("shop", "web"))
	if _, err := h.Endpoints("10.96.0.1", 80); err == nil || !strings.Contains(err.Error(), "no endpoint of the Service") {
		t.Errorf("of the next Service: %v", err)
	}
}
