package test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

const (
	kustomizeDir = "../kustomize"
	chartDir     = "../helm/tunnel"
)

// An object is an object of Kubernetes, as it is in YAML.
type object map[string]any

// at returns the value at a path of maps; nil if there is none.
func (o object) at(path ...string) any {
	var v any = map[string]any(o)
	for _, key := range path {
		m, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = m[key]
	}
	return v
}

// text returns the string at a path; "" if there is none.
func (o object) text(path ...string) string {
	s, _ := o.at(path...).(string)
	return s
}

func (o object) kind() string { return o.text("kind") }
func (o object) name() string { return o.text("metadata", "name") }

// key tells the objects of a cluster apart.
func (o object) key() string {
	return strings.Join([]string{o.text("apiVersion"), o.kind(), o.text("metadata", "namespace"), o.name()}, "/")
}

// overlays returns the names of the kustomize overlays.
func overlays(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(kustomizeDir, "overlays"))
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	if len(all) < 7 {
		t.Fatalf("only the overlays %q are found", all)
	}
	return all
}

// kustomized returns the objects of an overlay.
func kustomized(t *testing.T, overlay string) []object {
	t.Helper()
	resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).
		Run(filesys.MakeFsOnDisk(), filepath.Join(kustomizeDir, "overlays", overlay))
	if err != nil {
		t.Fatal(err)
	}
	text, err := resources.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, string(text))
}

// namespaceOf returns the namespace of an overlay.
func namespaceOf(t *testing.T, objects []object) object {
	t.Helper()
	var found []object
	for _, o := range objects {
		if o.kind() == "Namespace" {
			found = append(found, o)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d Namespaces, want one", len(found))
	}
	return found[0]
}

// ciFile returns the values file for the same installation as an overlay.
func ciFile(overlay string) string { return filepath.Join(chartDir, "ci", overlay+".yaml") }

// readValues reads a values file of the folder ci.
func readValues(t *testing.T, overlay string) chartutil.Values {
	t.Helper()
	values, err := chartutil.ReadValuesFile(ciFile(overlay))
	if err != nil {
		t.Fatal(err)
	}
	return values
}

// helm renders the chart as helm template does. It returns the objects as YAML, and the notes.
func helm(t *testing.T, namespace string, values map[string]any) (manifests, notes string, err error) {
	t.Helper()
	chart, err := loader.LoadDir(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	release := chartutil.ReleaseOptions{Name: "tunnel", Namespace: namespace, Revision: 1, IsInstall: true}
	render, err := chartutil.ToRenderValues(chart, values, release, chartutil.DefaultCapabilities)
	if err != nil {
		return "", "", err
	}
	files, err := engine.Render(chart, render)
	if err != nil {
		return "", "", err
	}
	var all strings.Builder
	for name, text := range files {
		if strings.HasSuffix(name, "NOTES.txt") {
			notes = text
			continue
		}
		if strings.HasSuffix(name, ".yaml") {
			fmt.Fprintf(&all, "---\n%s\n", text)
		}
	}
	return all.String(), notes, nil
}

// parse returns the objects of a YAML text with several documents.
func parse(t *testing.T, text string) []object {
	t.Helper()
	documents := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
	var all []object
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		var o object
		if err := yaml.UnmarshalStrict(document, &o); err != nil {
			t.Fatalf("%v in:\n%s", err, document)
		}
		if len(o) > 0 { // else the document holds comments only
			all = append(all, o)
		}
	}
}

// byKey returns objects by their key. No two objects may have the same key.
func byKey(t *testing.T, objects []object) map[string]object {
	t.Helper()
	all := make(map[string]object)
	for _, o := range objects {
		if all[o.key()] != nil {
			t.Errorf("%s is there twice", o.key())
		}
		all[o.key()] = o
	}
	return all
}

// find returns the object of a kind and a name.
func find(t *testing.T, objects []object, kind, name string) object {
	t.Helper()
	for _, o := range objects {
		if o.kind() == kind && o.name() == name {
			return o
		}
	}
	t.Fatalf("there is no %s %s", kind, name)
	return nil
}
