package main

import (
	"fmt"

	"tunnel.example/tunnel/pkg/egress"
	"tunnel.example/tunnel/pkg/podnet"
)

// addCNI adds the edge's part in the network of the node's pods, if the configuration asks for it.
func (w *edgeWiring) addCNI() error {
	c := w.conf.CNI
	if !c.On {
		return nil
	}
	node, err := podnet.New(w.podNetwork())
	if err != nil {
		return fmt.Errorf("mode.edge.cni podcidrs: %w", err)
	}
	w.egress.TellNetworks(node.SetSubnets)
	if c.Routes {
		w.egress.TellNeighbours(node.Links, func(all []egress.Neighbour) {
			var neighbours []podnet.Neighbour
			for _, n := range all {
				neighbours = append(neighbours, podnet.Neighbour(n))
			}
			node.SetNeighbours(neighbours)
		})
	}
	w.addWriter(node)
	return nil
}

// podNetwork configures the edge's part in the network of pods. What it has routes to is direct for Services.
func (w *edgeWiring) podNetwork() podnet.Config {
	c := w.conf.CNI
	cfg := podnet.Config{
		ConfDir: c.ConfDir, BinDir: c.BinDir, Subnets: c.PodCIDRs, Routes: c.Routes, Bandwidth: c.Bandwidth, Log: w.log,
	}
	if w.services != nil {
		cfg.Routed = w.services.SetRouted
	}
	return cfg
}
