package conf

import (
	"bytes"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
)

// commented matches a key or table of an example file that is commented out.
var commented = regexp.MustCompile(`(?m)^#(\S)`)

// TestExamples: every key in the example files exists, and every key that exists is in an example file.
func TestExamples(t *testing.T) {
	shown := make(map[string]bool)
	for _, file := range []string{"cloud.toml", "edge.toml"} {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		r := newReport(&source{file: file})
		decode(commented.ReplaceAll(data, []byte("$1")), r)
		if err := r.err(); err != nil {
			t.Errorf("%s with every key:\n%v", file, err)
		}
		for key := range r.src.lines {
			shown[key] = true
		}
	}
	var walk func(at toml.Key, ty reflect.Type)
	walk = func(at toml.Key, ty reflect.Type) {
		for f := range ty.Fields() {
			key, ft := join(at, f.Tag.Get("toml")), f.Type
			if !shown[key.String()] {
				t.Errorf("neither cloud.toml nor edge.toml shows %s", key)
			}
			if ft.Kind() == reflect.Pointer {
				ft = ft.Elem()
			}
			if ft.Kind() == reflect.Struct {
				walk(key, ft)
			}
		}
	}
	walk(nil, reflect.TypeFor[tables]())
}

// TestExamplesLoad loads the example files unchanged, with empty files in place of dev-certs' files.
func TestExamplesLoad(t *testing.T) {
	examples := make(map[string][]byte)
	for _, file := range []string{"cloud.toml", "edge.toml"} {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		examples[file] = data
	}
	t.Chdir(t.TempDir())
	for file, data := range examples {
		write(t, "conf/"+file, string(data))
		for _, path := range regexp.MustCompile(`(?m)^\w+ = "(dev/[^"]+)"`).FindAllSubmatch(data, -1) {
			write(t, "conf/"+string(path[1]), "x")
		}
		if bytes.Contains(data, []byte("\t")) || strings.Contains(string(data), " \n") {
			t.Errorf("%s has a tab or a trailing space", file)
		}
	}
	c, err := LoadCloud("conf/cloud.toml", testEnv())
	if err != nil {
		t.Fatal(err)
	}
	wantEqual(t, c.Warnings, nil)
	if !c.HTTPS.Terminates() || c.TCP[0].Node != "edge1" {
		t.Errorf("cloud.toml configures %+v", c)
	}
	e, err := LoadEdge("conf/edge.toml", Env{})
	if err != nil {
		t.Fatal(err)
	}
	wantEqual(t, e.Warnings, nil)
	if e.Node != "edge1" {
		t.Errorf("edge.toml configures %+v", e)
	}
}

// TestRules: each rule that renames a key of SuperEdge does only that, and leads to a key that exists.
func TestRules(t *testing.T) {
	for _, key := range []string{
		"mode.cloud.stream.server.grpc_port", "mode.cloud.stream.server.log_port",
		"mode.cloud.stream.server.channelz_addr",
		"mode.cloud.egress.servercert", "mode.cloud.egress.serverkey",
		"mode.edge.stream.client.server_name", "mode.edge.stream.client.log_port",
		"mode.edge.stream.client.channelz_addr",
	} {
		rule, ok := superEdgeRule(key)
		if !ok || rule.rename == "" || rule.ignore != "" || rule.refuse != "" {
			t.Errorf("%s: %+v", key, rule)
			continue
		}
		r := newReport(&source{file: "f"})
		value := `"x"`
		if strings.HasSuffix(key, "port") {
			value = "1"
		}
		decode([]byte(key+" = "+value), r)
		if err := r.err(); err != nil {
			t.Error(err)
		}
		if ws := r.warnings(); len(ws) != 1 || !strings.Contains(ws[0], rule.rename) {
			t.Errorf("%s: warnings %q", key, ws)
		}
	}
}
