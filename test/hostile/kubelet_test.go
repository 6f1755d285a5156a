package hostile

import (
	"crypto/tls"
	"io"
	"log"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

// kubelet is the HTTPS server of the calm node. Some of its paths mean harm.
type kubelet struct {
	addr     string
	trap     string       // where it redirects to
	followed atomic.Int64 // how often somebody has come there
	upgrades atomic.Int64 // requests that came with an Upgrade
	secret   string       // stands in what it answers; written before it is asked
}

func newKubelet(t *testing.T, ca *auth.CA) *kubelet {
	t.Helper()
	leaf := auth.Leaf{CommonName: rig.Node, DNSNames: []string{rig.Node}, Server: true}
	pair := testca.CA{CA: ca}.Pair(t, leaf)
	k := new(kubelet)
	k.trap = serve(t, func(net.Conn) { k.followed.Add(1) })
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			k.upgrades.Add(1)
		}
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Set-Cookie", "session="+k.secret)
		w.Header().Set("X-Error", k.secret)
		io.WriteString(w, "a page\n")
	})
	mux.HandleFunc("/redirect", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "https://"+k.trap+"/", http.StatusFound)
	})
	mux.HandleFunc("/endless-header", raw(func(c net.Conn) {
		io.WriteString(c, "HTTP/1.1 200 OK\r\n")
		pour(c, lines{})
	}))
	mux.HandleFunc("/switch", raw(func(c net.Conn) {
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"+
			"HTTP/1.1 200 OK\r\n\r\n")
	}))
	mux.HandleFunc("/garbage", raw(func(c net.Conn) { pour(c, io.LimitReader(zeros{}, mib)) }))
	mux.HandleFunc("/leaky-status", raw(func(c net.Conn) { io.WriteString(c, "HTTP/1.1 "+k.secret+" OK\r\n\r\n") }))
	mux.HandleFunc("/leaky-header",
		raw(func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\n"+k.secret+" no colon\r\n\r\n") }))
	mux.HandleFunc("/leaky-length", raw(func(c net.Conn) {
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: "+k.secret+"\r\n\r\n")
	}))
	mux.HandleFunc("/leaky-idle", raw(func(c net.Conn) {
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		time.Sleep(100 * time.Millisecond) // it is kept for the next request
		io.WriteString(c, k.secret+"\r\n\r\n")
		time.Sleep(100 * time.Millisecond)
	}))
	mux.HandleFunc("/leaky-switch", raw(func(c net.Conn) {
		io.WriteString(c, "HTTP/1.1 101 "+k.secret+"\r\nConnection: Upgrade\r\nUpgrade: "+k.secret+"\r\n\r\n")
	}))
	server := &http.Server{
		Handler: mux, TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}},
		ReadHeaderTimeout: hangs, ErrorLog: log.New(io.Discard, "", 0),
	}
	k.addr = testkit.ServeTLS(t, ln, server)
	return k
}

// pour writes what comes from r, 16 MiB a second. Faster, it would weigh what the edge does
// until it hears that nobody wants this.
func pour(c net.Conn, r io.Reader) {
	c.SetWriteDeadline(time.Now().Add(hangs))
	for b := make([]byte, 16<<10); ; time.Sleep(time.Millisecond) {
		n, err := r.Read(b)
		if err != nil {
			return
		}
		if _, err := c.Write(b[:n]); err != nil {
			return
		}
	}
}

// raw answers a request by bytes.
func raw(answer func(net.Conn)) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		answer(c)
	}
}
