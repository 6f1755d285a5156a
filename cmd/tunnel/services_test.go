package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/services/relay"
)

// edgeSocket serves these paths as the admin socket of an edge, and returns its path.
func edgeSocket(t *testing.T, handlers map[string]http.Handler) (path string) {
	t.Helper()
	ln, path := listenSocket(t)
	mux := http.NewServeMux()
	for pattern, h := range handlers {
		mux.Handle(pattern, h)
	}
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go srv.Serve(ln) // Close ends it
	t.Cleanup(func() { srv.Close() })
	return path
}

// listenSocket opens a unix socket, which nobody serves yet.
func listenSocket(t *testing.T) (ln net.Listener, path string) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("tunnel has no unix sockets on Windows")
	}
	dir, err := os.MkdirTemp("/tmp", "t") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path = filepath.Join(dir, "sock")
	ln, err = net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln, path
}

// What the commands print, with text of the cluster that is not printable.
func TestServicesCommands(t *testing.T) {
	since := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	list := relay.List{Node: "edge1", Stale: &since, Ports: []relay.Port{{
		Service: "shop/web", Name: "http\x1b", Address: "10.96.0.10", Protocol: "TCP", Port: 80, Served: relay.ServedRelay,
		Usable: 1, Known: 2, Endpoints: []relay.Verdict{
			{Address: "10.88.2.5", Port: 8080, Node: "edge2", Usable: true, Why: "it is reachable through the tunnel"},
			{Address: "10.88.3.5", Node: "edge3", Why: "it is not ready"},
		},
	}}}
	answer := func(v any) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { api.Answer(w, v) })
	}
	socket := edgeSocket(t, map[string]http.Handler{
		"GET /v1/services":          answer(list),
		"GET /v1/services/shop/web": answer(list),
		"GET /v1/services/shop/none": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			api.Refuse(w, http.StatusNotFound, "no-such-service", fmt.Errorf("node edge1 knows no Service shop/none"))
		}),
		"GET /v1/services/watch": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			lines := json.NewEncoder(w)
			for _, line := range []relay.Line{
				{Time: since, Path: "node/a", Value: json.RawMessage(`{"edge":true}`)},
				{Time: since, Path: "node/b", Deleted: true}, {Time: since, Lost: 7},
			} {
				if err := lines.Encode(line); err != nil {
					t.Error(err)
				}
			}
		}),
	})
	for _, c := range []struct {
		args string
		code int
		want []string // in the output or in the errors
	}{
		{"ls", exitOK, []string{"SERVED BY", "shop/web", "relay", "warning: this is what the cloud has sent until"}},
		{"ls -o wide", exitOK, []string{"KNOWN", "http?"}},
		{"ls -o json", exitOK, []string{`"served": "relay"`, `"stale_since": "2026-11-23T12:00:00Z"`}},
		{"ls -o yaml", exitOK, []string{"served: relay"}},
		{"ls -o text", exitUsage, []string{"-o is one of"}},
		{"explain shop/web", exitOK,
			[]string{"10.96.0.10 port 80", "served by relay", "it is reachable through the tunnel", "it is not ready"}},
		{"explain shop/web -o yaml", exitOK, []string{"why: it is not ready"}},
		{"explain shop/none", exitRuntime, []string{"knows no Service shop/none"}},
		{"explain web", exitUsage, []string{"name one Service, as NAMESPACE/NAME"}},
		{"watch", exitRuntime, []string{"set", `node/a  {"edge":true}`, "deleted  node/b", "warning: 7 changes are lost",
			"has ended the stream"}},
		{"watch -o json", exitRuntime, []string{`"path":"node/b","deleted":true`}},
		{"watch -o yaml", exitRuntime, []string{"path: node/a", "\n---\ndeleted: true\npath: node/b\n", "\n---\nlost: 7\n"}},
	} {
		args := append([]string{"services"}, append(strings.Fields(c.args), "--socket", socket)...)
		code, out, errs := says(t, args...)
		if code != c.code {
			t.Errorf("%s: exit code %d\n%s%s", c.args, code, out, errs)
		}
		for _, want := range c.want {
			if !strings.Contains(out+errs, want) {
				t.Errorf("%s: %q is missing in\n%s%s", c.args, want, out, errs)
			}
		}
	}
}

// An edge without the table says what to write.
func TestServicesAreOff(t *testing.T) {
	all := make(map[string]http.Handler)
	new(edgeWiring).handleServices(all)
	socket := edgeSocket(t, all)
	for _, args := range [][]string{{"ls"}, {"explain", "shop/web"}, {"watch"}} {
		code, _, errs := says(t, append([]string{"services", args[0], "--socket", socket}, args[1:]...)...)
		if code != exitRuntime || !strings.Contains(errs, "write [mode.edge.services]") {
			t.Errorf("%v: exit code %d, %s", args, code, errs)
		}
	}
}
