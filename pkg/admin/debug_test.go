package admin

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Debug serves health, metrics, the log level and pprof, and removes its socket at the end.
func TestDebug(t *testing.T) {
	dir, err := os.MkdirTemp("", "sock") // t.TempDir's path is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	var level slog.LevelVar
	health := New(":0", []Check{{Name: "stream"}}, NewRegistry("v1", new(tunnel.Counters), nil), discard())
	t.Run("running", func(t *testing.T) {
		start(t, NewDebug(path, health, &level, discard()))
		transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}, DisableKeepAlives: true}
		for _, c := range []struct {
			method, path, body string
			status             int
			says               string
		}{
			{"GET", "/healthz", "", 200, "ok"},
			{"GET", "/readyz?verbose", "", 200, "[+]stream ok"},
			{"GET", "/metrics", "", 200, "tunnel_build_info"},
			{"GET", "/loglevel", "", 200, "info"},
			{"PUT", "/loglevel", "debug\n", 200, "debug"},
			{"GET", "/loglevel", "", 200, "debug"},
			{"PUT", "/loglevel", "loud", 400, "debug, info, warn or error"},
			{"PUT", "/loglevel", strings.Repeat("debug", 100), 400, "debug, info, warn or error"},
			{"POST", "/loglevel", "info", 405, ""},
			{"GET", "/debug/pprof/", "", 200, "goroutine"},
			{"GET", "/debug/pprof/goroutine?debug=1", "", 200, "goroutine profile"},
			{"GET", "/debug/pprof/heap?debug=1", "", 200, "heap profile"},
			{"GET", "/debug/pprof/cmdline", "", 200, "admin"},
			{"GET", "/debug/pprof/no-such", "", 404, ""},
		} {
			url := "http://localhost" + c.path
			req, err := http.NewRequestWithContext(t.Context(), c.method, url, strings.NewReader(c.body))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := (&http.Client{Transport: transport, Timeout: patience}).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || resp.StatusCode != c.status || !strings.Contains(string(b), c.says) {
				t.Errorf("%s %s: %d %.200q %v; want %d %q", c.method, c.path, resp.StatusCode, b, err, c.status, c.says)
			}
		}
		if level.Level() != slog.LevelDebug {
			t.Errorf("the level is %v", level.Level())
		}
	})
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the socket is left behind: %v", err)
	}
}
