package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"sync"
)

// The paths that both systems list and watch.
const (
	pathNodes    = "/api/v1/nodes"
	pathServices = "/api/v1/services"
	pathSlices   = "/apis/discovery.k8s.io/v1/endpointslices"
)

const (
	namespace   = "shop"
	servicePort = 80
	targetPort  = 8080
	perService  = 10 // endpoints of each Service
)

// object is an object of Kubernetes, as JSON.
type object = map[string]any

// cluster is an API server with Services of perService endpoints each. There is one more Service, the probe, with one
// endpoint. It knows just enough of the API for the clients of tunnel and KPNG.
type cluster struct {
	services, nodes int

	mu      sync.Mutex // guards the following
	version int
	slices  []object                 // by the number of the Service; the last one is of the probe
	watches map[chan string]struct{} // of EndpointSlices; each takes many events, and is never closed
}

// newCluster makes a cluster in which every endpoint is ready.
func newCluster(services, nodes int) *cluster {
	c := &cluster{services: services, nodes: nodes, version: 1, watches: make(map[chan string]struct{})}
	for i := range services {
		c.slices = append(c.slices, c.slice(i, -1))
	}
	c.slices = append(c.slices, c.probeSlice(0))
	return c
}

// clusterIP returns the address of a Service.
func clusterIP(service int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 200, byte(service >> 8), byte(service)})
}

// clusterIPs is the network of the addresses of Services.
const clusterIPs = "10.200.0.0/16"

// endpointIP returns the address of an endpoint of a Service. All endpoints are in the network endpoints.
func endpointIP(service, n int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, byte(96 + n), byte(service >> 8), byte(service)})
}

// endpoints is the network of all endpoints.
const endpoints = "10.96.0.0/12"

// named returns an object with metadata.
func named(kind, version, name string, rest object) object {
	rest["kind"], rest["apiVersion"] = kind, version
	rest["metadata"] = object{"namespace": namespace, "name": name, "resourceVersion": "1", "uid": name}
	return rest
}

// nodeName returns the name of a node.
func nodeName(i int) string { return "edge-" + strconv.Itoa(i) }

// serviceName returns the name of a Service.
func serviceName(i int) string { return "service-" + strconv.Itoa(i) }

// generated returns a name with five random letters, as kube-apiserver makes them from generateName. It is the same
// each time.
func generated(prefix string, seed int) string {
	rng := rand.New(rand.NewPCG(uint64(seed), 0)) //nolint:gosec // chance is enough
	letters := make([]byte, 5)
	for i := range letters {
		letters[i] = "bcdfghjklmnpqrstvwxz2456789"[rng.IntN(27)]
	}
	return prefix + string(letters)
}

// service returns a Service.
func service(i int) object {
	return named("Service", "v1", serviceName(i), object{"spec": object{
		"type": "ClusterIP", "clusterIP": clusterIP(i).String(), "clusterIPs": []string{clusterIP(i).String()},
		"selector": object{"app": serviceName(i)}, "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
		"ipFamilies": []string{"IPv4"}, "ipFamilyPolicy": "SingleStack",
		"ports": []object{{"name": "http", "protocol": "TCP", "port": servicePort, "targetPort": targetPort}}}})
}

// slice returns the EndpointSlice of a Service. The endpoint with the number unready is not ready; -1: all are.
func (c *cluster) slice(service, unready int) object {
	var all []object
	for n := range perService {
		all = append(all, c.endpoint(service, n, n != unready))
	}
	return sliceOf(service, all)
}

// probeSlice returns the EndpointSlice of the probe, with the n-th endpoint.
func (c *cluster) probeSlice(n int) object {
	return sliceOf(c.services, []object{c.endpoint(c.services, n, true)})
}

func (c *cluster) endpoint(service, n int, ready bool) object {
	name := generated(serviceName(service)+"-5d78c9869d-", service*perService+n) // as of a Deployment
	return object{
		"addresses":  []string{endpointIP(service, n).String()},
		"conditions": object{"ready": ready, "serving": ready, "terminating": false},
		"nodeName":   nodeName((service*perService + n) % c.nodes),
		"targetRef":  object{"kind": "Pod", "namespace": namespace, "name": name, "uid": name},
	}
}

func sliceOf(service int, all []object) object {
	s := named("EndpointSlice", "discovery.k8s.io/v1", generated(serviceName(service)+"-", service), object{
		"addressType": "IPv4", "endpoints": all,
		"ports": []object{{"name": "http", "protocol": "TCP", "port": targetPort}}})
	s["metadata"].(object)["labels"] = object{"kubernetes.io/service-name": serviceName(service)}
	return s
}

// setReady makes an endpoint of a Service ready or not, and all others of the Service ready.
func (c *cluster) setReady(service, n int, ready bool) {
	if ready {
		n = -1
	}
	c.set(service, c.slice(service, n))
}

// setProbe gives the probe its n-th endpoint.
func (c *cluster) setProbe(n int) { c.set(c.services, c.probeSlice(n)) }

// set replaces an EndpointSlice, and tells those who watch.
func (c *cluster) set(service int, slice object) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.version++
	slice["metadata"].(object)["resourceVersion"] = strconv.Itoa(c.version)
	c.slices[service] = slice
	event, err := json.Marshal(object{"type": "MODIFIED", "object": slice})
	if err != nil {
		panic(err) // it consists of strings and numbers
	}
	for w := range c.watches {
		w <- string(event)
	}
}

// watched returns nil once a client watches EndpointSlices. A change before that would be lost.
func (c *cluster) watched() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.watches) == 0 {
		return errors.New("nobody watches EndpointSlices")
	}
	return nil
}

// list returns all objects of a path.
func (c *cluster) list(path string) object {
	c.mu.Lock()
	defer c.mu.Unlock()
	kind, version, items := "", "v1", []object{}
	switch path {
	case pathNodes:
		kind = "NodeList"
		for i := range c.nodes {
			items = append(items, named("Node", "v1", nodeName(i), object{"status": object{
				"addresses": []object{{"type": "InternalIP", "address": fmt.Sprintf("10.2.%d.%d", i>>8, i&0xff)}}}}))
		}
	case pathServices:
		kind = "ServiceList"
		for i := range c.services + 1 {
			items = append(items, service(i))
		}
	case pathSlices:
		kind, version, items = "EndpointSliceList", "discovery.k8s.io/v1", append(items, c.slices...)
	default:
		return nil
	}
	return object{"kind": kind, "apiVersion": version, "items": items,
		"metadata": object{"resourceVersion": strconv.Itoa(c.version)}}
}

// ServeHTTP implements http.Handler.
func (c *cluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	watch := q.Get("watch") != "" && q.Get("watch") != "false"
	if q.Get("sendInitialEvents") != "" { // as an API server without WatchList
		w.WriteHeader(http.StatusUnprocessableEntity)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if watch {
		c.serveWatch(w, r)
		return
	}
	list := c.list(r.URL.Path)
	if list == nil {
		w.WriteHeader(http.StatusNotFound)
	}
	json.NewEncoder(w).Encode(list) //nolint:errcheck // the client has gone
}

// serveWatch sends the changes of EndpointSlices. Nothing else changes. A client that lists is at the newest version
// when it watches, since changes begin later.
func (c *cluster) serveWatch(w http.ResponseWriter, r *http.Request) {
	events := make(chan string, 1024)
	if r.URL.Path == pathSlices {
		c.mu.Lock()
		c.watches[events] = struct{}{}
		c.mu.Unlock()
		defer func() {
			c.mu.Lock()
			delete(c.watches, events)
			c.mu.Unlock()
		}()
	}
	for {
		if http.NewResponseController(w).Flush() != nil {
			return
		}
		select {
		case e := <-events:
			fmt.Fprintln(w, e)
		case <-r.Context().Done():
			return
		}
	}
}

// serve serves the API on a listener until the program ends. It writes a kubeconfig to file.
func (c *cluster) serve(ln net.Listener, file string) error {
	go http.Serve(ln, c) //nolint:errcheck,gosec // until the program ends; the clients are ours
	config := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"contexts": [{"name": "c", "context": {"cluster": "c"}}],
		"clusters": [{"name": "c", "cluster": {"server": "http://%s"}}]}`, ln.Addr())
	return os.WriteFile(file, []byte(config), 0o600)
}
