//go:build e2e

package e2e

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// A gate stands between a cloud and kube-apiserver. It counts what is asked, and can answer that
// there is too much of it.
type gate struct {
	addr string // set once

	mu      sync.Mutex // guards the following
	refuses bool
	since   time.Time      // of the counts
	asked   map[string]int // by verb and path
	seconds map[int]int    // by second since then
}

// newGate opens a gate for the duration of the test.
func newGate(t *testing.T, c *cluster) *gate {
	t.Helper()
	pki := c.command(t.Context(), "pki", "leaf", "-dir", c.path("pki"), "-name", "gate", "-cn", "gate", "-ip",
		"127.0.0.1", "-server")
	if _, err := run(pki, nil); err != nil {
		t.Fatal(err)
	}
	cert, err := tls.LoadX509KeyPair(c.path("pki/gate.crt"), c.path("pki/gate.key"))
	if err != nil {
		t.Fatal(err)
	}
	server, err := url.Parse(apiServer)
	if err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: c.pool(t)}, ForceAttemptHTTP2: true}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(server) },
		Transport:     tr,
		FlushInterval: -1, // a watch is told at once
		// As without a gate: no answer, not another one.
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		ErrorLog:     log.New(io.Discard, "", 0),
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gate{addr: l.Addr().String()}
	g.count()
	srv := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if g.pass(r) {
				proxy.ServeHTTP(w, r)
				return
			}
			// As kube-apiserver's own priority and fairness answers (apiserver/pkg/server/filters, tooManyRequests).
			w.Header().Set("Retry-After", "1")
			http.Error(w, "Too many requests, please try again later.", http.StatusTooManyRequests)
		}),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}},
		ErrorLog:  log.New(io.Discard, "", 0),
	}
	done := make(chan error, 1)
	go func() { done <- srv.ServeTLS(l, "", "") }()
	t.Cleanup(func() {
		srv.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
		tr.CloseIdleConnections()
	})
	return g
}

// pass counts a request and reports whether it may go on.
func (g *gate) pass(r *http.Request) bool {
	verb := r.Method
	switch {
	case r.URL.Query().Get("watch") != "":
		verb = "WATCH"
	case verb == http.MethodGet && !strings.HasSuffix(r.URL.Path, "/"+nodesMap):
		verb = "LIST"
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.asked[verb+" "+r.URL.Path]++
	g.seconds[int(time.Since(g.since)/time.Second)]++
	return !g.refuses
}

// refuse has the gate answer 429 to everything, or no longer.
func (g *gate) refuse(yes bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.refuses = yes
}

// count begins to count anew.
func (g *gate) count() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.since, g.asked, g.seconds = time.Now(), make(map[string]int), make(map[int]int)
}

// counted returns how often what was asked since count, the number of all, the most in one second,
// and how long that is ago.
func (g *gate) counted() (asked map[string]int, all, most int, took time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, n := range g.seconds {
		all, most = all+n, max(most, n)
	}
	return maps.Clone(g.asked), all, most, time.Since(g.since)
}

// calm asserts that there was no hot loop since count: fewer than 5 requests a second, and a few more to begin with.
func (g *gate) calm(t *testing.T, during string) {
	t.Helper()
	asked, all, most, took := g.counted()
	t.Logf("%s: %d requests in %v, %d in one second at most:\n%s", during, all,
		took.Round(time.Millisecond), most, list(asked))
	if most > 10 || float64(all) > 5*(1+took.Seconds()) {
		t.Error("a hot loop")
	}
}

// list formats counts, the same way each time.
func list(counts map[string]int) string {
	var b strings.Builder
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		fmt.Fprintf(&b, "%4d %s\n", counts[what], what)
	}
	return b.String()
}
