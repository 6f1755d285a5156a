package hub

import (
	"log/slog"
	"strings"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/tunnel"
)

// targetHub has a Service with endpoints of all kinds.
func targetHub(t testing.TB, cfg Config) *Hub {
	if cfg.Serves == nil {
		cfg.Serves = func(node tunnel.NodeName) bool { return strings.HasPrefix(string(node), "edge") }
	}
	h := newHub(cfg)
	h.Set(web, nil)
	ports := []*services.Port{{Name: "http", Protocol: "TCP", Port: 8080}, {Name: "dns", Protocol: "UDP", Port: 53}}
	setEndpoint(t, h, "10.88.1.1", "edge1", ports...)
	setEndpoint(t, h, "10.88.2.1", "edge2", ports...)
	setEndpoint(t, h, "fd00::5", "edge2", ports...)
	setEndpoint(t, h, "10.244.0.5", "worker1", ports...)
	setEndpoint(t, h, "192.0.2.1", "", ports...)
	setEndpoint(t, h, "127.0.0.1", "edge2", ports...)
	setEndpoint(t, h, "169.254.169.254", "", ports...)
	h.Set(services.EndpointPath("other", "db", "db-a", "10.88.2.9"), // its Service is not told
		marshal(t, &services.Endpoint{Address: "10.88.2.9", Node: "edge2", Ports: ports}))
	for name, s := range map[string]*services.Service{
		"headless": {Headless: true}, "alias": {ExternalName: "example.com"},
		"other": {ClusterIps: []string{"10.96.0.9"}, OtherProxy: true},
	} {
		h.Set(services.ServicePath("shop", name), marshal(t, s))
		h.Set(services.EndpointPath("shop", name, "a", "10.88.2.1"),
			marshal(t, &services.Endpoint{Address: "10.88.2.1", Node: "edge2", Ports: ports}))
	}
	for _, node := range []string{"edge1", "edge2", "worker1"} {
		h.Set(services.NodePath(node), nil)
	}
	h.Set(services.EndpointPath("shop", "web", "web-a", "10.88.3.1"), // its slice has no nodeName
		marshal(t, &services.Endpoint{Address: "10.88.3.1", Home: "edge2", Ready: true, Serving: true, Ports: ports}))
	h.Joined("edge1")
	h.Joined("edge2")
	return h
}

func TestTarget(t *testing.T) {
	const web = "endpoint/shop/web/web-a/"
	for _, c := range []struct {
		target  string
		cluster bool
		want    string // where the cloud dials, or a part of the refusal
	}{
		{web + "10.88.2.1 TCP 8080", false, "edge2 10.88.2.1:8080"},
		{web + "fd00::5 TCP 8080", false, "edge2 [fd00::5]:8080"},
		{web + "10.88.2.1 TCP 8080", true, "edge2 10.88.2.1:8080"},
		{web + "10.88.3.1 TCP 8080", false, "edge2 10.88.3.1:8080"},
		{web + "10.244.0.5 TCP 8080", true, " 10.244.0.5:8080"},
		{web + "192.0.2.1 TCP 8080", true, " 192.0.2.1:8080"},
		{web + "10.244.0.5 TCP 8080", false, `denied: endpoint/shop/web/web-a/10.244.0.5 is on worker1, whose edge ` +
			`serves no Services: the cloud lets edges reach it with allow = ["cluster"]`},
		{web + "192.0.2.1 TCP 8080", false, `is on no node: the cloud lets edges reach it with allow = ["cluster"]`},
		{web + "10.88.1.1 TCP 8080", true, "denied: endpoint/shop/web/web-a/10.88.1.1 is on this node"},
		{web + "10.88.2.1 TCP 10250", true, "denied: endpoint/shop/web/web-a/10.88.2.1 has no port 10250 of TCP"},
		{web + "10.88.2.1 TCP 53", true, "has no port 53 of TCP"},
		{web + "10.88.2.1 UDP 53", false, "edge2 10.88.2.1:53"},
		{web + "10.244.0.5 UDP 53", true, " 10.244.0.5:53"},
		{web + "10.244.0.5 UDP 53", false, "denied: "},
		{web + "10.88.2.1 UDP 8080", true, "has no port 8080 of UDP"},
		{web + "10.88.2.1 SCTP 53", true, "denied: "},
		{web + "127.0.0.1 TCP 8080", true, "denied: 127.0.0.1 is no address of an endpoint"},
		{web + "169.254.169.254 TCP 8080", true, "denied: 169.254.169.254 is no address of an endpoint"},
		{web + "10.88.2.7 TCP 8080", true, "denied: endpoint/shop/web/web-a/10.88.2.7 is not an endpoint of a Service"},
		{"endpoint/other/db/db-a/10.88.2.9 TCP 8080", true, "is not an endpoint of a Service that this cloud sends to edges"},
		{"endpoint/shop/headless/a/10.88.2.1 TCP 8080", true, "is not an endpoint of a Service that this cloud"},
		{"endpoint/shop/alias/a/10.88.2.1 TCP 8080", true, "is not an endpoint of a Service that this cloud"},
		{"endpoint/shop/other/a/10.88.2.1 TCP 8080", true, "is not an endpoint of a Service that this cloud"},
		{"10.88.2.1:8080", true, "denied: "},
		{"", true, "denied: "},
		{"service/shop/web TCP 80", true, "denied: "},
	} {
		h := targetHub(t, Config{Cluster: c.cluster})
		h.Synced()
		request, refusal := h.Target("edge1", c.target)
		got := string(request.Node) + " " + request.Addr
		if refusal != nil {
			got = refusal.Error()
		}
		if !strings.Contains(got, c.want) || refusal == nil && got != c.want {
			t.Errorf("%q, cluster %v: %s; want %s", c.target, c.cluster, got, c.want)
		}
		network := map[bool]string{false: "tcp", true: tunnel.NetworkUDP}[strings.Contains(c.target, " UDP ")]
		if refusal == nil && (request.Category != Category || request.Network != network || request.Caller != "node edge1") {
			t.Errorf("%q: %+v", c.target, request)
		}
	}
}

// An edge cannot reach a deleted endpoint, and the log says once that an edge tries.
func TestTargetIsGone(t *testing.T) {
	var log testkit.Log
	h := targetHub(t, Config{Log: slog.New(testkit.Handler(&log))})
	const target = "endpoint/shop/web/web-a/10.88.2.1 TCP 8080"
	_, refusal := h.Target("edge1", target)
	if refusal == nil || refusal.Code != tunnel.Denied && refusal.Code != tunnel.Unreachable {
		t.Errorf("before all objects are known: %v", refusal)
	}
	h.Synced()
	if _, refusal := h.Target("edge1", target); refusal != nil {
		t.Fatal(refusal)
	}
	h.Delete(web)
	for range 3 {
		if _, refusal := h.Target("edge1", target); refusal == nil || refusal.Code != tunnel.Denied {
			t.Errorf("the Service is deleted: %v", refusal)
		}
	}
	h.Set(web, nil)
	h.Delete(services.NodePath("edge2"))
	if _, refusal := h.Target("edge1", target); refusal == nil || refusal.Code != tunnel.Denied {
		t.Errorf("the Node is deleted: %v", refusal)
	}
	if lines := log.Lines("may not reach"); len(lines) != 1 || !strings.Contains(lines[0], "edge1") {
		t.Errorf("the log is %q", lines)
	}
}

// The cloud dials no endpoint of a node whose edge is away: its own network may have such addresses, too. When the node
// is forgotten, it does.
func TestTargetOfANodeThatIsAway(t *testing.T) {
	for _, cluster := range []bool{false, true} {
		h := targetHub(t, Config{Cluster: cluster, Serves: func(tunnel.NodeName) bool { return false }})
		h.Synced()
		h.Joined("edge2") // it was there before
		request, refusal := h.Target("edge1", "endpoint/shop/web/web-a/10.88.2.1 TCP 8080")
		if refusal != nil || request.Node != "edge2" || request.Addr != "10.88.2.1:8080" {
			t.Errorf("cluster %t: through %q to %s, %v", cluster, request.Node, request.Addr, refusal)
		}
		h.Left("edge2")
		request, refusal = h.Target("edge1", "endpoint/shop/web/web-a/10.88.2.1 TCP 8080")
		if cluster != (refusal == nil && request.Node == "") {
			t.Errorf("cluster %t, forgotten: through %q, %v", cluster, request.Node, refusal)
		}
	}
}

// After a start of the cloud, an edge has a session a moment before Joined.
func TestTargetOfANodeThatHasCome(t *testing.T) {
	come := false
	h := targetHub(t, Config{Serves: func(node tunnel.NodeName) bool { return come && node == "worker1" }})
	h.Synced()
	come = true
	request, refusal := h.Target("edge1", "endpoint/shop/web/web-a/10.244.0.5 TCP 8080")
	if refusal != nil || request.Node != "worker1" {
		t.Errorf("through %q, %v", request.Node, refusal)
	}
}
