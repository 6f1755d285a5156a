// Package services is what a cloud tells an edge about the Services of the cluster, and what the edge makes of it:
// the items and their paths, the state that a node keeps, and which endpoints a node uses.
//
// The package is pure: it reads no file, opens no connection, and knows no Kubernetes client. Package hub, at the
// cloud, gathers items and sends them. Package relay, at the edge, keeps them and serves connections.
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

// What an edge that serves Services has in the kernel of its node.
const (
	RulesTable    = "tunnel-services"     // its nftables table, of the family inet
	RulesTableDNS = "tunnel-services-dns" // the same, for names
	RelayAddress  = "169.254.77.1"        // on loopback: where the rules lead
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

// CutService returns the namespace and the name in the path of a Service. Other paths are not ok.
func CutService(p Path) (namespace, name string, ok bool) {
	parts := split(p)
	if parts == nil || parts[0] != kindService {
		return "", "", false
	}
	return parts[1], parts[2], true
}

// EndpointPath returns the path of an address of an EndpointSlice. The slice has the name of its Service in the label
// kubernetes.io/service-name.
func EndpointPath(namespace, service, slice, address string) Path {
	return kindEndpoint + "/" + namespace + "/" + service + "/" + slice + "/" + address
}

// NodePath returns the path of a Node.
func NodePath(name string) Path { return kindNode + "/" + name }

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
// that an item is added and removed without its neighbours. The zero value is that of no items.
type Digests [Buckets]uint64

// Flip adds the item to its bucket, or removes it if it is there.
func (d *Digests) Flip(p Path, value []byte) {
	d[Bucket(p)] ^= digest(p, value)
}

// Encode returns the digests as they travel: 8 bytes each, in order, most significant first.
func (d *Digests) Encode() []byte {
	b := make([]byte, 0, Buckets*8)
	for _, v := range d {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	return b
}

// DecodeDigests returns the digests in b. Empty: those of no items.
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

// split returns the parts of a path, the kind first. It returns nil if p is no path.
func split(p Path) []string {
	parts := strings.Split(p, "/")
	want := map[string]int{kindService: 3, kindEndpoint: 5, kindNode: 2}[parts[0]]
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
