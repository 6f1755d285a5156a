package services

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

const (
	// maxItems bounds the items of a State. A cluster of 10,000 Services with 20 endpoints each has fewer. Of items above
	// this bound, the state keeps only path and digest, so that the cloud does not send them again and again.
	maxItems = 250_000
	// maxPaths bounds all paths of a State: of its items, and of the items above maxItems.
	maxPaths = 4 * maxItems
	// maxBytes bounds the bytes of all paths and values, also of the items above maxItems: the node's file holds those
	// items, too. 250,000 items have some 40 MiB.
	maxBytes = 256 << 20
)

// ErrTooMany is the error of a series that would lead to more than maxPaths paths, or to more than maxBytes bytes.
var ErrTooMany = fmt.Errorf("the cloud sends more than %d items, or more than %d MiB", maxPaths, maxBytes>>20)

// State is all that a node knows of the cluster's Services. It is not safe for concurrent use.
type State struct {
	digests Digests
	items   map[Path]string // the value of each item, encoded
	leftOut map[Path]left   // items for which there was no room
	most    int             // how many items the state has at most, apart from those in leftOut
	bytes   int             // of all paths and values, also of leftOut

	services map[string]*Service // by NAMESPACE/NAME
	// endpoints are the paths of the endpoints that can be read, sorted, by NAMESPACE/NAME of their Service. An endpoint
	// stays encoded until it is asked for: decoded, it takes five times the memory, and a node may know 200,000.
	endpoints map[string][]Path
	nodes     map[string]*Node
	clusterIP map[netip.Addr]int // how many Services have it as a ClusterIP
}

// left is an item that the state leaves out.
type left struct {
	digest uint64
	size   int // of its value, in bytes
}

// NewState returns the state without items.
func NewState() *State {
	return &State{
		items: make(map[Path]string), leftOut: make(map[Path]left), most: maxItems, services: make(map[string]*Service),
		endpoints: make(map[string][]Path), nodes: make(map[string]*Node), clusterIP: make(map[netip.Addr]int),
	}
}

// Difference is what a call of Apply has changed. No path is both set and deleted.
type Difference struct {
	Set     []*pb.Item
	Deleted []Path
}

// Empty reports whether nothing has changed.
func (d *Difference) Empty() bool { return len(d.Set) == 0 && len(d.Deleted) == 0 }

// Apply makes the changes of one series of batches, and returns what they have changed. A series ends with the first
// batch that has no more set. An item with a wrong path or an unreadable value counts in the digests, so that the cloud
// does not send it again. Such an item is no part of the state, and err names it. Items above maxItems also count in
// the digests alone; LeftOut counts them. A series that would lead to far too many items or bytes changes nothing: the
// error is ErrTooMany. What the series replaces or deletes counts as well.
func (s *State) Apply(series ...*pb.Changes) (d Difference, err error) {
	var errs []error
	paths, bytes := s.Len(), s.bytes
	for _, c := range series {
		for _, item := range c.GetSet() {
			if s.has(item) {
				continue
			}
			if !s.knows(item.GetPath()) {
				paths++
			}
			bytes += len(item.GetPath()) + len(item.GetValue())
		}
	}
	if paths > 4*s.most || bytes > maxBytes {
		return d, ErrTooMany
	}
	set := make(map[Path]struct{})
	for _, c := range series {
		for _, item := range c.GetSet() {
			set[item.GetPath()] = struct{}{}
			if s.has(item) {
				continue
			}
			if err := s.set(item.GetPath(), item.GetValue()); err != nil {
				errs = append(errs, err)
			}
			d.Set = append(d.Set, item)
		}
		for _, p := range c.GetDeleted() {
			delete(set, p)
			d.Deleted = s.delete(d.Deleted, p)
		}
	}
	var whole [Buckets]bool
	some := false
	for _, c := range series {
		for _, b := range c.GetWhole() {
			whole[b%Buckets], some = true, true
		}
	}
	if !some {
		d.settle(s)
		return d, errors.Join(errs...) // a change of one item looks at no other
	}
	sweep := func(p Path) {
		if _, now := set[p]; !now && whole[Bucket(p)] {
			d.Deleted = s.delete(d.Deleted, p)
		}
	}
	for p := range s.items {
		sweep(p)
	}
	for p := range s.leftOut {
		sweep(p)
	}
	d.settle(s)
	return d, errors.Join(errs...)
}

// settle leaves what holds at the end of a series, since one batch may set what a later one deletes, or the other way
// round. s is the state at the end.
func (d *Difference) settle(s *State) {
	if len(d.Deleted) == 0 {
		return
	}
	d.Set = slices.DeleteFunc(d.Set, func(item *pb.Item) bool { return !s.knows(item.GetPath()) })
	d.Deleted = slices.DeleteFunc(d.Deleted, s.knows)
}

// knows reports whether there is an item with a path, also one that is left out.
func (s *State) knows(p Path) bool {
	_, has := s.items[p]
	_, out := s.leftOut[p]
	return has || out
}

// has reports whether there is an item with the path and the value of another one, also one that is left out.
func (s *State) has(item *pb.Item) bool {
	if value, has := s.items[item.GetPath()]; has {
		return value == string(item.GetValue())
	}
	l, out := s.leftOut[item.GetPath()]
	return out && l.digest == Digest(item.GetPath(), item.GetValue())
}

// set puts an item in the place of the one that has its path.
func (s *State) set(p Path, value []byte) error {
	s.forget(p)
	s.digests.Flip(p, value)
	s.bytes += len(p) + len(value)
	if len(s.items) >= s.most {
		s.leftOut[p] = left{Digest(p, value), len(value)}
		return nil
	}
	s.items[p] = string(value)
	parts := split(p)
	if parts == nil {
		return fmt.Errorf("%q is no path of an item", p)
	}
	var err error
	switch parts[0] {
	case kindService:
		v := new(Service)
		if err = proto.Unmarshal(value, v); err == nil {
			s.services[nameIn(p)] = v
			s.countClusterIPs(v, 1)
		}
	case kindEndpoint:
		v := new(Endpoint)
		if err = proto.Unmarshal(value, v); err == nil {
			_, err = netip.ParseAddr(v.GetAddress())
		}
		if err == nil {
			of := s.endpoints[nameIn(p)]
			i, _ := slices.BinarySearch(of, p)
			s.endpoints[nameIn(p)] = slices.Insert(of, i, p)
		}
	case kindNode:
		v := new(Node)
		if err = proto.Unmarshal(value, v); err == nil {
			s.nodes[parts[1]] = v
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", p, err)
	}
	return nil
}

// delete removes the item with a path, and appends the path to gone if there was one.
func (s *State) delete(gone []Path, p Path) []Path {
	if !s.forget(p) {
		return gone
	}
	return append(gone, p)
}

// forget removes the item with a path. It reports whether there was one.
func (s *State) forget(p Path) bool {
	if l, out := s.leftOut[p]; out {
		delete(s.leftOut, p)
		s.bytes -= len(p) + l.size
		s.digests[Bucket(p)] ^= l.digest
		return true
	}
	value, known := s.items[p]
	if !known {
		return false
	}
	delete(s.items, p)
	s.bytes -= len(p) + len(value)
	s.digests.Flip(p, []byte(value))
	switch parts := split(p); {
	case parts == nil:
	case parts[0] == kindService:
		s.countClusterIPs(s.services[nameIn(p)], -1)
		delete(s.services, nameIn(p))
	case parts[0] == kindEndpoint:
		of := s.endpoints[nameIn(p)]
		if i, readable := slices.BinarySearch(of, p); readable {
			of = slices.Delete(of, i, i+1)
		}
		if s.endpoints[nameIn(p)] = of; len(of) == 0 {
			delete(s.endpoints, nameIn(p))
		}
	case parts[0] == kindNode:
		delete(s.nodes, parts[1])
	}
	return true
}

// countClusterIPs adds n to the counts of a Service's ClusterIPs. The Service may be nil.
func (s *State) countClusterIPs(v *Service, n int) {
	for _, text := range v.GetClusterIps() {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			continue
		}
		addr = addr.Unmap()
		if s.clusterIP[addr] += n; s.clusterIP[addr] == 0 {
			delete(s.clusterIP, addr)
		}
	}
}

// IsClusterIP reports whether a Service has the address as a ClusterIP.
func (s *State) IsClusterIP(addr netip.Addr) bool { return s.clusterIP[addr.Unmap()] > 0 }

// Digests returns the digests of the state.
func (s *State) Digests() Digests { return s.digests }

// Len returns the number of items, with those that are left out.
func (s *State) Len() int { return len(s.items) + len(s.leftOut) }

// LeftOut returns how many items are above maxItems, and so no part of the state.
func (s *State) LeftOut() int { return len(s.leftOut) }

// Service returns a Service, or nil.
func (s *State) Service(namespace, name string) *Service { return s.services[namespace+"/"+name] }

// Services yields all Services, sorted by NAMESPACE/NAME.
func (s *State) Services() iter.Seq2[Path, *Service] {
	return func(yield func(Path, *Service) bool) {
		for _, name := range slices.Sorted(maps.Keys(s.services)) {
			if !yield(kindService+"/"+name, s.services[name]) {
				return
			}
		}
	}
}

// ServicesWith yields the paths of the Services that have an endpoint for whose node and address match returns true, in
// no order. The state may have endpoints of a Service that it does not have.
func (s *State) ServicesWith(match func(node, address string) bool) iter.Seq[Path] {
	return func(yield func(Path) bool) {
		for name, endpoints := range s.endpoints {
			if slices.ContainsFunc(endpoints, func(p Path) bool { return match(placeIn(s.items[p])) }) &&
				!yield(kindService+"/"+name) {
				return
			}
		}
	}
}

// placeIn returns the Home and the address of an encoded Endpoint. It is far cheaper than to decode all fields.
func placeIn(value string) (at, address string) {
	var node, home string
	const fieldAddress, fieldNode, fieldHome = 1, 2, 12
	for b := []byte(value); len(b) > 0; {
		field, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return "", ""
		}
		b = b[n:]
		if n = protowire.ConsumeFieldValue(field, kind, b); n < 0 {
			return "", ""
		}
		if kind == protowire.BytesType {
			text, _ := protowire.ConsumeBytes(b)
			switch field {
			case fieldAddress:
				address = string(text)
			case fieldNode:
				node = string(text)
			case fieldHome:
				home = string(text)
			}
		}
		b = b[n:]
	}
	return cmp.Or(node, home), address
}

// Endpoint returns an endpoint, or nil.
func (s *State) Endpoint(p Path) *Endpoint {
	if ServiceOf(p) == "" {
		return nil
	}
	if _, ok := slices.BinarySearch(s.endpoints[nameIn(p)], p); !ok {
		return nil
	}
	return s.decode(p)
}

// decode returns the endpoint with a path in endpoints.
func (s *State) decode(p Path) *Endpoint {
	e := new(Endpoint)
	proto.Unmarshal([]byte(s.items[p]), e) //nolint:errcheck // set has done the same without an error
	return e
}

// Endpoints returns the endpoints of a Service, sorted by their paths.
func (s *State) Endpoints(service Path) []Named {
	if _, _, ok := CutService(service); !ok {
		return nil
	}
	of := s.endpoints[nameIn(service)]
	all := make([]Named, len(of))
	for i, p := range of {
		all[i] = Named{p, s.decode(p)}
	}
	return all
}

// Named is an endpoint with its path.
type Named struct {
	Path Path
	*Endpoint
}

var dashes = strings.NewReplacer(".", "-", ":", "-") //nolint:gochecknoglobals // a constant

// Hostname returns the label of an endpoint before the name of its Service, in lower case. An endpoint without a
// hostname has its address with dashes as its label.
func Hostname(e *Endpoint) string {
	if e.GetHostname() != "" {
		return strings.ToLower(e.GetHostname())
	}
	name := dashes.Replace(e.GetAddress())
	if strings.HasSuffix(name, "-") {
		name += "0" // a label does not end with a dash
	}
	return name
}

// Node returns a Node, or nil.
func (s *State) Node(name string) *Node { return s.nodes[name] }

// Home returns the name of the Node that an endpoint is on, or "". Policies look at Endpoint.node alone, as kube-proxy
// does.
func Home(e *Endpoint) string { return cmp.Or(e.GetNode(), e.GetHome()) }

// Digest returns the digest of an item.
func Digest(p Path, value []byte) uint64 {
	h := sha256.New()
	h.Write([]byte(p))
	h.Write([]byte{0}) // no path contains it
	h.Write(value)
	return binary.BigEndian.Uint64(h.Sum(nil))
}
