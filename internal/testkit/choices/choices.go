// Package choices is a table of Services, endpoints and nodes, and which endpoints each node chooses. The tests of
// pkg/services ask Choose for these choices, and test/services asks kube-proxy.
package choices

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"tunnel.example/tunnel/pkg/services"
)

// Case is a question to services.Choose, and the answer.
type Case struct {
	Name string

	Service   *services.Service
	Port      *services.Port // a port of Service
	At        netip.Addr     // a ClusterIP of Service
	Endpoints []services.Named
	Self      services.Self

	// The endpoints of each list of the Choice, as Places returns them.
	Cluster, Local, Reachable []string
	Anywhere                  bool
}

// Places returns where endpoints serve a port, as ADDRESS:PORT.
func Places(list []services.Named, port *services.Port) []string {
	var places []string
	for _, e := range list {
		n := services.TargetPort(e.Endpoint, port)
		places = append(places, net.JoinHostPort(e.GetAddress(), strconv.Itoa(int(n))))
	}
	return places
}

// row is the short form of a Case. The tables of this package consist of rows, and fill adds the defaults. Each Service
// gets the ClusterIPs 10.96.0.1 and fd00:96::1. A Service without ports gets the port http. The default node is node1
// in zone a.
type row struct {
	name      string
	svc       *services.Service
	port      int // of svc, by its index
	at        string
	self      *services.Self
	endpoints []string // one line per endpoint; see the func endpoint for its format
	// ADDRESS:PORT, separated by blanks. No reachable: the same as cluster, or as local if cluster is empty.
	cluster, local, reachable string
	onlyElsewhere             bool // the Choice is empty, but there are endpoints on other nodes
}

// Cases returns the table.
func Cases() []Case {
	var cases []Case
	for _, group := range [][]row{conditions(), hints(), policies(), ports(), families()} {
		for _, r := range group {
			cases = append(cases, r.fill())
		}
	}
	return cases
}

func (r row) fill() Case {
	c := Case{
		Name: r.name, Service: r.svc, At: netip.MustParseAddr("10.96.0.1"),
		Self:    services.Self{Node: "node1", Zone: "a"},
		Cluster: strings.Fields(r.cluster), Local: strings.Fields(r.local), Reachable: strings.Fields(r.reachable),
	}
	if c.Service == nil {
		c.Service = &services.Service{}
	}
	c.Service.ClusterIps = []string{"10.96.0.1", "fd00:96::1"}
	if c.Service.Ports == nil {
		c.Service.Ports = []*services.Port{{Name: "http", Protocol: "TCP", Port: 80}}
	}
	c.Port = c.Service.Ports[r.port]
	if r.at != "" {
		c.At = netip.MustParseAddr(r.at)
	}
	if r.self != nil {
		c.Self = *r.self
	}
	for _, line := range r.endpoints {
		c.Endpoints = append(c.Endpoints, endpoint(line))
	}
	if len(c.Reachable) == 0 {
		c.Reachable = c.Cluster
	}
	if len(c.Reachable) == 0 {
		c.Reachable = c.Local
	}
	c.Anywhere = len(c.Reachable) > 0 || r.onlyElsewhere
	for _, list := range []*[]string{&c.Cluster, &c.Local, &c.Reachable} {
		if len(*list) == 0 {
			*list = nil
		}
	}
	return c
}

// endpoint parses a line of row.endpoints. Spaces separate the fields:
//
//	ADDRESS NODE CONDITION [zones=LIST] [nodes=LIST] [slice=NAME] [ports=LIST]
//
// The NODE "-" means no node. A CONDITION is ready, unready, draining (terminating, still serving) or ending
// (terminating, not serving). zones and nodes are the endpoint's topology hints. A comma separates the elements of a
// LIST. An element of ports is NAME/PROTOCOL/NUMBER. The defaults are no hints, slice=web-1 and ports=http/TCP/8080.
func endpoint(line string) services.Named {
	fields := strings.Fields(line)
	e := &services.Endpoint{Address: fields[0], Node: strings.Trim(fields[1], "-")}
	switch fields[2] {
	case "ready":
		e.Ready, e.Serving = true, true
	case "draining":
		e.Serving, e.Terminating = true, true
	case "ending":
		e.Terminating = true
	case "unready":
	default:
		panic("no condition: " + line)
	}
	slice, list := "web-1", "http/TCP/8080"
	for _, field := range fields[3:] {
		key, value, _ := strings.Cut(field, "=")
		switch key {
		case "zones":
			e.ZoneHints = strings.Split(value, ",")
		case "nodes":
			e.NodeHints = strings.Split(value, ",")
		case "slice":
			slice = value
		case "ports":
			list = value
		default:
			panic("no key: " + line)
		}
	}
	for p := range strings.SplitSeq(list, ",") {
		port := &services.Port{}
		parts := strings.Split(p, "/")
		port.Name, port.Protocol = parts[0], parts[1]
		if _, err := fmt.Sscan(parts[2], &port.Port); err != nil {
			panic("no port: " + line)
		}
		e.Ports = append(e.Ports, port)
	}
	return services.Named{Path: services.EndpointPath("shop", "web", slice, e.GetAddress()), Endpoint: e}
}
