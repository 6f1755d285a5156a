package conf

import (
	"cmp"
	"net/netip"
)

// CNI configures the edge's part in the network of its node's pods, [mode.edge.cni].
type CNI struct {
	On       bool           // whether the table is there
	ConfDir  string         // folder of the runtime's network configurations
	BinDir   string         // folder of the CNI plugins
	PodCIDRs []netip.Prefix // networks of the node's pods; nil: the cloud tells them
	// Routes is whether to keep routes to the pods of nodes that are in one network with this one.
	Routes bool
	// Bandwidth is whether to chain the stock plugin bandwidth.
	Bandwidth bool
}

// Where container runtimes look by default.
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
