package https

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// ways are the ways through the front door. HTTP must work in each as with the standard library
// alone.
var ways = []struct {
	name      string
	configure func(*rig, *Config)
	caller    func(*rig) *tls.Config
	h2        bool
}{
	{"passthrough/h1", func(_ *rig, c *Config) { c.Mode = Passthrough }, direct, false},
	{"passthrough/h2", nil, direct, true},
	{"terminate/h1", nil, func(r *rig) *tls.Config { return r.caller("127.0.0.1") }, false},
	{"terminate/h2", func(_ *rig, c *Config) { c.Mode = Terminate },
		func(r *rig) *tls.Config { return r.caller("front.example") }, true},
	{"edge/h1", edgeTLS, func(r *rig) *tls.Config { return r.caller("127.0.0.1") }, false},
	{"edge/h2", edgeTLS, func(r *rig) *tls.Config { return r.caller("127.0.0.1") }, true},
}

// direct is the TLS configuration of a caller that authenticates the kubelet itself.
func direct(r *rig) *tls.Config {
	c := r.caller("edge1")
	c.RootCAs = r.kubeletCA.pool
	return c
}

// edgeTLS configures SuperEdge's way: the client certificate is on the edge.
func edgeTLS(r *rig, c *Config) {
	c.Kubelet = Kubelet{}
	r.tunnel.edge = NewEdge(dialTCP, always(r.clientCA.issue("edge-client")), nil)
}

func eachWay(t *testing.T, h http.Handler, test func(t *testing.T, r *rig, c *http.Client)) {
	t.Helper()
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			r := newRig(t, h, w.configure).start()
			test(t, r, r.client(w.caller(r), w.h2))
		})
	}
}

// h1 reports whether the caller in a subtest of eachWay speaks HTTP/1.1.
func h1(t *testing.T) bool { return strings.HasSuffix(t.Name(), "/h1") }

func TestStatuses(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var code int
		fmt.Sscanf(r.URL.Path, "/%d", &code)
		if code/100 == 3 {
			w.Header().Set("Location", "https://elsewhere.example/")
		}
		w.WriteHeader(code)
		if code != 204 && code != 304 {
			io.WriteString(w, "body")
		}
	})
	eachWay(t, h, func(t *testing.T, _ *rig, c *http.Client) {
		for _, code := range []int{
			200, 201, 202, 204, 206, 301, 302, 304, 307, 308,
			400, 401, 403, 404, 409, 429, 500, 502, 503, 504, 599,
		} {
			res, body := get(t, c, fmt.Sprintf("https://edge1:10250/%d", code))
			want := "body"
			if code == 204 || code == 304 {
				want = ""
			}
			if res.StatusCode != code || body != want {
				t.Errorf("%d came as %d %q", code, res.StatusCode, body)
			}
		}
	})
}

func TestHead(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Length", "12345") })
	eachWay(t, h, func(t *testing.T, _ *rig, c *http.Client) {
		for range 2 { // the second one on the same connection
			res, err := c.Head("https://edge1/")
			must(t, err)
			b, err := io.ReadAll(res.Body)
			must(t, err)
			res.Body.Close()
			if res.ContentLength != 12345 || len(b) != 0 {
				t.Errorf("Content-Length %d, %d bytes of body", res.ContentLength, len(b))
			}
		}
	})
}

func TestHeadersAndPath(t *testing.T) {
	var got *http.Request
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r
		w.Header()["X-Many"] = []string{"a", "b", "b"}
		w.Header()["Content-Type"] = nil
		w.Header().Set("Keep-Alive", "timeout=1")
		io.WriteString(w, "<html>")
	})
	eachWay(t, h, func(t *testing.T, r *rig, c *http.Client) {
		req, err := http.NewRequest("GET", "https://edge1:10250/a%2Fb//c/../d?x=1;y=%zz&x=2", nil)
		must(t, err)
		req.Header["X-Multi"] = []string{"1", "2"}
		req.Header.Set("Accept-Encoding", "")
		req.Header.Set("User-Agent", "")
		req.Header.Set("X-Forwarded-For", "10.9.9.9")
		res, err := c.Do(req)
		must(t, err)
		body, err := io.ReadAll(res.Body)
		must(t, err)
		res.Body.Close()
		if string(body) != "<html>" {
			t.Errorf("body %q", body)
		}
		if v := res.Header["X-Many"]; !slices.Equal(v, []string{"a", "b", "b"}) {
			t.Errorf("X-Many came as %q", v)
		}
		if v, ok := res.Header["Content-Type"]; ok {
			t.Errorf("a Content-Type was invented: %q", v)
		}
		if v := got.Header["X-Multi"]; !slices.Equal(v, []string{"1", "2"}) {
			t.Errorf("X-Multi came as %q", v)
		}
		if got.RequestURI != "/a%2Fb//c/../d?x=1;y=%zz&x=2" {
			t.Errorf("URI came as %q", got.RequestURI)
		}
		if got.Host != "edge1:10250" {
			t.Errorf("Host came as %q", got.Host)
		}
		want := []string{"X-Multi", "Accept-Encoding"}
		if !strings.HasPrefix(r.tunnel.requests()[0].Caller, DefaultClientName) {
			want = append(want, "X-Forwarded-For") // passed through, so we do not strip it
		}
		for k := range maps.Keys(got.Header) {
			if !slices.Contains(want, k) && k != "User-Agent" {
				t.Errorf("header %s: %q was added", k, got.Header[k])
			}
		}
		for _, k := range want {
			if _, ok := got.Header[k]; !ok && k != "Accept-Encoding" {
				t.Errorf("header %s was lost", k)
			}
		}
	})
}

func TestInformational(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
		if _, err := io.Copy(w, r.Body); err != nil {
			t.Errorf("reading the body: %v", err)
		}
	})
	eachWay(t, h, func(t *testing.T, _ *rig, c *http.Client) {
		var hints []string
		got100 := false
		ctx := httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{
			Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
				if code == http.StatusEarlyHints {
					hints = append(hints, h.Get("Link"))
				}
				return nil
			},
			Got100Continue: func() { got100 = true },
		})
		req, err := http.NewRequestWithContext(ctx, "POST", "https://edge1/", strings.NewReader("hello"))
		must(t, err)
		if h1(t) { // after a 103, net/http's HTTP/2 client waits for a 100 that never comes
			req.Header.Set("Expect", "100-continue")
		}
		res, err := c.Do(req)
		must(t, err)
		b, err := io.ReadAll(res.Body)
		must(t, err)
		res.Body.Close()
		if string(b) != "hello" || got100 != h1(t) || len(hints) != 1 || hints[0] == "" ||
			res.Header.Get("Link") != "" {
			t.Errorf("body %q, 100-continue %v, early hints %q, Link %q", b, got100, hints, res.Header.Get("Link"))
		}
	})
}

func TestExpectRefused(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) })
	eachWay(t, h, func(t *testing.T, _ *rig, c *http.Client) {
		if !h1(t) {
			return // net/http's HTTP/2 server does not tell its handler about 100-continue
		}
		read := false
		body := readerFunc(func([]byte) (int, error) { read = true; return 0, io.EOF })
		req, err := http.NewRequest("POST", "https://edge1/", body)
		must(t, err)
		req.ContentLength = 1 << 20
		req.Header.Set("Expect", "100-continue")
		res, err := c.Do(req)
		must(t, err)
		res.Body.Close()
		if res.StatusCode != http.StatusForbidden || read {
			t.Errorf("status %d, body sent %v", res.StatusCode, read)
		}
	})
}

func TestTrailers(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Errorf("reading the body: %v", err)
		}
		w.Write(body)
		w.Header().Set("X-Sum", r.Trailer.Get("X-Req-Sum"))
		w.Header().Set(http.TrailerPrefix+"X-Late", "late")
	})
	eachWay(t, h, func(t *testing.T, _ *rig, c *http.Client) {
		req, err := http.NewRequest("POST", "https://edge1/", nil)
		must(t, err)
		req.Trailer = http.Header{"X-Req-Sum": nil}
		req.Body = io.NopCloser(io.MultiReader(strings.NewReader("data"), readerFunc(func([]byte) (int, error) {
			req.Trailer.Set("X-Req-Sum", "42")
			return 0, io.EOF
		})))
		res, err := c.Do(req)
		must(t, err)
		b, err := io.ReadAll(res.Body)
		must(t, err)
		res.Body.Close()
		if string(b) != "data" || res.Trailer.Get("X-Sum") != "42" || res.Trailer.Get("X-Late") != "late" {
			t.Errorf("body %q, trailers %v", b, res.Trailer)
		}
	})
}

// hundredMB is the size of the transfers, as in the acceptance test of `kubectl cp`.
const hundredMB = 100 << 20

func TestBigBodies(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		if _, err := io.Copy(w, r.Body); err != nil {
			t.Errorf("echo: %v", err)
		}
	})
	eachWay(t, h, func(t *testing.T, _ *rig, c *http.Client) {
		size := int64(hundredMB)
		if !h1(t) || testing.Short() {
			size = hundredMB / 10 // HTTP/2 is slow under the race detector
		}
		var seed [32]byte
		sent, got := sha256.New(), sha256.New()
		body := io.TeeReader(io.LimitReader(rand.NewChaCha8(seed), size), sent)
		res, err := c.Post("https://edge1/", "application/octet-stream", io.NopCloser(body))
		must(t, err)
		defer res.Body.Close()
		n, err := io.Copy(got, res.Body)
		must(t, err)
		if n != size || !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
			t.Errorf("%d of %d bytes, hash %s, want %s",
				n, size, hex.EncodeToString(got.Sum(nil)), hex.EncodeToString(sent.Sum(nil)))
		}
	})
}

// Every line of an upload or of `logs -f` arrives before the next one is written.
func TestEveryLineIsFlushed(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		rc.EnableFullDuplex()
		rc.Flush() // sends the header alone
		lines := bufio.NewReader(r.Body)
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				return
			}
			io.WriteString(w, line)
			rc.Flush()
		}
	})
	for _, length := range []int64{-1, 16} { // chunked, and with Content-Length
		t.Run(fmt.Sprint(length), func(t *testing.T) {
			eachWay(t, h, func(t *testing.T, _ *rig, c *http.Client) {
				pr, pw := io.Pipe()
				req, err := http.NewRequest("POST", "https://edge1/", pr)
				must(t, err)
				req.ContentLength = length
				res, err := c.Do(req)
				must(t, err)
				defer res.Body.Close()
				lines := bufio.NewReader(res.Body)
				for _, want := range []string{"one\n", "two\n", "six\n"} {
					_, err := io.WriteString(pw, want)
					must(t, err)
					got, err := lines.ReadString('\n')
					must(t, err)
					if got != want {
						t.Errorf("got %q, want %q", got, want)
					}
				}
				// net/http's HTTP/2 client holds the last bytes of a body of known length until it
				// ends.
				io.WriteString(pw, "end\n")
				pw.Close()
				if rest, err := io.ReadAll(lines); err != nil || string(rest) != "end\n" {
					t.Errorf("the end came as %q, %v", rest, err)
				}
			})
		})
	}
}

// A caller that still has a body to send, and sends nothing, receives the whole response.
func TestEarlyAnswer(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		if r.Header.Get("X-Size") != "" {
			w.Header().Set("Content-Length", "8")
		}
		w.WriteHeader(http.StatusRequestEntityTooLarge)
		io.WriteString(w, "too ")
		http.NewResponseController(w).Flush()
		io.WriteString(w, "much")
		if r.ProtoMajor == 1 {
			http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0))
		}
	})
	eachWay(t, h, func(t *testing.T, r *rig, c *http.Client) {
		for _, size := range []string{"", "8"} {
			pr, pw := io.Pipe()
			req, err := http.NewRequest("POST", "https://edge1/", pr)
			must(t, err)
			req.Header.Set("X-Size", size)
			answered := make(chan struct{})
			go func() {
				defer close(answered)
				res, err := c.Do(req)
				if err != nil {
					t.Error(err)
					return
				}
				defer res.Body.Close()
				b, err := io.ReadAll(res.Body)
				if err != nil || res.StatusCode != 413 || string(b) != "too much" {
					t.Errorf("answer %d %q, %v", res.StatusCode, b, err)
				}
			}()
			io.WriteString(pw, "the first of many")
			within(t, "the answer", patience, answered)
			pw.Close()
		}
		testkit.Eventually(t, "no conn is left in use", func() bool {
			c.CloseIdleConnections()
			return r.tunnel.openConns() <= 1
		})
	})
}

func TestCallerGone(t *testing.T) {
	started, gone := make(chan struct{}, 1), make(chan struct{}, 1)
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		io.WriteString(w, "line\n")
		rc.Flush()
		started <- struct{}{}
		<-r.Context().Done()
		gone <- struct{}{}
	})
	eachWay(t, h, func(t *testing.T, _ *rig, c *http.Client) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, "GET", "https://edge1/logs", nil)
		must(t, err)
		res, err := c.Do(req)
		must(t, err)
		defer res.Body.Close()
		within(t, "the request", patience, started)
		cancel()
		within(t, "the target's end", patience, gone)
	})
}

func TestTargetGone(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Size") != "" {
			w.Header().Set("Content-Length", "100")
		}
		io.WriteString(w, "half")
		http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	eachWay(t, h, func(t *testing.T, _ *rig, c *http.Client) {
		for _, size := range []string{"", "100"} {
			req, err := http.NewRequest("GET", "https://edge1/", nil)
			must(t, err)
			req.Header.Set("X-Size", size)
			res, err := c.Do(req)
			must(t, err)
			_, err = io.ReadAll(res.Body)
			res.Body.Close()
			if err == nil {
				t.Error("a cut answer ended as if it were whole")
			}
		}
	})
}

// Requests after the loss of a session do not fail.
func TestSessionLost(t *testing.T) {
	eachWay(t, nil, func(t *testing.T, r *rig, c *http.Client) {
		for i := range 5 {
			if _, body := get(t, c, "https://edge1/"); body != "pong" {
				t.Fatalf("request %d: %q", i, body)
			}
			r.tunnel.resetAll()
			if strings.Contains(t.Name(), "passthrough") {
				c.CloseIdleConnections() // they belong to the caller
			}
		}
	})
}

func TestSessionLostMidAnswer(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "half")
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	eachWay(t, h, func(t *testing.T, r *rig, c *http.Client) {
		res, err := c.Get("https://edge1/")
		must(t, err)
		defer res.Body.Close()
		r.tunnel.resetAll()
		if _, err := io.ReadAll(res.Body); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("a cut answer ended with %v", err)
		}
	})
}

// Nodes that connect, fail and disconnect leave nothing in the pool.
func TestPoolForgets(t *testing.T) {
	r := newRig(t, nil, func(_ *rig, c *Config) { c.Kubelet.CA, c.Kubelet.Insecure = nil, true }).start()
	c := r.client(r.caller("127.0.0.1"), true)
	for i := range 50 {
		node := tunnel.NodeName(fmt.Sprintf("node%d", i))
		r.tunnel.set(func(f *fakeTunnel) { f.nodes[node] = true })
		res, body := get(t, c, "https://"+string(node)+"/")
		wantStatus(t, res, body, 200, "pong")
		res, body = get(t, c, "https://unknown-"+string(node)+"/")
		wantStatus(t, res, body, 502, "not connected")
		r.tunnel.set(func(f *fakeTunnel) { f.fail = tunnel.Refusef(tunnel.Refused, "nobody there") })
		r.tunnel.resetAll()
		testkit.Eventually(t, "the node refuses", func() bool {
			res, _ := get(t, c, "https://"+string(node)+"/")
			return res.StatusCode == 502
		})
		r.tunnel.set(func(f *fakeTunnel) { f.fail = nil })
	}
	testkit.Eventually(t, "all nodes are forgotten", func() bool { return r.door.hops() == 0 })
}

// A target that does not read its upload does not stop the uploads of others.
func TestStalledUpload(t *testing.T) {
	stalled, resume := make(chan struct{}, 8), make(chan struct{})
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stall" {
			stalled <- struct{}{}
			<-resume // net/http notices that the caller has gone only after reading its body
			return
		}
		io.Copy(io.Discard, r.Body)
		io.WriteString(w, "done")
	})
	eachWay(t, h, func(t *testing.T, _ *rig, c *http.Client) {
		if strings.Contains(t.Name(), "passthrough/h2") {
			return // the kubelet's own HTTP/2 server decides here
		}
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				body := readerFunc(func(p []byte) (int, error) { return len(p), ctx.Err() })
				req, err := http.NewRequestWithContext(ctx, "POST", "https://edge1/stall", body)
				if err != nil {
					t.Error(err)
					return
				}
				if res, err := c.Do(req); err == nil {
					res.Body.Close()
				}
			})
		}
		for range 4 {
			within(t, "the stalled upload", patience, stalled)
		}
		endless := readerFunc(func(p []byte) (int, error) { return len(p), nil })
		res, err := c.Post("https://edge1/", "", io.LimitReader(endless, 8<<20))
		must(t, err)
		b, err := io.ReadAll(res.Body)
		must(t, err)
		res.Body.Close()
		wantStatus(t, res, string(b), 200, "done")
		cancel()
		for range 4 {
			resume <- struct{}{}
		}
		wg.Wait()
	})
}

// Requests share conns to the kubelet.
func TestPool(t *testing.T) {
	r := newRig(t, nil, nil).start()
	c := r.client(r.caller("127.0.0.1"), false)
	// One conn, unless a goroutine is late: net/http does not keep a conn whose request took 50 ms longer to write. On a
	// busy machine that may happen often, but not always.
	fewest := math.MaxInt
	for range 5 {
		before := len(r.tunnel.requests())
		for range 10 {
			get(t, c, "https://edge1/")
		}
		if fewest = min(fewest, len(r.tunnel.requests())-before); fewest <= 5 {
			break
		}
	}
	if fewest > 5 {
		t.Errorf("10 requests made %d conns", fewest)
	}
	r.tunnel.resetAll()
	testkit.Eventually(t, "the conn is forgotten", func() bool { return r.tunnel.openConns() == 0 })
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
