package https

import (
	"bufio"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// wantLine waits for exactly one line with all of words, and fails if the line has one of never.
func (r *rig) wantLine(words []string, never ...string) {
	r.t.Helper()
	testkit.Eventually(r.t, strings.Join(words, " "), func() bool { return len(r.logs.Lines(words...)) > 0 })
	lines := r.logs.Lines(words...)
	if len(lines) != 1 {
		r.t.Errorf("%d lines have %q", len(lines), words)
	}
	for _, n := range never {
		if strings.Contains(lines[0], n) {
			r.t.Errorf("%q is in %s", n, lines[0])
		}
	}
}

// Each failed request is one warning that says who asked for what, and why it failed. Each served one is one
// line at level debug. No line has the query.
func TestFailuresAreWarnings(t *testing.T) {
	t.Parallel()
	metrics := []Caller{{Name: "metrics-server", May: []auth.Class{auth.ClassMetrics}}}
	refused := new(tunnel.Refusals)
	r := newRig(t, nil, func(_ *rig, c *Config) {
		c.Callers, c.Counters, c.Sink.Refusals = metrics, new(tunnel.Counters), refused
	}).start()
	who := []string{"caller=" + DefaultClientName, "remote=127.0.0.1:", "frontend=" + r.addr, "method=GET"}
	client := r.client(r.caller("127.0.0.1"), true)

	r.tunnel.set(func(f *fakeTunnel) {
		f.fail = tunnel.Refusef(tunnel.Refused, "dialling 127.0.0.1:10250: nobody is there")
	})
	res, body := get(t, client, "https://edge1/exec/ns/pod/c?command=secret2")
	wantStatus(t, res, body, 502)
	r.wantLine(append(who, "level=WARN", "https request failed", "node=edge1", "path=/exec/ns/pod/c", "status=502",
		"nobody is there"), "secret2")

	r.tunnel.set(func(f *fakeTunnel) { f.fail = nil }) // behind the failure: a pooled conn needs no dial

	res, body = get(t, client, "https://edge1/containerLogs/ns/pod/c?tail=secret1")
	wantStatus(t, res, body, 200)
	r.wantLine(append(who, "level=DEBUG", "https request served", "node=edge1", "path=/containerLogs/ns/pod/c",
		"status=200", "bytes=4"), "secret1")

	res, body = get(t, client, "https://edge9/pods?a=secret3")
	wantStatus(t, res, body, 502)
	r.wantLine(append(who, "level=WARN", "https request failed", "node=edge9", "path=/pods", "status=502",
		"node edge9 is not connected"), "secret3")

	as := r.caller("127.0.0.1")
	as.Certificates = []tls.Certificate{*r.clientCA.issue("metrics-server")}
	res, body = get(t, r.client(as, false), "https://edge1/exec/ns/pod/c?command=secret4")
	wantStatus(t, res, body, 403)
	r.wantLine([]string{"level=WARN", "https request denied", "caller=metrics-server", "path=/exec/ns/pod/c",
		"status=403", "needs the class"}, "secret4")

	// The status page shows each refused request, whether the audit has an event of it or not.
	var paths []string
	for _, e := range refused.Last() {
		paths = append(paths, e.Result+" "+string(e.Node)+e.Path)
	}
	want := []string{"denied /exec/ns/pod/c", "no-such-node edge9/pods", "refused edge1/exec/ns/pod/c"}
	if !slices.Equal(paths, want) {
		t.Errorf("the refusals are %q", paths)
	}

	c := &r.door.cfg.Counters.Doors[tunnel.DoorHTTPS]
	if n, sum, _ := c.Durations(); n != 1 || sum <= 0 {
		t.Errorf("%d requests were served, in %v s", n, sum)
	}
	for code, want := range map[tunnel.Code]uint64{
		tunnel.Refused: 1, tunnel.NoSuchNode: 1, tunnel.Denied: 1, tunnel.Timeout: 0, 0: 0,
	} {
		if n := c.Results(code); n != want {
			t.Errorf("%d callers were refused with %v, want %d", n, code, want)
		}
	}
}

// shownEvents is a tap that always has a watcher. It notes what it is shown.
type shownEvents struct{ testkit.Trail[string] }

func (*shownEvents) Watched() bool { return true }

func (s *shownEvents) Show(phase tunnel.Phase, e tunnel.Event) {
	s.Record(string(phase) + " " + string(e.Kind) + " " + e.Result)
}

// A caller whose connection could not be passed through meets us, and is refused once more. The tap and the status page
// show it once; the audit has its exec as well, with the name in its certificate.
func TestRefusedCallerIsShownOnce(t *testing.T) {
	t.Parallel()
	tap, refused, audit := new(shownEvents), new(tunnel.Refusals), new(testkit.Trail[tunnel.Event])
	r := newRig(t, nil, func(r *rig, c *Config) {
		c.Counters = new(tunnel.Counters)
		c.Sink = tunnel.Sink{Tap: tap, Refusals: refused, Audit: audit.Record}
		r.tunnel.fail = tunnel.Refusef(tunnel.Timeout, "too slow")
	}).start()
	res, body := get(t, r.client(r.caller("edge1"), false), "https://edge1/exec/ns/pod/c")
	wantStatus(t, res, body, 504)
	door := &r.door.cfg.Counters.Doors[tunnel.DoorHTTPS]
	testkit.Eventually(t, "the request is counted", func() bool { return door.Results(tunnel.Timeout) == 1 })
	testkit.Eventually(t, "two events", func() bool { return len(audit.All()) == 2 })
	if all := audit.All(); all[0].Kind != tunnel.EventHTTPS || all[1].Kind != tunnel.EventExec ||
		all[1].Caller != DefaultClientName {
		t.Errorf("the audit has %+v", all)
	}
	if all := tap.All(); !slices.Equal(all, []string{"refused https timeout"}) {
		t.Errorf("the tap is shown %q", all)
	}
	if all := refused.Last(); len(all) != 1 {
		t.Errorf("the refusals are %+v", all)
	}
}

// A caller whose address has too many connections to the node is shown once as well, by its request: the connection
// was not even tried.
func TestCallerAtALimitIsShownOnce(t *testing.T) {
	t.Parallel()
	for name, caller := range map[string]string{
		"a caller that may call": DefaultClientName, "a caller that may not": "metrics-server",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tap, refused := new(shownEvents), new(tunnel.Refusals)
			r := newRig(t, nil, func(_ *rig, c *Config) {
				c.Counters, c.Limits.ConnsPerAddress = new(tunnel.Counters), 1
				c.Sink = tunnel.Sink{Tap: tap, Refusals: refused}
			}).start()
			release, ok := r.door.passthroughs.admit(netip.MustParseAddr("127.0.0.1"), "edge1", 1)
			if !ok {
				t.Fatal("the first connection of an address is refused")
			}
			defer release()
			as := r.caller("edge1")
			as.Certificates = []tls.Certificate{*r.clientCA.issue(caller)}
			get(t, r.client(as, false), "https://edge1/pods")
			testkit.Eventually(t, "the tap is shown the request", func() bool { return len(tap.All()) > 0 })
			if all := tap.All(); !slices.Equal(all, []string{"refused request overloaded"}) {
				t.Errorf("the tap is shown %q", all)
			}
			if all := refused.Last(); len(all) != 1 {
				t.Errorf("the refusals are %+v", all)
			}
		})
	}
}

// Warnings are limited by code: many failures of one kind hide no failure of another.
func TestFailuresAreLimited(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil, nil).start()
	client := r.client(r.caller("127.0.0.1"), true)
	for range 3 * failureBurst {
		res, body := get(t, client, "https://edge9/pods")
		wantStatus(t, res, body, 502)
	}
	r.tunnel.set(func(f *fakeTunnel) { f.fail = errors.New("broken") })
	res, body := get(t, client, "https://edge1/pods")
	wantStatus(t, res, body, 502)
	if n := len(r.logs.Lines("level=WARN", "node=edge9")); n != failureBurst {
		t.Errorf("%d warnings of edge9, want %d", n, failureBurst)
	}
	r.wantLine([]string{"level=WARN", "node=edge1", "broken"})
}

// A caller that verifies the kubelet's certificate meets ours while the node is away. It reports that the
// certificate is for another name; our log names the cause.
func TestNodeAwayForAVerifyingCaller(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*rig){
		"node edge1 is not connected":   func(r *rig) { r.hold("edge1", false) },
		"node edge1 cannot be reached":  func(r *rig) { r.tunnel.set(func(f *fakeTunnel) { f.fail = errors.New("down") }) },
		"shown the certificate of this": func(r *rig) { r.hold("edge1", false) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, nil, func(r *rig, c *Config) {
				c.Certificate = always(r.frontCA.issue("front", "front.example"))
			}).start()
			change(r)
			cfg := r.caller("edge1") // trusts our CA, and so sees the wrong name
			err := tls.Client(r.tcp(), cfg).Handshake()
			if err == nil || !strings.Contains(err.Error(), "x509: certificate is valid for front.example, not edge1") {
				t.Errorf("the caller reports %v", err)
			}
			r.wantLine([]string{"level=WARN", "https handshake failed", "node=edge1", name, "remote=127.0.0.1:"})
		})
	}
}

// Without certificates of our own, a connection that cannot be passed through is a warning, too.
func TestNotPassedThroughIsAWarning(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil, func(r *rig, c *Config) {
		c.Mode = Passthrough
		r.tunnel.fail = tunnel.Refusef(tunnel.Timeout, "too slow")
	}).start()
	if err := tls.Client(r.tcp(), direct(r)).Handshake(); err == nil {
		t.Error("the handshake has succeeded")
	}
	r.wantLine([]string{"level=WARN", "not passed through", "node=edge1", "remote=127.0.0.1:", "too slow"})
}

// Old kubelets have paths of their streaming server, with a token that the audit does not show.
func TestEventOf(t *testing.T) {
	t.Parallel()
	for path, want := range map[string][2]string{
		"/exec/ns/pod/c":          {"exec", "/exec/ns/pod/c"},
		"/run/ns/pod/c":           {"exec", "/run/ns/pod/c"},
		"/cri/exec/secret":        {"exec", "/cri/exec"},
		"//cri//attach/secret":    {"attach", "/cri/attach"},
		"/cri/portforward/secret": {"port-forward", "/cri/portforward"},
		"/portForward/ns/pod":     {"port-forward", "/portForward/ns/pod"},
		"/cri/secret/secret":      {"request", "/cri/secret"},
		"/cri":                    {"request", "/cri/"},
		"/pods":                   {"request", "/pods"},
	} {
		if kind, shown := eventOf(path); string(kind) != want[0] || shown != want[1] {
			t.Errorf("%s: %q %q, want %q", path, kind, shown, want)
		}
	}
}

// An event that is kept does not keep the request line in memory, which has the query.
func TestEventKeepsNoQuery(t *testing.T) {
	t.Parallel()
	here, there := net.Pipe()
	defer here.Close()
	defer there.Close()
	text := "POST /exec/ns/pod/c?command=secret HTTP/1.1\r\nHost: edge1\r\n\r\n"
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text)))
	must(t, err)
	e := &entry{r: r, conn: &clientConn{Conn: here}, path: r.URL.Path}
	got := e.event()
	if got.Method != r.Method || got.Path != r.URL.Path {
		t.Errorf("the event is %+v", got)
	}
	if unsafe.StringData(got.Method) == unsafe.StringData(r.Method) ||
		unsafe.StringData(got.Path) == unsafe.StringData(r.URL.Path) {
		t.Error("the event has a part of the request line")
	}
}

// The audit has each exec, attach and port-forward that is terminated, and each connection that is passed
// through; it has no query, and no other request.
func TestAudit(t *testing.T) {
	t.Parallel()
	seen := new(testkit.Trail[tunnel.Event])
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		io.WriteString(w, "pong")
	})
	r := newRig(t, h, func(_ *rig, c *Config) { c.Sink.Audit = seen.Record }).start()
	client := r.client(r.caller("127.0.0.1"), false)
	for _, path := range []string{"/exec/ns/pod/c?command=secret", "/attach/ns/pod/c", "/portForward/ns/pod", "/pods"} {
		res, err := client.Post("https://edge1"+path, "", strings.NewReader("ping!"))
		must(t, err)
		io.Copy(io.Discard, res.Body)
		res.Body.Close()
	}
	r.hold("edge1", false)
	res, body := get(t, client, "https://edge1/run/ns/pod/c?cmd=secret")
	wantStatus(t, res, body, 502)
	r.hold("edge1", true)
	c := r.raw(direct(r))
	must(t, c.Close())
	testkit.Eventually(t, "five events", func() bool { return len(seen.All()) == 5 })
	for i, want := range []tunnel.Event{
		{Kind: tunnel.EventExec, Result: "ok", Node: "edge1", Path: "/exec/ns/pod/c", Status: 200, Sent: 5, Received: 4},
		{Kind: tunnel.EventAttach, Result: "ok", Node: "edge1", Path: "/attach/ns/pod/c", Status: 200, Sent: 5, Received: 4},
		{Kind: tunnel.EventPortForward, Result: "ok", Node: "edge1", Path: "/portForward/ns/pod", Status: 200,
			Sent: 5, Received: 4},
		{Kind: tunnel.EventExec, Result: "no-such-node", Node: "edge1", Path: "/run/ns/pod/c", Status: 502},
		{Kind: tunnel.EventHTTPS, Result: "ok", Node: "edge1"},
	} {
		got := seen.All()[i]
		if got.Seconds <= 0 || got.Remote == "" || got.Caller == "" || got.Door != r.addr || got.Target != "127.0.0.1:10250" {
			t.Errorf("event %d is %+v", i, got)
		}
		if i < 4 && got.Caller != DefaultClientName {
			t.Errorf("event %d is of the caller %q", i, got.Caller)
		}
		if i < 4 { // the handshake of a connection that is passed through has any length
			if got.Sent != want.Sent || i < 3 && got.Received != want.Received {
				t.Errorf("event %d: %d and %d bytes", i, got.Sent, got.Received)
			}
		}
		if got.Kind != want.Kind || got.Result != want.Result || got.Node != want.Node || got.Path != want.Path ||
			got.Status != want.Status {
			t.Errorf("event %d is %+v, want %+v", i, got, want)
		}
	}
}
