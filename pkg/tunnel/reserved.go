package tunnel

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// MayJoin returns nil if a node may have the name n, else an error with the reason. A request
// finds its node by the name that the caller uses. So a node must not have a name by which
// callers reach another machine. Such names are IP addresses, localhost, the API server's names
// inside a cluster, and the names in others, for example the host of the API server.
func (n NodeName) MayJoin(others ...string) error {
	name := string(n)
	_, notIP := netip.ParseAddr(name)
	switch {
	case notIP == nil:
		return fmt.Errorf("node name %s is an IP address: requests for that address would go to the node; "+
			"give the node another name", n)
	case slices.Contains([]string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}, name),
		strings.HasPrefix(name, "kubernetes.default.svc."), strings.HasSuffix(name, ".localhost"):
		return fmt.Errorf("node name %s is reserved: callers reach another machine by it; give the node another name", n)
	case slices.ContainsFunc(others, func(o string) bool { return strings.EqualFold(strings.TrimSuffix(o, "."), name) }):
		return fmt.Errorf("node name %s is the host of the API server: give the node another name", n)
	}
	return nil
}
