package cni

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/containernetworking/cni/pkg/types"
)

// Reservation says which attachment has an address, or had it last. Its JSON form is the content of a file.
type Reservation struct {
	Address     netip.Addr `json:"address"`
	Network     string     `json:"network"` // name of the network in the network configuration
	ContainerID string     `json:"containerID"`
	IfName      string     `json:"ifname"`
	Pod         Pod        `json:"pod,omitzero"` // zero if the runtime names no pod
	NetNS       string     `json:"netns"`        // path of the network namespace
	NetNSInode  uint64     `json:"netnsInode"`   // the kernel reuses a path, but no inode of a live namespace
	BootID      string     `json:"bootID"`       // names the boot of the machine in which the address was reserved
	Reserved    time.Time  `json:"reserved"`
	Released    time.Time  `json:"released,omitzero"` // zero while the address is in use
}

// Pod names a pod of Kubernetes.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
}

// remembered reports whether the address is free, and kept for the pod that had it last.
func (r *Reservation) remembered() bool { return !r.Released.IsZero() }

// belongsTo reports whether the address is in use by an attachment.
func (r *Reservation) belongsTo(a attachment) bool {
	return !r.remembered() && r.attachment() == a
}

func (r *Reservation) attachment() attachment {
	return attachment{r.Network, r.ContainerID, r.IfName}
}

// attachment is the unit of ADD and DEL: one interface of one container in one network.
type attachment struct {
	network, containerID, ifName string
}

// same reports whether other may get the address of p again. Only namespace and name count, since a pod that is made
// again has another UID. Containers without a pod are never the same.
func (p Pod) same(other Pod) bool {
	return p.Name != "" && p.Namespace == other.Namespace && p.Name == other.Name
}

// podOf reads the pod from CNI_ARGS, where container runtimes for Kubernetes put it.
func podOf(args string) (Pod, error) {
	var known struct {
		types.CommonArgs
		K8S_POD_NAMESPACE, K8S_POD_NAME, K8S_POD_UID, K8S_POD_INFRA_CONTAINER_ID types.UnmarshallableString
	}
	if err := types.LoadArgs(args, &known); err != nil {
		return Pod{}, types.NewError(types.ErrInvalidEnvironmentVariables, "reading CNI_ARGS", err.Error())
	}
	return Pod{string(known.K8S_POD_NAMESPACE), string(known.K8S_POD_NAME), string(known.K8S_POD_UID)}, nil
}

func (p Pod) String() string {
	if p.Name == "" {
		return "a container without a pod"
	}
	return fmt.Sprintf("%s/%s", p.Namespace, p.Name)
}
