package test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	corev1 "k8s.io/api/core/v1"
)

// rights returns the rights in Roles and ClusterRoles, one string for each right.
func rights(objects []object) map[string]bool {
	all := make(map[string]bool)
	for _, o := range objects {
		if !strings.HasPrefix(o.name(), "tunnel-cloud") || o.kind() != "Role" && o.kind() != "ClusterRole" {
			continue
		}
		rules, _ := o["rules"].([]any)
		for _, r := range rules {
			rule := object(r.(map[string]any))
			for _, group := range rule["apiGroups"].([]any) {
				for _, resource := range rule["resources"].([]any) {
					for _, verb := range rule["verbs"].([]any) {
						all[fmt.Sprint(o.kind(), " ", group, "/", resource, rule["resourceNames"], " ", verb)] = true
					}
				}
			}
		}
	}
	return all
}

// TestRights: the rights by feature are together the rights of cloud-rbac.yaml, in kustomize and in Helm.
func TestRights(t *testing.T) {
	want := rights(readYAML(t, "../cloud-rbac.yaml"))
	if len(want) < 15 {
		t.Fatalf("cloud-rbac.yaml has only the rights %v", want)
	}
	components, err := filepath.Glob(filepath.Join(kustomizeDir, "components", "rbac-*", "rbac.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var objects []object
	for _, file := range components {
		objects = append(objects, readYAML(t, file)...)
	}
	equalRights(t, "kustomize", rights(objects), want)

	add, err := chartutil.ReadValues([]byte(`
cloud:
  config:
    join: {signer: kubernetes, ca: /etc/tunnel/secret/ca.crt}
    egress: {kubernetes: true}
    admin: {inventory: "configmap:tunnel-inventory"}
    services: {namespaces: ["*"], mirror: {ports: "20000-20999", service: tunnel-cloud-peers}}
`))
	if err != nil {
		t.Fatal(err)
	}
	text, _, err := helm(t, "tunnel-system", chartutil.CoalesceTables(add, readValues(t, "ha-terminate")))
	if err != nil {
		t.Fatal(err)
	}
	equalRights(t, "Helm", rights(parse(t, text)), want)
}

func equalRights(t *testing.T, what string, got, want map[string]bool) {
	t.Helper()
	for right := range want {
		if !got[right] {
			t.Errorf("%s lacks %s", what, right)
		}
	}
	for right := range got {
		if !want[right] {
			t.Errorf("%s has %s, and cloud-rbac.yaml has not", what, right)
		}
	}
}

// TestBindings: every binding of every overlay is to a role that exists, for an account that exists.
func TestBindings(t *testing.T) {
	for _, overlay := range overlays(t) {
		objects := kustomized(t, overlay)
		for _, o := range objects {
			if o.kind() != "RoleBinding" && o.kind() != "ClusterRoleBinding" {
				continue
			}
			if role := o.text("roleRef", "name"); !strings.HasPrefix(role, "system:") {
				find(t, objects, o.text("roleRef", "kind"), role)
			}
			for _, s := range o["subjects"].([]any) {
				subject := object(s.(map[string]any))
				if subject.kind() != "ServiceAccount" {
					continue
				}
				account := find(t, objects, "ServiceAccount", subject.text("name"))
				if account.text("metadata", "namespace") != subject.text("namespace") {
					t.Errorf("%s: %s binds an account of %s", overlay, o.key(), subject.text("namespace"))
				}
			}
		}
	}
}

// readYAML returns the objects of a file.
func readYAML(t *testing.T, file string) []object {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, string(text))
}

// appVersion returns the version of tunnel that the chart installs.
func appVersion(t *testing.T) string {
	t.Helper()
	chart, err := loader.LoadDir(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	if "v"+chart.Metadata.Version != chart.Metadata.AppVersion {
		t.Errorf("Chart.yaml has version %s and appVersion %s", chart.Metadata.Version, chart.Metadata.AppVersion)
	}
	return chart.Metadata.AppVersion
}

// TestVersions: kustomize installs the version that the chart installs, and the CoreDNS that the end-to-end tests
// build.
func TestVersions(t *testing.T) {
	version := regexp.MustCompile(`(?:tunnel:|app\.kubernetes\.io/version: )(v[\w.-]+)`)
	found := 0
	err := filepath.WalkDir(kustomizeDir, func(file string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(file)
		for _, m := range version.FindAllSubmatch(text, -1) {
			found++
			if string(m[1]) != appVersion(t) {
				t.Errorf("%s has version %s, want %s", file, m[1], appVersion(t))
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if found < 10 {
		t.Errorf("only %d versions are found", found)
	}
	mod, err := os.ReadFile("../../test/cluster/src/coredns/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	images := templates(t, kustomized(t, "ha"))
	if !slices.ContainsFunc(images, func(p corev1.PodTemplateSpec) bool {
		_, tag, _ := strings.Cut(p.Spec.Containers[0].Image, "coredns/coredns:")
		return tag != "" && strings.Contains(string(mod), "github.com/coredns/coredns v"+tag)
	}) {
		t.Error("the image of CoreDNS is not of the version that the end-to-end tests build")
	}
}
