package test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// TestOwnOverlay: the overlay of the user's own that README.md shows works: it changes the image of every pod of
// tunnel, and the configuration.
func TestOwnOverlay(t *testing.T) {
	page, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	example := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindSubmatch(page)
	if example == nil {
		t.Fatal("README.md shows no overlay")
	}
	dir := filepath.Join(t.TempDir(), "mine")
	deployment, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	// kustomize refuses absolute paths.
	relative, err := filepath.Rel(dir, deployment)
	if err != nil {
		t.Fatal(err)
	}
	overlay := strings.Replace(string(example[1]), "../tunnel/deployment", relative, 1)
	write(t, filepath.Join(dir, "kustomization.yaml"), overlay)
	write(t, filepath.Join(dir, "cloud.toml"), "# mine\n")
	resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		t.Fatalf("%v\n%s", err, overlay)
	}
	text, err := resources.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	objects := parse(t, string(text))
	changed := 0
	for _, pod := range templates(t, objects) {
		if pod.Labels["app.kubernetes.io/component"] == "coredns" {
			continue
		}
		changed++
		if got := pod.Spec.Containers[0].Image; got != "registry.example.com/tunnel:"+appVersion(t) {
			t.Errorf("a pod has the image %s", got)
		}
		for _, v := range pod.Spec.Volumes {
			if v.Name != "config" {
				continue
			}
			if got := find(t, objects, "ConfigMap", v.ConfigMap.Name).text("data", "cloud.toml"); got != "# mine\n" {
				t.Errorf("the pod mounts the configuration %q", got)
			}
		}
	}
	if changed < 2 {
		t.Errorf("%d pods run tunnel, want the cloud and the Job", changed)
	}
}
