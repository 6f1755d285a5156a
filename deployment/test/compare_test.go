package test

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
	"github.com/google/go-cmp/cmp"
)

// What Helm's objects have, and kustomize's have not. Nothing else may differ.
var (
	helmLabels      = []string{"helm.sh/chart", "app.kubernetes.io/managed-by"}
	helmAnnotations = []string{"checksum/config"} // restarts pods after a change of their configuration
)

// TestHelmAndKustomize: the chart, with a values file of the folder ci, makes the objects of the overlay of the
// same name. Helm makes no Namespace: the user creates it, or helm install --create-namespace does.
func TestHelmAndKustomize(t *testing.T) {
	for _, overlay := range overlays(t) {
		t.Run(overlay, func(t *testing.T) {
			objects := kustomized(t, overlay)
			namespace := namespaceOf(t, objects)
			objects = slices.DeleteFunc(objects, func(o object) bool { return o.kind() == "Namespace" })
			text, notes, err := helm(t, namespace.name(), readValues(t, overlay))
			if err != nil {
				t.Fatal(err)
			}
			if strings.TrimSpace(notes) == "" {
				t.Error("there are no notes")
			}
			want, got := byKey(t, objects), byKey(t, parse(t, text))
			if len(want) < 3 {
				t.Fatalf("the overlay has only %d objects", len(want))
			}
			for _, o := range want {
				joinLines(o)
				parseTOML(t, o)
				sortLists(o)
			}
			for _, o := range got {
				parseTOML(t, o)
				sortLists(o)
				withoutHelm(o)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("kustomize (-) and Helm (+) differ:\n%s", diff)
			}
		})
	}
}

// TestEveryOverlayHasValues: no values file of the folder ci is without its overlay.
func TestEveryOverlayHasValues(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(chartDir, "ci", "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	all := overlays(t)
	for _, file := range files {
		if name := strings.TrimSuffix(filepath.Base(file), ".yaml"); !slices.Contains(all, name) {
			t.Errorf("%s has no overlay", file)
		}
	}
}

// joinLines removes the line breaks that kustomize puts into the base64 of a Secret.
func joinLines(o object) {
	data, ok := o["data"].(map[string]any)
	if !ok || o.kind() != "Secret" {
		return
	}
	for name, value := range data {
		data[name] = strings.ReplaceAll(fmt.Sprint(value), "\n", "")
	}
}

// withoutHelm removes the labels and annotations of Helm from an object and from its pod template.
func withoutHelm(o object) {
	for _, path := range [][]string{{"metadata"}, {"spec", "template", "metadata"}} {
		metadata, ok := o.at(path...).(map[string]any)
		if !ok {
			continue
		}
		remove(metadata, "labels", helmLabels)
		remove(metadata, "annotations", helmAnnotations)
	}
}

// remove deletes keys of a map in metadata, and the map itself if nothing is left.
func remove(metadata map[string]any, field string, keys []string) {
	m, ok := metadata[field].(map[string]any)
	if !ok {
		return
	}
	for _, key := range keys {
		delete(m, key)
	}
	if len(m) == 0 {
		delete(metadata, field)
	}
}

// sortLists sorts volumes, mounts and variables of a pod template by name: their order means nothing here, and
// kustomize puts the entries of components first.
func sortLists(o object) {
	spec, ok := o.at("spec", "template", "spec").(map[string]any)
	if !ok {
		return
	}
	sortByName(spec["volumes"])
	for _, kind := range []string{"initContainers", "containers"} {
		containers, _ := spec[kind].([]any)
		for _, c := range containers {
			sortByName(c.(map[string]any)["volumeMounts"])
			sortByName(c.(map[string]any)["env"])
		}
	}
}

func sortByName(list any) {
	all, _ := list.([]any)
	slices.SortFunc(all, func(a, b any) int {
		return strings.Compare(fmt.Sprint(a.(map[string]any)["name"]), fmt.Sprint(b.(map[string]any)["name"]))
	})
}

// parseTOML replaces each TOML file of a ConfigMap by its content, since comments and order may differ.
func parseTOML(t *testing.T, o object) {
	t.Helper()
	data, ok := o["data"].(map[string]any)
	if !ok || o.kind() != "ConfigMap" {
		return
	}
	for name, value := range data {
		text, ok := value.(string)
		if !ok || filepath.Ext(name) != ".toml" {
			continue
		}
		var content map[string]any
		if _, err := toml.Decode(text, &content); err != nil {
			t.Fatalf("%s of %s: %v\n%s", name, o.key(), err, text)
		}
		data[name] = content
	}
}
