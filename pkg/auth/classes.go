package auth

// Class is a kind of request to a kubelet. The classes are modelled on the subresources by
// which a kubelet authorises callers (kubernetes/pkg/kubelet/server/auth.go); what is its
// "proxy" is divided into three.
type Class string

// The classes.
const (
	ClassMetrics Class = "metrics" // figures: /metrics, /stats
	ClassHealth  Class = "health"  // /healthz
	ClassPods    Class = "pods"    // the specifications of pods, with what stands in them: /pods, /runningpods
	ClassLogs    Class = "logs"    // of containers and of the node: /containerLogs, /logs
	ClassExec    Class = "exec"    // commands and ports in containers: /exec, /attach, /run, /portForward
	ClassAll     Class = "all"     // everything that there is, exec included
)

// Classes returns all of them.
func Classes() []Class {
	return []Class{ClassMetrics, ClassHealth, ClassPods, ClassLogs, ClassExec, ClassAll}
}
