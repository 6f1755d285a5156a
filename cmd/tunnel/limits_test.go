package main

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/dns"
	"tunnel.example/tunnel/pkg/egress"
	"tunnel.example/tunnel/pkg/https"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

// defaultLimits returns the defaults of both tables, as docs/limits.md writes them.
func defaultLimits() (cloud, edge map[string]string) {
	s, e, h := stream.DefaultLimits(), stream.DefaultEdgeLimits(), https.DefaultLimits()
	seconds := func(d time.Duration) string { return fmt.Sprintf("%.0f s", d.Seconds()) }
	kib := func(n int) string { return fmt.Sprintf("%d KiB", n>>10) }
	cloud = map[string]string{
		"joining":             fmt.Sprint(s.Joining),
		"joiningperaddress":   fmt.Sprint(s.JoiningPerAddress),
		"jointimeout":         seconds(s.JoinTimeout),
		"metadata":            kib(s.Metadata),
		"conns":               fmt.Sprint(s.Conns),
		"opens":               fmt.Sprint(s.Opens, " a second"),
		"dials":               fmt.Sprint(s.Dials),
		"strangers":           fmt.Sprint(h.Strangers),
		"strangersperaddress": fmt.Sprint(h.StrangersPerAddress),
		"handshaketimeout":    seconds(h.HandshakeTimeout),
		"headers":             kib(h.Headers),
		"connsperaddress":     fmt.Sprint(h.ConnsPerAddress),
		"flows":               fmt.Sprint(udp.DefaultFlows),
		"flowsperaddress":     fmt.Sprint(udp.DefaultFlowsPerAddress),
		"dns":                 fmt.Sprint(dns.DefaultConns),
		"lookups":             fmt.Sprint(dns.DefaultLookups),
		"health":              fmt.Sprint(admin.DefaultConns),
	}
	edge = map[string]string{
		"conns":  fmt.Sprint(e.Conns),
		"dials":  fmt.Sprint(e.Dials),
		"flows":  fmt.Sprint(udp.DefaultEdgeFlows),
		"health": fmt.Sprint(admin.DefaultConns),
	}
	return cloud, edge
}

// TestLimitsPage: docs/limits.md lists every key with its default, and every metric. The example
// files show the same defaults. The tests of conf check that an example file has exactly the
// keys of the table.
func TestLimitsPage(t *testing.T) {
	cloud, edge := defaultLimits()
	page := read(t, "../../docs/limits.md")
	onCloud, onEdge, ok := strings.Cut(page, "## On an edge")
	if !ok {
		t.Fatal("the page has no part for the edge")
	}
	row := regexp.MustCompile("(?m)^\\| (?:`(\\w+)`|–) \\| ([^|]+) \\| [^|]+ \\| [^|]+ \\| `(\\w+)` \\|$")
	metrics := make(map[string]bool)
	for _, part := range []struct {
		name, text, example string
		want                map[string]string
	}{
		{"mode.cloud.limits", onCloud, "../../conf/cloud.toml", cloud},
		{"mode.edge.limits", onEdge, "../../conf/edge.toml", edge},
	} {
		got := make(map[string]string)
		for _, m := range row.FindAllStringSubmatch(part.text, -1) {
			metrics[m[3]] = true
			if m[1] != "" {
				got[m[1]] = m[2]
			}
		}
		if !maps.Equal(got, part.want) {
			t.Errorf("docs/limits.md says of [%s]\n%v, and the code\n%v", part.name, got, part.want)
		}
		if shown := examples(t, part.example, part.name); !maps.Equal(shown, numbers(part.want)) {
			t.Errorf("%s shows [%s] as\n%v, and the code has\n%v", part.example, part.name, shown, numbers(part.want))
		}
	}
	var all []string
	for _, l := range tunnel.Limits() {
		all = append(all, l.String())
	}
	slices.Sort(all)
	if got := slices.Sorted(maps.Keys(metrics)); !slices.Equal(got, all) {
		t.Errorf("docs/limits.md has the metrics\n%v, and the code\n%v", got, all)
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// examples returns the keys and values of a table that an example file shows as comments.
func examples(t *testing.T, file, table string) map[string]string {
	t.Helper()
	_, text, ok := strings.Cut(read(t, file), "#["+table+"]\n")
	if !ok {
		t.Fatalf("%s has no [%s]", file, table)
	}
	text, _, _ = strings.Cut(text, "\n\n")
	shown := make(map[string]string)
	for _, m := range regexp.MustCompile(`(?m)^#(\w+) = (\d+)$`).FindAllStringSubmatch(text, -1) {
		shown[m[1]] = m[2]
	}
	return shown
}

// An edge may configure as many connections as a cloud asks for. The example shows the default.
func TestConnections(t *testing.T) {
	if conf.MaxConnections != stream.MaxConnections {
		t.Errorf("%d connections can be configured, and a cloud asks for %d", conf.MaxConnections, stream.MaxConnections)
	}
	example, err := os.ReadFile("../../conf/edge.toml")
	if err != nil {
		t.Fatal(err)
	}
	if line := fmt.Sprintf("\n#connections = %d\n", stream.DefaultConnections); !strings.Contains(string(example), line) {
		t.Errorf("conf/edge.toml does not have the line %q", line)
	}
}

// TestShownDefaults: the example of the cloud shows the defaults of packages that conf does not know.
func TestShownDefaults(t *testing.T) {
	var strategies []string
	for _, s := range egress.Strategies() {
		strategies = append(strategies, strconv.Quote(string(s)))
	}
	example := read(t, "../../conf/cloud.toml")
	for _, line := range []string{
		fmt.Sprintf("clientnames = [%q]", https.DefaultClientName),
		fmt.Sprintf("audience = %q", defaultAudience),
		fmt.Sprintf("strategies = [%s]", strings.Join(strategies, ", ")),
	} {
		if !strings.Contains(example, "\n#"+line+"\n") {
			t.Errorf("conf/cloud.toml does not have the line #%s", line)
		}
	}
}

// numbers returns limits without their units.
func numbers(limits map[string]string) map[string]string {
	only := make(map[string]string)
	for key, text := range limits {
		only[key], _, _ = strings.Cut(text, " ")
	}
	return only
}
