package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/url"
	"strings"
	"time"

	cyclonedx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/uuid"
)

// bomVersion is the version of CycloneDX that bills of materials have. Readers of 1.7 are still rare.
const bomVersion = cyclonedx.SpecVersion1_6

// addBOM writes the bill of materials of p: the modules in the binary, with their licences.
func (r *release) addBOM(p *program, docs documents) error {
	sum := sha256.Sum256(p.data)
	program := cyclonedx.Component{
		BOMRef: purl(r.module, r.version), Type: cyclonedx.ComponentTypeApplication, Name: "tunnel",
		Version: r.version, PackageURL: purl(r.module, r.version), Licenses: licences(identify(docs.license)),
		Hashes: &[]cyclonedx.Hash{{Algorithm: cyclonedx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}},
	}
	properties := []cyclonedx.Property{{Name: "cdx:gomod:build:env:GOVERSION", Value: p.info.GoVersion}}
	for _, name := range []string{"CGO_ENABLED", "GOARCH", "GOOS", "GOARM"} {
		if value := p.setting(name); value != "" {
			properties = append(properties, cyclonedx.Property{Name: "cdx:gomod:build:env:" + name, Value: value})
		}
	}
	components, refs := []cyclonedx.Component{}, []string{}
	for _, m := range p.modules {
		c, err := component(m)
		if err != nil {
			return err
		}
		components, refs = append(components, c), append(refs, c.BOMRef)
	}

	bom := cyclonedx.NewBOM()
	// The serial number is the binary's, so that two builds of one commit agree.
	bom.SerialNumber = uuid.NewSHA1(uuid.NameSpaceURL, sum[:]).URN()
	bom.Metadata = &cyclonedx.Metadata{
		Timestamp: r.time.Format(time.RFC3339), Component: &program, Properties: &properties,
	}
	bom.Components = &components
	bom.Dependencies = &[]cyclonedx.Dependency{{Ref: program.BOMRef, Dependencies: &refs}}
	var b bytes.Buffer
	encoder := cyclonedx.NewBOMEncoder(&b, cyclonedx.BOMFileFormatJSON).SetPretty(true)
	if err := encoder.EncodeVersion(bom, bomVersion); err != nil {
		return err
	}
	return r.put(r.name(p.String()+".cdx.json"), b.Bytes())
}

// component describes a module.
func component(m linked) (cyclonedx.Component, error) {
	c := cyclonedx.Component{
		BOMRef: purl(m.path, m.version), Type: cyclonedx.ComponentTypeLibrary, Name: m.path, Version: m.version,
		Scope: cyclonedx.ScopeRequired, PackageURL: purl(m.path, m.version), Licenses: licences(m.licences),
	}
	if m.path == standardLibrary {
		return c, nil
	}
	// A sum of go.sum is a SHA-256 over the list of the module's files with their sums.
	sum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.sum, "h1:"))
	if err != nil || len(sum) != sha256.Size {
		return c, fmt.Errorf("module %s %s: unexpected sum %q", m.path, m.version, m.sum)
	}
	c.Hashes = &[]cyclonedx.Hash{{Algorithm: cyclonedx.HashAlgoSHA256, Value: hex.EncodeToString(sum)}}
	return c, nil
}

// purl returns the package URL of a module: github.com/package-url/purl-spec, type golang.
func purl(path, version string) string {
	return "pkg:golang/" + strings.ToLower(path) + "@" + url.QueryEscape(version)
}

// licences lists licences by their SPDX identifiers.
func licences(ids []string) *cyclonedx.Licenses {
	list := cyclonedx.Licenses{}
	for _, id := range ids {
		list = append(list, cyclonedx.LicenseChoice{License: &cyclonedx.License{ID: id}})
	}
	return &list
}
