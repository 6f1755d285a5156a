package hostile

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/test/rig"
	"tunnel.example/tunnel/test/rig/rigtest"
)

// launch starts a process of a pair and ends it with the test.
func launch(t *testing.T, start func() (*rig.Process, error)) *rig.Process {
	t.Helper()
	p, err := start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		alive := p.Alive()
		p.Kill()
		if log := p.Log().String(); !alive || t.Failed() || strings.Contains(log, "panic") {
			t.Errorf("alive at the end: %t; the log:\n%s", alive, log[max(0, len(log)-8000):])
		}
	})
	return p
}

// insert puts lines behind the head of a table in one of a pair's files.
func insert(t *testing.T, p *rig.Pair, file, table, lines string) {
	t.Helper()
	b, err := os.ReadFile(p.Path(file))
	if err != nil {
		t.Fatal(err)
	}
	head := "[" + table + "]\n"
	if !bytes.Contains(b, []byte(head)) {
		t.Fatalf("%s has no table %s", file, table)
	}
	if err := os.WriteFile(p.Path(file), bytes.Replace(b, []byte(head), []byte(head+lines+"\n"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
}

// stuffer is strangers of several addresses. Each shows a made-up ServiceAccount token and
// sends, behind it, as much as a stream's window allows.
type stuffer struct {
	v    *victim
	from []net.IP
	each int

	mu   sync.Mutex     // guards the following
	told map[string]int // how many answers there were, by gRPC's code
}

// comeBack is after what time a stranger asks again. More often, its handshakes would be what
// others notice.
const comeBack = 5 * time.Second

// hold has the strangers ask, again and again, until stop is called. It returns when each
// has asked once.
func (s *stuffer) hold() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var asked, all sync.WaitGroup
	for i, ip := range s.from {
		for j := range s.each {
			asked.Add(1)
			all.Go(func() {
				first := sync.OnceFunc(asked.Done)
				defer first()
				for n := 0; ctx.Err() == nil; n++ {
					s.ask(ctx, ip, fmt.Sprintf("eyJ.eyJ.%d-%d-%d", i, j, n), first)
					first()
					select {
					case <-time.After(comeBack):
					case <-ctx.Done():
					}
				}
			})
		}
	}
	asked.Wait()
	return func() {
		cancel()
		all.Wait()
	}
}

// ask is one connection, from its handshake until somebody closes it.
func (s *stuffer) ask(ctx context.Context, ip net.IP, token string, asked func()) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // closes it
	raw, err := dialFrom(ctx, nil, ip, s.v.Addr["grpc"])
	if err != nil {
		return
	}
	raw.(*net.TCPConn).SetWriteBuffer(64 << 10) // what does not fit is the test's to hold
	c := tls.Client(raw, s.v.edgeTLS())
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		return
	}
	f := http2.NewFramer(c, c)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	var head bytes.Buffer
	enc := hpack.NewEncoder(&head)
	for _, h := range [][2]string{
		{":method", "POST"}, {":scheme", "https"}, {":path", pb.Stream_TunnelStreaming_FullMethodName},
		{":authority", "tunnel.cloud.io"},
		{"content-type", "application/grpc"}, {"te", "trailers"},
		{"authorization", "Bearer " + auth.EncodeToken(rig.Node, auth.Secret(token))},
	} {
		enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	if errors.Join(f.WriteSettings(),
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: head.Bytes(), EndHeaders: true})) != nil {
		return
	}
	asked()
	var sent sync.WaitGroup
	defer sent.Wait()
	defer cancel()
	sent.Go(func() {
		const frame = 16 << 10
		for range window / frame {
			if f.WriteData(1, false, zeroes[:frame]) != nil {
				return
			}
		}
	})
	for {
		got, err := f.ReadFrame()
		if err != nil {
			return
		}
		if h, ok := got.(*http2.MetaHeadersFrame); ok {
			for _, field := range h.Fields {
				if field.Name == "grpc-status" {
					s.tell(field.Value)
				}
			}
		}
	}
}

var zeroes [16 << 10]byte

func (s *stuffer) tell(code string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.told[code]++
}

// TestHostileReviews is strangers with made-up ServiceAccount tokens, while Kubernetes does
// not answer. They hold little of the cloud's memory, those beyond the limit are told at once, and an
// edge with a token of the file joins as ever.
func TestHostileReviews(t *testing.T) {
	const (
		sources = 4
		waits   = 24        // of one address
		holds   = 256 << 10 // for each: 129 KiB that are read, its handshake and its buffers
	)
	each := 48
	if long() {
		each = 128
	}
	most := int64(sources * each * holds)
	k := newAPIServer(t)
	t.Setenv("KUBECONFIG", k.config)
	t.Setenv("GOGC", "20") // so that what is held shows in what a cloud weighs
	p, err := rig.NewPair(rig.Config{
		Binary: program, Dir: t.TempDir(), Others: evils,
		Cloud: "[mode.cloud.join]\nanynode = true\nserviceaccounts = [\"tunnel-system/tunnel-edge\"]\n" +
			"audience = \"tunnel\"\n",
	})
	if err != nil {
		t.Fatal(err)
	}
	cloud := launch(t, p.StartCloud)
	testkit.Within(t, readyWithin, "the cloud is ready", func() error { return rig.Ready(p.CloudHealth()) })
	v := &victim{
		Addr: map[string]string{"grpc": p.GRPC()}, Dir: p.Path(""),
		Token: map[string]string{evils[0]: p.Token(evils[0]).Reveal()},
	}
	join := func() error { return joinFrom(nil, net.IPv4(127, 0, 0, 3), v, evils[0]) }
	if err := join(); err != nil {
		t.Fatal(err)
	}
	if err := cloud.ResetPeak(); err != nil {
		t.Fatal(err)
	}
	before, err := cloud.Memory()
	if err != nil {
		t.Fatal(err)
	}
	s := &stuffer{v: v, each: each, told: make(map[string]int)}
	for i := range sources {
		s.from = append(s.from, net.IPv4(127, 0, 1, byte(i)))
	}
	begun := time.Now()
	defer s.hold()()
	t.Logf("%d strangers have asked after %s", sources*each, time.Since(begun).Round(time.Millisecond))
	// On a busy machine some come late: reviews have been given up, and others may wait.
	refused := float64(sources * (each - waits) / 2)
	full := 0.0
	for begun := time.Now(); full < refused && time.Since(begun) < takes; time.Sleep(poll) {
		values, err := rig.Metrics(p.CloudHealth())
		if err != nil {
			t.Fatal(err)
		}
		full = values[`tunnel_auth_reviews_total{result="full"}`]
	}
	if full < refused {
		t.Errorf("of %d strangers %v were refused without a wait; want %v", sources*each, full, refused)
	}
	if n := k.reviews.Load(); n == 0 {
		t.Error("no token has come to Kubernetes")
	}
	wantServed(t, soon, join)
	now, err := cloud.Memory()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("memory: %d MiB, at most %d MiB more", before.Now/mib, (now.Peak-before.Now)/mib)
	if grown := now.Peak - before.Now; grown > most {
		t.Errorf("the cloud grew by %d MiB; want %d at most", grown/mib, most/mib)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t.Logf("strangers were told, by code: %v", s.told)
	if len(s.told) != 1 || s.told["14"] == 0 {
		t.Error("want UNAVAILABLE (14) alone")
	}
}

// TestHostileAskers is somebody who asks the cloud's DNS for names that are no node's. An
// upstream is asked for sources in allowfrom alone.
func TestHostileAskers(t *testing.T) {
	var asked atomic.Int64
	upstream := dnsServer(t, func(w dns.ResponseWriter, q *dns.Msg) {
		asked.Add(1)
		m := new(dns.Msg).SetReply(q)
		m.Answer = []dns.RR{&dns.A{
			Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60},
			A:   net.IPv4(192, 0, 2, 1),
		}}
		w.WriteMsg(m)
	})
	p, err := rig.NewPair(rig.Config{Binary: program, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	port := testkit.FreePort(t)
	at := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	insert(t, p, "cloud.toml", "mode.cloud.stream.dns",
		fmt.Sprintf("listen = %q\nupstream = [%q]\nallowfrom = [\"127.0.0.2/32\"]", at, upstream))
	launch(t, p.StartCloud)
	testkit.Within(t, readyWithin, "the cloud is ready", func() error { return rig.Ready(p.CloudHealth()) })
	ask := func(network, from, name string) string {
		t.Helper()
		ip := net.ParseIP(from)
		var local net.Addr = &net.UDPAddr{IP: ip}
		if network == "tcp" {
			local = &net.TCPAddr{IP: ip}
		}
		c := dns.Client{Net: network, Timeout: hangs, Dialer: &net.Dialer{LocalAddr: local}}
		m, _, err := c.Exchange(new(dns.Msg).SetQuestion(name, dns.TypeA), at)
		if err != nil {
			t.Fatal(err)
		}
		answer := dns.RcodeToString[m.Rcode]
		for _, rr := range m.Answer {
			answer += " " + rr.(*dns.A).A.String()
		}
		return answer
	}
	for _, network := range []string{"udp", "tcp"} {
		before := asked.Load()
		for i := range thefts {
			if got := ask(network, "127.0.0.9", fmt.Sprintf("a%d.example.", i)); got != "REFUSED" {
				t.Errorf("%s: somebody else is answered %s; want REFUSED", network, got)
			}
		}
		if n := asked.Load() - before; n != 0 {
			t.Errorf("%s: for somebody else the upstream was asked %d times; want none", network, n)
		}
		if got := ask(network, "127.0.0.2", "a.example."); got != "NOERROR 192.0.2.1" {
			t.Errorf("%s: one of allowfrom is answered %s", network, got)
		}
		if n := asked.Load() - before; n != 1 {
			t.Errorf("%s: the upstream was asked %d times; want once, for the one of allowfrom", network, n)
		}
	}
}

// dnsServer runs a DNS server over UDP and TCP until the end of the test.
func dnsServer(t *testing.T, handle dns.HandlerFunc) string {
	t.Helper()
	port := testkit.FreePort(t)
	at := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	for _, network := range []string{"udp", "tcp"} {
		up, ended := make(chan struct{}), make(chan error, 1)
		s := &dns.Server{Addr: at, Net: network, Handler: handle, NotifyStartedFunc: func() { close(up) }}
		go func() { ended <- s.ListenAndServe() }()
		select {
		case <-up:
		case err := <-ended:
			t.Fatal(err)
		}
		t.Cleanup(func() {
			s.Shutdown()
			<-ended
		})
	}
	return at
}

// TestHostileMetadata is a cloud that has an edge dial the metadata service of the edge's
// machine. A wide entry of allow does not permit it, one of its own does.
func TestHostileMetadata(t *testing.T) {
	const metadata = "169.254.169.254:80"
	network := rigtest.Network(t)
	if err := network.IP("addr add 169.254.169.254/32 dev lo"); err != nil {
		t.Fatal(err)
	}
	ln, err := network.Listen(metadata)
	if err != nil {
		t.Fatal(err)
	}
	var dialled atomic.Int64
	server := &http.Server{
		ReadHeaderTimeout: hangs,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, "credentials")
		}),
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateNew {
				dialled.Add(1)
			}
		},
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(ln) }()
	t.Cleanup(func() {
		server.Close()
		<-ended
	})
	for name, tc := range map[string]struct {
		allow     string // self:1, since the service stands on the edge's own machine here
		permitted bool
	}{
		"a wide entry":         {`["self:1", "0.0.0.0/0:*"]`, false},
		"an entry of its own":  {`["self:1", "0.0.0.0/0:*", "169.254.169.254:80"]`, true},
		"an entry of its port": {`["self:1", "0.0.0.0/0:80"]`, false},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := rig.NewPair(rig.Config{
				Binary: program, Dir: t.TempDir(), CloudHost: rig.Host{Network: network}, EdgeHost: rig.Host{Network: network},
				TCP: map[string]string{"metadata": metadata},
			})
			if err != nil {
				t.Fatal(err)
			}
			insert(t, p, "edge.toml", "mode.edge", "allow = "+tc.allow)
			cloud := launch(t, p.StartCloud)
			edge := launch(t, p.StartEdge)
			testkit.Within(t, readyWithin, "cloud and edge are ready", func() error {
				here := net.IPv4(127, 0, 0, 1)
				return errors.Join(getFrom(network, here, p.CloudHealth(), "http://cloud/readyz", nil),
					getFrom(network, here, p.EdgeHealth(), "http://edge/readyz", nil))
			})
			before := dialled.Load()
			err = getFrom(network, net.IPv4(127, 0, 0, 1), p.Door("metadata"), "http://"+metadata+"/latest/meta-data/", nil)
			n := dialled.Load() - before
			if tc.permitted {
				if err != nil || n != 1 {
					t.Errorf("it is dialled %d times: %v; want once, and its answer", n, err)
				}
				return
			}
			if err == nil || n != 0 {
				t.Fatalf("it is dialled %d times: %v; want a denial", n, err)
			}
			for _, log := range []*rig.Log{cloud.Log(), edge.Log()} {
				testkit.Within(t, readyWithin, "cloud and edge log the denial", func() error {
					if !strings.Contains(log.String(), "may not dial "+metadata) {
						return errors.New("there is none")
					}
					return nil
				})
			}
		})
	}
}

// say connects, sends text, and returns the answer up to its end.
func say(network, addr, text string) (answer string, err error) {
	conn, err := net.Dial(network, addr)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(hangs))
	if text != "" { // even an empty write takes a reset's error, and the read then sees a clean end
		io.WriteString(conn, text)
	}
	b, err := io.ReadAll(conn)
	return string(b), err
}

// TestHostileNames is a cloud that asks an edge for names of the edge's network. A denial
// tells neither the cloud nor its caller what they resolve to. The edge's log does.
func TestHostileNames(t *testing.T) {
	const name, port = "localhost", "5" // it is in every machine's hosts file, and so looked up as others are
	socket := filepath.Join(t.TempDir(), "s")
	p, err := rig.NewPair(rig.Config{
		Binary: program, Dir: t.TempDir(), Debug: true,
		TCP:   map[string]string{"name": name + ":" + port},
		Cloud: "[mode.cloud.egress]\nhttpconnect = [\"unix://" + socket + "\"]\nstrategies = [\"default\"]\n",
	})
	if err != nil {
		t.Fatal(err)
	}
	insert(t, p, "edge.toml", "mode.edge", `allow = ["self:4"]`)
	cloud := launch(t, p.StartCloud)
	edge := launch(t, p.StartEdge)
	testkit.Within(t, readyWithin, "cloud and edge are ready", func() error {
		return errors.Join(rig.Ready(p.CloudHealth()), rig.Ready(p.EdgeHealth()))
	})
	denied := "may not dial " + name + ":" + port
	address := regexp.MustCompile(`(127\.0\.0\.1|\[::1\]):` + port + `\b`)
	for door, c := range map[string]struct{ network, addr, says string }{
		"tcp":    {"tcp", p.Door("name"), ""},
		"egress": {"unix", socket, fmt.Sprintf("CONNECT %s:%s HTTP/1.1\r\nHost: %s:%s\r\n\r\n", name, port, name, port)},
	} {
		t.Run(door, func(t *testing.T) {
			seen, seenByEdge := len(cloud.Log().String()), len(edge.Log().String())
			answer, err := say(c.network, c.addr, c.says)
			t.Logf("the caller is answered %q, %v", answer, err)
			// The TCP front door answers by a reset, which may come during the dial.
			if door == "tcp" && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("want a reset")
			}
			if door == "egress" && !strings.Contains(answer, denied) {
				t.Errorf("want the denial")
			}
			testkit.Within(t, readyWithin, "the cloud logs the denial", func() error {
				if !strings.Contains(cloud.Log().String()[seen:], denied) {
					return errors.New("it does not")
				}
				return nil
			})
			testkit.Within(t, readyWithin, "the edge logs the address", func() error {
				if !address.MatchString(edge.Log().String()[seenByEdge:]) {
					return errors.New("it does not")
				}
				return nil
			})
			for what, text := range map[string]string{"the cloud's log": cloud.Log().String()[seen:],
				"what the caller is told": string(answer)} {
				if found := address.FindString(text); found != "" {
					t.Errorf("%s holds %s:\n%s", what, found, text)
				}
			}
		})
	}
}

// TestHostileGuesses is a token file with tokens that may be guessed. The cloud warns of
// their lines when it starts and when the file changes, and shows none.
func TestHostileGuesses(t *testing.T) {
	const first, second = "Correct-Horse", "Battery-Staple"
	p, err := rig.NewPair(rig.Config{Binary: program, Dir: t.TempDir(), Token: first, Debug: true})
	if err != nil {
		t.Fatal(err)
	}
	long := auth.NewToken().Reveal()
	write := func(lines string) {
		t.Helper()
		if err := os.WriteFile(p.Path("tokens"), []byte(lines), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("# nodes\nedge2:" + long + "\n" + rig.Node + ":" + first + "\n")
	cloud := launch(t, p.StartCloud)
	edge := launch(t, p.StartEdge)
	testkit.Within(t, readyWithin, "cloud and edge are ready", func() error {
		return errors.Join(rig.Ready(p.CloudHealth()), rig.Ready(p.EdgeHealth()))
	})
	const warning = "may be guessed"
	warned := func(line string) error {
		for l := range strings.SplitSeq(cloud.Log().String(), "\n") {
			if strings.Contains(l, warning) && strings.Contains(l, line) {
				return nil
			}
		}
		return fmt.Errorf("no warning of %s", line)
	}
	testkit.Within(t, readyWithin, "the cloud warns of the file", func() error { return warned("lines=[3]") })
	write(rig.Node + ":" + first + "\nedge2:" + long + "\nedge3:" + second + "\nedge4:" + long + "4\n")
	testkit.Within(t, readyWithin, "the cloud warns of the changed file", func() error { return warned(`lines="[1 3]"`) })
	if n := strings.Count(cloud.Log().String(), warning); n != 2 {
		t.Errorf("there are %d warnings, want 2", n)
	}
	if where := p.Leaks(cloud, edge); len(where) > 0 {
		t.Errorf("the node's token is in %q", where)
	}
	for _, token := range []string{first, second, long} {
		if strings.Contains(cloud.Log().String(), token) {
			t.Errorf("the cloud's log holds %q", token)
		}
	}
}
