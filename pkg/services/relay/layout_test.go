package relay

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

// table is a model of the kernel's table: it applies steps, and follows a packet through sets and chains.
type table map[tableKey]element

type tableKey struct {
	elementKey
	v6 bool
}

func keyOf(of setKind, key string, v6 bool) tableKey {
	return tableKey{elementKey{set: of, key: key}, v6}
}

// apply does the steps, and fails if the kernel would: what goes must be there, and what comes must not.
func (k table) apply(s steps) error {
	for _, some := range [][]change{s.early, s.atOnce, s.late} {
		for _, one := range some {
			if e := one.gone; e != nil {
				key := tableKey{elementKey{e.set, e.key, e.end}, one.at.Addr().Is6()}
				if had, ok := k[key]; !ok || had != *e {
					return fmt.Errorf("%v is not there, but %v", *e, had)
				}
				delete(k, key)
			}
			if e := one.add; e != nil {
				key := tableKey{elementKey{e.set, e.key, e.end}, one.at.Addr().Is6()}
				if had, ok := k[key]; ok {
					return fmt.Errorf("%v is there, and %v comes", had, *e)
				}
				k[key] = *e
			}
		}
		if err := k.whole(false); err != nil {
			return err
		}
	}
	return k.whole(true)
}

// whole checks that each chain that something leads to finds its endpoints. Between two steps, an endpoint may be
// missing among those that callers may keep: then they get another one.
func (k table) whole(live bool) error {
	for _, e := range k {
		if e.set != setFront && e.set != setPorts {
			continue
		}
		pods, own, others := e.to, e.to, e.to
		if e.to.kind == chainSplit {
			pods, own, others = e.to.parts()
		}
		for _, c := range []chain{pods, own, others} {
			if _, err := k.picks(e, c, live); err != nil {
				return err
			}
		}
	}
	return nil
}

// picks returns the endpoints that a chain may choose.
func (k table) picks(e element, c chain, live bool) (all []netip.AddrPort, err error) {
	if c.kind != chainPick && c.kind != chainAffine {
		return nil, nil
	}
	key := e.key
	if c.node {
		size := 4
		if c.v6 {
			size = 16
		}
		key = string(make([]byte, size)) + key
	}
	first := 0
	if c.local {
		first = firstLocal
	}
	for i := range c.n {
		index := string(binary.NativeEndian.AppendUint32(nil, uint32(first+i)))
		end, ok := k[keyOf(setEnds, key+index, c.v6)]
		if !ok {
			return nil, fmt.Errorf("%s misses its endpoint %d", c.name(), i)
		}
		if c.kind == chainAffine && live {
			set := setLive
			if c.local {
				set = setLiveLocal
			}
			if _, live := k[keyOf(set, key+end.val, c.v6)]; !live {
				return nil, fmt.Errorf("%s misses its endpoint %d among those that live", c.name(), i)
			}
		}
		addr, _ := netip.AddrFromSlice([]byte(end.val[:len(end.val)-4]))
		all = append(all, netip.AddrPortFrom(addr, binary.BigEndian.Uint16([]byte(end.val[len(end.val)-4:]))))
	}
	return all, nil
}

// The ways of a packet.
const (
	wayRelay   = "relay"
	wayReject  = "reject"
	wayDrop    = "drop"
	wayNowhere = "nowhere"
)

// way returns where a packet to an address goes: to the relay, nowhere, or to one of some endpoints.
func (k table) way(at address, from string) (how string, ends []netip.AddrPort) {
	nodePort := at.isNodePort()
	find := func(ofAddress, ofPort setKind) (element, bool) {
		of, text := ofAddress, string(key(at))
		if nodePort {
			of, text = ofPort, string(portKey(at))
		}
		e, ok := k[keyOf(of, text, at.Addr().Is6())]
		return e, ok
	}
	if _, ok := find(setServices, setRelayPorts); ok {
		return wayRelay, nil
	}
	if e, ok := find(setFront, setPorts); ok {
		c := e.to
		if c.kind == chainSplit {
			pods, own, others := c.parts()
			c = map[string]chain{"pod": pods, "node": own, "outside": others}[from]
		}
		switch c.kind {
		case chainPick, chainAffine:
			ends, _ = k.picks(e, c, true)
			return fmt.Sprintf("ends, masquerade: %t", c.masquerade), ends
		case chainRelay:
			return wayRelay, nil
		case chainDrop:
			return wayDrop, nil
		}
		return wayReject, nil
	}
	if e, ok := find(setNone, setNonePorts); ok {
		return map[chainKind]string{chainReject: wayReject, chainDrop: wayDrop}[e.to.kind], nil
	}
	return wayNowhere, nil
}

// wanted returns where Kubernetes wants a packet to go, by services.Choose. Among the permitted endpoints, those that
// the node reaches by itself come first, and then those that the tunnel reaches.
func wanted(n planner, s *services.State, f frontend, from string) (how string, ends []netip.AddrPort) {
	c := services.Choose(f.service, f.port, f.at.Addr(), s.Endpoints(f.path), services.Self{Node: n.node})
	list, masquerade := c.Cluster, f.external
	switch {
	case !f.external && f.service.GetInternalLocal():
		list = c.Local
	case f.external && f.service.GetExternalLocal() && from == "outside":
		list, masquerade = c.Local, false
	case f.external && f.service.GetExternalLocal() && from == "pod":
		masquerade = false
	}
	var direct, far, rest []netip.AddrPort
	for _, e := range list {
		at := netip.AddrPortFrom(netip.MustParseAddr(e.GetAddress()), services.TargetPort(e.Endpoint, f.port))
		switch {
		case e.GetNode() == n.node:
			direct = append(direct, at)
		case s.Node(e.GetNode()).GetEdge() && f.at.protocol != protocolSCTP:
			far = append(far, at)
		default:
			rest = append(rest, at)
		}
	}
	switch {
	case len(direct) > 0:
		ends = direct
	case len(far) > 0:
		return wayRelay, nil
	case len(rest) > 0:
		ends = rest
	case c.Anywhere && (!f.external || !f.service.GetExternalLocal() || from == "outside"):
		return wayDrop, nil
	default:
		return wayReject, nil
	}
	slices.SortFunc(ends, netip.AddrPort.Compare)
	return fmt.Sprintf("ends, masquerade: %t", masquerade), ends
}

// After any changes, the elements of the kernel are those of the state, each packet goes where Kubernetes wants it to
// go, and between two steps no chain lacks an endpoint.
func TestLayout(t *testing.T) {
	n, s, kernel := planner{node: "edge1", full: true}, services.NewState(), make(table)
	p, had := n.plan(s), make(rules)
	rng := rand.New(rand.NewPCG(3, 4))
	flip := func(of int) bool { return rng.IntN(of) == 0 }
	ways := make(map[string]int)
	for range 1500 {
		service, node := "s"+strconv.Itoa(rng.IntN(4)), "edge"+strconv.Itoa(1+rng.IntN(3))
		addr := "10.88.0." + strconv.Itoa(1+rng.IntN(6))
		if flip(3) {
			addr = "fd00:88::" + strconv.Itoa(1+rng.IntN(4))
		}
		e := ready(addr, node)
		e.Ports = append(e.Ports, &services.Port{Name: "sctp", Protocol: "SCTP", Port: 9})
		e.Ready = !flip(4)
		e.Terminating = !e.Ready && flip(2)
		e.Serving = e.Ready || flip(2)
		one := item(t, services.EndpointPath("a", service, "x", addr), e)
		switch rng.IntN(8) {
		case 0:
			one = item(t, services.NodePath(node), &services.Node{Edge: flip(2), PodCidrs: []string{"10.88.0.0/24"}})
		case 1:
			last := service[1:]
			v := siteService(func(s *services.Service) {
				s.ClusterIps = []string{"10.96.0." + last, "fd00:96::" + last}
				s.Ports[0].NodePort = 30000 + uint32(rng.IntN(4)) // two Services may have one
				s.Ports = append(s.Ports, &services.Port{Name: "sctp", Protocol: "SCTP", Port: 9})
				s.InternalLocal, s.ExternalLocal = flip(3), flip(3)
				if flip(2) {
					s.AffinitySeconds = uint32(10 * rng.IntN(3))
				}
				if flip(2) {
					s.ExternalIps = []string{"203.0.113." + strconv.Itoa(rng.IntN(2)), "10.96.0.1"}
				}
			})
			one = item(t, services.ServicePath("a", service), v)
		}
		changes := &pb.Changes{Set: []*pb.Item{one}}
		if flip(5) {
			changes = &pb.Changes{Deleted: []string{one.GetPath()}}
		}
		d, err := s.Apply(changes)
		if err != nil {
			t.Fatal(err)
		}
		n.update(p, s, &d)
		next := follow(had, p)
		wantPlan(t, p, n.plan(s), changes)
		before, after := listening(had).difference(listening(next))
		if err := kernel.apply(stepsOf(before, after)); err != nil {
			t.Fatalf("after %v: %v", changes, err)
		}
		had = next
		whole := make(table)
		if err := whole.apply(stepsOf(nil, listening(p.all()))); err != nil || !maps.Equal(whole, kernel) {
			t.Fatalf("after %v, the kernel has %v, want %v; %v", changes, kernel, whole, err)
		}
		for _, f := range p.frontends {
			for _, from := range []string{"pod", "node", "outside"} {
				how, ends := kernel.way(f.at, from)
				wantHow, wantEnds := wanted(n, s, *f, from)
				if how != wantHow || !slices.Equal(ends, wantEnds) {
					t.Fatalf("after %v: %s %s of %s from %s: %s %v, want %s %v", changes, f.at, f.at.protocol, f.path, from,
						how, ends, wantHow, wantEnds)
				}
				ways[how]++
			}
		}
	}
	t.Logf("ways: %v", ways)
	if len(ways) != 5 { // with and without masquerading, and all constants but nowhere
		t.Errorf("ways: %v", ways)
	}
}

// follow returns rules with what a plan says has changed since they were its own.
func follow(had rules, p *plan) rules {
	before, after := p.take()
	next := maps.Clone(had)
	for at, one := range before {
		if r, ok := had[at]; !ok || !r.equal(one) {
			panic(fmt.Sprintf("%v was %v, and not %v", at, r, one))
		}
		delete(next, at)
	}
	maps.Copy(next, after)
	return next
}

// listening returns rules with a port of the relay.
func listening(all rules) rules {
	with := make(rules)
	for at, r := range all {
		if r.relayed() && at.isPort() {
			r.port = 7
		}
		with[at] = r
	}
	return with
}

// The end of a network.
func TestAddressAfter(t *testing.T) {
	for text, want := range map[string]string{
		"10.88.0.0/16": "10.89.0.0", "10.88.1.128/25": "10.88.2.0", "10.0.0.1/32": "10.0.0.2", "255.0.0.0/8": "invalid IP",
		"fd00:88::/32": "fd00:89::", "fd00::/9": "fd80::",
	} {
		if got := addressAfter(netip.MustParsePrefix(text)); got.String() != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}
