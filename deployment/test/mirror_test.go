package test

import (
	"fmt"
	"slices"
	"testing"

	"helm.sh/helm/v3/pkg/chartutil"
)

// With cloud.config.services.mirror, the chart writes the table and its rights, and pods reach the ports of twins.
// Without it, the cloud has no right to change Services.
func TestMirror(t *testing.T) {
	for values, on := range map[string]bool{
		"cloud: {}": false,
		`cloud: {config: {egress: {kubernetes: true},
			services: {mirror: {ports: "20000-20999", service: tunnel-cloud-peers}}}}`: true,
	} {
		add, err := chartutil.ReadValues([]byte(values))
		if err != nil {
			t.Fatal(err)
		}
		text, _, err := helm(t, "tunnel-system", chartutil.CoalesceTables(add, readValues(t, "ha-services")))
		if err != nil {
			t.Fatal(err)
		}
		objects := parse(t, text)
		if got := rights(objects)["ClusterRole /services<nil> patch"]; got != on {
			t.Errorf("%s: the right to change Services is %t", values, got)
		}
		opened := slices.ContainsFunc(find(t, objects, "NetworkPolicy", "tunnel-cloud").at("spec", "ingress").([]any),
			func(rule any) bool {
				port := rule.(map[string]any)["ports"].([]any)[0].(map[string]any)
				return fmt.Sprint(port["port"]) == "20000" && fmt.Sprint(port["endPort"]) == "20999"
			})
		if opened != on {
			t.Errorf("%s: the ports of twins are open: %t", values, opened)
		}
		config := find(t, objects, "ConfigMap", "tunnel-cloud")
		parseTOML(t, config)
		got := config.at("data", "cloud.toml", "mode", "cloud", "services", "mirror", "service")
		if on && got != "tunnel-cloud-peers" {
			t.Errorf("%s: service is %v", values, got)
		}
	}
}
