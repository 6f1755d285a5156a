package https

import (
	"bufio"
	"crypto/tls"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

func (r *rig) wantLimited(l tunnel.Limit, n uint64) {
	r.t.Helper()
	testkit.Eventually(r.t, "limit "+l.String()+" is counted",
		func() bool { return r.door.cfg.Counters.LimitedBy(l) >= n })
	if got := r.door.cfg.Counters.LimitedBy(l); got != n {
		r.t.Errorf("limit %s was counted %d times, want %d", l, got, n)
	}
}

// A header above the limit is answered with 431 and counted, in both protocols; in HTTP/1 also when
// net/http refuses it.
func TestHeadersLimit(t *testing.T) {
	r := newRig(t, nil, func(_ *rig, c *Config) { c.Limits.Headers = 8 << 10 }).start()
	for _, h2 := range []bool{false, true} {
		client := r.client(r.caller("127.0.0.1"), h2)
		for size, status := range map[int]int{4 << 10: 200, 12 << 10: 431} {
			req, err := http.NewRequest("GET", "https://edge1/", nil)
			must(t, err)
			req.Header.Set("X", strings.Repeat("x", size))
			res, err := client.Do(req)
			must(t, err)
			b, err := io.ReadAll(res.Body)
			must(t, err)
			res.Body.Close()
			wantStatus(t, res, string(b), status)
		}
	}
	r.wantLimited(tunnel.LimitHeaders, 2)
	c := r.raw(r.caller("127.0.0.1"))
	_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: edge1\r\nX: "+strings.Repeat("x", 100<<10))
	must(t, err)
	res := readResponse(t, bufio.NewReader(c), "GET")
	wantStatus(t, res, "", 431)
	r.wantLimited(tunnel.LimitHeaders, 3)
}

// A caller with long certificates is disconnected before they are parsed.
func TestLongHandshake(t *testing.T) {
	r := newRig(t, nil, nil).start()
	cfg := r.caller("127.0.0.1")
	long := r.clientCA.issue(DefaultClientName)
	for len(long.Certificate) < 2*maxHandshake/len(long.Certificate[0]) {
		long.Certificate = append(long.Certificate, long.Certificate[0])
	}
	cfg.Certificates = []tls.Certificate{*long}
	c := tls.Client(r.tcp(), cfg)
	io.Copy(io.Discard, c) // returns when the door closes the connection
	testkit.Eventually(t, "the log says why", func() bool {
		return strings.Contains(r.logs.String(), "the TLS handshake is longer than 98304 bytes")
	})
}

// A caller that does not finish its ClientHello, handshake or header in time is disconnected and
// counted; so is one that may not call.
func TestHandshakeTimeout(t *testing.T) {
	for name, dawdle := range map[string]func(r *rig) io.Reader{
		"no ClientHello": func(r *rig) io.Reader { return r.tcp() },
		"no end of the handshake": func(r *rig) io.Reader {
			c := r.tcp()
			_, err := c.Write(testkit.ClientHello("127.0.0.1"))
			must(r.t, err)
			return c
		},
		// On a busy machine, the handshake of the next two cases may end too late, which is the same limit.
		"no end of the header": func(r *rig) io.Reader {
			c := tls.Client(r.tcp(), r.caller("127.0.0.1"))
			io.WriteString(c, "GET / HTTP/1.1\r\nHost: edge1\r\n")
			return c
		},
		"may not call": func(r *rig) io.Reader {
			cfg := r.caller("127.0.0.1")
			cfg.Certificates = []tls.Certificate{*r.clientCA.issue("mallory")}
			return tls.Client(r.tcp(), cfg)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, nil, func(_ *rig, c *Config) { c.Limits.HandshakeTimeout = 3 * time.Second }).start()
			io.Copy(io.Discard, dawdle(r)) // returns when the door closes the connection
			r.wantLimited(tunnel.LimitHandshakeTimeout, 1)
		})
	}
}
