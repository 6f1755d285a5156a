// Package names makes the cluster's DNS zone from the state of a node, as Kubernetes specifies the zone.
//
//	zone := names.NewZone("cluster.local")
//	difference, err := state.Apply(changes)
//	zone.Update(state, &difference)
//	reply := zone.Answer(state, question)
//
// The specification is docs/specification.md of github.com/kubernetes/dns, version 1.1.0 of the schema. Where the
// specification leaves a choice, the zone does as CoreDNS does. An endpoint without hostname has its address with
// dashes as its name. Endpoints of Services with a ClusterIP have names, too.
//
// The package opens no sockets. The zone has no records of nodes or of namespaces.
package names

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"

	"tunnel.example/tunnel/pkg/services"
)

const (
	// ttl is how long a client may cache an answer, also the answer that there is no record, in seconds. It is the default
	// of CoreDNS.
	ttl = 5
	// schemaVersion is the version of the specification.
	schemaVersion = "1.1.0"
	// maxRecords is the most records of an answer. No DNS message has room for more addresses.
	maxRecords = 4096
	// maxPointers is the most names of one address in an answer. Any user can make many Services with one address.
	maxPointers = 256
	// maxAliases is how many aliases the zone follows in one answer.
	maxAliases = 8
)

// These labels stand directly before the cluster's domain. The name with labelVersion has the record of schemaVersion.
const (
	labelService = "svc"
	labelPod     = "pod"
	labelVersion = "dns-version"
)

// Zone is the zone of a cluster. Like the state, it is not safe for concurrent use.
type Zone struct {
	domain     string // lower case, with the dot at its end; set once
	namespaces map[string]int
	known      map[services.Path][]netip.Addr // for each Service, its addresses in pointers
	pointers   map[netip.Addr][]services.Path // the Services and endpoints that have an address, sorted
}

// NewZone returns the zone of a domain, such as cluster.local, without Services.
func NewZone(domain string) *Zone {
	return &Zone{
		domain: dns.CanonicalName(domain), namespaces: make(map[string]int),
		known: make(map[services.Path][]netip.Addr), pointers: make(map[netip.Addr][]services.Path),
	}
}

// Load fills the zone from a state, and forgets what the zone had.
func (z *Zone) Load(s *services.State) {
	*z = *NewZone(z.domain)
	for p := range s.Services() {
		z.update(s, p)
	}
}

// Update adapts the zone to a state. d is what has changed since the last Update or Load.
func (z *Zone) Update(s *services.State, d *services.Difference) {
	changed := make(map[services.Path]struct{})
	note := func(p services.Path) {
		if service := services.ServiceOf(p); service != "" {
			p = service
		}
		changed[p] = struct{}{}
	}
	for _, item := range d.Set {
		note(item.GetPath())
	}
	for _, p := range d.Deleted {
		note(p)
	}
	for p := range changed {
		z.update(s, p)
	}
}

// update replaces what the zone keeps of the Service with path p. If p is the path of another item, update does
// nothing.
func (z *Zone) update(s *services.State, p services.Path) {
	namespace, name, ok := services.CutService(p)
	if !ok {
		return
	}
	if had, known := z.known[p]; known {
		delete(z.known, p)
		for _, addr := range had {
			z.pointers[addr] = slices.DeleteFunc(z.pointers[addr], func(one services.Path) bool {
				return one == p || services.ServiceOf(one) == p
			})
			if len(z.pointers[addr]) == 0 {
				delete(z.pointers, addr)
			}
		}
		if z.namespaces[namespace]--; z.namespaces[namespace] == 0 {
			delete(z.namespaces, namespace)
		}
	}
	service := s.Service(namespace, name)
	if service == nil {
		return
	}
	z.namespaces[namespace]++
	z.known[p] = nil
	point := func(text string, to services.Path) {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return
		}
		addr = addr.Unmap()
		if i, has := slices.BinarySearch(z.pointers[addr], to); !has {
			z.pointers[addr] = slices.Insert(z.pointers[addr], i, to)
		}
		z.known[p] = append(z.known[p], addr)
	}
	for _, ip := range service.GetClusterIps() {
		point(ip, p)
	}
	for _, e := range ready(s, p, service) {
		point(e.GetAddress(), e.Path)
	}
}

// nameOf returns the name of a Service, or of an endpoint.
func (z *Zone) nameOf(s *services.State, p services.Path) string {
	of := services.ServiceOf(p)
	if of == "" {
		namespace, name, _ := services.CutService(p)
		return name + "." + namespace + "." + labelService + "." + z.domain
	}
	return services.Hostname(s.Endpoint(p)) + "." + z.nameOf(s, of)
}

// ready returns the endpoints of a Service that have names: the ready ones, or all if the Service publishes those that
// are not ready.
func ready(s *services.State, p services.Path, service *services.Service) []services.Named {
	return slices.DeleteFunc(s.Endpoints(p), func(e services.Named) bool {
		return !e.GetReady() && !service.GetPublishNotReady()
	})
}

// Answer returns the reply to a question: its code and its records. It returns nil if the name is not in the zone: then
// another server may know the name. If the last record is an alias (CNAME) and the question asks for another type, the
// caller must ask another server for the alias' target.
func (z *Zone) Answer(s *services.State, q dns.Question) *dns.Msg {
	name := dns.CanonicalName(q.Name)
	if addr, ok := reverse(name); ok {
		return z.pointer(s, q, addr)
	}
	m := new(dns.Msg)
	owner := q.Name // in the client's spelling
	for dns.IsSubDomain(z.domain, name) {
		if len(m.Answer) == maxAliases {
			return &dns.Msg{MsgHdr: dns.MsgHdr{Rcode: dns.RcodeServerFailure}}
		}
		v := view{z, s, owner, q.Qtype}
		r := v.records(strings.Split(strings.TrimSuffix(strings.TrimSuffix(name, z.domain), "."), "."))
		if !r.exists {
			m.Rcode = dns.RcodeNameError
		}
		if len(r.answer) == 0 {
			m.Ns = []dns.RR{z.soa(z.domain)}
		}
		m.Answer, m.Extra = append(m.Answer, r.answer...), r.extra
		if len(r.answer) != 1 || q.Qtype == dns.TypeCNAME || q.Qtype == dns.TypeANY {
			return m
		}
		alias, ok := r.answer[0].(*dns.CNAME)
		if !ok {
			return m
		}
		name, owner = dns.CanonicalName(alias.Target), alias.Target
	}
	if len(m.Answer) == 0 {
		return nil
	}
	return m
}

// soa returns the SOA record: it says how long a client may cache that a name has no record. The other fields have no
// use, since nobody transfers the zone.
func (*Zone) soa(owner string) dns.RR {
	return &dns.SOA{
		Hdr: dns.RR_Header{Name: owner, Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: ttl},
		Ns:  ".", Mbox: ".", Serial: 1, Refresh: 1, Retry: 1, Expire: 1, Minttl: ttl,
	}
}

// pointer answers a question for the name of an address.
func (z *Zone) pointer(s *services.State, q dns.Question, addr netip.Addr) *dns.Msg {
	paths := z.pointers[addr]
	if len(paths) == 0 {
		return nil
	}
	m := new(dns.Msg)
	if q.Qtype != dns.TypePTR && q.Qtype != dns.TypeANY {
		m.Ns = []dns.RR{z.soa(q.Name)}
		return m
	}
	names := make([]string, 0, len(paths))
	for _, p := range paths[:min(len(paths), maxPointers)] {
		names = append(names, z.nameOf(s, p))
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) { // two slices have the same endpoint for a moment
		m.Answer = append(m.Answer, &dns.PTR{
			Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypePTR, Class: dns.ClassINET, Ttl: ttl}, Ptr: name,
		})
	}
	return m
}

// reverse returns the address in a name for reverse lookups, such as 1.0.96.10.in-addr.arpa. The name is in lower case.
func reverse(name string) (netip.Addr, bool) {
	if text, ok := strings.CutSuffix(name, ".in-addr.arpa."); ok {
		labels := strings.Split(text, ".")
		slices.Reverse(labels)
		addr, err := netip.ParseAddr(strings.Join(labels, "."))
		return addr, err == nil && addr.Is4()
	}
	text, ok := strings.CutSuffix(name, ".ip6.arpa.")
	digits := strings.Split(text, ".")
	if !ok || len(digits) != 32 || len(text) != 63 {
		return netip.Addr{}, false
	}
	slices.Reverse(digits)
	var b strings.Builder
	for i, digit := range digits {
		if i > 0 && i%4 == 0 {
			b.WriteByte(':')
		}
		b.WriteString(digit)
	}
	addr, err := netip.ParseAddr(b.String())
	return addr.Unmap(), err == nil
}

// view is the zone together with the state and one question.
type view struct {
	*Zone
	state *services.State
	owner string // the name in the records of the answer
	qtype uint16
}

// result is the answer for one name.
type result struct {
	exists        bool
	answer, extra []dns.RR
}

// records returns the answer for a name. labels are the name's labels before the cluster's domain.
func (v view) records(labels []string) result {
	n := len(labels)
	switch last := labels[n-1]; {
	case n == 1 && last == "": // the domain itself
		return v.only(v.soa(v.owner))
	case n == 1 && last == labelVersion:
		return v.only(&dns.TXT{Hdr: v.header(v.owner, dns.TypeTXT), Txt: []string{schemaVersion}})
	case n <= 2 && last == labelPod:
		return result{exists: true}
	case n == 3 && last == labelPod:
		addr, err := podAddress(labels[0])
		if err != nil {
			return result{}
		}
		return v.only(v.address(v.owner, addr))
	case last != labelService:
		return result{}
	case n == 1:
		return result{exists: true}
	case n == 2:
		return result{exists: v.namespaces[labels[0]] > 0}
	default:
		return v.ofService(labels[n-2], labels[n-3], labels[:n-3])
	}
}

// podAddress returns the address of a pod by its name, such as 10-88-1-5.
func podAddress(label string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(strings.ReplaceAll(label, "-", "."))
	if err != nil {
		addr, err = netip.ParseAddr(strings.ReplaceAll(label, "-", ":"))
	}
	return addr.WithZone("").Unmap(), err
}

// ofService returns the answer for the name of a Service, or for a name below it: HOSTNAME or _PORT._PROTOCOL.
func (v view) ofService(namespace, name string, below []string) result {
	service := v.state.Service(namespace, name)
	if service == nil {
		return result{}
	}
	path := services.ServicePath(namespace, name)
	if target := service.GetExternalName(); target != "" {
		_, err := netip.ParseAddr(target)
		if _, ok := dns.IsDomainName(target); len(below) > 0 || err == nil || !ok {
			return result{}
		}
		alias := &dns.CNAME{Hdr: v.header(v.owner, dns.TypeCNAME), Target: dns.Fqdn(target)}
		return result{exists: true, answer: []dns.RR{alias}}
	}
	switch {
	case len(below) == 0 && !service.GetHeadless():
		r := v.addresses(slices.Clone(service.GetClusterIps()), true)
		return v.withPorts(r, service, path, nil)
	case len(below) == 0:
		all := ready(v.state, path, service)
		return v.withPorts(v.addresses(addressesOf(all), false), service, path, all)
	case len(below) == 1 && !strings.HasPrefix(below[0], "_"):
		named := slices.DeleteFunc(ready(v.state, path, service), func(e services.Named) bool {
			return services.Hostname(e.Endpoint) != below[0]
		})
		return v.withPorts(v.addresses(addressesOf(named), false), service, path, named)
	case len(below) > 2:
		return result{}
	}
	protocol, ok := strings.CutPrefix(below[len(below)-1], "_")
	port := "" // any: does the protocol have a named port?
	if ok && len(below) == 2 {
		port, ok = strings.CutPrefix(below[0], "_")
		ok = ok && port != ""
	}
	if !ok {
		return result{}
	}
	var endpoints []services.Named // of a headless Service
	if service.GetHeadless() {
		endpoints = ready(v.state, path, service)
	}
	r := v.ports(service, path, endpoints, func(p *services.Port) bool {
		return p.GetName() != "" && (port == "" || p.GetName() == port) && strings.ToLower(p.GetProtocol()) == protocol
	})
	r.exists = len(r.answer) > 0
	if len(below) == 1 || v.qtype != dns.TypeSRV && v.qtype != dns.TypeANY {
		r.answer, r.extra = nil, nil
	}
	return r
}

// withPorts adds the SRV records of all ports to the answer r for the name of a Service or of an endpoint, if the
// question asks for SRV. The specification leaves that open. CoreDNS does so, and programs that look for their peers
// rely on it.
func (v view) withPorts(r result, service *services.Service, path services.Path, endpoints []services.Named) result {
	if v.qtype != dns.TypeSRV || !r.exists {
		return r
	}
	with := v.ports(service, path, endpoints, func(*services.Port) bool { return true })
	with.exists = true
	return with
}

// ports returns an SRV record for each port for which match returns true, and the addresses of the records' targets.
// The targets are the endpoints. If endpoints is nil and the Service has a ClusterIP, the target is the Service itself.
func (v view) ports(
	service *services.Service, path services.Path, endpoints []services.Named, match func(*services.Port) bool,
) (r result) {
	own := v.nameOf(v.state, path)
	type place struct {
		target string
		port   uint32
	}
	had := make(map[place]bool)
	add := func(ports []*services.Port, target string, addresses ...string) {
		for _, p := range ports {
			at := place{target, p.GetPort()}
			if !match(p) || p.GetPort() > 0xffff || had[at] || len(r.answer) == maxRecords {
				continue
			}
			had[at] = true
			r.answer = append(r.answer, &dns.SRV{
				Hdr: v.header(v.owner, dns.TypeSRV), Priority: 0, Weight: 100, Port: uint16(p.GetPort()), Target: target,
			})
		}
		for _, text := range addresses {
			if addr, err := netip.ParseAddr(text); err == nil && len(r.answer) > 0 && len(r.extra) < maxRecords {
				r.extra = append(r.extra, v.address(target, addr.Unmap()))
			}
		}
	}
	if endpoints == nil && !service.GetHeadless() {
		add(service.GetPorts(), own, service.GetClusterIps()...)
		return r
	}
	for _, e := range endpoints {
		add(e.GetPorts(), services.Hostname(e.Endpoint)+"."+own, e.GetAddress())
	}
	return r
}

// addresses returns the address records for a name. exists reports whether the name exists: it may have no addresses.
func (v view) addresses(texts []string, exists bool) result {
	r := result{exists: exists || len(texts) > 0}
	slices.Sort(texts)
	for _, text := range slices.Compact(texts) { // two slices have the same address for a moment
		if addr, err := netip.ParseAddr(text); err == nil && len(r.answer) < maxRecords {
			r.answer = append(r.answer, v.only(v.address(v.owner, addr.Unmap())).answer...)
		}
	}
	rand.Shuffle(len(r.answer), func(i, j int) { r.answer[i], r.answer[j] = r.answer[j], r.answer[i] })
	return r
}

// addressesOf returns the addresses of endpoints.
func addressesOf(all []services.Named) []string {
	texts := make([]string, len(all))
	for i, e := range all {
		texts[i] = e.GetAddress()
	}
	return texts
}

// only returns the answer for a name whose only record is rr.
func (v view) only(rr dns.RR) result {
	if v.qtype != rr.Header().Rrtype && v.qtype != dns.TypeANY {
		return result{exists: true}
	}
	return result{exists: true, answer: []dns.RR{rr}}
}

// address returns the record of an address.
func (v view) address(owner string, addr netip.Addr) dns.RR {
	if addr.Is4() {
		return &dns.A{Hdr: v.header(owner, dns.TypeA), A: addr.AsSlice()}
	}
	return &dns.AAAA{Hdr: v.header(owner, dns.TypeAAAA), AAAA: addr.AsSlice()}
}

func (view) header(owner string, of uint16) dns.RR_Header {
	return dns.RR_Header{Name: owner, Rrtype: of, Class: dns.ClassINET, Ttl: ttl}
}
