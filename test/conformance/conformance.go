// Package conformance knows what `make conformance` runs, and judges it: Kubernetes' own e2e tests through each front
// door of the cloud, compared with the same tests where kube-apiserver reaches the nodes directly.
//
//	groups := conformance.Groups()                     // which tests
//	results, err := conformance.ReadJUnit(report)      // what became of them
//	problems := conformance.Judge(door, control, run)  // what fails through a door only
//	page := conformance.Table(runs)                    // for docs/conformance.md
//
// The package starts nothing. test/e2e/conformance_test.go has the cluster and the tunnel, build.sh makes the programs
// and images.
package conformance

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// A Group is a row of the table: tests that ask kube-apiserver for the same thing.
type Group struct {
	Name string
	// Pods says that kube-apiserver opens connections to pods, not only to kubelets.
	Pods bool
	// Patterns match names of tests as ReadJUnit returns them. A test belongs to the first group that has a match.
	Patterns []*regexp.Regexp
}

// Groups returns the tests that run, in the order of the table.
func Groups() []Group {
	group := func(name string, pods bool, patterns ...string) Group {
		g := Group{Name: name, Pods: pods}
		for _, p := range patterns {
			g.Patterns = append(g.Patterns, regexp.MustCompile(p))
		}
		return g
	}
	const simple = `^\[sig-cli\] Kubectl client Simple pod `
	return []Group{
		group("exec, logs and port-forward over WebSocket", false,
			`^\[sig-node\] Pods should support .* over websockets`,
			`^\[sig-cli\] Kubectl Port forwarding .* over websockets`,
			simple+`should support inline execution and attach with websockets or fallback to spdy`),
		group("`kubectl exec`", false,
			simple+`should support exec`,
			simple+`should return command exit codes execing into a container`,
			`^\[sig-cli\] Kubectl exec should be able to execute 1000 times in a container`),
		group("`kubectl attach`, `kubectl run`", false,
			simple+`should support inline execution and attach`,
			simple+`Kubectl run `),
		group("`kubectl logs`", false,
			`^\[sig-cli\] Kubectl logs `,
			simple+`should contain last line of the log`,
			`^\[sig-cli\] Kubectl client Kubectl cluster-info dump `,
			`^\[sig-node\] Kubelet when scheduling a busybox command in a pod should print the output to logs`,
			`^\[sig-node\] Ephemeral Containers \[NodeConformance\] will start an ephemeral container in an existing pod`),
		group("`kubectl cp`", false,
			`^\[sig-cli\] Kubectl client Kubectl copy `,
			simple+`should return command exit codes should handle in-cluster config`),
		group("`kubectl port-forward`", false,
			`^\[sig-cli\] Kubectl Port forwarding `,
			simple+`should return command exit codes should support port-forward`),
		group("`kubectl proxy`", false, `^\[sig-cli\] Kubectl client Proxy server `),
		group("node proxy: logs, metrics, pods", false,
			`^\[sig-network\] Proxy version v1 should proxy logs on node`,
			`^\[sig-instrumentation\] MetricsGrabber should grab all metrics from a Kubelet`,
			`^\[sig-instrumentation\] Metrics should grab all metrics from kubelet /metrics/resource endpoint`,
			`^\[sig-node\] PreStop graceful pod terminated should wait until preStop hook completes the process`,
			`^\[sig-node\] kubelet Clean up pods on node `),
		group("pod and Service proxy", true,
			`^\[sig-network\] Proxy version v1 should proxy through a service and a pod`,
			`^\[sig-network\] Proxy version v1 A set of valid responses are returned for both pod and service`,
			`^\[sig-cli\] Kubectl client Update Demo `),
		group("admission webhooks", true, `^\[sig-api-machinery\] AdmissionWebhook `),
		group("conversion webhooks", true, `^\[sig-api-machinery\] CustomResourceConversionWebhook `),
		group("aggregated APIs", true,
			`^\[sig-api-machinery\] Aggregator Should be able to support the 1\.17 Sample API Server`,
			`^\[sig-api-machinery\] OpenAPIV3 should contain OpenAPI V3 for Aggregated APIServer`),
	}
}

// GroupOf returns the index of the group that a test belongs to, or -1.
func GroupOf(groups []Group, test string) int {
	return slices.IndexFunc(groups, func(g Group) bool {
		return slices.ContainsFunc(g.Patterns, func(p *regexp.Regexp) bool { return p.MatchString(test) })
	})
}

// Focus returns the regular expression by which ginkgo selects the tests of some groups. It has no anchors, since
// ginkgo puts the name of the suite before the name of the test (ginkgo/v2/internal/focus.go).
func Focus(groups []Group) string {
	var all []string
	for _, g := range groups {
		for _, p := range g.Patterns {
			all = append(all, strings.TrimPrefix(p.String(), "^"))
		}
	}
	return strings.Join(all, "|")
}

// A Door is a column of the table: a way from kube-apiserver to the nodes.
type Door struct {
	Key   string // in names of files and sub-tests
	Title string
	// Names says that kube-apiserver dials nodes by name and pods by address. The door has no way to pods.
	Names bool
}

// Control is the column with direct reach: no tunnel, no NAT.
func Control() Door { return Door{Key: "control", Title: "direct reach"} }

// Doors returns the columns that are compared with Control.
func Doors() []Door {
	return []Door{
		{Key: "names-passthrough", Title: "names, passthrough", Names: true},
		{Key: "names-terminate", Title: "names, terminate", Names: true},
		{Key: "names-relayed", Title: "names, relayed", Names: true},
		{Key: "egress-grpc", Title: "egress, gRPC"},
		{Key: "egress-connect", Title: "egress, HTTP CONNECT"},
	}
}

// NeedsPods is why a door by names does not run the groups that need pods.
const NeedsPods = "needs a connection to a pod, and names lead to kubelets only"

// Exception returns why a door need not pass a group, or "".
func (d Door) Exception(g Group) string {
	if d.Names && g.Pods {
		return NeedsPods
	}
	return ""
}

// Runs returns the groups that a door has to pass.
func (d Door) Runs(groups []Group) []Group {
	return slices.DeleteFunc(slices.Clone(groups), func(g Group) bool { return d.Exception(g) != "" })
}

// Judge returns one line for each test that passed in the control and did not pass through the door, and for each
// group of which nothing passed.
func Judge(groups []Group, door Door, control, through []Result) []string {
	var problems []string
	got := make(map[string]Result, len(through))
	for _, r := range through {
		got[r.Test] = r
	}
	passed := make([]int, len(groups))
	for _, want := range control {
		i := GroupOf(groups, want.Test)
		if i < 0 || want.State != Passed || door.Exception(groups[i]) != "" {
			continue
		}
		switch r, ran := got[want.Test]; {
		case !ran:
			problems = append(problems, want.Test+": did not run")
		case r.State == Passed:
			passed[i]++
		default:
			problems = append(problems, fmt.Sprintf("%s: %s: %s", want.Test, r.State, firstLine(r.Message)))
		}
	}
	for i, g := range groups {
		if passed[i] == 0 && door.Exception(g) == "" {
			problems = append(problems, g.Name+": no test passed, so the row proves nothing")
		}
	}
	return problems
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}

// Missing returns the patterns that match no test of a version: a test that was renamed must not drop out unseen. tests
// are names as ReadList returns them.
func Missing(groups []Group, tests []string) []string {
	var missing []string
	for _, g := range groups {
		for _, p := range g.Patterns {
			if !slices.ContainsFunc(tests, p.MatchString) {
				missing = append(missing, p.String())
			}
		}
	}
	return missing
}
