package page

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// source is a Source with the nodes that it is given.
type source struct {
	nodes []api.Node
	asked atomic.Int64
}

func (s *source) Nodes(context.Context) *api.NodeList {
	s.asked.Add(1)
	return &api.NodeList{APIVersion: "v1", Replica: "cloud-0", Nodes: s.nodes, Incomplete: []string{"no nodes of b"}}
}

func (s *source) Statuses(context.Context) (all []*api.Status, incomplete []string) {
	return []*api.Status{{Replica: "cloud-0", Refusals: []tunnel.Event{{Result: "denied", Err: "<b>why</b>"}}},
		{Replica: "cloud-2"}, {Replica: "cloud-1"}}, []string{"no status of b"}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// get answers a request with the page's handler.
func get(s *Server, method, host, path string, header http.Header) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, nil)
	r.Host = host
	for key, values := range header {
		r.Header[key] = values
	}
	w := httptest.NewRecorder()
	s.Handler().ServeHTTP(w, r)
	return w
}

// Only local names lead to the page, nothing but GET and HEAD is answered, and there are no other paths.
func TestWhoMayAsk(t *testing.T) {
	s := New("", new(source), quiet())
	for _, test := range []struct {
		method, host, path string
		want               int
	}{
		{"GET", "127.0.0.1:9790", "/", 200},
		{"GET", "localhost:19790", "/", 200},
		{"GET", "[::1]:9790", "/page.js", 200},
		{"HEAD", "localhost", "/style.css", 200},
		{"GET", "localhost:1", "/data.json", 200},
		{"GET", "evil.example:9790", "/", 421},
		{"GET", "evil.example", "/data.json", 421},
		{"GET", "localhost.evil.example", "/data.json", 421},
		{"GET", "127.0.0.1.evil.example", "/data.json", 421},
		{"GET", "192.0.2.1:9790", "/data.json", 421},
		{"GET", "", "/data.json", 421},
		{"POST", "127.0.0.1:9790", "/data.json", 405},
		{"DELETE", "127.0.0.1:9790", "/v1/nodes/edge1", 405},
		{"OPTIONS", "127.0.0.1:9790", "/", 405},
		{"GET", "127.0.0.1:9790", "/v1/nodes", 404},
		{"GET", "127.0.0.1:9790", "/index.htm", 404},
		{"GET", "127.0.0.1:9790", "/assets/", 404},
	} {
		w := get(s, test.method, test.host, test.path, nil)
		if w.Code != test.want {
			t.Errorf("%s %s of %q: %d; want %d", test.method, test.path, test.host, w.Code, test.want)
		}
		h := w.Header()
		if h.Get("Content-Security-Policy") != policy || h.Get("X-Content-Type-Options") != "nosniff" ||
			h.Get("Cache-Control") != "no-store" || h.Get("Cross-Origin-Resource-Policy") != "same-origin" ||
			h.Get("Referrer-Policy") != "no-referrer" || h.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s %s of %q: headers %v", test.method, test.path, test.host, h)
		}
	}
}

// The page loads nothing from elsewhere, and has no script, style or handler in its HTML. The script makes no HTML.
func TestAssets(t *testing.T) {
	s := New("", new(source), quiet())
	for path, kind := range map[string]string{"/": "text/html", "/style.css": "text/css", "/page.js": "text/javascript"} {
		w := get(s, "GET", "localhost", path, nil)
		if !strings.HasPrefix(w.Header().Get("Content-Type"), kind) {
			t.Errorf("%s is %s", path, w.Header().Get("Content-Type"))
		}
		text := strings.ReplaceAll(w.Body.String(), "http://www.w3.org/2000/svg", "") // the name of a namespace
		for _, bad := range []string{"http://", "https://", "//cdn", "@import", "url(", "innerHTML", "outerHTML",
			"insertAdjacentHTML", "document.write", "eval(", "style=\"", "onclick", "onload", "<style"} {
			if strings.Contains(text, bad) {
				t.Errorf("%s has %s", path, bad)
			}
		}
		own := strings.Count(text, "<script src=\"page.js\" defer></script>")
		if path == "/" && (own != 1 || strings.Count(text, "<script") != 1) {
			t.Error("the page has a script of its own")
		}
	}
}

// The data is what the API says, with or without compression, and what is missing is named.
func TestData(t *testing.T) {
	s := New("", &source{nodes: []api.Node{{Name: "edge1", State: api.Missing, LastEnd: "<script>"}}}, quiet())
	for _, encoding := range []string{"", "gzip"} {
		srv := httptest.NewServer(s.Handler())
		client := &http.Client{Transport: &http.Transport{DisableCompression: encoding == ""}} // else it asks for gzip
		response, err := client.Get(srv.URL + "/data.json")
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(response.Body)
		response.Body.Close()
		client.CloseIdleConnections()
		srv.Close()
		var got Data
		if err != nil || json.Unmarshal(text, &got) != nil || response.Header.Get("Content-Type") != "application/json" {
			t.Fatalf("%v, %v, %s", err, response.Header, text)
		}
		if response.Uncompressed != (encoding == "gzip") {
			t.Errorf("%q: compressed: %t", encoding, response.Uncompressed)
		}
		if len(got.Nodes.Nodes) != 1 || got.Nodes.Nodes[0].LastEnd != "<script>" || len(got.Replicas) != 3 ||
			got.Replicas[1].Replica != "cloud-1" || got.Replicas[0].Refusals[0].Err != "<b>why</b>" ||
			fmt.Sprint(got.Incomplete) != "[no nodes of b no status of b]" {
			t.Errorf("%s", text)
		}
	}
}

// However many pages ask, the replicas are asked once in two seconds.
func TestAskedSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		of := new(source)
		s := New("", of, quiet())
		for range 10 {
			get(s, "GET", "localhost", "/data.json", nil)
			time.Sleep(keep / 20)
		}
		if n := of.asked.Load(); n != 1 {
			t.Errorf("asked %d times at once", n)
		}
		time.Sleep(keep)
		get(s, "GET", "localhost", "/data.json", nil)
		if n := of.asked.Load(); n != 2 {
			t.Errorf("asked %d times after %v", n, keep)
		}
	})
}

// The data of 10,000 nodes fits a narrow link.
func TestManyNodes(t *testing.T) {
	of := new(source)
	for n := range 10_000 {
		of.nodes = append(of.nodes, api.Node{
			Name: fmt.Sprintf("edge-%05d.site-%03d.example.com", n, n%100), State: api.Connected, LastSeen: time.Now(),
			Sessions: []api.Session{{
				Replica: "cloud-0", ID: fmt.Sprintf("%032x", n*7919), Remote: fmt.Sprintf("192.0.2.%d:4", n%250),
			}},
		})
	}
	s := New("", of, quiet())
	w := get(s, "GET", "localhost", "/data.json", http.Header{"Accept-Encoding": {"gzip"}})
	t.Logf("10,000 nodes: %d kB", w.Body.Len()/1000)
	if w.Body.Len() > 1<<20 {
		t.Errorf("%d bytes", w.Body.Len())
	}
	var got Data
	plain := get(s, "GET", "localhost", "/data.json", nil)
	if err := json.NewDecoder(plain.Body).Decode(&got); err != nil || len(got.Nodes.Nodes) != 10_000 {
		t.Errorf("%d nodes, %v", len(got.Nodes.Nodes), err)
	}
}

// The page is served on loopback until it is stopped, and on no other address.
func TestRun(t *testing.T) {
	for _, bad := range []string{"0.0.0.0:0", ":0", "192.0.2.1:0", "nonsense"} {
		if err := New(bad, new(source), quiet()).Run(t.Context()); err == nil || !strings.Contains(err.Error(), "127.0.0.1") {
			t.Errorf("%s: %v", bad, err)
		}
	}
	s := New("127.0.0.1:0", new(source), quiet())
	running := testkit.Run(t, s.Run)
	testkit.Eventually(t, "the page listens", func() bool { return s.Addr() != nil })
	c, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", s.Addr())
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil || !strings.Contains(line, "200") {
		t.Errorf("%q, %v", line, err)
	}
	taken := New(s.Addr().String(), new(source), quiet())
	if err := taken.Run(t.Context()); err == nil {
		t.Error("a taken port is no error")
	}
	running.Stop()
}
