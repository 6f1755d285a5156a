// Package balancers puts balancers between callers, edges and the cloud: HAProxy and nginx of Debian with the
// configurations of docs/network.md, and senders of the PROXY protocol through two replicas.
//
// `make proxies` unpacks both programs; without them TestBalancers skips them.
package balancers
