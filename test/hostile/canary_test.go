package hostile

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	channelz "google.golang.org/grpc/channelz/grpc_channelz_v1"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/test/rig"
)

// canaries are secrets that are known by their sight: what each is, by how it looks.
type canaries struct {
	mu    sync.Mutex // guards the following
	looks map[string]string
}

func newCanaries() *canaries { return &canaries{looks: make(map[string]string)} }

// make makes a secret. It is a token, a header, a node's name, whatever it is put into.
func (c *canaries) make(what string) string {
	b := make([]byte, 12)
	rand.Read(b)
	s := "canary-" + hex.EncodeToString(b)
	c.add(what, s)
	return s
}

// add has a secret looked for, also as it may stand in files, in headers and on the wire.
func (c *canaries) add(what, secret string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.looks[secret] = what
	c.looks[strings.TrimPrefix(auth.Secret(secret).Hashed(), "sha256:")] = what + ", hashed"
	c.looks[url.QueryEscape(secret)] = what
	for shift := range 3 { // base64 looks in three ways, depending on what stands before
		b := base64.RawStdEncoding.EncodeToString([]byte(strings.Repeat("x", shift) + secret))
		c.looks[b[4:len(b)-4]] = what + ", in base64"
	}
	c.looks[hex.EncodeToString([]byte(secret))] = what + ", in hex"
}

// addKeys adds every private key in the files of a folder: each line of its base64, and its bytes.
func (c *canaries) addKeys(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	keys := 0
	for _, e := range entries {
		rest, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // a folder, a socket
		}
		var block *pem.Block
		for block == nil || !strings.HasSuffix(block.Type, "PRIVATE KEY") {
			if block, rest = pem.Decode(rest); block == nil {
				break
			}
		}
		if block == nil {
			continue
		}
		keys++
		what := "the key in " + e.Name()
		c.mu.Lock()
		for line := range strings.Lines(string(pem.EncodeToMemory(block))) {
			if line = strings.TrimSpace(line); !strings.HasPrefix(line, "-----") && len(line) >= 24 {
				c.looks[line] = what
			}
		}
		// The middle is the number that is secret; what stands around it is the same in all.
		c.looks[hex.EncodeToString(block.Bytes[36:60])] = what + ", in hex"
		c.mu.Unlock()
	}
	if keys == 0 {
		t.Fatalf("there is no key in %s", dir)
	}
}

// in returns which secrets can be seen in a text.
func (c *canaries) in(text string) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	found := make(map[string]bool)
	for look, what := range c.looks {
		if strings.Contains(text, look) {
			found[what] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// without returns a text without the looks of a secret that may be there.
func (c *canaries) without(text, what string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	for look, is := range c.looks {
		if is == what {
			text = strings.ReplaceAll(text, look, "…")
		}
	}
	return text
}

// outputs is all that came out, by where.
type outputs struct {
	mu    sync.Mutex // guards the following
	texts map[string]string
}

func (o *outputs) add(where, text string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.texts == nil {
		o.texts = make(map[string]string)
	}
	o.texts[where] += text + "\n"
}

func (o *outputs) err(where string, err error) {
	if err != nil {
		o.add(where, err.Error())
	}
}

// check fails when a secret is in an output, or an output lacks what proves that it was
// looked at.
func (o *outputs) check(t *testing.T, c *canaries, proofs map[string]string) {
	t.Helper()
	for where, text := range o.texts {
		for _, what := range c.in(text) {
			t.Errorf("%s shows %s", where, what)
			for line := range strings.Lines(text) {
				if len(c.in(line)) > 0 {
					t.Logf("  %.300s", strings.TrimSpace(line))
					break
				}
			}
		}
	}
	for where, proof := range proofs {
		if !strings.Contains(o.texts[where], proof) {
			t.Errorf("%s has no %q: it is not looked at\n%.2000s", where, proof, o.texts[where])
		}
	}
}

// TestTheCanaryTestCanFail plants a secret in every output in turn.
func TestTheCanaryTestCanFail(t *testing.T) {
	c := newCanaries()
	token := c.make("a token")
	c.make("something else")
	for name, text := range map[string]string{
		"plain":         "token=" + token,
		"on the wire":   auth.EncodeToken("edge1", auth.Secret(token)),
		"hashed":        "edge1:" + auth.Secret(token).Hashed(),
		"in a URL":      "GET /exec?command=" + token,
		"in base64":     "Basic " + base64.StdEncoding.EncodeToString([]byte("u:"+token)),
		"in hex":        fmt.Sprintf("% x %x", "u", token),
		"among others'": strings.Repeat("x", 1<<20) + token + strings.Repeat("y", 1<<20),
	} {
		if found := c.in(text); len(found) != 1 || !strings.HasPrefix(found[0], "a token") {
			t.Errorf("%s: found %q", name, found)
		}
	}
	if found := c.in("nothing to see: canary-0123456789abcdef01234567"); len(found) != 0 {
		t.Errorf("found %q where nothing is", found)
	}
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	_, key, err := ca.Issue(rig.CloudLeaf())
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "a.key"), key, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	c.addKeys(t, dir)
	block, _ := pem.Decode(key)
	for _, text := range []string{string(key), fmt.Sprintf("%x", block.Bytes)} {
		if len(c.in(text)) == 0 {
			t.Error("a private key is not found")
		}
	}
}

// TestCanary runs a cloud and an edge with secrets everywhere, has everything fail that
// can, and looks at all that they say.
func TestCanary(t *testing.T) {
	for _, format := range []string{"text", "json"} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			newCage(t, format).run()
		})
	}
}

const kubeletsWords = "what the kubelet says"

// cage is a cloud and an edge whose secrets are canaries.
type cage struct {
	*lab
	secrets *canaries
	out     *outputs
	bearer  string // what a caller presents to the kubelet

	collector *httptest.Server // of the spans of cloud and edges

	egress, page string   // addresses of the egress front door, and of the status page
	echo         string   // address of a target that echoes
	ran          []string // command lines, without the name of the program

	past, joiner auth.Secret // tokens of evil0
}

func newCage(t *testing.T, format string) *cage {
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	c := &cage{lab: &lab{t: t, kubelet: newKubelet(t, ca)}, secrets: newCanaries(), out: new(outputs)}
	c.bearer = c.secrets.make("the caller's token")
	c.kubelet.secret = c.secrets.make(kubeletsWords)
	c.egress, c.page = testkit.FreeAddress(t), testkit.FreeAddress(t)
	c.collector = httptest.NewServer(http.HandlerFunc(c.collect))
	t.Cleanup(c.collector.Close)
	c.echo = serve(t, func(conn net.Conn) { io.Copy(conn, conn) })
	dir := t.TempDir()
	c.Pair, err = rig.NewPair(rig.Config{
		Binary: program, Dir: dir, CA: ca, Debug: true, Token: auth.Secret(c.secrets.make("the edge's token")),
		TCP:   map[string]string{"echo": c.echo, "closed": "127.0.0.1:1", "denied": "192.0.2.1:22"},
		HTTPS: c.kubelet.addr, Others: []string{"evil0"},
		Cloud: fmt.Sprintf(cageTOML, c.page, c.egress, c.collector.URL),
		Edge:  "[mode.edge.admin]\nsocket = \"edge.sock\"\n" + c.edgeTraces(),
		Args:  []string{"--log-format", format},
	})
	if err != nil {
		t.Fatal(err)
	}
	c.secrets.add("the token of evil0", c.Token("evil0").Reveal())
	nodes, err := auth.NewCA("nodes", time.Hour)
	if err == nil {
		err = os.WriteFile(c.Path("nodes.crt"), nodes.CertPEM(), 0o600)
	}
	if err == nil {
		err = os.WriteFile(c.Path("nodes.key"), nodes.KeyPEM(), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	c.secrets.addKeys(t, dir)
	// Tokens that are good for something else, or not any more.
	c.past, c.joiner = auth.Secret(c.secrets.make("an expired token")), auth.Secret(c.secrets.make("a token to join with"))
	f, err := os.OpenFile(c.Path("tokens"), os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = fmt.Fprintf(f, "evil0:%s expires=2020-01-01T00:00:00Z\nevil0:%s join\nevil2:revoked\n",
			c.past.Hashed(), c.joiner.Reveal())
	}
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	return c
}

const cageTOML = `[mode.cloud.admin]
socket = "cloud.sock"
inventory = "nodes.json"
forwards = "forwards.toml"
page = %q
[mode.cloud.egress]
httpconnect = ["tls://%s"]
cert = "https.crt"
key = "https.key"
clientca = "ca.crt"
clientnames = ["kube-apiserver-kubelet-client"]
strategies = ["default"]
[mode.cloud.audit]
file = "audit.json"
[mode.cloud.traces]
endpoint = %q
permillion = 1000000
[mode.cloud.join]
ca = "nodes.crt"
cakey = "nodes.key"
address = "127.0.0.1:{{.GRPC}}"
cloudca = "ca.crt"
`

// edgeTraces has an edge send its spans.
func (c *cage) edgeTraces() string {
	return fmt.Sprintf("[mode.edge.traces]\nendpoint = %q\n", c.collector.URL)
}

// collect looks at spans. The texts in a message of OTLP are as they are.
func (c *cage) collect(_ http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body) // a process that is killed sends a part
	from := "cloud"
	if bytes.Contains(body, []byte("tunnel-edge")) {
		from = "edges"
	}
	c.out.add("the spans of the "+from, fmt.Sprintf("%s %v %s", r.URL, r.Header, body))
}

func (c *cage) run() {
	t := c.t
	var err error
	if c.cloud, err = c.StartCloud(); err != nil {
		t.Fatal(err)
	}
	defer c.cloud.Kill()
	if c.edge, err = c.StartEdge(); err != nil {
		t.Fatal(err)
	}
	defer c.edge.Kill()
	testkit.Within(t, readyWithin, "cloud and edge are ready", func() error { return rig.Ready(c.EdgeHealth()) })
	tapped := c.taps()
	c.joins()
	c.requests()
	c.connects()
	c.conns()
	tapped()
	c.newcomers()
	c.operates()
	c.proxiedNode()
	c.rotates()
	c.badTokenFiles()
	c.listen()
	c.configChecks()
	c.strangeEdges()
	c.proxiedEdges()
	// The last words: what a process says that is asked to die with all it knows.
	for _, p := range []*rig.Process{c.cloud, c.edge} {
		if err := p.Signal(syscall.SIGQUIT); err != nil {
			t.Fatal(err)
		}
		<-p.Done()
	}
	for name, log := range map[string]*rig.Log{"cloud": &c.CloudLog, "edge": &c.EdgeLog} {
		text := log.String()
		c.out.add("the log of the "+name, text)
		// The stacks that SIGQUIT prints may have functions with "panic" in their names, such as those that recover.
		before, _, quit := strings.Cut(text, "SIGQUIT: quit")
		if !quit {
			t.Errorf("the %s has printed no stacks", name)
		}
		if i := strings.Index(before, "panic"); i >= 0 {
			t.Errorf("the %s has panicked: %s", name, before[max(0, i-1000):min(len(before), i+1000)])
		}
	}
	c.collector.Close() // which waits for requests
	c.audit()
	c.everyCommand()
	c.out.check(t, c.secrets, map[string]string{
		"the audit":                        `"path":"/exec/ns/pod/c"`,
		"the spans of the cloud":           "/cri/exec",
		"the spans of the edges":           "connection refused",
		"the log of the cloud":             "SIGQUIT: quit",
		"the log of the edge":              "SIGQUIT: quit",
		"what a refused edge is told":      "Unauthenticated",
		"what a caller is answered":        "HTTP/1.1 502",
		"/metrics of the cloud":            "tunnel_joins_refused_total",
		"/readyz?verbose of the cloud":     "[+]stream ok",
		"channelz":                         "127.0.0.1",
		"pprof of the cloud":               "goroutine profile",
		"pprof of the edge":                "goroutine profile",
		"the command line of the cloud":    "cloud.toml",
		"what tunnel config check says":    "token file",
		"what a strange edge says":         "no session",
		"what tunnel check says":           "lets node edge1 join",
		"what an edge says of its proxy":   "407",
		"what join says of its proxy":      "407",
		"what tunnel join says":            "evil3",
		"what tunnel token says":           "evil3",
		"what the newcomer's edge says":    "SIGQUIT: quit",
		"/loglevel at the socket of cloud": "debug",
		"/v1/nodes at the socket of cloud": "api_version",
		"/v1/status at the socket of edge": "api_version",
		"what tunnel status says":          "api_version",
		"what tunnel cert status says":     "evil3",
		"what tunnel ls says":              "edge1",
		"what tunnel top says":             "edge1",
		"what tunnel ping says":            "edge1",
		"what tunnel trace says":           "connection refused",
		"what tunnel tap says":             "192.0.2.1:22",
		"what tunnel reload says":          "***",
		"what tunnel forward ls says":      "configuration",
		"what tunnel token list says":      "many-*",
		"what tunnel drain says":           "there is no other replica",
		"what tunnel cert rotate-ca says":  "step 2",
		"what tunnel init says":            "cloud.toml",
		"what the new cloud says":          "SIGQUIT: quit",
		"what an edge behind a proxy says": "SIGQUIT: quit",
		"diag of the cloud":                "tunnel_build_info",
		"diag of the edge behind a proxy":  `token = "***"`,
		"the status page":                  `"edge1"`,
		"the file nodes.json":              "edge1",
		"the file forwards.toml":           "edge1",
	})
	if !strings.Contains(c.CloudLog.String(), "DEBUG") {
		t.Error("the cloud does not log at level debug")
	}
}

// audit is what the audit has of all that: every kind of event that this test causes is in it.
func (c *cage) audit() {
	text, err := os.ReadFile(c.Path("audit.json"))
	if err != nil {
		c.t.Fatal(err)
	}
	c.out.add("the audit", string(text))
	kinds := make(map[string]bool)
	for line := range bytes.Lines(text) {
		var e struct{ Event, Result string }
		if err := json.Unmarshal(line, &e); err != nil {
			c.t.Errorf("a line of the audit: %v: %s", err, line)
		}
		kinds[e.Event+" "+e.Result] = true
	}
	for _, want := range []string{"egress ok", "egress refused", "reload ok", "join ok", "join denied", "leave ok",
		"issue ok", "issue denied", "token ok", "revoke ok", "token-create ok", "token-revoke ok", "exec ok", "tcp ok",
		"tcp refused", "tcp denied"} {
		if !kinds[want] {
			c.t.Errorf("the audit has no %q: it has %q", want, slices.Sorted(maps.Keys(kinds)))
		}
	}
}

// joins is edges whose proof is wrong in every way, and one whose proof is good.
func (c *cage) joins() {
	wrong := func(what string) auth.Secret { return auth.Secret(c.secrets.make(what)) }
	long := c.secrets.make("a token that is too long")
	for _, authorization := range []string{
		"Bearer " + auth.EncodeToken(rig.Node, wrong("a wrong token")),
		"Bearer " + auth.EncodeToken("evil0", c.Token(rig.Node)),
		"Bearer " + auth.EncodeToken("evil0", c.past),
		"Bearer " + auth.EncodeToken("evil0", c.joiner),
		"Bearer " + auth.EncodeToken("evil2", wrong("a token of a revoked node")),
		"Bearer " + auth.EncodeToken("no-such-node", wrong("a token of an unknown node")),
		"Bearer " + auth.EncodeToken(rig.Node, auth.Secret(strings.Repeat(long, 300))),
		`Bearer {"nodename":"edge1","token":"` + c.secrets.make("a token in broken JSON"),
		`Bearer {"nodename":"edge1","token":"x","` + c.secrets.make("a token as a key") + `":"y"}`,
		`Bearer {"nodename":"edge1","token":{"a":"` + c.secrets.make("a token in an object") + `"}}`,
		"Bearer " + c.secrets.make("a bare token"),
		"Basic " + base64.StdEncoding.EncodeToString([]byte("edge1:"+c.secrets.make("a password"))),
		c.secrets.make("no scheme at all"),
		"Bearer tunnel1." + base64.RawURLEncoding.EncodeToString([]byte(`{"secret":"`+c.secrets.make("a join token")+`"}`)),
		"Bearer ey" + base64.RawURLEncoding.EncodeToString(
			[]byte(`{"sub":"`+c.secrets.make("a ServiceAccount's token")+`"}`)),
	} {
		ctx, cancel := context.WithCancel(c.t.Context())
		e := c.victim().dial(ctx, rig.Node)
		var err error
		e.control, err = e.TunnelStreaming(metadata.AppendToOutgoingContext(ctx, "authorization", authorization))
		if err == nil {
			e.say("stream", "hello", "", &pb.Hello{Version: 1})
			err = e.end()
		}
		c.out.err("what a refused edge is told", err)
		_, err = pb.NewCertificatesClient(c.connection(ctx)).Sign(metadata.AppendToOutgoingContext(ctx,
			"authorization", authorization),
			&pb.SignRequest{Request: []byte(c.secrets.make("a certificate request"))})
		c.out.err("what a refused edge is told", err)
		cancel()
	}
	// One that is good, and then presents what is not.
	ctx, cancel := context.WithCancel(c.t.Context())
	defer cancel()
	e, err := c.victim().join(ctx, "evil0")
	if err != nil {
		c.t.Fatal(err)
	}
	for _, token := range []string{auth.EncodeToken("evil0", wrong("a wrong new token")),
		auth.EncodeToken(rig.Node, wrong("a new token of another node")), c.secrets.make("a bare new token")} {
		e.say("stream", "credential", "", &pb.Credential{AccessToken: token})
	}
	// What it says beside that is nobody's to repeat, either.
	for _, typ := range []string{"heartbeat", "refused", "drain", "credential", "shout"} {
		m := &pb.StreamMsg{Category: "stream", Type: typ, Topic: c.secrets.make("a topic"),
			Data: []byte(c.secrets.make("the data of a message")), Addr: c.secrets.make("an address")}
		e.control.Send(m)
	}
	c.out.err("what a refused edge is told", e.end())
}

// connection connects an attacker to the gRPC port.
func (c *cage) connection(ctx context.Context) *grpc.ClientConn {
	cc, err := grpc.NewClient("passthrough:///"+c.GRPC(), grpc.WithTransportCredentials(credentials.NewTLS(c.EdgeTLS())))
	if err != nil {
		c.t.Fatal(err)
	}
	context.AfterFunc(ctx, func() { cc.Close() })
	return cc
}

// requests is HTTP through the front door, with secrets wherever HTTP has a place.
func (c *cage) requests() {
	secret := "Authorization: Bearer " + c.bearer + "\r\nCookie: session=" + c.secrets.make("a cookie") +
		"\r\nX-Remote-User: " + c.secrets.make("a header") +
		"\r\nTraceparent: " + c.secrets.make("a traceparent that is none") + "\r\n"
	body := `{"stdin":"` + c.secrets.make("the body of an exec") + `"}`
	length := fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(body), body)
	for _, request := range []string{
		"POST /exec/ns/pod/c?command=" + c.secrets.make("an exec's command") +
			" HTTP/1.1\r\nHost: edge1\r\n" + secret + length,
		// A kubelet that redirects callers to its streaming server has a secret in the path.
		"POST /cri/exec/" + c.secrets.make("the token of a stream") + "?a=" + c.secrets.make("a query") +
			" HTTP/1.1\r\nHost: edge1\r\n" + secret + length,
		"POST /cri/attach/" + c.secrets.make("the token of a stream") +
			" HTTP/1.1\r\nHost: no-such-node\r\n" + secret + length,
		"GET / HTTP/1.1\r\nHost: no-such-node\r\n" + secret + "\r\n",
		"GET / HTTP/1.1\r\nHost: edge1:1\r\n" + secret + "\r\n",
		"POST / HTTP/1.1\r\nHost: edge1\r\nTransfer-Encoding: chunked\r\n" + secret + length,
		"POST / HTTP/1.1\r\nHost: edge1\r\nTransfer-Encoding: chunked\r\n" + secret + "\r\n" + body,
		"GET / HTTP/1.1\r\nHost: edge1\r\n" + secret + "Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: edge1\r\n" + secret + "Upgrade: websocket\r\nConnection: Upgrade\r\n" + length,
		"GET / HTTP/1.1\r\nHost: edge1\r\nAuthorization " + c.bearer + "\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: edge1\r\nAuthorization: \x00" + c.bearer + "\r\n\r\n",
		c.bearer + "\r\n\r\n",
		"GET /leaky-status HTTP/1.1\r\nHost: edge1\r\n" + secret + "\r\n",
		"GET /leaky-header HTTP/1.1\r\nHost: edge1\r\n" + secret + "\r\n",
		"GET /leaky-length HTTP/1.1\r\nHost: edge1\r\n" + secret + "\r\n",
		"GET /leaky-switch HTTP/1.1\r\nHost: edge1\r\n" + secret + "Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
		"GET /leaky-idle HTTP/1.1\r\nHost: edge1\r\n" + secret + "\r\n",
		"GET /garbage HTTP/1.1\r\nHost: edge1\r\n" + secret + "\r\n",
	} {
		conn, err := c.victim().caller(c.t.Context())
		if err != nil {
			c.t.Fatal(err)
		}
		answer := exchange(conn, request)
		c.out.add("what a caller is answered", c.secrets.without(answer, kubeletsWords)) // they are for the caller
	}
	// Without TLS, without a certificate, and where no HTTP is spoken.
	plain := "GET / HTTP/1.1\r\nHost: edge1\r\n" + secret + "\r\n"
	for _, addr := range []string{c.HTTPSDoor(), c.GRPC(), c.Channelz(), c.CloudHealth(), c.EdgeHealth()} {
		conn, err := attackerDial(c.t.Context(), addr)
		if err != nil {
			c.t.Fatal(err)
		}
		c.out.add("what a caller is answered", exchange(conn, plain))
	}
	conn, err := attackerDial(c.t.Context(), c.HTTPSDoor())
	if err != nil {
		c.t.Fatal(err)
	}
	c.out.add("what a caller is answered", exchange(tls.Client(conn, c.victim().callerTLS(false)), plain))
}

// exchange sends a request and returns all that comes back, and the error.
func exchange(conn net.Conn, request string) string {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(2 * time.Second))
	go io.WriteString(conn, request)
	var answer bytes.Buffer
	_, err := io.CopyN(&answer, conn, 1)
	if err == nil {
		conn.SetReadDeadline(time.Now().Add(200 * time.Millisecond)) // the connection may be kept
		_, err = io.Copy(&answer, conn)
	}
	return fmt.Sprintf("%s %v", answer.String(), err)
}

// conns is bytes through the TCP front doors: to a target that takes them, to one that
// does not listen, and to one that may not be dialled.
func (c *cage) conns() {
	for _, door := range []string{"echo", "closed", "denied"} {
		conn, err := net.Dial("tcp", c.Door(door))
		if err != nil {
			c.out.err("what a caller is answered", err) // it was reset as fast as that
			continue
		}
		conn.(*net.TCPConn).SetLinger(0)
		conn.SetDeadline(time.Now().Add(time.Second))
		io.WriteString(conn, c.secrets.make("bytes of a conn"))
		io.CopyN(io.Discard, conn, 8)
		conn.Close()
	}
}

// newcomers is machines that become nodes by tunnel join, or do not, and the edge of one.
// What tunnel token create prints is a secret, and meant to be: all else is looked at.
func (c *cage) newcomers() {
	cloud := c.Path("cloud.toml")
	created, err := exec.Command(program, "token", "create", "-c", cloud, "--node", "evil3").CombinedOutput()
	token := regexp.MustCompile(`tunnel1\.[A-Za-z0-9_-]+`).FindString(string(created))
	if err != nil || token == "" {
		c.t.Fatalf("no token: %v: %s", err, created)
	}
	parsed, err := auth.ParseJoinToken(token)
	if err != nil {
		c.t.Fatal(err)
	}
	c.secrets.add("a join token", token)
	c.secrets.add("the secret of a join token", parsed.Secret.Reveal())
	forged := parsed
	forged.Secret = auth.Secret(c.secrets.make("the secret of a forged join token"))
	elsewhere := parsed
	elsewhere.Address = "127.0.0.1:1"
	impostor := parsed
	impostor.CA[0]++
	dir := c.t.TempDir()
	for i, stdin := range []string{
		token, token, token[:len(token)-3], token + token, "tunnel1." + c.secrets.make("a join token that is none"),
		forged.Encode().Reveal(), elsewhere.Encode().Reveal(), impostor.Encode().Reveal(), "echo '" + token,
	} {
		c.secrets.add("a join token that is wrong", stdin)
		to := dir
		if i > 1 {
			to = c.t.TempDir()
		}
		c.tell("what tunnel join says", stdin, "join", "--dir", to, "--log-level", "debug")
	}
	for _, where := range [][]string{{"join", token}, {"join", "--token-file", token}, {"join", "--token", token}, {token},
		{"token", "create", token}, {"token", "revoke", "-c", cloud, "--node", token}, {"edge", "-c", token}} {
		c.tell("what tunnel says of a token in its arguments", "", where...)
	}
	c.secrets.addKeys(c.t, dir)
	var log rig.Log
	p, err := rig.Start(&log, program, "edge", "-c", filepath.Join(dir, "edge.toml"), "--log-level", "debug")
	if err != nil {
		c.t.Fatal(err)
	}
	defer p.Kill()
	testkit.Within(c.t, readyWithin, "the newcomer has a session", func() error {
		if !strings.Contains(log.String(), "session started") {
			return fmt.Errorf("its log: %s", log.String())
		}
		return nil
	})
	c.asks("the newcomer", filepath.Join(dir, "edge.toml"))
	c.says("cert status", cloud, []string{"wide", "json"})
	c.says("cert renew", filepath.Join(dir, "edge.toml"), []string{"text", "json"})
	c.secrets.addKeys(c.t, dir)
	for _, args := range [][]string{{"token", "list", "-c", cloud}, {"token", "revoke", "-c", cloud, "--node", "evil3"},
		{"token", "list", "-c", cloud}} {
		c.tell("what tunnel token says", "", args...)
	}
	testkit.Within(c.t, readyWithin, "the newcomer is revoked", func() error {
		if !strings.Contains(log.String(), "revoked") && !strings.Contains(log.String(), "no session") {
			return fmt.Errorf("its log: %s", log.String())
		}
		return nil
	})
	if err := p.Signal(syscall.SIGQUIT); err != nil {
		c.t.Fatal(err)
	}
	<-p.Done()
	c.out.add("what the newcomer's edge says", log.String())
}

// tell runs the program to its end and keeps what it says.
func (c *cage) tell(where, stdin string, args ...string) {
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*hangs)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdin = strings.NewReader(stdin + "\n")
	said, _ := cmd.CombinedOutput() // most of it fails
	c.ran = append(c.ran, strings.Join(args, " ")+" ")
	c.out.add(where, string(said))
}

// badTokenFiles has the cloud read token files that are wrong, while it runs.
func (c *cage) badTokenFiles() {
	path := c.Path("tokens")
	good, err := os.ReadFile(path)
	if err != nil {
		c.t.Fatal(err)
	}
	seen := len(c.CloudLog.String())
	for _, bad := range c.wrongTokenFiles() {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			c.t.Fatal(err)
		}
		testkit.Within(c.t, readyWithin, "the cloud has seen that its token file is wrong", func() error {
			if log := c.CloudLog.String(); !strings.Contains(log[seen:], "token") {
				return fmt.Errorf("nothing is said of it")
			}
			return nil
		})
		c.health("cloud", c.CloudHealth())
		seen = len(c.CloudLog.String())
	}
	if err := os.WriteFile(path, good, 0o600); err != nil {
		c.t.Fatal(err)
	}
}

// wrongTokenFiles are token files with mistakes that people make.
func (c *cage) wrongTokenFiles() []string {
	token := func() string { return c.secrets.make("a token in a wrong file") }
	key, err := os.ReadFile(c.Path("cloud.key"))
	if err != nil {
		c.t.Fatal(err)
	}
	return []string{
		token() + "\n",
		token() + ":\n",
		":" + token() + "\n",
		"edge1 " + token() + "\n",
		"edge1=" + token() + "\n",
		"Edge_1:" + token() + "\n",
		strings.ToUpper(token()[:7]) + token() + ":edge1\n", // swapped
		token() + "_:edge1\n",                               // swapped, and no node's name
		"edge1:" + token() + "\nedge1:" + token() + "\n",
		"edge1:" + token() + " " + token() + "\n",
		"edge1:" + token() + " expires=" + token() + "\n",
		"edge1:" + token() + " " + token() + "=x\n",
		"edge1:sha256:" + token() + "\n",
		"default:" + token() + "\n",
		"edge1:" + strings.Repeat(token(), 200) + "\n",
		`{"nodename":"edge1","token":"` + token() + "\"}\n",
		`token = "` + token() + "\"\n",
		string(key),
	}
}

// health asks a health port everything.
func (c *cage) health(name, addr string) {
	for _, path := range []string{"/healthz", "/readyz?verbose", "/metrics"} {
		resp, err := http.Get("http://" + addr + path)
		if err != nil {
			c.t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			c.t.Fatal(err)
		}
		c.out.add(path+" of the "+name, string(text))
	}
}

// listen looks at everything that a process shows.
func (c *cage) listen() {
	for name, side := range map[string]struct {
		process *rig.Process
		health  string
	}{"cloud": {c.cloud, c.CloudHealth()}, "edge": {c.edge, c.EdgeHealth()}} {
		c.health(name, side.health)
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", side.process.PID()))
		if err != nil {
			c.t.Fatal(err)
		}
		c.out.add("the command line of the "+name, string(line))
		client := &http.Client{Timeout: hangs,
			Transport: &http.Transport{DisableKeepAlives: true,
				DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
					return new(net.Dialer).DialContext(ctx, "unix", c.Path(name+".sock"))
				}}}
		paths := []string{"/loglevel", "/readyz?verbose", "/metrics", "/v1/status"}
		if name == "cloud" {
			paths = append(paths, "/v1/nodes")
		}
		for _, path := range paths {
			c.out.add(path+" at the socket of "+name, fetch(c.t, client, path))
		}
		for _, path := range []string{"", "cmdline", "heap", "heap?debug=1", "allocs?debug=1", "goroutine?debug=1",
			"goroutine?debug=2", "goroutine", "mutex?debug=1", "block?debug=1", "threadcreate?debug=1",
			"trace?seconds=1", "profile?seconds=1"} {
			c.out.add("pprof of the "+name, fetch(c.t, client, "/debug/pprof/"+path))
		}
	}
	c.channelz()
}

// fetch returns what a socket answers, unpacked.
func fetch(t *testing.T, client *http.Client, path string) string {
	t.Helper()
	resp, err := client.Get("http://localhost" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusServiceUnavailable { // not ready
		t.Fatalf("%s: HTTP %d, %v", path, resp.StatusCode, err)
	}
	if unpacked, err := gzip.NewReader(bytes.NewReader(b)); err == nil {
		if b, err = io.ReadAll(unpacked); err != nil {
			t.Fatal(err)
		}
	}
	return string(b)
}

// channelz asks for every server and every connection.
func (c *cage) channelz() {
	cc, err := grpc.NewClient(c.Channelz(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		c.t.Fatal(err)
	}
	defer cc.Close()
	client, ctx := channelz.NewChannelzClient(cc), c.t.Context()
	servers, err := client.GetServers(ctx, &channelz.GetServersRequest{})
	if err != nil {
		c.t.Fatal(err)
	}
	c.out.add("channelz", servers.String())
	for _, s := range servers.GetServer() {
		for _, l := range s.GetListenSocket() {
			c.socket(client, l.GetSocketId())
		}
		sockets, err := client.GetServerSockets(ctx, &channelz.GetServerSocketsRequest{ServerId: s.GetRef().GetServerId()})
		if err != nil {
			c.t.Fatal(err)
		}
		for _, ref := range sockets.GetSocketRef() {
			c.socket(client, ref.GetSocketId())
		}
	}
	top, err := client.GetTopChannels(ctx, &channelz.GetTopChannelsRequest{})
	if err != nil {
		c.t.Fatal(err)
	}
	c.out.add("channelz", top.String())
}

func (c *cage) socket(client channelz.ChannelzClient, id int64) {
	s, err := client.GetSocket(c.t.Context(), &channelz.GetSocketRequest{SocketId: id})
	if err != nil {
		return // it has gone meanwhile
	}
	addr := s.GetSocket().GetRemote().GetTcpipAddress().GetIpAddress()
	c.out.add("channelz",
		s.String()+" "+net.IP(addr).String()+" "+net.IP(s.GetSocket().GetLocal().GetTcpipAddress().GetIpAddress()).String())
}

// configChecks has tunnel config check, and tunnel cloud and edge, read files with secrets
// in wrong places.
func (c *cage) configChecks() {
	read := func(name string) string {
		b, err := os.ReadFile(c.Path(name))
		if err != nil {
			c.t.Fatal(err)
		}
		return string(b)
	}
	check := func(files map[string]string, args ...string) {
		dir := c.t.TempDir()
		for _, name := range []string{"ca.crt", "cloud.crt", "cloud.key", "https.crt", "https.key", "client.crt",
			"client.key", "tokens", "token", "cloud.toml", "edge.toml"} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(read(name)), 0o600); err != nil {
				c.t.Fatal(err)
			}
		}
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				c.t.Fatal(err)
			}
		}
		ctx, cancel := context.WithTimeout(c.t.Context(), hangs)
		defer cancel()
		cmd := exec.CommandContext(ctx, program, args...)
		cmd.Dir = dir
		text, _ := cmd.CombinedOutput()
		c.out.add("what tunnel config check says", string(text))
	}
	cloud, edge := read("cloud.toml"), read("edge.toml")
	for _, tokens := range c.wrongTokenFiles() {
		check(map[string]string{"tokens": tokens}, "config", "check", "-c", "cloud.toml", "--log-level", "debug")
	}
	token := func() string { return c.secrets.make("a token in edge.toml") }
	for _, line := range []string{
		"token = " + token(), `token = "` + token(), "token = '" + token(), `token = "` + token() + `\q"`,
		"token = " + token() + `"`,
		`token = ["` + token() + `"]`, `token = {a = "` + token() + `"}`, `token "` + token() + `"`,
		`tokens = "` + token() + `"`, `proxy = "http://me:` + token() + `@"`, `proxy = ` + token(),
		`"` + token() + `" = "edge1"`, `token = """` + token(), token(), "[" + token(),
		`token = "` + token() + "\"\ntoken = \"" + token() + `"`,
		`logport = "` + token() + `"`,
	} {
		check(map[string]string{"edge.toml": strings.Replace(edge, `tokenfile = "token"`, line, 1)}, "config", "check", "-c",
			"edge.toml", "--log-level", "debug")
	}
	for _, wrong := range []string{token() + "\n" + token() + "\n", " " + token(), "edge1:" + token(),
		strings.Repeat(token(), 500), token() + "\x00"} {
		check(map[string]string{"token": wrong}, "config", "check", "-c", "edge.toml", "--log-level", "debug")
	}
	// Files in each other's places.
	for _, swap := range [][2]string{
		{`cert = "cloud.crt"`, `cert = "cloud.key"`}, {`key = "cloud.key"`, `key = "https.key"`},
		{`key = "cloud.key"`, `key = "tokens"`},
		{`tokenfile = "tokens"`, `tokenfile = "cloud.key"`}, {`tokenfile = "tokens"`, `tokenfile = "token"`},
		{`clientca = "ca.crt"`, `clientca = "cloud.key"`},
	} {
		check(map[string]string{"cloud.toml": strings.Replace(cloud, swap[0], swap[1], 1)}, "config", "check", "-c",
			"cloud.toml", "--log-level", "debug")
	}
	broken := strings.Replace(read("cloud.key"), "-----END", "----END", 1)
	check(map[string]string{"cloud.key": broken}, "config", "check", "-c", "cloud.toml")
	check(map[string]string{"edge.toml": strings.Replace(edge, `cert = "ca.crt"`, `cert = "cloud.key"`, 1)}, "config",
		"check", "-c", "edge.toml")
	check(nil, "edge", "-c", "edge.toml", token()) // a token in argv is refused without being repeated
	check(nil, "config", "check", "-c", "cloud.key")
	check(nil, "config", "check", "-c", "tokens")
	check(nil, "cloud", "-c", "token")
}

// strangeEdges is edges that are set up wrongly, as processes: what they log.
func (c *cage) strangeEdges() {
	for name, wrong := range map[string]string{"a wrong token": c.secrets.make("the wrong token of an edge"),
		"a token of somebody else": c.Token("evil0").Reveal()} {
		config := strings.Replace(c.edgeConfig(), `tokenfile = "token"`, fmt.Sprintf("token = %q", wrong), 1)
		path := c.Path("strange.toml")
		if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
			c.t.Fatal(err)
		}
		var log rig.Log
		p, err := rig.Start(&log, program, "edge", "-c", path, "--log-level", "debug")
		if err != nil {
			c.t.Fatal(err)
		}
		testkit.Within(c.t, readyWithin, name+" is refused", func() error {
			if !strings.Contains(log.String(), "no session") {
				return fmt.Errorf("its log: %s", log.String())
			}
			return nil
		})
		if err := p.Signal(syscall.SIGQUIT); err != nil {
			c.t.Fatal(err)
		}
		<-p.Done()
		c.out.add("what a strange edge says", log.String())
	}
}

// proxiedEdges is edges, and newcomers, whose proxy takes no password, or is none.
func (c *cage) proxiedEdges() {
	password := c.secrets.make("the password of a proxy")
	const refusal = "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=\"x\"\r\n\r\n"
	for _, tt := range []struct{ scheme, answer string }{
		{"http", refusal}, {"http", "HTTP/1.1 403 Forbidden\r\n\r\n"}, {"http", ""}, {"https", refusal},
		{"socks5", "\x05\x02"},
	} {
		proxy := serve(c.t, func(conn net.Conn) {
			conn.Read(make([]byte, 1000))
			io.WriteString(conn, tt.answer)
		})
		url := tt.scheme + "://me:" + password + "@" + proxy
		path := c.Path("proxy.url")
		if err := os.WriteFile(path, []byte(url+"\n"), 0o600); err != nil {
			c.t.Fatal(err)
		}
		for _, line := range []string{fmt.Sprintf("proxy = %q", url), `proxyfile = "proxy.url"`} {
			c.proxiedEdge(line)
		}
		c.proxiedJoin("--proxy", url)
		c.proxiedJoin("--proxy-file", path)
	}
	for _, line := range []string{
		`proxy = "ftp://me:` + password + `@proxy"`, `proxy = "http://me:` + password + ` @proxy"`,
		`proxy = ["` + password + `"]`,
		`proxy = "` + password + `:@/"`, `servers = ["wss://me:` + password + `@cloud/tunnel"]`, `proxy = "` + password,
	} {
		c.proxiedEdge(line)
	}
}

// proxiedEdge runs an edge with a line about its proxy until it has failed.
func (c *cage) proxiedEdge(line string) {
	path := c.Path("proxied.toml")
	if err := os.WriteFile(path, []byte(c.edgeConfig()+line+"\n"), 0o600); err != nil {
		c.t.Fatal(err)
	}
	c.tell("what an edge says of its proxy", "", "config", "check", "-c", path)
	c.tell("what tunnel check says", "", "check", "-c", path)
	var log rig.Log
	p, err := rig.Start(&log, program, "edge", "-c", path, "--log-level", "debug")
	if err != nil {
		c.t.Fatal(err)
	}
	testkit.Within(c.t, readyWithin, "the edge fails", func() error {
		if p.Alive() && !strings.Contains(log.String(), "no session") {
			return fmt.Errorf("its log: %s", log.String())
		}
		return nil
	})
	if p.Alive() {
		p.Signal(syscall.SIGQUIT)
	}
	<-p.Done()
	c.out.add("what an edge says of its proxy", log.String())
}

// proxiedJoin has a newcomer join through a proxy.
func (c *cage) proxiedJoin(flags ...string) {
	create := exec.Command(program, "token", "create", "-c", c.Path("cloud.toml"), "--node", "evil4")
	created, err := create.CombinedOutput()
	token := regexp.MustCompile(`tunnel1\.[A-Za-z0-9_-]+`).FindString(string(created))
	if err != nil || token == "" {
		c.t.Fatalf("no token: %v", err)
	}
	c.secrets.add("a join token", token)
	c.tell("what join says of its proxy", token, append([]string{"join", "--dir", c.t.TempDir()}, flags...)...)
}

// edgeConfig is that of the edge without what it listens on.
func (c *cage) edgeConfig() string {
	b, err := os.ReadFile(c.Path("edge.toml"))
	if err != nil {
		c.t.Fatal(err)
	}
	text, _, _ := strings.Cut(string(b), "[mode.edge.admin]")
	var lines []string
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "logport") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}
