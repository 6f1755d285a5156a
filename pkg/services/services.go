// Package services has what a cloud and its edges share about the Services of the cluster. It has the items that a
// cloud sends, the state that an edge keeps of them, and the choice of endpoints for a node.
//
// The package reads no file, opens no connection, and knows no Kubernetes client. Package hub, in the cloud, gathers
// items and sends them. Package relay, in the edge, keeps them and serves connections.
package services

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"strings"

	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

// The values of items.
type (
	Service  = pb.Service
	Endpoint = pb.Endpoint
	Node     = pb.Node
	Port     = pb.Port
)

// An edge that serves Services has these in the kernel of its node.
const (
	RulesTable    = "tunnel-services"     // its nftables table, of the family inet
	RulesTableDNS = "tunnel-services-dns" // the nftables table that redirects DNS queries
	RelayAddress  = "169.254.77.1"        // the relay's own address, on loopback: the rules redirect to it
)

// Path names an item:
//
//	service/NAMESPACE/NAME
//	endpoint/NAMESPACE/SERVICE/SLICE/ADDRESS
//	node/NAME
//
// No part contains a slash: they are names of Kubernetes objects and IP addresses.
type Path = string

// The first parts of paths.
const (
	kindService  = "service"
	kindEndpoint = "endpoint"
	kindNode     = "node"
)

// ServicePath returns the path of a Service.
func ServicePath(namespace, name string) Path { return kindService + "/" + namespace + "/" + name }

// CutService returns the namespace and the name in the path of a Service. ok is false for any other path.
func CutService(p Path) (namespace, name string, ok bool) {
	parts := split(p)
	if parts == nil || parts[0] != kindService {
		return "", "", false
	}
	return parts[1], parts[2], true
}

// EndpointPath returns the path of one address in an EndpointSlice. service is the slice's label
// kubernetes.io/service-name.
func EndpointPath(namespace, service, slice, address string) Path {
	return kindEndpoint + "/" + namespace + "/" + service + "/" + slice + "/" + address
}

// NodePath returns the path of a Node.
func NodePath(name string) Path { return kindNode + "/" + name }

// MaxPorts bounds the ports of a Service, as discovery.k8s.io/v1 bounds those of an EndpointSlice. MaxAddresses bounds
// its external IPs and the addresses of its load balancers, together. An edge in mode full has rules for each port of
// each address.
const (
	MaxPorts     = 100
	MaxAddresses = 64
)

// MaxValue is the most bytes of a value, so that each item fits into a batch.
const MaxValue = 16 << 10

// Buckets is the number of parts that the items are divided into, by their paths.
const Buckets = 256

// Bucket returns the bucket of a path.
func Bucket(p Path) int {
	sum := sha256.Sum256([]byte(p))
	return int(sum[0])
}

// Digests are the digests of all buckets. The digest of a bucket is the exclusive or of the digests of its items, so
// one item can be added or removed without the others. The zero value stands for no items.
type Digests [Buckets]uint64

// Flip adds an item to the digest of its bucket, or removes the item if the digest contains it.
func (d *Digests) Flip(p Path, value []byte) {
	d[Bucket(p)] ^= Digest(p, value)
}

// Encode returns the digests as the protocol has them: 8 bytes each, in order, most significant first.
func (d *Digests) Encode() []byte {
	b := make([]byte, 0, Buckets*8)
	for _, v := range d {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	return b
}

// DecodeDigests returns the digests in b. An empty b stands for the digests of no items.
func DecodeDigests(b []byte) (d Digests, err error) {
	if len(b) == 0 {
		return d, nil
	}
	if len(b) != Buckets*8 {
		return d, errors.New("the digests of the buckets have a wrong length")
	}
	for i := range d {
		d[i] = binary.BigEndian.Uint64(b[i*8:])
	}
	return d, nil
}

// nameIn returns NAMESPACE/NAME in the path of a Service, and that of its Service in the path of an endpoint.
func nameIn(p Path) string {
	_, rest, _ := strings.Cut(p, "/")
	namespace, rest, _ := strings.Cut(rest, "/")
	name, _, _ := strings.Cut(rest, "/")
	start := strings.IndexByte(p, '/') + 1
	return p[start : start+len(namespace)+1+len(name)]
}

// split returns the parts of a path, the kind first. It returns nil if p is no path.
func split(p Path) []string {
	parts := strings.Split(p, "/")
	want := 0
	switch parts[0] {
	case kindService:
		want = 3
	case kindEndpoint:
		want = 5
	case kindNode:
		want = 2
	}
	if len(parts) != want {
		return nil
	}
	for _, part := range parts {
		if part == "" {
			return nil
		}
	}
	return parts
}
