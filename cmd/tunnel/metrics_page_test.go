package main

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
)

// docs/metrics.md is made from what /metrics of a cloud and of an edge answers, in several configurations.

// metric is a family of /metrics.
type metric struct {
	name, kind, help string
	labels           map[string][]string // each label's values
}

var (
	commentLine = regexp.MustCompile(`^# (HELP|TYPE) (\w+) (.*)$`)
	sampleLine  = regexp.MustCompile(`^(\w+?)(?:\{(.*)\})? \S+$`)
	labelPair   = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)
)

// readMetrics parses the text format of Prometheus. It skips the metrics of the Go runtime and of the
// process.
func readMetrics(t *testing.T, text io.Reader) map[string]*metric {
	t.Helper()
	all := make(map[string]*metric)
	var last *metric // a family's samples follow its HELP and TYPE
	lines := bufio.NewScanner(text)
	for lines.Scan() {
		comment, sample := commentLine.FindStringSubmatch(lines.Text()), sampleLine.FindStringSubmatch(lines.Text())
		switch {
		case comment != nil && comment[1] == "HELP":
			last = &metric{name: comment[2], help: comment[3], labels: make(map[string][]string)}
			if !strings.HasPrefix(last.name, "go_") && !strings.HasPrefix(last.name, "process_") {
				all[last.name] = last
			}
		case comment != nil:
			last.kind = comment[3]
		case sample != nil:
			for _, pair := range labelPair.FindAllStringSubmatch(sample[2], -1) {
				if values := last.labels[pair[1]]; !slices.Contains(values, pair[2]) {
					last.labels[pair[1]] = append(values, pair[2])
				}
			}
		default:
			t.Fatalf("/metrics has the line %q", lines.Text())
		}
	}
	return all
}

// serve runs health and metrics of a daemon, and returns its metrics. The daemon has an admin socket.
func serve(t *testing.T, d *daemon) map[string]*metric {
	t.Helper()
	d.level = new(slog.LevelVar)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1) // one error is sent
	go func() { ended <- d.observe(ctx) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", d.socket)
	}
	client := &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	var answer *http.Response
	testkit.Within(t, 10*time.Second, "the admin socket answers", func() (err error) {
		answer, err = client.Get("http://admin/metrics")
		return err
	})
	defer answer.Body.Close()
	return readMetrics(t, answer.Body)
}

// metricFiles makes the files that the configurations of this test name, and makes their folder the working
// directory.
func metricFiles(t *testing.T) {
	t.Helper()
	ca := testca.New(t, "ca")
	cert, key, err := ca.Issue(auth.Leaf{
		CommonName: "tunnel", DNSNames: []string{"tunnel"}, Server: true, Client: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	for name, content := range map[string]string{
		"ca": string(ca.CertPEM()), "cert": string(cert), "key": string(key), "cakey": string(ca.KeyPEM()),
		"tokens": "edge1:0123456789abcdef\n", "token": "0123456789abcdef\n", "kubeconfig": kubeconfig,
	} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("KUBECONFIG", "kubeconfig")
}

const plainCloud = `
[mode.cloud.admin]
socket = "cloud.sock"
[mode.cloud.stream.server]
grpcport = 9000
cert = "cert"
key = "key"
tokenfile = "tokens"
`

const plainEdge = `
[mode.edge]
node = "edge1"
[mode.edge.admin]
socket = "edge.sock"
[mode.edge.stream.client]
servername = "127.0.0.1:9000"
dns = "tunnel"
cert = "ca"
tokenfile = "token"
`

const plainEgress = `
[mode.cloud.egress]
grpc = ["unix:///run/tunnel/egress.sock"]
`

const plainDNS = `
[mode.cloud.stream.dns]
configmap = "tunnel-nodes"
`

// feature is a part of a cloud that has metrics of its own.
type feature struct{ title, condition, toml string }

// features are in the order of the page.
func features() []feature {
	return []feature{
		{"The audit", "A cloud has this metric if `file` in `[mode.cloud.audit]` is set.", `
[mode.cloud.audit]
file = "audit.json"
`},
		{"Traces", "A cloud has these metrics if `endpoint` in `[mode.cloud.traces]` is set, and an edge if `endpoint` in " +
			"`[mode.edge.traces]` is set.", `
[mode.cloud.traces]
endpoint = "http://collector:4318"
permillion = 10000
`},
		{"Other replicas", "A cloud has these metrics if `[mode.cloud.stream.peers]` names other replicas.", `
[mode.cloud.stream.peers]
service = "tunnel-cloud-peers:9000"
ca = "ca"
servername = "tunnel"
`},
		{"DNS: the ConfigMap", "A cloud has these metrics if `configmap` in `[mode.cloud.stream.dns]` is set. " +
			"Every replica has them.\nOn a replica that does not write, the gauges are 0.", plainDNS},
		{"DNS: the mounted file", "A cloud has these metrics if `hosts` in `[mode.cloud.stream.dns]` is set.",
			plainDNS + "hosts = \"hosts\"\n"},
		{"DNS: the responder", "A cloud has these metrics if `listen` in `[mode.cloud.stream.dns]` is set. " +
			"An edge has them if `dns` in `[mode.edge.services]` is set.", `
[mode.cloud.stream.dns]
listen = "127.0.0.1:5353"
`},
		{"Egress", "A cloud has these metrics if `grpc` or `httpconnect` in `[mode.cloud.egress]` is set, " +
			"or if it has the table `[mode.cloud.services.mirror]`.",
			plainEgress},
		{"Egress with Kubernetes", "A cloud has this metric if `kubernetes` in `[mode.cloud.egress]` is true.",
			plainEgress + "kubernetes = true\n"},
		{"Egress under Konnectivity's names",
			"A cloud has these metrics if `konnectivitymetrics` in `[mode.cloud.egress]` is true.",
			plainEgress + "konnectivitymetrics = true\n"},
		{"Services", "A cloud has these metrics if it has the table `[mode.cloud.services]`.", "[mode.cloud.services]\n"},
	}
}

// cloudMetrics returns the metrics of a cloud.
func cloudMetrics(t *testing.T, text string) map[string]*metric {
	t.Helper()
	if err := os.WriteFile("cloud.toml", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := conf.LoadCloud("cloud.toml", conf.Env{
		HostName: "cloud", PodIP: "10.0.0.1", PodName: "cloud-1", PodNamespace: "tunnel-system",
	})
	if err != nil {
		t.Fatal(err)
	}
	d, err := newCloud(c, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, d)
}

// edgeMetrics returns the metrics of an edge.
func edgeMetrics(t *testing.T, text string) map[string]*metric {
	t.Helper()
	if err := os.WriteFile("edge.toml", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	e, err := conf.LoadEdge("edge.toml", conf.Env{})
	if err != nil {
		t.Fatal(err)
	}
	d, err := newEdge(e, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, d)
}

// everyMetric returns the metrics of clouds with every feature, with the values of labels that they have together.
func everyMetric(t *testing.T) map[string]*metric {
	t.Helper()
	metricFiles(t)
	all := cloudMetrics(t, plainCloud)
	for _, f := range features() {
		for name, m := range cloudMetrics(t, plainCloud+f.toml) {
			known := all[name]
			if known == nil {
				all[name] = m
				continue
			}
			for label, values := range m.labels {
				known.labels[label] = append(known.labels[label], values...)
			}
		}
	}
	return all
}

// unit derives the unit from the name, which ends in the unit by the rules of Prometheus.
func (m *metric) unit() string {
	name := strings.TrimSuffix(m.name, "_total")
	switch {
	case strings.HasSuffix(name, "_timestamp_seconds"):
		return "Unix time in seconds"
	case strings.HasSuffix(name, "_seconds"):
		return "seconds"
	case strings.HasSuffix(name, "_bytes"):
		return "bytes"
	default:
		return "–"
	}
}

// maxValues is how many values of a label the page lists.
const maxValues = 15

// labelText lists the labels, and their values if they are few and the same everywhere.
func (m *metric) labelText() string {
	var all []string
	for _, label := range slices.Sorted(maps.Keys(m.labels)) {
		values := slices.Sorted(slices.Values(m.labels[label]))
		depends := m.name == "tunnel_build_info" || label == "use" || label == "module" || len(values) > maxValues
		switch {
		case label == "le": // the bounds of a histogram's buckets
		case depends:
			all = append(all, "`"+label+"`")
		default:
			all = append(all, "`"+label+"`: `"+strings.Join(values, "`, `")+"`")
		}
	}
	return cmp.Or(strings.Join(all, "; "), "–")
}

// metricsPart returns the part of the page with some metrics.
func metricsPart(title, condition string, some map[string]*metric) string {
	b := new(strings.Builder)
	fmt.Fprintf(b, "\n## %s\n\n%s\n\n| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n",
		title, condition)
	page := regexp.MustCompile(`docs/(\w+\.md)`)
	for _, name := range slices.Sorted(maps.Keys(some)) {
		m := some[name]
		fmt.Fprintf(b, "| `%s` | %s | %s | %s | %s |\n", name, m.kind, m.unit(), m.labelText(),
			page.ReplaceAllString(m.help, "[$1]($1)"))
	}
	return b.String()
}

const metricsHead = `# Metrics

<!-- Made by "make docs" from the answers of /metrics of a cloud and of an edge. A test compares. -->

This page lists every metric of a cloud and of an edge.
To read the metrics, set the key ` + "`logport`" + ` and run ` + "`curl http://127.0.0.1:7000/metrics`" + `.
Or set the key ` + "`socket`" + `, and run:
` + "`curl --unix-socket /run/tunnel-cloud/admin.sock http://admin/metrics`" + `.
[configuration.md](configuration.md) describes the keys.

- No metric has a label that names a node, an address or a caller.
- Counters and histograms exist from the start, with the value 0: an alert on a rate sees the first event.
- Each process also has the metrics of the Go runtime (` + "`go_…`" + `) and of the process (` + "`process_…`" + `).
  Prometheus' client library for Go names these metrics.
`

// TestMetricsPage: docs/metrics.md is up to date, and has every metric that the code names.
func TestMetricsPage(t *testing.T) {
	inCode, page := metricsInCode(t), filepath.Join(workingDir(t), "../../docs/metrics.md")
	metricFiles(t)
	cloud, edge := cloudMetrics(t, plainCloud), edgeMetrics(t, plainEdge)
	known, both := maps.Clone(cloud), maps.Clone(cloud)
	maps.Copy(known, edge)
	maps.DeleteFunc(both, func(name string, _ *metric) bool { return edge[name] == nil })
	onlyIn := func(all, other map[string]*metric) map[string]*metric {
		some := maps.Clone(all)
		maps.DeleteFunc(some, func(name string, _ *metric) bool { return other[name] != nil })
		return some
	}
	text := metricsHead + metricsPart("Cloud and edge", "Every cloud and every edge has these metrics.", both) +
		metricsPart("Every cloud", "An edge does not have these metrics.\n"+
			"`tunnel_nodes` and `tunnel_node_certificates` need `socket` or `inventory` in `[mode.cloud.admin]`.\n"+
			"Each replica counts the connected and the missing nodes of all replicas: "+
			"of these states of `tunnel_nodes`, take the maximum.\n"+
			"A replica counts flapping nodes by the sessions with itself, "+
			"and certificates of nodes that it holds or held last: "+
			"of the state `flapping` and of `tunnel_node_certificates`, take the sum.\n"+
			"In such a sum, a node may count at more than one replica.", onlyIn(cloud, edge))
	if own := onlyIn(edge, cloud); len(own) > 0 {
		text += metricsPart("Every edge", "A cloud does not have these metrics.", own)
	}
	for _, f := range features() {
		more := onlyIn(cloudMetrics(t, plainCloud+f.toml), known)
		if len(more) == 0 {
			t.Errorf("%s: there is no metric of its own", f.title)
		}
		maps.Copy(known, more)
		text += metricsPart(f.title, f.condition, more)
	}
	if runtime.GOOS == "linux" {
		more := onlyIn(edgeMetrics(t, plainEdge+"[mode.edge.services]\nstate = \"services.db\"\n"), known)
		maps.Copy(known, more)
		text += metricsPart("Services: an edge", "An edge has these metrics if it has the table `[mode.edge.services]`. "+
			"[services.md](services.md) says more.", more)
		writeNodeFile(t, "node")
		more = onlyIn(edgeMetrics(t, strings.Replace(plainEdge, "tokenfile = \"token\"", "nodecert = \"node\"", 1)+
			"[mode.edge.services]\nstate = \"services.db\"\nnear = \"127.0.0.1:9443\"\nnearca = \"ca\"\n"), known)
		maps.Copy(known, more)
		text += metricsPart("Services: nodes of one site",
			"An edge has these metrics if `near` in `[mode.edge.services]` is set.", more)
	}
	for name, m := range known {
		if m.kind == "" || m.help == "" {
			t.Errorf("%s: type %q, help %q", name, m.kind, m.help)
		}
	}
	if got := slices.Sorted(maps.Keys(known)); !slices.Equal(got, inCode) {
		t.Errorf("the configurations of this test have the metrics\n%q, and the code names\n%q", got, inCode)
	}
	testkit.Page(t, page, text)
}

// writeNodeFile writes a certificate of edge1 that ca has signed, with its key. ca is a file of metricFiles.
func writeNodeFile(t *testing.T, file string) {
	t.Helper()
	key, request, err := auth.NewRequest("edge1")
	if err != nil {
		t.Fatal(err)
	}
	signer, err := auth.NewFileSigner("ca", "cakey", 0)
	if err != nil {
		t.Fatal(err)
	}
	chain, err := signer.Sign(t.Context(), "edge1", request)
	if err != nil {
		t.Fatal(err)
	}
	if err := auth.WriteNodeFile(file, chain, key); err != nil {
		t.Fatal(err)
	}
}

func workingDir(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// metricsInCode returns the names of metrics that the code has as literals, sorted.
func metricsInCode(t *testing.T) []string {
	t.Helper()
	ours, theirs := regexp.MustCompile(`"(tunnel_[a-z_]+)"`), regexp.MustCompile(`\bprefix ?\+ ?"([a-z_]+)"`)
	found := make(map[string]bool)
	for _, top := range []string{".", "../../pkg"} {
		err := filepath.WalkDir(top, func(file string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
				return err
			}
			text, err := os.ReadFile(file)
			for _, m := range ours.FindAllSubmatch(text, -1) {
				found[string(m[1])] = true
			}
			if filepath.ToSlash(file) == "../../pkg/egress/metrics.go" {
				for _, m := range theirs.FindAllSubmatch(text, -1) {
					found["konnectivity_network_proxy_server_"+string(m[1])] = true
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return slices.Sorted(maps.Keys(found))
}
