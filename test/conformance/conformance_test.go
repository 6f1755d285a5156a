package conformance

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestReadJUnit(t *testing.T) {
	f, err := os.Open("testdata/junit.xml")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got, err := ReadJUnit(f)
	if err != nil {
		t.Fatal(err)
	}
	want := []Result{
		{"[sig-api-machinery] AdmissionWebhook [Privileged:ClusterAdmin] should mutate configmap", Failed,
			"timedout: A suite timeout occurred", time.Minute},
		{"[sig-cli] Kubectl client Simple pod should return command exit codes should handle in-cluster config", Skipped,
			"skipped - Only supported for node OS arch [amd64] (not arm64)", 0},
		{"[sig-cli] Kubectl client Simple pod should support exec", Passed, "", 12500 * time.Millisecond},
		{"[sig-node] Pods should support retrieving logs from the container over websockets", Failed,
			"Failed to open websocket to wss://10.77.0.1:6443/x: bad status\nmore", 3 * time.Second},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v", got)
	}
}

func TestReadJUnitOfASuiteThatDidNotStart(t *testing.T) {
	for name, report := range map[string]string{
		"BeforeSuite": `<testsuites><testsuite><testcase name="[SynchronizedBeforeSuite]" status="failed">
			<failure message="no nodes"></failure></testcase></testsuite></testsuites>`,
		"no XML": "e2e.test: exec format error",
	} {
		if got, err := ReadJUnit(strings.NewReader(report)); err == nil {
			t.Errorf("%s: no error, but %+v", name, got)
		}
	}
}

func TestReadList(t *testing.T) {
	got, err := ReadList(strings.NewReader(`The following spec names can be used with 'ginkgo run --focus/skip':
    test/e2e/network/proxy.go:87: [sig-network] Proxy version v1 should proxy logs on node using proxy subresource ` + `
    ../x/webhook.go:246: [sig-api-machinery] AdmissionWebhook [Privileged:ClusterAdmin] should mutate [Conformance]

`))
	want := []string{
		"[sig-network] Proxy version v1 should proxy logs on node using proxy subresource",
		"[sig-api-machinery] AdmissionWebhook [Privileged:ClusterAdmin] should mutate",
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v", got, err)
	}
}

// ginkgo's focus selects a test exactly if the test belongs to a group.
func TestFocus(t *testing.T) {
	suite := FrontDoors()
	focus := regexp.MustCompile(suite.Focus(suite.Control))
	for test, want := range map[string]string{
		"[sig-cli] Kubectl client Simple pod should support exec through an HTTP proxy": "`kubectl exec`",
		"[sig-cli] Kubectl client Simple pod should support inline execution and attach with websockets " +
			"or fallback to spdy": "exec, logs and port-forward over WebSocket",
		"[sig-cli] Kubectl client Simple pod should support inline execution and attach": "`kubectl attach`, `kubectl run`",
		"[sig-cli] Kubectl Port forwarding With a server listening on localhost should support forwarding " +
			"over websockets": "exec, logs and port-forward over WebSocket",
		"[sig-cli] Kubectl Port forwarding with a pod being removed should stop port-forwarding": "`kubectl port-forward`",
		"[sig-network] Proxy version v1 should proxy logs on node using proxy subresource": "node proxy: logs, " +
			"metrics, pods",
		"[sig-network] Services should serve a basic endpoint from pods": "",
	} {
		group := ""
		if i := suite.groupOf(test); i >= 0 {
			group = suite.Groups[i].Name
		}
		if group != want {
			t.Errorf("%s: in group %q, want %q", test, group, want)
		}
		if got := focus.MatchString("Kubernetes e2e suite " + test); got != (want != "") {
			t.Errorf("%s: the focus selects it: %t", test, got)
		}
	}
}

func TestMissing(t *testing.T) {
	suite := Suite{
		Groups:  []Group{{Patterns: []*regexp.Regexp{regexp.MustCompile("^a"), regexp.MustCompile("^b")}}},
		Excused: map[string]string{"abc": "", "abcd": ""},
	}
	if got := suite.Missing([]string{"abc"}); !slices.Equal(got, []string{"^b", "abcd"}) {
		t.Errorf("got %q", got)
	}
}

// twoGroups has tests "kubelet …", and tests "pods …" that need pods.
func twoGroups() Suite {
	return Suite{
		Groups: []Group{
			{Name: "kubelets", Patterns: []*regexp.Regexp{regexp.MustCompile("^kubelet")}},
			{Name: "pods", Pods: true, Patterns: []*regexp.Regexp{regexp.MustCompile("^pods")}},
		},
		Excused: map[string]string{"kubelet 5": "no reason"},
	}
}

func TestJudge(t *testing.T) {
	control := []Result{
		{Test: "kubelet 1", State: Passed}, {Test: "kubelet 2", State: Passed}, {Test: "kubelet 3", State: Failed},
		{Test: "kubelet 4", State: Skipped}, {Test: "pods 1", State: Passed}, {Test: "else", State: Passed},
		{Test: "kubelet 5", State: Passed},
	}
	egress, names := Door{Key: "egress"}, Door{Key: "names", Names: true}
	for _, test := range []struct {
		name    string
		door    Door
		through []Result
		want    []string
	}{
		{"all well", egress, []Result{{Test: "kubelet 1", State: Passed}, {Test: "kubelet 2", State: Passed},
			{Test: "pods 1", State: Passed}}, nil},
		{"an excused failure, and a test that leaves itself out for another provider", egress, []Result{
			{Test: "kubelet 1", State: Passed}, {Test: "kubelet 1", State: Skipped}, {Test: "kubelet 2", State: Passed},
			{Test: "pods 1", State: Passed}, {Test: "kubelet 5", State: Failed}}, nil},
		{"two tests of a name, and one fails", egress, []Result{{Test: "kubelet 1", State: Failed, Message: "EOF"},
			{Test: "kubelet 1", State: Passed}, {Test: "kubelet 2", State: Passed}, {Test: "pods 1", State: Passed}},
			[]string{"kubelet 1: failed: EOF"}},
		{"no pods by names", names, []Result{{Test: "kubelet 1", State: Passed}, {Test: "kubelet 2", State: Passed}}, nil},
		{"a failure", egress, []Result{{Test: "kubelet 1", State: Passed},
			{Test: "kubelet 2", State: Failed, Message: "EOF\nstack"}, {Test: "pods 1", State: Passed}},
			[]string{"kubelet 2: failed: EOF"}},
		{"a test that leaves itself out only through the door", egress, []Result{{Test: "kubelet 1", State: Passed},
			{Test: "kubelet 2", State: Skipped, Message: "skipped - x"}, {Test: "pods 1", State: Passed}},
			[]string{"kubelet 2: skipped: skipped - x"}},
		{"a test that did not run", names, []Result{{Test: "kubelet 1", State: Passed}},
			[]string{"kubelet 2: did not run"}},
		{"nothing", names, nil, []string{"kubelet 1: did not run", "kubelet 2: did not run",
			"kubelets: no test passed, so the row proves nothing"}},
	} {
		if got := twoGroups().Judge(test.door, control, test.through); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %q, want %q", test.name, got, test.want)
		}
	}
	// A control in which nothing works must not make every door pass.
	broken := []Result{{Test: "kubelet 1", State: Failed}}
	if got := twoGroups().Judge(names, broken, broken); len(got) == 0 {
		t.Error("a control in which nothing passes is judged to be fine")
	}
}

// A door by names does not run the tests that need pods.
func TestFocusOfDoors(t *testing.T) {
	for focus, door := range map[string]Door{"kubelet|pods": {}, "kubelet": {Names: true}} {
		if got := twoGroups().Focus(door); got != focus {
			t.Errorf("%+v: got %q, want %q", door, got, focus)
		}
	}
}

func TestTable(t *testing.T) {
	exec, node := "[sig-cli] Kubectl client Simple pod should support exec", "[sig-cli] Kubectl exec should be able to "+
		"execute 1000 times in a container"
	skipped := Result{Test: "[sig-cli] Kubectl client Kubectl copy x", State: Skipped, Message: "skipped - arm64"}
	failed := Result{Test: "[sig-cli] Kubectl client Kubectl copy y", State: Failed, Message: "running /tmp/kubectl\nEOF"}
	run := Run{Version: "v1.2.3", Results: map[string][]Result{
		"control":           {{Test: exec, State: Passed}, {Test: node, State: Passed}, skipped, failed},
		"names-passthrough": {{Test: exec, State: Passed}, {Test: node, State: Failed}, skipped, failed},
		"names-terminate":   {},
		"names-relayed":     {},
		"egress-grpc":       {},
	}}
	got := FrontDoors().Table(run)
	for _, want := range []string{
		"### Kubernetes v1.2.3\n",
		"| tests | direct reach | names, passthrough | names, terminate |",
		"| `kubectl exec` | 2 of 2 | 1 of 2 | 0 of 0 |",
		"| `kubectl cp` | 0 of 1 | 0 of 1 | 0 of 0 |",
		"| admission webhooks | 0 of 0 | no way to pods | no way to pods | no way to pods | 0 of 0 | not run |\n",
		"\n- left out by the test itself: `[sig-cli] Kubectl client Kubectl copy x` (skipped - arm64)\n" +
			"- failed in the column \"direct reach\", so no other column has to pass it: " +
			"`[sig-cli] Kubectl client Kubectl copy y`\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in:\n%s", want, got)
		}
	}
	// node failed through a door only: its cell says so, and Judge does.
	if n := strings.Count(got, "\n- "); n != 2 {
		t.Errorf("%d tests are listed, want 2:\n%s", n, got)
	}
}

// The page has the rows and columns of the suites. What its cells count, only a run of make conformance knows.
func TestPage(t *testing.T) {
	page, err := os.ReadFile("../../docs/conformance.md")
	if err != nil {
		t.Fatal(err)
	}
	lines := func(text string) (tables []string) {
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, "### ") || strings.HasPrefix(line, "|") {
				tables = append(tables, regexp.MustCompile(`\b\d+ of \d+\b`).ReplaceAllString(line, "not run"))
			}
		}
		return tables
	}
	var want strings.Builder
	for _, suite := range []Suite{FrontDoors(), Services()} {
		for _, version := range Versions() {
			heading := regexp.MustCompile(`(?m)^### ` + suite.Heading + ` (v` + version + `\.\S+)$`)
			m := heading.FindStringSubmatch(string(page))
			if m == nil {
				t.Fatalf("the page has no table of %s %s", suite.Heading, version)
			}
			want.WriteString(suite.Table(Run{Version: m[1]}))
		}
	}
	if got, want := lines(string(page)), lines(want.String()); !slices.Equal(got, want) {
		t.Errorf("the tables of the page are\n%swant\n%s", strings.Join(got, ""), strings.Join(want, ""))
	}
}

func TestReplace(t *testing.T) {
	suite := FrontDoors()
	page := func(tables ...Run) string {
		all := "a\n\n"
		for _, run := range tables {
			all += suite.Table(run)
		}
		return all + "## Other tables\n\nb\n<!-- /conformance -->\nc\n"
	}
	first, second := Run{Version: "v1.34.4"}, Run{Version: "v1.36.3"}
	for _, newer := range []Run{{Version: "v1.34.5"}, {Version: "v1.36.4"}} {
		want := page(newer, second)
		if newer.Version == "v1.36.4" {
			want = page(first, newer)
		}
		if got, err := suite.Replace(page(first, second), newer); err != nil || got != want {
			t.Errorf("%s: got %q, %v", newer.Version, got, err)
		}
	}
	for _, bad := range []string{"a page without marks", page(second), "### Kubernetes v1.34.4\n"} {
		if _, err := suite.Replace(bad, first); err == nil {
			t.Errorf("a table of %q was replaced", bad)
		}
	}
}
