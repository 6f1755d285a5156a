package tunnel

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// MayJoin returns why no node may have the name n, or nil. A request finds its node by the
// name that its caller uses, so a node must not have a name by which callers reach
// something else: an IP address, the API server's names inside a cluster, the machine
// itself, or one of others (the host of the API server, for example).
func (n NodeName) MayJoin(others ...string) error {
	name := string(n)
	_, notIP := netip.ParseAddr(name)
	switch {
	case notIP == nil:
		return fmt.Errorf("node name %s is an IP address: requests for that address would go to the node; give the node another name", n)
	case slices.Contains([]string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}, name),
		strings.HasPrefix(name, "kubernetes.default.svc."), strings.HasSuffix(name, ".localhost"):
		return fmt.Errorf("node name %s is reserved: callers reach another machine by it; give the node another name", n)
	case slices.ContainsFunc(others, func(o string) bool { return strings.EqualFold(strings.TrimSuffix(o, "."), name) }):
		return fmt.Errorf("node name %s is the host of the API server: give the node another name", n)
	}
	return nil
}
