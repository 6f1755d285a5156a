package https

import (
	"bufio"
	"crypto/tls"
	"io"
	"net/http"
	"net/url"
	"path"
	"strings"
	"testing"

	"tunnel.example/tunnel/pkg/auth"
)

// A caller with the class metrics gets metrics and nothing else, whatever method, protocol or
// spelling of the path it uses.
func TestCallersClasses(t *testing.T) {
	var reached []string
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reached = append(reached, r.URL.Path)
		io.WriteString(w, "pong")
	}), func(_ *rig, c *Config) {
		c.Mode = Terminate
		c.Callers = []Caller{{"metrics-server", []auth.Class{auth.ClassMetrics}},
			{"collector", []auth.Class{auth.ClassLogs, auth.ClassPods}}, {"root", []auth.Class{auth.ClassAll}}}
	}).start()
	as := func(name string) *tls.Config {
		cfg := r.caller("edge1")
		cfg.Certificates = []tls.Certificate{*r.clientCA.issue(name)}
		return cfg
	}
	const upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
	for _, test := range []struct {
		caller, line, header string
		status               int
		needs                string
	}{
		{"metrics-server", "GET /metrics", "", 200, ""},
		{"metrics-server", "GET /metrics/resource", "", 200, ""},
		{"metrics-server", "GET /stats/summary?only_cpu_and_memory=true", "", 200, ""},
		{"metrics-server", "POST /exec/ns/pod/c?command=sh", "", 403, "exec"},
		{"metrics-server", "GET /exec/ns/pod/c?command=sh", upgrade, 403, "exec"},
		{"metrics-server", "GET /portForward/ns/pod", upgrade, 403, "exec"},
		{"metrics-server", "GET /attach/ns/pod/c", upgrade, 403, "exec"},
		{"metrics-server", "GET /run/ns/pod/c", "", 403, "exec"},
		{"metrics-server", "GET /containerLogs/ns/pod/c", "", 403, "logs"},
		{"metrics-server", "GET /pods", "", 403, "pods"},
		{"metrics-server", "GET /healthz", "", 403, "health"},
		{"metrics-server", "GET /configz", "", 403, "all"},
		{"metrics-server", "GET /metricsx", "", 403, "all"},
		{"metrics-server", "GET /metrics/../exec/ns/pod/c", upgrade, 403, "all"},
		{"metrics-server", "GET /metrics/%2e%2e/exec/ns/pod/c", upgrade, 403, "all"},
		{"metrics-server", "GET /metrics/..%2fexec/ns/pod/c", upgrade, 403, "all"},
		{"metrics-server", "GET /metrics%2f..%2fexec/ns/pod/c", upgrade, 403, "all"},
		{"metrics-server", `GET /metrics/..\exec/ns/pod/c`, upgrade, 403, "all"},
		{"metrics-server", "GET //metrics", "", 403, "all"},
		{"metrics-server", "GET /./metrics", "", 403, "all"},
		{"metrics-server", "GET //exec/ns/pod/c", upgrade, 403, "all"},
		{"metrics-server", "GET /%65xec/ns/pod/c", upgrade, 403, "all"},
		{"metrics-server", "GET https://edge1/exec/ns/pod/c", upgrade, 403, "exec"},
		{"metrics-server", "GET /metrics/%252e%252e/exec/ns/pod/c", upgrade, 403, "all"},
		{"metrics-server", "GET x:exec/ns/pod/c", upgrade, 403, "all"},
		{"metrics-server", "CONNECT edge1:443", "", 403, "all"},
		{"collector", "GET /containerLogs/ns/pod/c?follow=true", "", 200, ""},
		{"collector", "GET /pods", "", 200, ""},
		{"collector", "GET /metrics", "", 403, "metrics"},
		{"root", "POST /exec/ns/pod/c", "", 200, ""},
		{"root", "GET /odd//%2e%2e/path", "", 200, ""},
		{DefaultClientName, "POST /exec/ns/pod/c", "", 200, ""},
		{"mallory", "POST /exec/ns/pod/c", "", 403, "exec"},
	} {
		reached = nil
		c := r.raw(as(test.caller))
		io.WriteString(c, test.line+" HTTP/1.1\r\nHost: edge1\r\n"+test.header+"\r\n")
		method, _, _ := strings.Cut(test.line, " ")
		res := readResponse(t, bufio.NewReader(c), method)
		b, err := io.ReadAll(res.Body)
		must(t, err)
		c.Close()
		if res.StatusCode != test.status || test.status == 403 &&
			(len(reached) != 0 || !strings.Contains(string(b), "needs the class "+test.needs+" ")) {
			t.Errorf("%s: %s: %d %s; %q reached the kubelet", test.caller, test.line, res.StatusCode, b, reached)
		}
		if strings.Contains(string(b), "add it") {
			t.Errorf("%s: %s: it advises to add the caller: %s", test.caller, test.line, b)
		}
	}
}

// A kubelet that cleans the path of a forwarded request sees a path of the same class; otherwise
// the request is in auth.ClassAll.
func FuzzClass(f *testing.F) {
	for _, s := range []string{
		"/metrics", "/metrics/../exec/a", "//exec", "/metrics%2f..", "/stats/%20", "/logs/",
		"x:exec", "*", "/metrics/.", "/metrics\\..\\exec", "/metrics/%2e",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, uri string) {
		u, err := url.ParseRequestURI(uri)
		if err != nil {
			return
		}
		class := classOf(u)
		if class == auth.ClassAll {
			return
		}
		sent, err := url.ParseRequestURI(u.RequestURI())
		if err != nil || classOf(sent) != class {
			t.Fatalf("%q is %s, and what is sent, %v, is not: %v", uri, class, sent, err)
		}
		if c := classOf(&url.URL{Path: path.Clean(sent.Path)}); c != class {
			t.Errorf("%q is %s, and when it has been cleaned %s", uri, class, c)
		}
	})
}
