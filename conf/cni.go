package conf

import (
	"cmp"
	"net/netip"
)

// CNI configures what the edge does for the network of its node's pods, [mode.edge.cni].
type CNI struct {
	On       bool           // the file has the table
	ConfDir  string         // folder of the runtime's network configurations
	BinDir   string         // folder of the CNI plugins
	PodCIDRs []netip.Prefix // networks of the node's pods; nil: the cloud tells the edge
	// Routes is true if the edge keeps routes to the pods of other nodes in its own network.
	Routes bool
	// Bandwidth is true if the runtime also executes the stock plugin bandwidth for each pod.
	Bandwidth bool
}

// The folders in which container runtimes look for network configurations and plugins by default.
const (
	DefaultConfDir = "/etc/cni/net.d"
	DefaultBinDir  = "/opt/cni/bin"
)

// newCNI makes a CNI from its table, which may be nil.
func newCNI(t *cniKeys, r *report) CNI {
	if t == nil {
		return CNI{}
	}
	c := CNI{
		On:        true,
		ConfDir:   r.src.path(cmp.Or(t.ConfDir, DefaultConfDir)),
		BinDir:    r.src.path(cmp.Or(t.BinDir, DefaultBinDir)),
		Routes:    t.Routes,
		Bandwidth: t.Bandwidth,
		PodCIDRs:  r.prefixes(edgeTablePrefix+"cni.podcidrs", t.PodCIDRs),
	}
	return c
}
