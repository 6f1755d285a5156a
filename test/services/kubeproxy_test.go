package services

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/kubernetes/pkg/proxy"

	"tunnel.example/tunnel/pkg/services"
)

const (
	namespace = "shop"
	name      = "web"
)

// answer is what a node uses for a port of a Service in one family: endpoints as ADDRESS:PORT, sorted.
type answer struct {
	Cluster, Local, Reachable []string
	Anywhere                  bool
}

// question is what is the same for all ports of a Service.
type question struct {
	svc       *services.Service
	endpoints []services.Named
	self      services.Self
}

// askKubeProxy returns kube-proxy's answer. It gives kube-proxy objects of Kubernetes, as the API server does.
// known is false if kube-proxy does not know the port in this family.
func askKubeProxy(q question, port *services.Port, v6 bool) (a answer, known bool) {
	family := v1.IPv4Protocol
	if v6 {
		family = v1.IPv6Protocol
	}
	changedServices := proxy.NewServiceChangeTracker(family, nil, nil)
	changedServices.Update(nil, serviceObject(q.svc))
	ports := proxy.ServicePortMap{}
	ports.Update(changedServices)

	changedSlices := proxy.NewEndpointsChangeTracker(family, q.self.Node, nil, nil)
	for _, slice := range sliceObjects(q.endpoints) {
		changedSlices.EndpointSliceUpdate(slice, false)
	}
	endpoints := proxy.EndpointsMap{}
	endpoints.Update(changedSlices)

	key := proxy.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: namespace, Name: name},
		Port:           port.GetName(), Protocol: v1.Protocol(port.GetProtocol()),
	}
	info, known := ports[key]
	if !known {
		return answer{}, false
	}
	labels := map[string]string{v1.LabelHostname: "a name that does not count"}
	if q.self.Zone != "" {
		labels[v1.LabelTopologyZone] = q.self.Zone
	}
	cluster, local, reachable, anywhere := proxy.CategorizeEndpoints(endpoints[key], info, q.self.Node, labels)
	return answer{places(cluster), places(local), places(reachable), anywhere}, true
}

func places(endpoints []proxy.Endpoint) []string {
	var all []string
	for _, e := range endpoints {
		all = append(all, e.String())
	}
	slices.Sort(all)
	return all
}

// serviceObject returns the Service as the API server holds it.
func serviceObject(svc *services.Service) *v1.Service {
	o := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: v1.ServiceSpec{
			Type:                     v1.ServiceTypeClusterIP,
			ClusterIP:                v1.ClusterIPNone,
			ExternalIPs:              svc.GetExternalIps(),
			PublishNotReadyAddresses: svc.GetPublishNotReady(),
		},
	}
	for i, ip := range svc.GetClusterIps() {
		if i == 0 {
			o.Spec.ClusterIP = ip
		}
		o.Spec.ClusterIPs = append(o.Spec.ClusterIPs, ip)
		family := v1.IPv4Protocol
		if netip.MustParseAddr(ip).Is6() {
			family = v1.IPv6Protocol
		}
		o.Spec.IPFamilies = append(o.Spec.IPFamilies, family)
	}
	for _, p := range svc.GetPorts() {
		if p.GetNodePort() != 0 {
			o.Spec.Type = v1.ServiceTypeNodePort
		}
		o.Spec.Ports = append(o.Spec.Ports, v1.ServicePort{
			Name: p.GetName(), Protocol: v1.Protocol(p.GetProtocol()),
			Port: int32(p.GetPort()), NodePort: int32(p.GetNodePort()),
		})
	}
	for _, ip := range svc.GetLoadBalancerIps() {
		o.Spec.Type = v1.ServiceTypeLoadBalancer
		o.Spec.HealthCheckNodePort = 31000
		o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: ip})
	}
	if svc.GetExternalLocal() {
		o.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	}
	if svc.GetInternalLocal() {
		local := v1.ServiceInternalTrafficPolicyLocal
		o.Spec.InternalTrafficPolicy = &local
	}
	if d := svc.GetDistribution(); d != "" {
		o.Spec.TrafficDistribution = &d
	}
	return o
}

// sliceObjects returns the EndpointSlices that hold the endpoints. All endpoints of a slice have the same ports.
func sliceObjects(endpoints []services.Named) []*discovery.EndpointSlice {
	var all []*discovery.EndpointSlice
	for _, e := range endpoints {
		sliceName := strings.Split(e.Path, "/")[3]
		i := slices.IndexFunc(all, func(s *discovery.EndpointSlice) bool { return s.Name == sliceName })
		if i < 0 {
			i = len(all)
			all = append(all, emptySlice(sliceName, e.Endpoint))
		}
		all[i].Endpoints = append(all[i].Endpoints, endpointObject(e.Endpoint, len(all[i].Endpoints)%2 == 0))
	}
	return all
}

func emptySlice(sliceName string, first *services.Endpoint) *discovery.EndpointSlice {
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: sliceName, Labels: map[string]string{discovery.LabelServiceName: name},
		},
		AddressType: discovery.AddressTypeIPv4,
	}
	if netip.MustParseAddr(first.GetAddress()).Is6() {
		s.AddressType = discovery.AddressTypeIPv6
	}
	for _, p := range first.GetPorts() {
		portName, protocol, number := p.GetName(), v1.Protocol(p.GetProtocol()), int32(p.GetPort())
		s.Ports = append(s.Ports, discovery.EndpointPort{Name: &portName, Protocol: &protocol, Port: &number})
	}
	return s
}

// endpointObject returns the endpoint as a slice holds it. With defaults, it leaves out what has the default value.
func endpointObject(e *services.Endpoint, defaults bool) discovery.Endpoint {
	condition := func(value, byDefault bool) *bool {
		if defaults && value == byDefault {
			return nil
		}
		return &value
	}
	o := discovery.Endpoint{
		Addresses: []string{e.GetAddress()},
		Conditions: discovery.EndpointConditions{
			Ready: condition(e.GetReady(), true), Serving: condition(e.GetServing(), true),
			Terminating: condition(e.GetTerminating(), false),
		},
	}
	if e.GetNode() != "" {
		o.NodeName = &e.Node
	}
	if len(e.GetZoneHints())+len(e.GetNodeHints()) == 0 {
		return o
	}
	o.Hints = &discovery.EndpointHints{}
	for _, zone := range e.GetZoneHints() {
		o.Hints.ForZones = append(o.Hints.ForZones, discovery.ForZone{Name: zone})
	}
	for _, node := range e.GetNodeHints() {
		o.Hints.ForNodes = append(o.Hints.ForNodes, discovery.ForNode{Name: node})
	}
	return o
}

// String describes the question in a failure.
func (q question) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "node %+v\nservice %v\n", q.self, q.svc)
	for _, e := range q.endpoints {
		fmt.Fprintf(&b, "%s %v\n", e.Path, e.Endpoint)
	}
	return b.String()
}
