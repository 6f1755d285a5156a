package vanish

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig/rigtest"
)

// The way reach: an edge serves a Service of the cluster, and the endpoint is on another node. So a conn leads from
// the edge to the cloud, and on to the other edge. Each edge has its own network, because both write rules for
// Services.
// The edge that faces the vanishing machine is inside. The other one, with the end of each conn that stays, is far.

const (
	farNode = "edge2"
	farIP   = "10.9.1.2"
	nearIP  = "10.9.1.1" // of the machine inside, at its link to the far one
	// clusterIP is the address of the Service.
	clusterIP, servicePort = "10.96.0.10", 80
)

// addFar makes the network that is far, and the ways to it and to the Service.
func (tn *tunnel) addFar() {
	tn.t.Helper()
	tn.far = rigtest.Network(tn.t)
	tn.smallBuffers(tn.far)
	tn.ip(tn.inside, "link add name veth1 type veth peer name veth1 netns %s", tn.far.Path())
	tn.ip(tn.inside, "addr add %s/24 dev veth1", nearIP)
	tn.ip(tn.far, "addr add %s/24 dev veth1", farIP)
	tn.ip(tn.inside, "link set veth1 up")
	tn.ip(tn.far, "link set veth1 up")
	tn.ip(tn.far, "route add default via %s", nearIP)
	tn.routeServices()
}

// routeServices has the machine outside reach the Service. The kernel forgets the route when the link goes down.
func (n *networks) routeServices() {
	n.t.Helper()
	n.ip(n.outside, "route replace %s via %s", clusterIP, insideIP)
}

// addCluster starts an API server that knows a Service with one endpoint: a port of an address, on a node. It returns
// the path of a program, which starts the program under test with a kubeconfig for that API server.
func (tn *tunnel) addCluster(dir, address string, port int, on string) (wrapped string) {
	tn.t.Helper()
	type object = map[string]any
	named := func(name string, rest object) object {
		rest["metadata"] = object{"namespace": "shop", "name": name, "resourceVersion": "1",
			"labels": object{"kubernetes.io/service-name": "web"}}
		return rest
	}
	var nodes []object
	for _, name := range []string{node, farNode} {
		nodes = append(nodes, object{"metadata": object{"name": name, "resourceVersion": "1"}})
	}
	lists := map[string]object{
		"/api/v1/nodes": {"kind": "NodeList", "apiVersion": "v1", "items": nodes},
		"/api/v1/services": {"kind": "ServiceList", "apiVersion": "v1", "items": []object{named("web", object{
			"spec": object{"type": "ClusterIP", "clusterIP": clusterIP,
				"ports": []object{{"name": "any", "port": servicePort}}}})}},
		"/apis/discovery.k8s.io/v1/endpointslices": {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1",
			"items": []object{named("web-a", object{"addressType": "IPv4",
				"ports":     []object{{"name": "any", "port": port}},
				"endpoints": []object{{"addresses": []string{address}, "nodeName": on}}})}},
	}
	for _, list := range lists {
		list["metadata"] = object{"resourceVersion": "1"}
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		list := lists[r.URL.Path]
		switch {
		case list == nil:
			w.WriteHeader(http.StatusNotFound)
		case q.Get("sendInitialEvents") != "": // as an old API server
			w.WriteHeader(http.StatusUnprocessableEntity)
		case q.Get("watch") != "": // nothing changes
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
		default:
			w.Header().Set("Content-Type", "application/json")
			json.NewEncoder(w).Encode(list)
		}
	}))
	server.Listener.Close()
	var err error
	if server.Listener, err = tn.inside.Listen("127.0.0.1:0"); err != nil {
		tn.t.Fatal(err)
	}
	server.Start()
	tn.t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	wrapped = filepath.Join(dir, "tunnel")
	script := fmt.Sprintf("#!/bin/sh\nKUBECONFIG=%s exec %s \"$@\"\n", testkit.Kubeconfig(tn.t, server.URL), program)
	if err := os.WriteFile(wrapped, []byte(script), 0o700); err != nil {
		tn.t.Fatal(err)
	}
	return wrapped
}

// servesServices returns what makes an edge serve Services.
func servesServices(dir, node string) string {
	return fmt.Sprintf("[mode.edge.services]\nstate = %q\n", filepath.Join(dir, node+".services"))
}

// awaitRules waits until the edge at the callers' end has rules for the Service: until then a packet to it is lost.
func (tn *tunnel) awaitRules(node string) {
	tn.t.Helper()
	edge := tn.members[slices.IndexFunc(tn.members, func(m member) bool { return m.Name == node })]
	err := testkit.Poll(takes, func() error {
		values, err := edge.Metrics()
		if err == nil && values["tunnel_services_redirected_addresses"] == 0 {
			err = errors.New("it has no rules")
		}
		return err
	})
	if err != nil {
		tn.t.Fatalf("%s does not serve the Service after %v: %v", edge.Name, time.Duration(takes), err)
	}
}
