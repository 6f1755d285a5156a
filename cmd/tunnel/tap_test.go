package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/tap"
	"tunnel.example/tunnel/pkg/tunnel"
)

// lines is where a command writes, for a test that reads meanwhile.
type lines struct{ *os.File }

func newLines(t *testing.T) lines {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "out")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return lines{f}
}

// String returns what was written so far.
func (l lines) String() string {
	text, _ := os.ReadFile(l.Name())
	return string(text)
}

// tapped runs tunnel tap in a process until the end of the test.
func (o *operated) tapped(args ...string) lines {
	o.t.Helper()
	out := newLines(o.t)
	p := startTo(o.t, out.File, append([]string{"tap"}, args...)...)
	o.t.Cleanup(func() {
		p.cmd.Process.Signal(os.Interrupt)
		if code, text := p.wait(); code != exitOK {
			o.t.Errorf("tap ends with the exit code %d: %s", code, text)
		}
	})
	return out
}

// An operator sees a conn when it opens and when it ends, at each replica, and the node that carries most.
func TestTapOfReplicas(t *testing.T) {
	o, other := pairOfReplicas(t)
	start(t, "cloud", "-c", other)
	o.eventually("the other replica lists the node", exitOK, "ls", "-c", other, "edge1")
	target, port := testkit.Serve(t, testkit.Echo), testkit.FreeAddress(t)
	o.want(exitOK, "forward", "add", "-c", o.cloud, port, "edge1/"+target)
	near := o.tapped("-c", o.cloud, "-o", "json")
	far := o.tapped("-c", other, "edge1", "-o", "json")
	documents := o.tapped("-c", o.cloud, "-o", "yaml")
	table := o.tapped("-c", o.cloud, "-o", "wide")
	// A conn before a tap watches is not shown, so there are conns until each tap shows one.
	calls := 0
	testkit.Within(t, 20*time.Second, "each tap shows a conn", func() error {
		c, err := net.Dial("tcp", port)
		if err != nil {
			return err
		}
		defer c.Close()
		calls++
		io.WriteString(c, "hello")
		c.(*net.TCPConn).CloseWrite()
		if _, err = io.ReadAll(c); err != nil {
			return err
		}
		for _, out := range []lines{near, far, documents, table} {
			if text := out.String(); strings.Count(text, "\n") < 3 || !strings.Contains(text, "end") {
				return fmt.Errorf("%q", text)
			}
		}
		return nil
	})
	host, _ := os.Hostname()
	for _, out := range []lines{near, far} {
		ends := 0
		for line := range strings.Lines(out.String()) {
			var l tap.Line
			if err := json.Unmarshal([]byte(line), &l); err != nil || l.Event == nil {
				t.Fatalf("%q: %v", line, err)
			}
			if l.Node != "edge1" || l.Target != target || l.Door != port || l.Replica != host || l.Result != "ok" {
				t.Errorf("the line is %s", line)
			}
			if l.Phase == tunnel.PhaseEnd && l.Sent == 5 && l.Received == 5 && l.Seconds > 0 {
				ends++
			}
		}
		if ends == 0 || ends > calls {
			t.Errorf("%d ends of %d conns", ends, calls)
		}
	}
	for i, text := range strings.Split(documents.String(), "---\n") {
		var l tap.Line
		if err := yaml.Unmarshal([]byte(text), &l); err != nil || l.Event == nil || l.Node != "edge1" || l.Target != target {
			t.Errorf("document %d is %v\n%s", i, err, text)
		}
	}
	if text := table.String(); !strings.HasPrefix(text, "TIME ") || !strings.Contains(text, target) ||
		!strings.Contains(text, "5B") {
		t.Errorf("the table is\n%s", text)
	}
	patientCompletion(t)
	testTrace(o, other, target)
	testTop(o, port)
}

// testTrace traces a target that answers, one at which nothing listens, one that the edge does not permit, and a node
// that is away.
func testTrace(o *operated, other, target string) {
	o.t.Helper()
	for _, file := range []string{o.cloud, other} {
		out := o.want(exitOK, "trace", "-c", file, "edge1", target)
		if !strings.Contains(out, "edge1, which is connected") || !strings.Contains(out, "allow permits "+target) ||
			!strings.Contains(out, "connected to "+target) || strings.Contains(out, "FAILED") {
			o.t.Errorf("trace says\n%s", out)
		}
	}
	_, port, _ := net.SplitHostPort(target)
	if out := o.want(exitOK, "trace", "-c", o.cloud, "edge1", "localhost:"+port); !strings.Contains(out, "resolves to") {
		o.t.Errorf("trace says\n%s", out)
	}
	out := o.want(exitRefused, "trace", "-c", o.cloud, "edge1", testkit.FreeAddress(o.t))
	if !strings.Contains(out, "FAILED (refused)") || !strings.Contains(out, "next: nothing listens") {
		o.t.Errorf("trace says\n%s", out)
	}
	var traced api.Traced
	text := o.want(exitRefused, "trace", "-c", o.cloud, "edge1", "192.0.2.1:22", "-o", "json")
	if err := json.Unmarshal([]byte(text), &traced); err != nil || len(traced.Hops) != 3 ||
		traced.Hops[2].Code != "denied" || !strings.Contains(traced.Hops[2].Next, "allow in [mode.edge]") {
		o.t.Errorf("%+v, %v", traced, err)
	}
	if out = o.want(exitAway, "trace", "-c", o.cloud, "edge2", target); !strings.Contains(out, "no replica holds edge2") {
		o.t.Errorf("trace says\n%s", out)
	}
	o.want(exitUsage, "trace", "-c", o.cloud, "edge1", "no-port")
	if _, out, _ = says(o.t, "__complete", "trace", "-c", o.cloud, "ed"); !strings.HasPrefix(out, "edge1\t") {
		o.t.Errorf("completion offers %q", out)
	}
}

// testTop shows the node while its conns carry bytes.
func testTop(o *operated, port string) {
	o.t.Helper()
	c, err := net.Dial("tcp", port)
	if err != nil {
		o.t.Fatal(err)
	}
	defer c.Close()
	ended := make(chan struct{}) // closed when the writer has ended
	go func() {
		defer close(ended)
		go io.Copy(io.Discard, c)
		for {
			if _, err := c.Write(make([]byte, 1000)); err != nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	var list struct{ Nodes []rate }
	testkit.Within(o.t, 20*time.Second, "top shows the throughput", func() error {
		_, out, errs := says(o.t, "top", "-c", o.cloud, "--once", "--interval", "200ms", "-o", "json")
		if err := json.Unmarshal([]byte(out), &list); err != nil {
			return errors.Join(err, errors.New(errs))
		}
		if len(list.Nodes) != 1 || list.Nodes[0].SentPerSecond == 0 || list.Nodes[0].ReceivedPerSecond == 0 ||
			list.Nodes[0].Conns == 0 {
			return fmt.Errorf("%+v", list)
		}
		return nil
	})
	out := o.want(exitOK, "top", "-c", o.cloud, "--once", "--interval", "200ms", "--sort", "conns")
	if !strings.Contains(out, "1 nodes connected") || !strings.Contains(out, "\nedge1 ") {
		o.t.Errorf("top says\n%s", out)
	}
	for form, want := range map[string]string{"wide": software(), "yaml": "- conns: "} {
		out = o.want(exitOK, "top", "-c", o.cloud, "--once", "--interval", "200ms", "-o", form)
		if !strings.Contains(out, want) {
			o.t.Errorf("top -o %s says\n%s", form, out)
		}
	}
	o.want(exitUsage, "top", "-c", o.cloud, "--sort", "luck")
	o.want(exitUsage, "top", "-c", o.cloud, "-n", "0")
	c.Close()
	<-ended
}

// The throughput is that of the time between two lists, also over sessions that are new, and for each replica.
func TestRates(t *testing.T) {
	at := time.Now()
	session := func(id string, sent, received uint64) api.Session {
		return api.Session{
			Replica: "a", ID: id, Since: at.Add(time.Second), Conns: 1, SentBytes: sent, ReceivedBytes: received,
		}
	}
	before := &api.NodeList{Time: at, Nodes: []api.Node{
		{Name: "edge1", State: api.Connected, Sessions: []api.Session{session("1", 1000, 0)}},
		{Name: "edge2", State: api.Connected, Sessions: []api.Session{session("2", 9000, 9000)}},
	}}
	list := &api.NodeList{Time: at.Add(2 * time.Second), Nodes: []api.Node{
		{Name: "edge1", State: api.Connected, Sessions: []api.Session{session("1", 3000, 400), session("new", 200, 0)}},
		{Name: "edge2", State: api.Connected, Sessions: []api.Session{session("3", 50, 0)}},
		{Name: "edge3", State: api.Missing},
	}}
	// The replica of edge4 did not answer when the list before was made.
	old := session("4", 1e9, 1e9)
	old.Since = at.Add(-time.Hour)
	list.Nodes = append(list.Nodes, api.Node{Name: "edge4", State: api.Connected, Sessions: []api.Session{old}})
	// The replica of edge5 has not answered now.
	list.Nodes = append(list.Nodes, api.Node{Name: "edge5", State: api.Connected})
	got := rates(before, list)
	if len(got) != 4 || got[0].SentPerSecond != 1100 || got[0].ReceivedPerSecond != 200 || got[0].Conns != 2 ||
		got[0].SentBytes != 3200 || got[1].SentPerSecond != 25 {
		t.Errorf("%+v", got)
	}
	if got[1].RatesUnknown || !got[2].RatesUnknown || got[2].SentPerSecond != 0 || got[2].SentBytes != 1e9 ||
		!got[3].RatesUnknown {
		t.Errorf("%+v", got)
	}
	var wide bytes.Buffer
	flags := topFlags{sort: "rate", count: 4, once: true, output: outputFlag{form: "wide"}}
	if err := flags.show(&wide, list, got); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(wide.String()), "\n")
	if got := strings.Fields(lines[len(lines)-1]); !slices.Equal(got,
		[]string{"edge5", "-", "0", "-", "-", "0B", "0B", "-", "0", "-", "-", "-"}) {
		t.Errorf("edge5 is shown as %q", got)
	}
	for key, first := range map[string]string{
		"rate": "edge1", "sent": "edge1", "conns": "edge1", "rtt": "edge1", "total": "edge4",
	} {
		var out bytes.Buffer
		flags := topFlags{sort: key, count: 1, once: true, output: outputFlag{form: "table"}}
		if err := flags.show(&out, list, rates(before, list)); err != nil || strings.Count(out.String(), "\n") != 3 ||
			!strings.Contains(out.String(), first) || (first == "edge4") != strings.Contains(out.String(), " -  ") {
			t.Errorf("%s: %v\n%s", key, err, out.String())
		}
	}
}

// Callers choose some of the text of a tap. It can move no cursor and begin no line.
func TestTapPrintable(t *testing.T) {
	var out, errs bytes.Buffer
	p := tapPrinter{out: &out, errs: &errs, output: outputFlag{form: "wide"}}
	for _, line := range []tap.Line{
		{Phase: tunnel.PhaseRefused, Replica: "a\x1b", Event: &tunnel.Event{
			Caller: "me\n", Target: "\x1b[2J", Err: "x\ny", Method: "GET\r", Path: "/\x07", Status: 502, Skipped: 2,
		}},
		{Lost: 7}, {Warning: "old\x1b"}, {},
	} {
		if err := p.show(line); err != nil {
			t.Fatal(err)
		}
	}
	if text := out.String(); strings.ContainsAny(text, "\x1b\r\x07") || strings.Count(text, "\n") != 2 ||
		!strings.Contains(text, "GET? /? 502: x?y (and 2 more before)") {
		t.Errorf("%q", text)
	}
	if text := errs.String(); strings.Contains(text, "\x1b") || !strings.Contains(text, "7 events are lost") {
		t.Errorf("%q", text)
	}
}
