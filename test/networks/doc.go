// Package networks joins clouds from networks that have only one way out: a proxy, an HTTP ingress, or a proxy that
// inspects TLS. The boxes in between are Debian's own programs, each with a configuration as its manual shows it.
//
// TestNetworks skips a box that is not installed. `make networks` installs all of them, and then a missing one
// fails.
package networks
