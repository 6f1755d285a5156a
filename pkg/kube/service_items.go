package kube

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/services"
)

// This file makes items from objects. It leaves out the same parts as kube-proxy, and reads a missing field in the same
// way (kubernetes/pkg/proxy: serviceport.go, endpointslicecache.go). So an edge chooses the endpoints that kube-proxy
// would choose.

// serviceObject holds the fields of a Service (k8s.io/api/core/v1) that this package uses.
type serviceObject struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		Type                  string        `json:"type"`
		ClusterIP             string        `json:"clusterIP"`
		ClusterIPs            []string      `json:"clusterIPs"`
		ExternalName          string        `json:"externalName"`
		ExternalIPs           []string      `json:"externalIPs"`
		Ports                 []servicePort `json:"ports"`
		InternalTrafficPolicy string        `json:"internalTrafficPolicy"`
		ExternalTrafficPolicy string        `json:"externalTrafficPolicy"`
		TrafficDistribution   string        `json:"trafficDistribution"`
		HealthCheckNodePort   portNumber    `json:"healthCheckNodePort"`
		SourceRanges          []string      `json:"loadBalancerSourceRanges"`
		SessionAffinity       string        `json:"sessionAffinity"`
		SessionAffinityConfig struct {
			ClientIP struct {
				TimeoutSeconds uint32 `json:"timeoutSeconds"`
			} `json:"clientIP"`
		} `json:"sessionAffinityConfig"`
		PublishNotReadyAddresses bool `json:"publishNotReadyAddresses"`
	} `json:"spec"`
	Status struct {
		LoadBalancer struct {
			Ingress []struct {
				IP     string `json:"ip"`
				IPMode string `json:"ipMode"`
			} `json:"ingress"`
		} `json:"loadBalancer"`
	} `json:"status"`
}

// servicePort is a port of a Service.
type servicePort struct {
	Name     string     `json:"name"`
	Protocol string     `json:"protocol"`
	Port     portNumber `json:"port"`
	NodePort portNumber `json:"nodePort"`

	TargetPort intstr.IntOrString `json:"targetPort"`
}

// serviceList is a list of Services.
type serviceList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []serviceObject `json:"items"`
}

// sliceObject holds the fields of an EndpointSlice (k8s.io/api/discovery/v1) that this package uses.
type sliceObject struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	AddressType string          `json:"addressType"`
	Endpoints   []sliceEndpoint `json:"endpoints"`
	Ports       []slicePort     `json:"ports"`
}

// sliceEndpoint is an endpoint of an EndpointSlice.
type sliceEndpoint struct {
	Addresses  []string `json:"addresses"`
	Conditions struct {
		Ready       *bool `json:"ready"`
		Serving     *bool `json:"serving"`
		Terminating *bool `json:"terminating"`
	} `json:"conditions"`
	Hostname string `json:"hostname"`
	NodeName string `json:"nodeName"`
	Zone     string `json:"zone"`
	Hints    struct {
		ForZones []hint `json:"forZones"`
		ForNodes []hint `json:"forNodes"`
	} `json:"hints"`
}

// hint names a zone or a node.
type hint struct {
	Name string `json:"name"`
}

// slicePort is a port of an EndpointSlice.
type slicePort struct {
	Name     *string    `json:"name"`
	Protocol string     `json:"protocol"`
	Port     portNumber `json:"port"`
}

// portNumber is a port in an object, or 0 if the object has a number there that is no port. The API server stores such
// numbers, for example as the node port of a Service of type ExternalName. An error instead of 0 would make the whole
// list unreadable, and any user could cause that.
type portNumber uint16

// UnmarshalJSON implements json.Unmarshaler.
func (p *portNumber) UnmarshalJSON(b []byte) error {
	var n int64
	if err := json.Unmarshal(b, &n); err != nil {
		return err
	}
	*p = 0
	if n > 0 && n <= math.MaxUint16 {
		*p = portNumber(n)
	}
	return nil
}

// sliceList is a list of EndpointSlices.
type sliceList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []sliceObject `json:"items"`
}

// DeepCopyObject may share slices with the original, because nothing changes an object after it was decoded.

// DeepCopyObject implements runtime.Object.
func (s *serviceObject) DeepCopyObject() runtime.Object {
	c := *s
	return &c
}

// DeepCopyObject implements runtime.Object.
func (l *serviceList) DeepCopyObject() runtime.Object {
	c := *l
	c.Items = slices.Clone(l.Items)
	return &c
}

// DeepCopyObject implements runtime.Object.
func (s *sliceObject) DeepCopyObject() runtime.Object {
	c := *s
	return &c
}

// DeepCopyObject implements runtime.Object.
func (l *sliceList) DeepCopyObject() runtime.Object {
	c := *l
	c.Items = slices.Clone(l.Items)
	return &c
}

// Types, policies and other words of Services.
const (
	typeExternalName  = "ExternalName"
	typeNodePort      = "NodePort"
	typeLoadBalancer  = "LoadBalancer"
	noClusterIP       = "None" // headless
	policyLocal       = "Local"
	affinityClientIP  = "ClientIP"
	ipModeVIP         = "VIP"
	defaultProtocol   = "TCP"
	defaultAffinity   = 10800 // seconds
	zoneLabel         = "topology.kubernetes.io/zone"
	addressTypeIPv4   = "IPv4"
	addressTypeIPv6   = "IPv6"
	addressInternalIP = "InternalIP"
	// The Service of the cluster's DNS is in dnsNamespace. Its name, or the value of its label dnsLabel, is dnsName:
	// some distributions change the name, but keep the label.
	dnsNamespace, dnsName, dnsLabel = "kube-system", "kube-dns", "k8s-app"
	// kube-proxy ignores Services that have otherProxyLabel, and EndpointSlices that have headlessLabel. The value of a
	// label does not matter. Before Kubernetes 1.36, kube-proxy also ignored Services that have headlessLabel.
	// The source is cmd/kube-proxy/app/server.go.
	otherProxyLabel, headlessLabel = "service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless"
	// spreadAnnotation, with the value "true", gives each endpoint the same chance to get a connection.
	spreadAnnotation = "tunnel.example/spread"
)

// item returns the item of a Service, or nil if the Service has no address yet. A Service without ClusterIP, or of
// another proxy, or of none, also has an item: edges use such an item only to answer DNS queries.
func (s *serviceObject) item() *services.Service {
	spec := &s.Spec
	if spec.Type == typeExternalName {
		return &services.Service{ExternalName: spec.ExternalName}
	}
	ips := spec.ClusterIPs
	switch {
	case spec.ClusterIP == "":
		return nil
	case spec.ClusterIP == noClusterIP:
		ips = nil
	case len(ips) == 0:
		ips = []string{spec.ClusterIP}
	}
	_, otherProxy := s.Labels[otherProxyLabel]
	_, noProxy := s.Labels[headlessLabel]
	item := &services.Service{
		ClusterIps: ips, Headless: len(ips) == 0, ExternalIps: spec.ExternalIPs, OtherProxy: otherProxy || noProxy,
		Spread:          s.Annotations[spreadAnnotation] == "true",
		ClusterDns:      s.Namespace == dnsNamespace && (s.Name == dnsName || s.Labels[dnsLabel] == dnsName),
		InternalLocal:   spec.InternalTrafficPolicy == policyLocal,
		Distribution:    spec.TrafficDistribution,
		PublishNotReady: spec.PublishNotReadyAddresses, HealthCheckNodePort: uint32(spec.HealthCheckNodePort),
		LoadBalancerLimited: limits(spec.SourceRanges),
	}
	reachable := spec.Type == typeNodePort || spec.Type == typeLoadBalancer || len(spec.ExternalIPs) > 0
	item.ExternalLocal = spec.ExternalTrafficPolicy == policyLocal && reachable
	if spec.SessionAffinity == affinityClientIP {
		item.AffinitySeconds = cmp.Or(spec.SessionAffinityConfig.ClientIP.TimeoutSeconds, defaultAffinity)
	}
	for _, p := range spec.Ports {
		item.Ports = append(item.Ports, &services.Port{
			Name: p.Name, Protocol: cmp.Or(p.Protocol, defaultProtocol), Port: uint32(p.Port), NodePort: uint32(p.NodePort),
		})
	}
	for _, i := range s.Status.LoadBalancer.Ingress {
		if i.IP != "" && (i.IPMode == "" || i.IPMode == ipModeVIP) {
			item.LoadBalancerIps = append(item.LoadBalancerIps, i.IP)
		}
	}
	return item
}

// limits reports whether the source ranges of a load balancer exclude any address. As for kube-proxy, 0.0.0.0/0 permits
// every IPv4 address, and ::/0 every IPv6 address.
func limits(ranges []string) bool {
	every := make(map[bool]bool) // by whether it is IPv6
	for _, text := range ranges {
		if p, err := netip.ParsePrefix(strings.TrimSpace(text)); err == nil && p.Bits() == 0 {
			every[p.Addr().Is6()] = true
		}
	}
	return slices.ContainsFunc(ranges, func(text string) bool { return !every[strings.Contains(text, ":")] })
}

// items returns the endpoints of a slice. Only the first address of an endpoint counts. If two endpoints have the same
// address, the endpoint that takes traffic counts.
func (s *sliceObject) items() (all []*services.Endpoint) {
	if s.AddressType != addressTypeIPv4 && s.AddressType != addressTypeIPv6 {
		return nil
	}
	var ports []*services.Port
	for _, p := range s.Ports {
		if p.Name != nil && p.Port != 0 {
			ports = append(ports, &services.Port{
				Name: *p.Name, Protocol: cmp.Or(p.Protocol, defaultProtocol), Port: uint32(p.Port),
			})
		}
	}
	isSet := func(b *bool, byDefault bool) bool {
		if b == nil {
			return byDefault
		}
		return *b
	}
	at := make(map[string]int)
	for _, e := range s.Endpoints {
		if len(e.Addresses) == 0 {
			continue
		}
		addr, err := netip.ParseAddr(e.Addresses[0])
		if err != nil {
			continue
		}
		item := &services.Endpoint{
			Address: addr.Unmap().String(), Node: e.NodeName, Zone: e.Zone, Hostname: e.Hostname, Ports: ports,
			Ready: isSet(e.Conditions.Ready, true), Serving: isSet(e.Conditions.Serving, true),
			Terminating: isSet(e.Conditions.Terminating, false),
			ZoneHints:   names(e.Hints.ForZones), NodeHints: names(e.Hints.ForNodes),
		}
		switch i, twice := at[item.GetAddress()]; {
		case !twice:
			at[item.GetAddress()] = len(all)
			all = append(all, item)
		case item.GetReady() && !all[i].GetReady():
			all[i] = item
		}
	}
	return all
}

// names returns the names of hints.
func names(hints []hint) (all []string) {
	for _, h := range hints {
		all = append(all, h.Name)
	}
	return all
}

// item returns the item of a Node.
func (n *nodeObject) item() *services.Node {
	item := &services.Node{Zone: n.Labels[zoneLabel], PodCidrs: n.Spec.PodCIDRs}
	for _, a := range n.Status.Addresses[:min(len(n.Status.Addresses), maxAddresses)] {
		if a.Type == addressInternalIP {
			item.InternalIps = append(item.InternalIps, a.Address)
		}
	}
	return item
}

// podNetworks returns the networks of the Node's pods. Those of a control-plane Node do not count: it has no edge.
func (n *nodeObject) podNetworks() (all []netip.Prefix) {
	if isControlPlane(n.Labels) {
		return nil
	}
	for _, text := range n.Spec.PodCIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			all = append(all, unmapped(p))
		}
	}
	return all
}

// controlAddresses returns the addresses of a Node of the control plane; nil: it is none.
func (n *nodeObject) controlAddresses() (all []netip.Addr) {
	if !isControlPlane(n.Labels) {
		return nil
	}
	for _, a := range n.Status.Addresses[:min(len(n.Status.Addresses), maxAddresses)] {
		if ip, ok := parseAddr(a.Address); ok {
			all = append(all, ip)
		}
	}
	return all
}

// item returns the encoded item; nil if there is no item or the item is too large. key names the object in the log.
func (s *Services) item(key string, item proto.Message) []byte {
	if !item.ProtoReflect().IsValid() {
		return nil
	}
	value, err := proto.MarshalOptions{Deterministic: true}.Marshal(item)
	if err == nil && len(value) <= services.MaxValue {
		return value
	}
	if err == nil {
		err = fmt.Errorf("it has %d bytes, and may have %d", len(value), services.MaxValue)
	}
	s.leaveOut(key, err)
	return nil
}

// cutAddresses leaves an item at most MaxAddresses external IPs and addresses of load balancers, external IPs first.
// item may be nil.
func (s *Services) cutAddresses(key string, item *services.Service) {
	n := len(item.GetExternalIps()) + len(item.GetLoadBalancerIps())
	if n <= services.MaxAddresses {
		return
	}
	item.ExternalIps = item.ExternalIps[:min(len(item.ExternalIps), services.MaxAddresses)]
	left := services.MaxAddresses - len(item.ExternalIps)
	item.LoadBalancerIps = item.LoadBalancerIps[:min(len(item.LoadBalancerIps), left)]
	if skipped, ok := s.tooLarge.Allow(); ok {
		s.log.Warn("edges get some of the external IPs and addresses of load balancers of a Service", "object", key,
			"has", n, "get", services.MaxAddresses, "skipped", skipped)
	}
}

// leaveOut says in the log that edges do not get an object.
func (s *Services) leaveOut(key string, why error) {
	if skipped, ok := s.tooLarge.Allow(); ok {
		s.log.Warn("edges do not get an object of the cluster: it is too large, or is not text",
			"object", key, "err", why, "skipped", skipped)
	}
}
