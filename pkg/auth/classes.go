package auth

// Class is a kind of request to a kubelet. The classes follow the subresources by which a
// kubelet authorises callers (kubernetes/pkg/kubelet/server/auth.go). The kubelet's subresource
// "proxy" is split into three classes here.
type Class string

// The classes.
const (
	ClassMetrics Class = "metrics" // metrics of the node and its pods: /metrics, /stats
	ClassHealth  Class = "health"  // /healthz
	ClassPods    Class = "pods"    // pod specifications and all that they contain: /pods, /runningpods
	ClassLogs    Class = "logs"    // logs of containers and of the node: /containerLogs, /logs
	ClassExec    Class = "exec"    // commands and ports in containers: /exec, /attach, /run, /portForward
	ClassAll     Class = "all"     // every request, exec included
)

// Classes returns all classes.
func Classes() []Class {
	return []Class{ClassMetrics, ClassHealth, ClassPods, ClassLogs, ClassExec, ClassAll}
}
