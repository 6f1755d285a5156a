package https

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// upgradeWays are the ways in which the door itself switches protocols.
var upgradeWays = []struct {
	name      string
	configure func(*rig, *Config)
}{{"terminate", nil}, {"edge", edgeTLS}}

// hijacked serves an upgrade request by hand: it writes answer unchanged; then serve owns the
// connection.
func hijacked(t *testing.T, answer string, serve func(net.Conn, *bufio.Reader)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		io.WriteString(c, answer)
		if serve != nil {
			serve(c, rw.Reader)
		}
	})
}

func upgradeRequest(protocol, more string) string {
	return "POST /exec?command=sh HTTP/1.1\r\nHost: edge1:10250\r\n" +
		"Connection: keep-alive, Upgrade\r\nUpgrade: " + protocol + "\r\n" +
		"X-Stream-Protocol-Version: v4.channel.k8s.io\r\nX-Stream-Protocol-Version: v3.channel.k8s.io\r\n" +
		"Content-Length: 0\r\n\r\n" + more
}

const switching = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n" +
	"X-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n"

func TestUpgrade(t *testing.T) {
	for _, way := range upgradeWays {
		for _, protocol := range []string{"SPDY/3.1", "websocket", "WebSocket"} {
			t.Run(way.name+"/"+protocol, func(t *testing.T) {
				echo := hijacked(t, fmt.Sprintf(switching, protocol)+"early ", func(c net.Conn, br *bufio.Reader) {
					io.Copy(c, br) // until the half-close
					io.WriteString(c, " bye")
				})
				r := newRig(t, echo, way.configure).start()
				c := r.raw(r.caller("" + "127.0.0.1"))
				// The first bytes arrive in the same packet as the request.
				_, err := io.WriteString(c, upgradeRequest(protocol, "pipelined "))
				must(t, err)
				br := bufio.NewReader(c)
				res := readResponse(t, br, "POST")
				if res.StatusCode != 101 || res.Header.Get("Upgrade") != protocol ||
					res.Header.Get("X-Stream-Protocol-Version") != "v4.channel.k8s.io" {
					t.Fatalf("answer %d %v", res.StatusCode, res.Header)
				}
				payload := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
				go func() {
					c.Write(payload)
					c.CloseWrite()
				}()
				got, err := io.ReadAll(br)
				must(t, err)
				if want := "early pipelined " + string(payload) + " bye"; string(got) != want {
					t.Errorf("%d bytes, want %d", len(got), len(want))
				}
				testkit.Eventually(t, "the conn ends", func() bool { return r.tunnel.openConns() == 0 })
			})
		}
	}
}

// A reset by either side resets the other side of an upgraded conn.
func TestUpgradeReset(t *testing.T) {
	for _, way := range upgradeWays {
		t.Run(way.name+"/caller", func(t *testing.T) {
			ended := make(chan error, 1)
			h := hijacked(t, fmt.Sprintf(switching, "SPDY/3.1"), func(c net.Conn, br *bufio.Reader) {
				_, err := io.Copy(io.Discard, br)
				ended <- err
			})
			r := newRig(t, h, way.configure).start()
			raw := r.tcp()
			c := tls.Client(raw, r.caller("127.0.0.1"))
			_, err := io.WriteString(c, upgradeRequest("SPDY/3.1", ""))
			must(t, err)
			readResponse(t, bufio.NewReader(c), "POST")
			raw.SetLinger(0)
			raw.Close()
			select {
			case err := <-ended:
				if err == nil {
					t.Error("a reset came as a clean end")
				}
			case <-time.After(patience):
				t.Error("the target does not notice")
			}
		})
		t.Run(way.name+"/target", func(t *testing.T) {
			h := hijacked(t, fmt.Sprintf(switching, "SPDY/3.1")+"x", func(c net.Conn, _ *bufio.Reader) {
				tcp := c.(*tls.Conn).NetConn().(*net.TCPConn)
				tcp.SetLinger(0)
				tcp.Close()
			})
			r := newRig(t, h, way.configure).start()
			c := r.raw(r.caller("127.0.0.1"))
			_, err := io.WriteString(c, upgradeRequest("SPDY/3.1", ""))
			must(t, err)
			br := bufio.NewReader(c)
			if res, err := http.ReadResponse(br, nil); err == nil && res.StatusCode == 101 {
				_, err = io.Copy(io.Discard, br)
				if err == nil {
					t.Error("a reset came as a clean end")
				}
			}
		})
	}
}

// A response other than 101 is an ordinary response; the bytes after it are not tunnelled.
func TestUpgradeRefused(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Path", r.URL.Path)
		http.Error(w, "no exec for you", http.StatusForbidden)
	})
	for _, way := range upgradeWays {
		t.Run(way.name, func(t *testing.T) {
			r := newRig(t, h, way.configure).start()
			c := r.raw(r.caller("127.0.0.1"))
			br := bufio.NewReader(c)
			_, err := io.WriteString(c, upgradeRequest("SPDY/3.1", "GET /second HTTP/1.1\r\nHost: edge1\r\n\r\n"))
			must(t, err)
			res := readResponse(t, br, "POST")
			b, err := io.ReadAll(res.Body)
			must(t, err)
			wantStatus(t, res, string(b), 403, "no exec for you")
			res = readResponse(t, br, "GET")
			b, err = io.ReadAll(res.Body)
			must(t, err)
			wantStatus(t, res, string(b), 403)
			if p := res.Header.Get("X-Path"); p != "/second" {
				t.Errorf("the second request came as %q", p)
			}
		})
	}
}

// A 101 without an upgrade request opens no tunnel.
func TestUpgradeUnasked(t *testing.T) {
	for name, test := range map[string]struct{ request, answer string }{
		"plain request":    {"GET / HTTP/1.1\r\nHost: edge1\r\n\r\n", fmt.Sprintf(switching, "SPDY/3.1")},
		"no protocol":      {"GET / HTTP/1.1\r\nHost: edge1\r\n\r\n", "HTTP/1.1 101 Switching Protocols\r\n\r\n"},
		"another protocol": {upgradeRequest("SPDY/3.1", ""), fmt.Sprintf(switching, "websocket")},
		"ignored protocol": {upgradeRequest("h2c", ""), fmt.Sprintf(switching, "h2c")},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, hijacked(t, test.answer, nil), nil).start()
			c := r.raw(r.caller("127.0.0.1"))
			_, err := io.WriteString(c, test.request)
			must(t, err)
			res := readResponse(t, bufio.NewReader(c), "GET")
			b, err := io.ReadAll(res.Body)
			must(t, err)
			wantStatus(t, res, string(b), 502, "edge1")
		})
	}
}

// Other protocols are not passed to the target.
func TestUpgradeIgnored(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%q %q", r.Header["Upgrade"], r.Header["Connection"])
	})
	r := newRig(t, h, nil).start()
	c := r.raw(r.caller("127.0.0.1"))
	_, err := io.WriteString(c, upgradeRequest("h2c", ""))
	must(t, err)
	res := readResponse(t, bufio.NewReader(c), "POST")
	b, err := io.ReadAll(res.Body)
	must(t, err)
	wantStatus(t, res, string(b), 200, "[] []")
}

func TestUpgradeNodeGone(t *testing.T) {
	r := newRig(t, nil, nil).start()
	c := r.raw(r.caller("127.0.0.1"))
	_, err := io.WriteString(c, strings.Replace(upgradeRequest("SPDY/3.1", ""), "edge1", "edge2", 1))
	must(t, err)
	res := readResponse(t, bufio.NewReader(c), "POST")
	b, err := io.ReadAll(res.Body)
	must(t, err)
	wantStatus(t, res, string(b), 502, "node edge2 is not connected")
}

// A conn that is passed through is half-closed and reset like TCP.
func TestPassthroughEnds(t *testing.T) {
	target, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer target.Close()
	start := func(t *testing.T) (r *rig, here, there *net.TCPConn) {
		r = newRig(t, nil, nil)
		r.tunnel.target = target.Addr().String()
		r.start()
		here = r.tcp()
		_, err := here.Write(testkit.ClientHello("edge1"))
		must(t, err)
		c, err := target.Accept()
		must(t, err)
		t.Cleanup(func() { c.Close() })
		must(t, c.SetDeadline(time.Now().Add(patience)))
		got := make([]byte, len(testkit.ClientHello("edge1")))
		_, err = io.ReadFull(c, got)
		must(t, err)
		return r, here, c.(*net.TCPConn)
	}
	t.Run("half-close by the caller", func(t *testing.T) {
		_, here, there := start(t)
		must(t, here.CloseWrite())
		if _, err := io.ReadAll(there); err != nil {
			t.Errorf("the end came as %v", err)
		}
		_, err := io.WriteString(there, "still here")
		must(t, err)
		must(t, there.Close())
		if b, err := io.ReadAll(here); err != nil || string(b) != "still here" {
			t.Errorf("got %q, %v", b, err)
		}
	})
	t.Run("reset by the target", func(t *testing.T) {
		_, here, there := start(t)
		there.SetLinger(0)
		there.Close()
		if _, err := io.ReadAll(here); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a reset came as %v", err)
		}
	})
	t.Run("reset by the caller", func(t *testing.T) {
		_, here, there := start(t)
		here.SetLinger(0)
		here.Close()
		if _, err := io.ReadAll(there); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a reset came as %v", err)
		}
	})
	t.Run("session lost", func(t *testing.T) {
		r, here, _ := start(t)
		r.tunnel.resetAll()
		if _, err := io.ReadAll(here); err == nil {
			t.Error("a lost session came as a clean end")
		}
	})
}
