// Package cni drives the plugin tunnel-cni by what container runtimes use: libcni, containerd's go-cni, and
// the program cnitool; and measures it beside the stock plugins bridge and host-local. The folder is a Go
// module of its own, so that the daemon's go.mod holds none of these. Run it with `make cni`, as root.
package cni
