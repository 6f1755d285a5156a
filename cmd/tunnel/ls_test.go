package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/api"
)

// operated is a cloud and an edge as init and join set them up, in processes of their own.
type operated struct {
	t           *testing.T
	cloud, edge string // configuration files
	token       string
	cloudRuns   *process
	edgeRuns    *process
}

// patientCompletion has completions wait for longer: a busy machine may be slower than a person's patience.
func patientCompletion(t *testing.T) {
	t.Helper()
	limited = func(ctx context.Context, _ time.Duration) (context.Context, context.CancelFunc) {
		return context.WithTimeout(ctx, time.Minute)
	}
	t.Cleanup(func() { limited = context.WithTimeout })
}

// newOperated starts a cloud, and an edge that has joined it as edge1. change, if not nil, edits the files of the cloud
// before it starts.
func newOperated(t *testing.T, change func(o *operated, address string)) *operated {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("tunnel has no unix sockets on Windows")
	}
	dir, err := os.MkdirTemp("/tmp", "t") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	address := testkit.FreeAddress(t)
	o := &operated{t: t, cloud: filepath.Join(dir, "cloud", "cloud.toml"), edge: filepath.Join(dir, "edge", "edge.toml")}
	o.want(exitOK, "init", "--address", address, "--dir", filepath.Dir(o.cloud))
	if change != nil {
		change(o, address)
	}
	o.startCloud()
	var made struct{ Token string }
	created := o.want(exitOK, "token", "create", "-c", o.cloud, "--node", "edge1", "--json")
	if err = json.Unmarshal([]byte(created), &made); err != nil {
		t.Fatal(err)
	}
	o.token = made.Token
	file := filepath.Join(dir, "token")
	if err = os.WriteFile(file, []byte(made.Token), 0o600); err != nil {
		t.Fatal(err)
	}
	o.want(exitOK, "join", "--dir", filepath.Dir(o.edge), "--token-file", file)
	o.startEdge()
	return o
}

func (o *operated) startCloud() {
	o.t.Helper()
	o.cloudRuns = start(o.t, "cloud", "-c", o.cloud)
	o.eventually("the cloud answers", exitOK, "status", "-c", o.cloud)
}

func (o *operated) startEdge() {
	o.t.Helper()
	o.edgeRuns = start(o.t, "edge", "-c", o.edge)
	o.eventually("the edge is connected", exitOK, "ls", "-c", o.cloud, "edge1")
}

// eventually waits until a command ends with the exit code.
func (o *operated) eventually(what string, want int, args ...string) {
	o.t.Helper()
	testkit.Within(o.t, time.Minute, what, func() error {
		if code, out, errs := says(o.t, args...); code != want {
			return fmt.Errorf("exit code %d: %s%s", code, out, errs)
		}
		return nil
	})
}

// want runs a command and returns its output.
func (o *operated) want(want int, args ...string) string {
	o.t.Helper()
	code, out, errs := says(o.t, args...)
	if code != want {
		o.t.Fatalf("%q: exit code %d, want %d\n%s%s", args, code, want, out, errs)
	}
	if o.token != "" && strings.Contains(out+errs, o.token) {
		o.t.Errorf("%q shows the token", args)
	}
	return out
}

func (o *operated) list(args ...string) *api.NodeList {
	o.t.Helper()
	var list api.NodeList
	text := o.want(exitOK, append([]string{"ls", "-c", o.cloud, "-o", "json"}, args...)...)
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		o.t.Fatal(err)
	}
	return &list
}

// What init and join write is enough for ls, status and ping. A node that has gone is missing, also for the next
// process of the cloud, until it is forgotten.
func TestOperated(t *testing.T) {
	o := newOperated(t, nil)
	list := o.list()
	if len(list.Nodes) != 1 || list.Nodes[0].State != api.Connected {
		t.Fatalf("%+v", list)
	}
	n := list.Nodes[0]
	s := n.Newest()
	host, _ := os.Hostname()
	if n.Name != "edge1" || s.Replica != host || s.Software != software() || s.Kind != "edge" || s.Since.IsZero() ||
		n.CertificatesIssued != 1 || n.CertificateSerial == "" || time.Until(s.CertificateEnds) < time.Hour {
		t.Errorf("the node is %+v", n)
	}
	for _, form := range []string{"table", "wide", "yaml"} {
		if out := o.want(exitOK, "ls", "-c", o.cloud, "-o", form); !strings.Contains(out, "edge1") ||
			!strings.Contains(out, "connected") {
			t.Errorf("-o %s:\n%s", form, out)
		}
	}
	o.want(exitOK, "ls", "-c", o.cloud, "--missing")
	o.want(exitAway, "ls", "-c", o.cloud, "edge2")
	o.want(exitUsage, "ls", "-c", o.cloud, "-o", "xml")
	patientCompletion(t)
	if _, out, _ := says(t, "__complete", "ping", "-c", o.cloud, "ed"); !strings.HasPrefix(out, "edge1\tconnected\n") {
		t.Errorf("completion offers %q", out)
	}
	testStatus(o)
	testPing(o)
	testCertStatus(o)
	testForms(o)
	testCompletionOfForwards(o)

	o.edgeRuns.cmd.Process.Signal(os.Interrupt)
	o.edgeRuns.wait()
	o.eventually("the node is missing", exitAway, "ls", "-c", o.cloud, "edge1")
	o.cloudRuns.cmd.Process.Signal(os.Interrupt)
	o.cloudRuns.wait()
	o.want(exitRuntime, "ls", "-c", o.cloud)
	o.startCloud()
	if n = o.list().Nodes[0]; n.State != api.Missing || n.LastEnd != "the edge has stopped" || n.LastReplica != host ||
		time.Since(n.LastSeen) > time.Minute || n.CertificatesIssued != 1 || n.SessionsTotal != 1 {
		t.Errorf("the next process of the cloud remembers %+v", n)
	}
	o.want(exitAway, "ls", "-c", o.cloud, "--missing")
	o.want(exitAway, "ping", "-c", o.cloud, "edge1")
	o.want(exitOK, "forget", "-c", o.cloud, "edge1")
	if list = o.list("--missing"); len(list.Nodes) != 0 {
		t.Errorf("a forgotten node is listed: %+v", list)
	}
}

// pairOfReplicas starts a cloud with an edge, and writes the configuration of a second replica: other.
func pairOfReplicas(t *testing.T) (o *operated, other string) {
	t.Helper()
	o = newOperated(t, func(o *operated, address string) {
		text, err := os.ReadFile(o.cloud)
		if err != nil {
			t.Fatal(err)
		}
		second := testkit.FreeAddress(t)
		peers := fmt.Sprintf("\n[mode.cloud.stream.peers]\naddresses = [%q, %q]\n"+
			"ca = \"ca.crt\"\nservername = \"127.0.0.1\"\n", address, second)
		_, port, _ := net.SplitHostPort(address)
		_, otherPort, _ := net.SplitHostPort(second)
		other = filepath.Join(filepath.Dir(o.cloud), "other.toml")
		for file, text := range map[string]string{
			o.cloud: string(text),
			other: strings.NewReplacer("grpcport = "+port, "grpcport = "+otherPort, "cloud.sock", "other.sock",
				"nodes.json", "other.json").Replace(string(text)),
		} {
			if err = os.WriteFile(file, []byte(text+peers), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	})
	return o, other
}

// Each replica lists the nodes of the other one, and remembers them when the other one is gone. A ping goes through the
// replica that holds the node.
func TestOperatedReplicas(t *testing.T) {
	o, other := pairOfReplicas(t)
	second := start(t, "cloud", "-c", other)
	o.eventually("the other replica lists the node", exitOK, "ls", "-c", other, "edge1")
	var list api.NodeList
	if err := json.Unmarshal([]byte(o.want(exitOK, "ls", "-c", other, "-o", "json")), &list); err != nil {
		t.Fatal(err)
	}
	if len(list.Nodes) != 1 || list.Nodes[0].Newest().Software != software() || list.Nodes[0].CertificatesIssued != 1 {
		t.Errorf("the other replica lists %+v", list)
	}
	if out := o.want(exitOK, "ping", "-c", other, "edge1", "-n", "1"); !strings.Contains(out, "round trip") {
		t.Error(out)
	}
	if out := o.want(exitOK, "status", "-c", other); !strings.Contains(out, "1 nodes, joined") {
		t.Errorf("the status lacks the replica:\n%s", out)
	}
	testStatusOfAll(o, other)

	remembers := func() {
		t.Helper()
		testkit.Within(t, time.Minute, "the other replica remembers the node", func() error {
			var status api.Status
			_, out, errs := says(t, "status", "-c", other, "-o", "json")
			if err := json.Unmarshal([]byte(out), &status); err != nil || status.Counts.Remembered != 1 {
				return fmt.Errorf("%+v, %s", status.Counts, errs)
			}
			return nil
		})
	}
	remembers()

	// A replica that starts without memory learns from the other one.
	o.edgeRuns.cmd.Process.Signal(os.Interrupt)
	o.edgeRuns.wait()
	second.cmd.Process.Kill()
	second.wait()
	memory := filepath.Join(filepath.Dir(other), "other.json")
	if err := os.Remove(memory); err != nil && !errors.Is(err, fs.ErrNotExist) { // it may not be written yet
		t.Fatal(err)
	}
	start(t, "cloud", "-c", other)
	remembers()
	o.cloudRuns.cmd.Process.Kill()
	o.cloudRuns.wait()
	o.eventually("the other replica misses the node", exitAway, "ls", "-c", other, "--missing")
	out := o.want(exitAway, "ls", "-c", other, "edge1", "-o", "wide")
	if !strings.Contains(out, "edge1  missing") || !strings.Contains(out, "the edge has stopped") {
		t.Error(out)
	}
}

// testStatusOfAll asks one replica for the status of both. Each is an object as without --all.
func testStatusOfAll(o *operated, other string) {
	o.t.Helper()
	of := func(text string) *api.Status {
		status := new(api.Status)
		if err := yaml.UnmarshalStrict([]byte(text), status); err != nil { // JSON, too
			o.t.Fatalf("%v\n%s", err, text)
		}
		return status
	}
	documents := strings.Split(o.want(exitOK, "status", "--all", "-c", other, "-o", "yaml"), "---\n")
	if len(documents) != 2 {
		o.t.Fatalf("status --all has %d documents", len(documents))
	}
	for i, file := range []string{other, o.cloud} {
		one := of(o.want(exitOK, "status", "-c", file, "-o", "json"))
		if got := of(documents[i]); !got.Started.Equal(one.Started) || len(got.Replicas) != 1 || got.Counts.Nodes != i {
			o.t.Errorf("document %d is not the status of %s: %+v, want %+v", i, file, got, one)
		}
	}
	if out := o.want(exitOK, "status", "--all", "-c", other); strings.Count(out, ", ready\n") != 2 {
		o.t.Errorf("status --all says\n%s", out)
	}
	if out := o.want(exitOK, "status", "--all", "-c", o.edge); strings.Count(out, ", ready\n") != 1 {
		o.t.Errorf("status --all of an edge says\n%s", out)
	}
}

// testStatus asks the cloud and the edge.
func testStatus(o *operated) {
	o.t.Helper()
	for _, file := range []string{o.cloud, o.edge} {
		var status api.Status
		if err := json.Unmarshal([]byte(o.want(exitOK, "status", "-c", file, "-o", "json")), &status); err != nil {
			o.t.Fatal(err)
		}
		switch {
		case !status.Ready || len(status.Checks) == 0 || status.Software != software():
			o.t.Errorf("%s: %+v", file, status)
		case status.Mode == "cloud" && (status.Counts.Nodes != 1 || len(status.Listeners) == 0):
			o.t.Errorf("the cloud's status is %+v", status)
		case status.Mode == "edge" && (len(status.Sessions) != 1 || status.Node != "edge1"):
			o.t.Errorf("the edge's status is %+v", status)
		}
		if out := o.want(exitOK, "status", "-c", file, "-o", "wide"); !strings.Contains(out, ", ready\n") {
			o.t.Error(out)
		}
	}
	if code, _, errs := says(o.t, "ls", "-c", o.edge); code != exitConfig || !strings.Contains(errs, "an edge") {
		o.t.Errorf("ls with the edge's file: exit code %d, %s", code, errs)
	}
}

// testPing pings the node, a target of this machine, and one that refuses.
func testPing(o *operated) {
	o.t.Helper()
	if out := o.want(exitOK, "ping", "-c", o.cloud, "edge1", "--interval", "1ms"); strings.Count(out, "round trip") != 3 ||
		!strings.Contains(out, "3 pings: fastest") {
		o.t.Errorf("ping edge1:\n%s", out)
	}
	l, err := net.Listen("tcp", testkit.FreeAddress(o.t))
	if err != nil {
		o.t.Fatal(err)
	}
	accepted := make(chan int, 1) // bytes that the target gets
	go func() {
		c, err := l.Accept()
		if err != nil {
			accepted <- -1
			return
		}
		defer c.Close()
		n, _ := io.Copy(io.Discard, c)
		accepted <- int(n)
	}()
	out := o.want(exitOK, "ping", "-c", o.cloud, "edge1", l.Addr().String(), "-n", "1")
	if n := <-accepted; n != 0 || !strings.Contains(out, l.Addr().String()+" opened in") {
		o.t.Errorf("the target got %d bytes; ping says\n%s", n, out)
	}
	l.Close()
	o.want(exitRefused, "ping", "-c", o.cloud, "edge1", l.Addr().String())
	o.want(exitRefused, "ping", "-c", o.cloud, "edge1", "192.0.2.1:22") // not in the edge's list
	o.want(exitUsage, "ping", "-c", o.cloud, "Edge1")
	o.want(exitRuntime, "ping", "-c", o.cloud, "edge1", "no-port")
}

// testForms asks for YAML of commands whose other forms other tests read. A reload says whose it is.
func testForms(o *operated) {
	o.t.Helper()
	for line, want := range map[string]string{
		"ping edge1 -n 2 --interval 1ms -o yaml": "---\n",
		"token list -o yaml":                     "  node: edge1\n",
		"token list -o json":                     `"node":"edge1"`,
		"token create --node edge9 -o yaml":      "\nnode: edge9\n",
		"check -o yaml":                          "api_version: v1\n",
		"reload -o yaml":                         "mode: cloud\n",
		"forward ls -o yaml":                     "forwards: []\n",
	} {
		// check may fail here; what else fails has no output.
		_, out, errs := says(o.t, append(strings.Fields(line), "-c", o.cloud)...)
		if !strings.Contains("\n"+out, want) {
			o.t.Errorf("tunnel %s lacks %q:\n%s%s", line, want, out, errs)
		}
	}
	o.want(exitUsage, "token", "list", "-c", o.cloud, "-o", "wide")
	if out := o.want(exitOK, "reload", "-c", o.edge, "-o", "json"); !strings.Contains(out, `"mode": "edge"`) {
		o.t.Errorf("reload of an edge says\n%s", out)
	}
}

// testCompletionOfForwards completes the node of a new port, and the address of a port that can be changed.
func testCompletionOfForwards(o *operated) {
	o.t.Helper()
	port := testkit.FreeAddress(o.t)
	o.want(exitOK, "forward", "add", "-c", o.cloud, port, "edge1/127.0.0.1:22")
	for line, want := range map[string]string{
		"forward add -c " + o.cloud + " 127.0.0.1:1 ed":      "edge1/\tconnected\n:6\n", // no space, no files
		"forward add -c " + o.cloud + " 127.0.0.1:1 edge1/1": ":4\n",
		"forward add -c " + o.cloud + " 127":                 ":4\n", // a port that is not open yet
		"forward add -c " + o.cloud + " --replace 127":       port + "\tedge1/127.0.0.1:22\n:4\n",
		"forward rm -c " + o.cloud + " 127":                  port + "\tedge1/127.0.0.1:22\n:4\n",
		"forward rm -c " + o.cloud + " 10.":                  ":4\n",
		"forward rm -c " + o.cloud + " " + port + " 127":     ":4\n",
	} {
		if _, out, _ := says(o.t, append([]string{"__complete"}, strings.Fields(line)...)...); !strings.HasPrefix(out, want) {
			o.t.Errorf("%s: completion offers %q, want %q", line, out, want)
		}
	}
	o.want(exitOK, "forward", "rm", "-c", o.cloud, port)
}

// The commands say what to do if a configuration names no socket.
func TestNoSocket(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cloud.toml")
	if err := os.WriteFile(file, []byte("[mode.cloud.stream.server]\ngrpcport = 9000\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, command := range [][]string{{"ls"}, {"status"}, {"ping", "edge1"}, {"forget", "edge1"}, {"tap"}, {"top"},
		{"trace", "edge1", "127.0.0.1:22"}} {
		code, _, errs := says(t, append(command, "-c", file)...)
		const want = `write socket = "/run/tunnel-cloud/admin.sock" in [mode.cloud.admin]`
		if code != exitConfig || !strings.Contains(errs, want) {
			t.Errorf("%q: exit code %d, %s", command, code, errs)
		}
	}
}

// Durations and sizes are short, and right at the borders of their units.
func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", 59 * time.Second: "59s", time.Minute: "1m", 90 * time.Second: "1m30s", 25 * time.Hour: "1d1h",
		48 * time.Hour: "2d", 400 * 24 * time.Hour: "1y35d", -time.Hour: "-1h",
	} {
		if got := span(d); got != want {
			t.Errorf("%s is %q, want %q", d, got, want)
		}
	}
	for n, want := range map[uint64]string{
		0: "0B", 999: "999B", 1000: "1.0kB", 1_500_000: "1.5MB", 999_960: "1.0MB", 1 << 63: "9.2EB",
	} {
		if got := size(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
}

// A node chooses some of the text in the list. It can move no cursor and begin no line.
func TestPrintable(t *testing.T) {
	list := &api.NodeList{Time: time.Now(), Nodes: []api.Node{
		{Name: "edge1", State: api.Connected, Sessions: []api.Session{{Software: "v1\x1b[2J\nroot  connected"}}},
		{Name: "edge2", State: api.Missing, LastSoftware: "v1\r", LastEnd: "bye\x07\n"},
	}}
	var out strings.Builder
	if err := printNodes(&out, list, &outputFlag{form: "wide"}); err != nil {
		t.Fatal(err)
	}
	if text := out.String(); strings.ContainsAny(text, "\x1b\r\x07") || strings.Count(text, "\n") != 4 {
		t.Errorf("%q", text)
	}
}

// BenchmarkLs prints 10,000 nodes: the part of `tunnel ls` behind the answer of the cloud.
func BenchmarkLs(b *testing.B) {
	now := time.Now()
	list := &api.NodeList{Time: now}
	for n := range 10_000 {
		list.Nodes = append(list.Nodes, api.Node{
			Name: fmt.Sprintf("edge-%05d.example.com", n), State: api.Connected, CertificateEnds: now.Add(time.Hour),
			Sessions: []api.Session{{
				Replica: "cloud-0", Since: now.Add(-time.Hour), Remote: "192.0.2.7:40000", RoundTripSeconds: 0.012,
				Conns: 3, SentBytes: 123456, ReceivedBytes: 789, Software: "v1.2.3",
			}},
		})
	}
	for b.Loop() {
		if err := printNodes(io.Discard, list, &outputFlag{form: "wide"}); err != nil {
			b.Fatal(err)
		}
	}
}
