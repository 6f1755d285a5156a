// Package conformance knows what `make conformance` runs, and judges it: Kubernetes' own e2e tests through the tunnel,
// compared with the same tests without it.
//
//	suite := conformance.FrontDoors()                        // which tests, and in which ways
//	results, err := conformance.ReadJUnit(report)            // what became of them
//	problems := suite.Judge(door, control, results)          // what fails with the tunnel only
//	table := suite.Table(run)                                // for docs/conformance.md
//
// The package starts nothing. test/e2e/conformance_test.go has the clusters and the tunnel, build.sh makes the programs
// and images.
package conformance

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// Versions returns the versions of Kubernetes that run.
func Versions() []string { return []string{"1.34", "1.36"} }

// A Suite is a table of the page: tests, and the ways in which they run.
type Suite struct {
	Heading string // of a table, before the version, such as "Kubernetes"
	Groups  []Group
	Control Door
	Doors   []Door
	// Excused are tests that need not pass through a door. A sentence says why.
	Excused map[string]string
}

// A Group is a row of the table: tests of the same thing.
type Group struct {
	Name string
	// Pods says that kube-apiserver opens connections to pods, not only to kubelets.
	Pods bool
	// Patterns match names of tests as ReadJUnit returns them. A test belongs to the first group that has a match.
	Patterns []*regexp.Regexp
}

func group(name string, pods bool, patterns ...string) Group {
	g := Group{Name: name, Pods: pods}
	for _, p := range patterns {
		g.Patterns = append(g.Patterns, regexp.MustCompile(p))
	}
	return g
}

// FrontDoors returns the tests that have kube-apiserver open connections. They run once with direct reach, without
// tunnel and NAT, and once through each front door.
func FrontDoors() Suite {
	return Suite{
		Heading: "Kubernetes",
		Groups:  frontDoorGroups(),
		Control: Door{Key: "control", Title: "direct reach"},
		Doors: []Door{
			{Key: "names-passthrough", Title: "names, passthrough", Names: true},
			{Key: "names-terminate", Title: "names, terminate", Names: true},
			{Key: "names-relayed", Title: "names, relayed", Names: true},
			{Key: "egress-grpc", Title: "egress, gRPC"},
			{Key: "egress-connect", Title: "egress, HTTP CONNECT"},
		},
	}
}

// frontDoorGroups returns the groups of FrontDoors in the order of the table.
func frontDoorGroups() []Group {
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

// groupOf returns the index of the group that a test belongs to, or -1.
func (s Suite) groupOf(test string) int {
	return slices.IndexFunc(s.Groups, func(g Group) bool {
		return slices.ContainsFunc(g.Patterns, func(p *regexp.Regexp) bool { return p.MatchString(test) })
	})
}

// Focus returns the regular expression by which ginkgo selects the tests of a door. It has no anchors, since ginkgo
// puts the name of the suite before the name of the test (ginkgo/v2/internal/focus.go).
func (s Suite) Focus(door Door) string {
	var all []string
	for _, g := range s.Groups {
		if door.exception(g) != "" {
			continue
		}
		for _, p := range g.Patterns {
			all = append(all, strings.TrimPrefix(p.String(), "^"))
		}
	}
	return strings.Join(all, "|")
}

// A Door is a column of the table: a way in which the tests run.
type Door struct {
	Key   string // in names of files and sub-tests
	Title string
	// Names says that kube-apiserver dials nodes by name and pods by address. The door has no way to pods.
	Names bool
}

// needsPods is why a door by names does not run the groups that need pods.
const needsPods = "needs a connection to a pod, and names lead to kubelets only"

// exception returns why a door need not pass a group, or "".
func (d Door) exception(g Group) string {
	if d.Names && g.Pods {
		return needsPods
	}
	return ""
}

// Judge returns one line for each test that passed in the control and did not pass through the door, and for each
// group of which nothing passed.
func (s Suite) Judge(door Door, control, through []Result) []string {
	var problems []string
	got := make(map[string]Result, len(through))
	for _, r := range through {
		// The labels of a test are not in its name. A test of the same name may be there for another provider: it is skipped.
		if had, ok := got[r.Test]; !ok || had.State == Skipped || r.State == Failed {
			got[r.Test] = r
		}
	}
	passed := make([]int, len(s.Groups))
	for _, want := range control {
		i := s.groupOf(want.Test)
		if i < 0 || want.State != Passed || door.exception(s.Groups[i]) != "" {
			continue
		}
		_, excused := s.Excused[want.Test]
		switch r, ran := got[want.Test]; {
		case excused && r.State != Passed:
		case !ran:
			problems = append(problems, want.Test+": did not run")
		case r.State == Passed:
			passed[i]++
		default:
			problems = append(problems, fmt.Sprintf("%s: %s: %s", want.Test, r.State, firstLine(r.Message)))
		}
	}
	for i, g := range s.Groups {
		if passed[i] == 0 && door.exception(g) == "" {
			problems = append(problems, g.Name+": no test passed, so the row proves nothing")
		}
	}
	return problems
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}

// Missing returns the patterns that match no test of a version, and the excused tests that are none of its tests: a
// test that was renamed must not drop out unseen. tests are names as ReadList returns them.
func (s Suite) Missing(tests []string) []string {
	var missing []string
	for _, g := range s.Groups {
		for _, p := range g.Patterns {
			if !slices.ContainsFunc(tests, p.MatchString) {
				missing = append(missing, p.String())
			}
		}
	}
	for _, test := range slices.Sorted(maps.Keys(s.Excused)) {
		if !slices.Contains(tests, test) {
			missing = append(missing, test)
		}
	}
	return missing
}
