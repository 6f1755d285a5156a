// Package cni gives the pods of a node their addresses and network interfaces. It is the code of the CNI plugin
// tunnel-cni, which a container runtime executes once per verb. In this package and in package podnet, a link is a
// network interface, as in the program ip.
//
//	skel.PluginMainFuncs(cni.Funcs(), cni.Versions(), "CNI plugin tunnel-cni "+version)
//
// A pod gets a veth pair to the bridge of the node, one address of each subnet (/32 or /128), and a default
// route by the gateway, which is the first address of the subnet and belongs to the bridge.
//
// Addresses are sticky: after its release, an address stays remembered for the namespace and name of its
// pod, and the pod gets the address again. So if a node reboots without its cloud, its pods get the addresses that
// the Endpoints of the cluster still name.
//
// Who owns what:
//   - The folder of reservations (Conf.DataDir) holds one file per address. Every reader and writer locks
//     the folder. The kernel drops the lock of a process that dies.
//   - The bridge belongs to the node. ADD and STATUS make the bridge if it is missing; nothing removes it.
//   - A host link belongs to one attachment (container and interface). Its name is a hash of both, so DEL
//     finds the link when the network namespace of the pod is gone. A reservation lives longer than its link.
//
// The package makes no firewall rules and asks no API server: a pod gets its address even while the node is offline.
// The stock plugins portmap and bandwidth, chained behind this plugin, handle ports of the host and limits of rates.
package cni

import "github.com/containernetworking/cni/pkg/version"

// Defaults of the network configuration.
const (
	DefaultBridge  = "tunnel0"
	DefaultDataDir = "/var/lib/cni/tunnel"
)

// Versions are the versions of the CNI specification that the plugin speaks.
func Versions() version.PluginInfo {
	return version.PluginSupports("0.3.1", "0.4.0", "1.0.0", "1.1.0")
}
