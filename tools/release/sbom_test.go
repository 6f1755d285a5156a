package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	cyclonedx "github.com/CycloneDX/cyclonedx-go"
	"github.com/xeipuuv/gojsonschema"
)

// linkedInto returns the modules that the binary of a release names, as path@version, sorted.
func linkedInto(t *testing.T, e example) (modules []string) {
	t.Helper()
	program := dataOf(t, archived(t, e), "tunnel_v0.1.0_linux_amd64/tunnel")
	info, err := buildinfo.Read(bytes.NewReader(program))
	if err != nil {
		t.Fatal(err)
	}
	for _, dep := range info.Deps {
		modules = append(modules, dep.Path+"@"+dep.Version)
	}
	slices.Sort(modules)
	if len(modules) < 20 {
		t.Fatalf("the binary names %d modules only", len(modules))
	}
	return modules
}

func TestBOM(t *testing.T) {
	e := amd64(t)
	text := read(t, e.dir, "tunnel_v0.1.0_linux_amd64.cdx.json")
	checkSchema(t, text)
	var bom cyclonedx.BOM
	if err := json.Unmarshal(text, &bom); err != nil {
		t.Fatal(err)
	}
	if bom.Metadata.Timestamp != "2001-09-09T01:46:40Z" || bom.Metadata.Component.Version != "v0.1.0" {
		t.Errorf("metadata %+v", bom.Metadata)
	}
	var got []string
	for _, c := range *bom.Components {
		if c.Licenses == nil || len(*c.Licenses) == 0 {
			t.Errorf("%s has no licence", c.Name)
		}
		if c.Name != standardLibrary {
			got = append(got, c.Name+"@"+c.Version)
		}
	}
	slices.Sort(got)
	if want := linkedInto(t, e); !slices.Equal(got, want) {
		t.Errorf("components\n%q, want\n%q", got, want)
	}
	if first := (*bom.Components)[0]; first.Name != standardLibrary || !strings.HasPrefix(first.Version, "go1.") {
		t.Errorf("first component: %s %s, want the standard library", first.Name, first.Version)
	}
	if refs := (*bom.Dependencies)[0].Dependencies; len(*refs) != len(*bom.Components) {
		t.Errorf("tunnel depends on %d of %d components", len(*refs), len(*bom.Components))
	}
}

// checkSchema checks that a bill of materials follows CycloneDX's own schema. Among other things, the schema lists
// the identifiers of licences.
func checkSchema(t *testing.T, bom []byte) {
	t.Helper()
	dir := strings.TrimSpace(tool(t, ".", "go", "list", "-m", "-f", "{{.Dir}}", "github.com/CycloneDX/cyclonedx-go"))
	loader := gojsonschema.NewSchemaLoader()
	for _, name := range []string{"spdx.schema.json", "jsf-0.82.schemax.json"} {
		if err := loader.AddSchemas(gojsonschema.NewBytesLoader(read(t, dir, "schema", name))); err != nil {
			t.Fatal(err)
		}
	}
	own := read(t, dir, "schema", "bom-"+bomVersion.String()+".schema.json")
	schema, err := loader.Compile(gojsonschema.NewBytesLoader(own))
	if err != nil {
		t.Fatal(err)
	}
	result, err := schema.Validate(gojsonschema.NewBytesLoader(bom))
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range result.Errors() {
		t.Error(problem)
	}
	wrong := bytes.ReplaceAll(bom, []byte(`"Apache-2.0"`), []byte(`"Apache-2"`))
	broken, err := schema.Validate(gojsonschema.NewBytesLoader(wrong))
	if err != nil || broken.Valid() {
		t.Errorf("the schema permits a licence that is none: %v", err)
	}
}

func TestPurl(t *testing.T) {
	for _, test := range [][3]string{
		{"github.com/BurntSushi/toml", "v1.6.0", "pkg:golang/github.com/burntsushi/toml@v1.6.0"},
		{"example.org/x", "v2.0.0+incompatible", "pkg:golang/example.org/x@v2.0.0%2Bincompatible"},
	} {
		if got := purl(test[0], test[1]); got != test[2] {
			t.Errorf("got %s, want %s", got, test[2])
		}
	}
	if _, err := component(linked{path: "example.org/x", version: "v1.0.0", sum: "h1:short="}); err == nil {
		t.Error("a module without a sum is no error")
	}
}

func TestNotices(t *testing.T) {
	e := amd64(t)
	notices := string(dataOf(t, archived(t, e), "tunnel_v0.1.0_linux_amd64/NOTICES"))
	for _, module := range linkedInto(t, e) {
		path, version, _ := strings.Cut(module, "@")
		_, section, found := strings.Cut(notices, "\n"+path+" "+version+": ")
		section, _, _ = strings.Cut(section, strings.Repeat("=", 80))
		if !found || len(strings.Split(section, "\n")) < 3 {
			t.Errorf("no notice of %s: %q", module, section)
		}
	}
	for _, text := range []string{
		"\nThe Go standard library go1.", "Copyright (c) 2013 TOML authors", "Apache License",
		"Redistribution and use in source and binary forms",
	} {
		if !strings.Contains(notices, text) {
			t.Errorf("the notices lack %q", text)
		}
	}
}

const mit = `MIT License

Copyright (c) 2020 Somebody

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
`

func TestLicencesOfAModule(t *testing.T) {
	root := t.TempDir()
	goroot := strings.TrimSpace(tool(t, ".", "go", "env", "GOROOT"))
	patents := string(read(t, goroot, "PATENTS")) // licensecheck knows its text, but it is no licence of SPDX
	if len(identify([]byte(patents))) == 0 {
		t.Fatal("licensecheck does not know the text")
	}
	for name, text := range map[string]string{
		"LICENSE-MIT":       mit,
		"NOTICE.txt":        "This holds code by others.\n",
		"PATENTS":           patents,
		"README":            mit,
		"licence.go":        "package licence\n",
		"unused/LICENSE":    mit,
		"used/deep/COPYING": strings.Replace(mit, "Somebody", "Another", 1),
	} {
		write(t, root, name, text)
	}
	m := linked{path: "example.org/x", version: "v1.0.0"}
	if err := m.readTexts(root, []string{filepath.Join(root, "used", "deep", "er"), root}); err == nil {
		t.Error("a package without a folder is no error")
	}
	write(t, root, "used/deep/er/x.go", "package er\n")
	m = linked{path: "example.org/x", version: "v1.0.0"}
	if err := m.readTexts(root, []string{filepath.Join(root, "used", "deep", "er"), root}); err != nil {
		t.Fatal(err)
	}
	want := []string{"LICENSE-MIT", "NOTICE.txt", "PATENTS", "used/deep/COPYING"}
	if got := names(t, m.texts); !slices.Equal(got, want) {
		t.Errorf("texts %q, want %q", got, want)
	}
	if !slices.Equal(m.licences, []string{"MIT"}) {
		t.Errorf("licences %q", m.licences)
	}
}

func TestModuleWithoutLicence(t *testing.T) {
	root := t.TempDir()
	write(t, root, "x.go", "package x\n")
	write(t, root, "LICENSE", "All rights reserved. Ask us.\n")
	m := linked{path: "example.org/x", version: "v1.0.0"}
	wantError(t, m.readTexts(root, []string{root}), "example.org/x v1.0.0", "no known licence")
}

func TestNoticesRepeatNoText(t *testing.T) {
	r := small(t)
	p := fakeProgram("linux", "amd64")
	p.modules = []linked{
		{path: standardLibrary, version: "go1.26", texts: []file{{name: "LICENSE", data: []byte(mit)}}},
		{path: "example.org/x", version: "v1.0.0", texts: []file{{name: "COPYING", data: []byte(mit)}}},
	}
	got := string(r.noticesOf(p))
	if n := strings.Count(got, "Permission is hereby granted"); n != 1 {
		t.Errorf("the text is there %d times", n)
	}
	if want := "COPYING: the same text as LICENSE of The Go standard library\n"; !strings.Contains(got, want) {
		t.Errorf("the notices lack %q:\n%s", want, got)
	}
}
