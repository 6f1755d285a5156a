// Package podnet makes and repairs what an edge adds to the network of its node's pods. The CNI plugin tunnel-cni
// (pkg/cni) needs these things:
//   - the network configuration that the runtime reads, 10-tunnel.conflist, with the networks of the node's pods;
//   - the bridge, and the settings of the kernel for forwarding;
//   - one nftables table, which gives packets of pods the node's address where nobody knows the pods' addresses;
//   - if it is configured, routes to the pods of nodes that are in one network with this node.
//
// The networks come from the configuration, or from the cloud. The edge also reads the networks from its own file: so
// an edge that starts without its cloud uses the last networks. In the same way it keeps the neighbours for routes in a
// file. When the edge stops, everything stays, so pods have their network while the edge is restarted or replaced.
//
// The package assigns no addresses to pods.
package podnet
