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

// Every metric that an alert or the dashboard names is one of ours, with the suffix of its kind; every page that an
// alert names exists. The test of the manifests compares the chart's alerts with these.
func TestAlertsAndDashboard(t *testing.T) {
	known := metricsInCode(t)
	inText := regexp.MustCompile(`\btunnel_[a-z_]+`)
	check := func(where, expr string) {
		t.Helper()
		names := inText.FindAllString(expr, -1)
		if len(names) == 0 && !strings.Contains(expr, "process_") && !strings.HasPrefix(expr, "label_values") {
			t.Errorf("%s names no metric: %s", where, expr)
		}
		for _, name := range names {
			if !slices.Contains(known, strings.TrimSuffix(name, "_bucket")) {
				t.Errorf("%s names %s, which does not exist", where, name)
			}
		}
	}
	read := func(file string, v any) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join("../../deployment", file))
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
	for _, group := range rule.Spec.Groups {
		for _, r := range group.Rules {
			check(r.Alert, r.Expr)
			severe := r.Labels.Severity == "warning" || r.Labels.Severity == "critical"
			if alerts[r.Alert] || r.Annotations.Summary == "" || !severe {
				t.Errorf("the alert %q is there twice, or lacks a summary or a severity", r.Alert)
			}
			if _, err := os.Stat(filepath.Join("../..", r.Annotations.Page)); err != nil {
				t.Errorf("%s: %v", r.Alert, err)
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
			Targets []struct{ Expr string }
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
		}
	}
}
