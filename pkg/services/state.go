package services

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

const (
	// maxItems bounds the items of a State. A cluster of 10,000 Services with 20 endpoints each has fewer. Of items above
	// this bound, the state keeps only path and digest, so that the cloud does not send them again and again.
	maxItems = 250_000
	// maxPaths bounds all paths of a State: of its items, and of the items above maxItems.
	maxPaths = 4 * maxItems
)

// ErrTooMany is the error of a series with more than maxPaths paths.
var ErrTooMany = fmt.Errorf("the cloud sends more than %d items", maxPaths)

// State is all that a node knows of the cluster's Services. It is not safe for concurrent use.
type State struct {
	digests Digests
	items   map[Path]uint64   // the digest of each item
	leftOut map[Path]struct{} // items for which there was no room
	most    int               // how many items the state has at most, apart from those in leftOut

	services  map[string]*Service           // by NAMESPACE/NAME
	endpoints map[string]map[Path]*Endpoint // by NAMESPACE/NAME of the Service
	nodes     map[string]*Node
	clusterIP map[netip.Addr]int // how many Services have it as a ClusterIP
}

// NewState returns the state without items.
func NewState() *State {
	return &State{
		items: make(map[Path]uint64), leftOut: make(map[Path]struct{}), most: maxItems, services: make(map[string]*Service),
		endpoints: make(map[string]map[Path]*Endpoint), nodes: make(map[string]*Node), clusterIP: make(map[netip.Addr]int),
	}
}

// Difference is what a call of Apply has changed.
type Difference struct {
	Set     []*pb.Item
	Deleted []Path
}

// Empty reports whether nothing has changed.
func (d *Difference) Empty() bool { return len(d.Set) == 0 && len(d.Deleted) == 0 }

// Apply makes the changes of one series of batches, and returns what they have changed. A series ends with the first
// batch that has no more set. An item with a wrong path or an unreadable value counts in the digests, so that the cloud
// does not send it again. Such an item is no part of the state, and err names it. Items above maxItems also count in
// the digests alone; LeftOut counts them. A series with far too many items changes nothing: the error is ErrTooMany.
func (s *State) Apply(series ...*pb.Changes) (d Difference, err error) {
	var errs []error
	paths := len(s.items)
	for _, c := range series {
		for _, item := range c.GetSet() {
			if _, known := s.items[item.GetPath()]; !known {
				paths++
			}
		}
	}
	if paths > 4*s.most {
		return d, ErrTooMany
	}
	set := make(map[Path]struct{})
	for _, c := range series {
		for _, item := range c.GetSet() {
			set[item.GetPath()] = struct{}{}
			if s.items[item.GetPath()] == digest(item.GetPath(), item.GetValue()) {
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
		return d, errors.Join(errs...) // a change of one item looks at no other
	}
	for p := range s.items {
		if _, now := set[p]; !now && whole[Bucket(p)] {
			d.Deleted = s.delete(d.Deleted, p)
		}
	}
	return d, errors.Join(errs...)
}

// set puts an item in the place of the one that has its path.
func (s *State) set(p Path, value []byte) error {
	s.forget(p)
	sum := digest(p, value)
	s.items[p] = sum
	s.digests[Bucket(p)] ^= sum
	if len(s.items)-len(s.leftOut) > s.most {
		s.leftOut[p] = struct{}{}
		return nil
	}
	parts := split(p)
	if parts == nil {
		return fmt.Errorf("%q is no path of an item", p)
	}
	var err error
	switch parts[0] {
	case kindService:
		v := new(Service)
		if err = proto.Unmarshal(value, v); err == nil {
			s.services[parts[1]+"/"+parts[2]] = v
			s.countClusterIPs(v, 1)
		}
	case kindEndpoint:
		v := new(Endpoint)
		if err = proto.Unmarshal(value, v); err == nil {
			_, err = netip.ParseAddr(v.GetAddress())
		}
		if err == nil {
			of := parts[1] + "/" + parts[2]
			if s.endpoints[of] == nil {
				s.endpoints[of] = make(map[Path]*Endpoint)
			}
			s.endpoints[of][p] = v
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
	sum, known := s.items[p]
	if !known {
		return false
	}
	delete(s.items, p)
	s.digests[Bucket(p)] ^= sum
	if _, out := s.leftOut[p]; out {
		delete(s.leftOut, p)
		return true
	}
	switch parts := split(p); {
	case parts == nil:
	case parts[0] == kindService:
		s.countClusterIPs(s.services[parts[1]+"/"+parts[2]], -1)
		delete(s.services, parts[1]+"/"+parts[2])
	case parts[0] == kindEndpoint:
		of := parts[1] + "/" + parts[2]
		delete(s.endpoints[of], p)
		if len(s.endpoints[of]) == 0 {
			delete(s.endpoints, of)
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
func (s *State) Len() int { return len(s.items) }

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

// ServicesWith yields the paths of the Services that have an endpoint for which match returns true, in no order. The
// state may have endpoints of a Service that it does not have.
func (s *State) ServicesWith(match func(*Endpoint) bool) iter.Seq[Path] {
	return func(yield func(Path) bool) {
		for name, endpoints := range s.endpoints {
			for _, e := range endpoints {
				if match(e) {
					if !yield(kindService + "/" + name) {
						return
					}
					break
				}
			}
		}
	}
}

// Endpoint returns an endpoint, or nil.
func (s *State) Endpoint(p Path) *Endpoint {
	parts := split(p)
	if parts == nil || parts[0] != kindEndpoint {
		return nil
	}
	return s.endpoints[parts[1]+"/"+parts[2]][p]
}

// Endpoints returns the endpoints of a Service, sorted by their paths.
func (s *State) Endpoints(service Path) []Named {
	parts := split(service)
	if parts == nil || parts[0] != kindService {
		return nil
	}
	of := s.endpoints[parts[1]+"/"+parts[2]]
	all := make([]Named, 0, len(of))
	for _, p := range slices.Sorted(maps.Keys(of)) {
		all = append(all, Named{p, of[p]})
	}
	return all
}

// Named is an endpoint with its path.
type Named struct {
	Path Path
	*Endpoint
}

// Hostname returns the label of an endpoint before the name of its Service, in lower case. An endpoint without a
// hostname has its address with dashes as its label.
func Hostname(e *Endpoint) string {
	if e.GetHostname() != "" {
		return strings.ToLower(e.GetHostname())
	}
	name := strings.NewReplacer(".", "-", ":", "-").Replace(e.GetAddress())
	if strings.HasSuffix(name, "-") {
		name += "0" // a label does not end with a dash
	}
	return name
}

// Node returns a Node, or nil.
func (s *State) Node(name string) *Node { return s.nodes[name] }

// digest returns the digest of an item.
func digest(p Path, value []byte) uint64 {
	h := sha256.New()
	h.Write([]byte(p))
	h.Write([]byte{0}) // no path contains it
	h.Write(value)
	return binary.BigEndian.Uint64(h.Sum(nil))
}
