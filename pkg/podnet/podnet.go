// Package podnet is an edge's part in the network of its node's pods: what must be there before and while the
// CNI plugin tunnel-cni runs (pkg/cni). It keeps
//   - the network configuration that the runtime reads, 10-tunnel.conflist, with the networks of the Node;
//   - the bridge, and the settings of the kernel for forwarding;
//   - one nftables table, which hides pods behind the node where their addresses mean nothing;
//   - if it is configured, routes to the pods of nodes that are in one network with this node.
//
// The networks come from the configuration, or from the cloud. The file is also the memory: an edge that starts
// without its cloud goes on with the networks in it. Everything stays when the edge stops, so that pods have
// their network while the edge is restarted or replaced.
//
// So is the file with the neighbours, for routes.
//
// The package assigns no addresses to pods.
package podnet
