//go:build linux

// Command tunnel-cni is a CNI plugin: it gives the pods of a node addresses that survive a reboot without the
// cloud. A container runtime executes it; docs/cni.md says how to install it. All of its code is in pkg/cni,
// so that the binary holds neither gRPC nor a client of Kubernetes.
package main

import (
	"github.com/containernetworking/cni/pkg/skel"

	"tunnel.example/tunnel/pkg/cni"
)

// version is set by the linker (Makefile).
var version = "devel"

func main() {
	skel.PluginMainFuncs(cni.Funcs(), cni.Versions(), "CNI plugin tunnel-cni "+version)
}
