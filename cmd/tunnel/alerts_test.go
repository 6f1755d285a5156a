package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// scrapeLabels are the labels that Prometheus adds to every metric of a target.
var scrapeLabels = []string{"namespace", "pod", "instance"}

var (
	metricInExpr  = regexp.MustCompile(`\b((?:tunnel|process)_[a-z_]+)(?:\{([^}]*)\})?`)
	matcherInExpr = regexp.MustCompile(`(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"`)
	groupingInExp = regexp.MustCompile(`\b(by|on|without|ignoring)\s*\(([^)]*)\)\s*`)
	labelInLegend = regexp.MustCompile(`\{\{\s*(\w+)\s*\}\}`)
)

// faults returns what an expression of PromQL names and known does not have: a metric, a label of a metric, or the
// value of a label.
func faults(known map[string]*metric, expr string) (all []string) {
	has := func(name, label string) bool {
		m := known[strings.TrimSuffix(name, "_bucket")]
		return slices.Contains(scrapeLabels, label) || m != nil && m.labels[label] != nil
	}
	found := metricInExpr.FindAllStringSubmatchIndex(expr, -1)
	if found == nil {
		all = append(all, "there is no metric")
	}
	part := func(m []int, n int) string {
		if m[2*n] < 0 {
			return ""
		}
		return expr[m[2*n]:m[2*n+1]]
	}
	for _, at := range found {
		name := part(at, 1)
		m := known[strings.TrimSuffix(name, "_bucket")]
		if strings.HasPrefix(name, "process_") {
			m = new(metric) // of the client library, without labels
		}
		if m == nil {
			all = append(all, name+" does not exist")
			continue
		}
		for _, matcher := range matcherInExpr.FindAllStringSubmatch(part(at, 2), -1) {
			label, op, want := matcher[1], matcher[2], matcher[3]
			switch values := m.labels[label]; {
			case slices.Contains(scrapeLabels, label):
			case values == nil:
				all = append(all, name+" has no label "+label)
			case op == "=" || op == "!=":
				if !slices.Contains(values, want) {
					all = append(all, name+" has no "+label+" "+want)
				}
			default: // each alternative has a value
				for alternative := range strings.SplitSeq(want, "|") {
					pattern, err := regexp.Compile("^(?:" + alternative + ")$")
					if err != nil || !slices.ContainsFunc(values, pattern.MatchString) {
						all = append(all, name+" has no "+label+" like "+alternative)
					}
				}
			}
		}
	}
	for _, at := range groupingInExp.FindAllStringSubmatchIndex(expr, -1) {
		from, to := 0, len(expr) // on, ignoring: the metrics of the whole expression
		if word := part(at, 1); word == "by" || word == "without" {
			if from = at[1]; from == len(expr) || expr[from] != '(' {
				all = append(all, word+" does not stand before its group")
				continue
			}
			to = from + group(expr[from:])
		}
		for label := range strings.SplitSeq(part(at, 2), ",") {
			for _, metric := range found {
				inside := metric[0] >= from && metric[1] <= to
				label, name := strings.TrimSpace(label), part(metric, 1)
				if inside && !has(name, label) {
					all = append(all, name+" has no label "+label+" to group by")
				}
			}
		}
	}
	return all
}

// group returns the length of the group in parentheses at the start of expr.
func group(expr string) int {
	depth := 0
	for i, c := range expr {
		switch c {
		case '(':
			depth++
		case ')':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return len(expr)
}

// What the comparison with the metrics finds.
func TestFaults(t *testing.T) {
	known := map[string]*metric{
		"tunnel_nodes":       {labels: map[string][]string{"state": {"connected", "missing"}}},
		"tunnel_door_second": {labels: map[string][]string{"door": {"tcp"}, "le": {"1"}}},
	}
	for expr, want := range map[string]string{
		`max by (namespace, state) (tunnel_nodes{state="missing"}) > 0`:        "",
		`sum(tunnel_nodes{namespace=~"$namespace",state=~"connected|miss.*"})`: "",
		`sum by (door, le) (rate(tunnel_door_second_bucket[5m]))`:              "",
		`process_open_fds and on (instance) tunnel_nodes`:                      "",
		`1 > 0`:                                  "there is no metric",
		`tunnel_node`:                            "tunnel_node does not exist",
		`tunnel_nodes{state="mising"}`:           "tunnel_nodes has no state mising",
		`tunnel_nodes{state!="mising"}`:          "tunnel_nodes has no state mising",
		`tunnel_nodes{state=~"missing|con"}`:     "tunnel_nodes has no state like con",
		`tunnel_nodes{states=~".*"}`:             "tunnel_nodes has no label states",
		`sum by (door) (tunnel_nodes)`:           "tunnel_nodes has no label door to group by",
		`sum by (state) (a(tunnel_door_second))`: "tunnel_door_second has no label state to group by",
		`sum(tunnel_nodes) by (state)`:           "by does not stand before its group",
		`process_open_fds and on (x) tunnel_nodes`: "process_open_fds has no label x to group by; " +
			"tunnel_nodes has no label x to group by",
	} {
		if got := strings.Join(faults(known, expr), "; "); got != want {
			t.Errorf("%s: %q, want %q", expr, got, want)
		}
	}
}

// A replica counts connected and missing nodes of all replicas, and the other states by what it holds itself.
var overReplicas = regexp.MustCompile(`\b(max|sum)(?: by \([^)]*\))?\s*\((tunnel_node\w*)\{[^}]*\bstate=~?"([^"]*)"`)

// Every metric that an alert or the dashboard names is one of ours, with the suffix of its kind, with its labels and
// their values. Every alert names the page that explains it. The test of the manifests compares the chart's alerts with
// these.
func TestAlertsAndDashboard(t *testing.T) {
	deployment := filepath.Join(workingDir(t), "../../deployment")
	known := everyMetric(t)
	check := func(where, expr string) {
		t.Helper()
		for _, fault := range faults(known, expr) {
			t.Errorf("%s: %s: %s", where, fault, expr)
		}
		for _, m := range overReplicas.FindAllStringSubmatch(expr, -1) {
			want := "max"
			if m[2] == "tunnel_node_certificates" || m[3] == "flapping" {
				want = "sum"
			}
			if m[1] != want {
				t.Errorf("%s: the %s over replicas, want the %s: %s", where, m[1], want, expr)
			}
		}
	}
	read := func(file string, v any) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(deployment, file))
		if err == nil && filepath.Ext(file) == ".json" {
			err = json.Unmarshal(text, v)
		} else if err == nil {
			err = yaml.Unmarshal(text, v)
		}
		if err != nil {
			t.Fatal(err)
		}
	}

	var rule struct {
		Spec struct {
			Groups []struct {
				Rules []struct {
					Alert, Expr string
					Labels      struct{ Severity string }
					Annotations struct{ Summary, Page string }
				}
			}
		}
	}
	read("kustomize/components/alerts/prometheusrule.yaml", &rule)
	alerts := make(map[string]bool)
	page, err := os.ReadFile(filepath.Join(deployment, "..", "docs", "troubleshooting.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, group := range rule.Spec.Groups {
		for _, r := range group.Rules {
			check(r.Alert, r.Expr)
			severe := r.Labels.Severity == "warning" || r.Labels.Severity == "critical"
			if alerts[r.Alert] || r.Annotations.Summary == "" || !severe {
				t.Errorf("the alert %q is there twice, or lacks a summary or a severity", r.Alert)
			}
			if r.Annotations.Page != "docs/troubleshooting.md#alerts" {
				t.Errorf("%s: the page is %q", r.Alert, r.Annotations.Page)
			}
			if row := "\n| `" + r.Alert + "` | "; !strings.Contains(string(page), row) {
				t.Errorf("docs/troubleshooting.md has no row for the alert %s", r.Alert)
			}
			alerts[r.Alert] = true
			// Edges renew short-lived certificates: three days before the end are no fault of theirs, nor of a cloud's own
			// certificate with a life of a week.
			if r.Alert == "TunnelCertificateExpires" && (!strings.Contains(r.Expr, `{use=~"mode[.]cloud.*"}`) ||
				!strings.Contains(r.Expr, "tunnel_certificate_start_timestamp_seconds")) {
				t.Errorf("%s takes certificates of edges, or does not compare with the life of a certificate", r.Alert)
			}
		}
	}
	if len(alerts) < 15 {
		t.Errorf("%d alerts", len(alerts))
	}

	var dashboard struct {
		Templating struct {
			List []struct{ Name, AllValue string }
		}
		Panels []struct {
			Title   string
			Targets []struct{ Expr, LegendFormat string }
		}
	}
	read("grafana/tunnel.json", &dashboard)
	// Edges have some of these metrics, too: of all namespaces, only those with a cloud count.
	for _, v := range dashboard.Templating.List {
		if v.AllValue != "" {
			t.Errorf("all of %s is %s, also what is no cloud's", v.Name, v.AllValue)
		}
	}
	if len(dashboard.Panels) < 10 {
		t.Errorf("the dashboard has %d panels", len(dashboard.Panels))
	}
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			check(p.Title, target.Expr)
			for _, label := range labelInLegend.FindAllStringSubmatch(target.LegendFormat, -1) {
				check(p.Title+", its legend", "on ("+label[1]+") "+target.Expr)
			}
		}
	}
}
