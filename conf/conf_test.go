package conf

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// testEnv is the environment outside of Kubernetes: only the host name is known.
func testEnv() Env { return Env{HostName: "Edge1"} }

// inDir makes a folder with the files that the tests' configurations name, and makes it the working
// directory, so that problems have short paths.
func inDir(t testing.TB) {
	t.Helper()
	t.Chdir(t.TempDir())
	for _, name := range []string{"ca", "crt", "key", "tokens", "token"} {
		write(t, name, "not looked into")
	}
}

func write(t testing.TB, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// The smallest valid configurations of a cloud and an edge. Tests append to them.
const (
	server = `[mode.cloud.stream.server]
grpcport = 9000
cert = "crt"
key = "key"
tokenfile = "tokens"
`
	client = `[mode.edge.stream.client]
servername = "127.0.0.1:9000"
dns = "tunnel.cloud.io"
cert = "ca"
tokenfile = "token"
`
)

func TestLoadCloud(t *testing.T) {
	inDir(t)
	if err := os.Mkdir("sub", 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, "sub/cloud.toml", `
[mode.cloud.stream.server]
grpcport = 9000
cert = "../crt"
key = "../key"
tokenfile = "../tokens"
allowshared = true
logport = 7000
channelzaddr = "localhost:7001"
[mode.cloud.stream.dns]
debug = true
configmap = "ignored"
listen = "127.0.0.1:5353"
upstream = ["10.96.0.10:53"]
[mode.cloud.https]
cert = "../crt"
key = "../key"
tls = "terminate"
clientca = "../ca"
clientnames = ["me"]
listen = "::1"
allowfrom = ["10.0.0.0/8", "::1", "192.168.1.1"]
addr = { "10250" = "127.0.0.1:10250", "9100" = "node-exporter:9100" }
kubelet.cert = "../crt"
kubelet.key = "../key"
kubelet.insecure = true
[mode.cloud.tcp]
"127.0.0.1:6443" = "127.0.0.1:6443"
":2222" = "edge-1.example/[::1]:22"
[mode.cloud.tcpallow]
":2222" = ["10.0.0.0/8"]
`)
	c, err := LoadCloud("sub/cloud.toml", testEnv())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Errorf("Validate after loading: %v", err)
	}
	c.src = nil
	want := &Cloud{
		Server: Server{
			GRPCPort: 9000, Cert: "crt", Key: "key", TokenFile: "tokens", AllowShared: true,
			LogPort: 7000, ChannelzAddr: "localhost:7001",
		},
		DNS: DNS{
			Listen: "127.0.0.1:5353", Upstream: []netip.AddrPort{netip.MustParseAddrPort("10.96.0.10:53")},
			Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")},
		},
		HTTPS: HTTPS{
			Ports:  map[string]string{"10250": "127.0.0.1:10250", "9100": "node-exporter:9100"},
			Listen: "::1", TLS: TLSTerminate,
			AllowFrom: auth.Sources{
				netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("::1/128"),
				netip.MustParsePrefix("192.168.1.1/32"),
			},
			Cert: "crt", Key: "key", ClientCA: "ca", ClientNames: []string{"me"},
			Kubelet: Kubelet{Cert: "crt", Key: "key", Insecure: true},
		},
		TCP: []TCPListener{
			{Listen: "127.0.0.1:6443", Target: "127.0.0.1:6443"},
			{
				Listen: ":2222", Node: "edge-1.example", Target: "[::1]:22",
				Allow: auth.Sources{netip.MustParsePrefix("10.0.0.0/8")},
			},
		},
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("got  %+v\nwant %+v", c, want)
	}
}

func TestLoadEdge(t *testing.T) {
	inDir(t)
	write(t, "edge.toml", `
[mode.edge]
node = "edge1"
allow = ["self:10250", "10.0.0.0/8:443", "[fd00::/8]:*"]
[mode.edge.stream.client]
servername = "tunnel.example.com:9000"
dns = "tunnel.cloud.io"
cert = "ca"
token = "canary"
sessions = "one"
congestion = "reno"
logport = 7010
channelzaddr = "127.0.0.1:7011"
[mode.edge.https]
cert = "crt"
key = "key"
`)
	e, err := LoadEdge("edge.toml", testEnv())
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Validate(); err != nil {
		t.Errorf("Validate after loading: %v", err)
	}
	if s := fmt.Sprintf("%v %+v %#v", e, *e, *e); strings.Contains(s, "canary") {
		t.Errorf("the token is printed: %s", s)
	}
	e.src = nil
	want := &Edge{
		Warnings: []string{"edge.toml:15: mode.edge.https.cert: a key that every kubelet obeys lies on this edge: " +
			"keep it on the cloud, in [mode.cloud.https.kubelet], if you can"},
		Node: "edge1", NodeFrom: "node in [mode.edge]",
		Allow: []string{"self:10250", "10.0.0.0/8:443", "[fd00::/8]:*"},
		Addr:  "tunnel.example.com:9000", ServerName: "tunnel.cloud.io", CA: "ca", Token: "canary",
		Congestion: "reno", LogPort: 7010, ChannelzAddr: "127.0.0.1:7011",
		HTTPS: EdgeHTTPS{Cert: "crt", Key: "key"},
	}
	if !reflect.DeepEqual(e, want) {
		t.Errorf("got  %+v\nwant %+v", e, want)
	}
}

// TestWay: how an edge reaches its cloud. A password is not printed, and makes the file a secret one.
func TestWay(t *testing.T) {
	inDir(t)
	const servers = `[mode.edge.stream.client]
dns = "tunnel.cloud.io"
cert = "ca"
tokenfile = "token"
servers = ["cloud:9000", "wss://cloud/tunnel"]
`
	for _, tt := range []struct{ text, proxy, file string }{
		{servers, "", ""},
		{servers + "proxy = \"env\"\n", "", ""},
		{servers + "proxy = \"none\"\n", ProxyNone, ""},
		{servers + "proxy = \"http://me:canary@proxy:3128\"\nproxyca = \"ca\"\n", "http://me:canary@proxy:3128", ""},
		{servers + "proxyfile = \"token\"\n", "", "token"},
	} {
		write(t, "edge.toml", tt.text)
		e, err := LoadEdge("edge.toml", testEnv())
		if err != nil {
			t.Errorf("%s\n%v", tt.text, err)
			continue
		}
		if e.Proxy.Reveal() != tt.proxy || e.ProxyFile != tt.file ||
			!slices.Equal(e.Places(), []string{"cloud:9000", "wss://cloud/tunnel"}) {
			t.Errorf("%s\n%+v, proxy %q", tt.text, e, e.Proxy.Reveal())
		}
		if s := fmt.Sprintf("%v %+v %#v", e, *e, *e); strings.Contains(s, "canary") {
			t.Errorf("the password is printed: %s", s)
		}
	}
	write(t, "edge.toml", servers+"proxy = \"http://me:canary@proxy:3128\"\n")
	if err := os.Chmod("edge.toml", 0o644); err != nil {
		t.Fatal(err)
	}
	e, err := LoadEdge("edge.toml", testEnv())
	if err != nil || len(e.Warnings) != 1 || !strings.Contains(e.Warnings[0], "proxy: edge.toml can be read by others") {
		t.Errorf("%v, %v", e, err)
	}
	write(t, "edge.toml", client)
	if e, err = LoadEdge("edge.toml", testEnv()); err != nil || !slices.Equal(e.Places(), []string{"127.0.0.1:9000"}) {
		t.Errorf("%v, %v", e, err)
	}
}

// TestNode: the node's name comes from the file, NODE_NAME or the host name, in this order.
func TestNode(t *testing.T) {
	inDir(t)
	for _, c := range []struct {
		name, own        string
		env              Env
		node, from, fail string
	}{
		{
			name: "the file wins", own: "a", env: Env{NodeName: "b", HostName: "c"},
			node: "a", from: "node in [mode.edge]",
		},
		{name: "then the environment", env: Env{NodeName: "b", HostName: "c"}, node: "b", from: "NODE_NAME"},
		{
			name: "then the host name, in lower case", env: Env{HostName: "Factory-7.LAN"},
			node: "factory-7.lan", from: "the host name",
		},
		{name: "none", fail: `edge.toml: mode.edge.node: missing, and neither NODE_NAME nor the host name is set: ` +
			`write node = "edge1", the node's name in Kubernetes`},
		{name: "bad host name", env: Env{HostName: "my_pc"}, fail: `edge.toml: mode.edge.node: ` +
			`node name "my_pc" is not an RFC 1123 subdomain: ` +
			`use lower-case letters, digits, '-' and '.' (it comes from the host name): ` +
			`write node = "edge1", the node's name in Kubernetes`},
		{name: "bad environment", env: Env{NodeName: "Edge1", HostName: "c"}, fail: `edge.toml: mode.edge.node: ` +
			`node name "Edge1" is not an RFC 1123 subdomain: ` +
			`use lower-case letters, digits, '-' and '.' (it comes from NODE_NAME): ` +
			`write node = "edge1", the node's name in Kubernetes`},
		{name: "bad file", own: "Edge1", env: Env{NodeName: "b"}, fail: `edge.toml:2: mode.edge.node: ` +
			`node name "Edge1" is not an RFC 1123 subdomain: use lower-case letters, digits, '-' and '.'`},
	} {
		t.Run(c.name, func(t *testing.T) {
			text := client
			if c.own != "" {
				text = fmt.Sprintf("[mode.edge]\nnode = %q\n", c.own) + client
			}
			write(t, "edge.toml", text)
			e, err := LoadEdge("edge.toml", c.env)
			if c.fail != "" {
				// If the key is missing, the line is that of the first table of [mode.edge].
				got := strings.Replace(fmt.Sprint(err), "edge.toml:1:", "edge.toml:", 1)
				if got != c.fail {
					t.Errorf("got  %s\nwant %s", got, c.fail)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if string(e.Node) != c.node || e.NodeFrom != c.from {
				t.Errorf("node %q from %q, want %q from %q", e.Node, e.NodeFrom, c.node, c.from)
			}
		})
	}
}

// TestMode: a file is given to the wrong command, or configures nothing.
func TestMode(t *testing.T) {
	inDir(t)
	write(t, "cloud.toml", server)
	write(t, "edge.toml", client)
	write(t, "both.toml", server+client)
	write(t, "empty.toml", "# nothing\n")
	write(t, "typo.toml", "[mode.clowd.stream.server]\ngrpcport = 1\n")

	fails := func(err error, want string) {
		t.Helper()
		if fmt.Sprint(err) != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
	_, err := LoadCloud("edge.toml", testEnv())
	fails(err, "edge.toml: this file configures an edge: run tunnel edge -c edge.toml, or give the cloud's file")
	_, err = LoadEdge("cloud.toml", testEnv())
	fails(err, "cloud.toml: this file configures a cloud: run tunnel cloud -c cloud.toml, or give the edge's file")
	_, err = LoadCloud("empty.toml", testEnv())
	fails(err, "empty.toml: this file configures nothing: it has no [mode.cloud]")
	_, err = Check("empty.toml", testEnv())
	fails(err, "empty.toml: this file configures nothing: it has neither [mode.cloud] nor [mode.edge]")
	_, err = LoadCloud("typo.toml", testEnv())
	fails(err, "typo.toml:1: mode.clowd: unknown table: did you mean cloud?")
	_, err = LoadCloud("absent.toml", testEnv())
	fails(err, "absent.toml: the file does not exist: give the path of a configuration file with -c")
	_, err = LoadCloud(".", testEnv())
	fails(err, ".: the file cannot be read: is a directory")

	for file, want := range map[string][2]bool{
		"cloud.toml": {true, false}, "edge.toml": {false, true}, "both.toml": {true, true},
	} {
		k, err := Check(file, testEnv())
		if err != nil {
			t.Errorf("%s: %v", file, err)
		}
		if got := [2]bool{k.Cloud != nil, k.Edge != nil}; got != want {
			t.Errorf("Check(%s) found cloud and edge %v, want %v", file, got, want)
		}
	}
}

// TestByHand: a value that was made by hand is checked as well, and its zero values mean the defaults.
func TestByHand(t *testing.T) {
	inDir(t)
	c := &Cloud{Server: Server{GRPCPort: 9000, Cert: "crt", Key: "key", TokenFile: "tokens"}}
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
	c.Server.Key = ""
	c.HTTPS.TLS = 7
	want := "mode.cloud.stream.server.key: missing: write the certificate's private key, " +
		"such as key = \"cloud.key\"\n" +
		"mode.cloud.https.tls: there is no tls mode 7"
	if err := c.Validate(); err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	e := &Edge{Node: "edge1", Addr: "127.0.0.1:9000", ServerName: "x", CA: "ca", Token: "t"}
	if err := e.Validate(); err != nil {
		t.Error(err)
	}
	e.Node = "Edge1"
	if err := e.Validate(); err == nil {
		t.Error("a bad node name passes")
	}
}

// TestSuperEdge loads files from SuperEdge's repository: those of its documentation, and those of its
// deployments, in the form of versions 0.2 to 0.8.0 and in the form since 0.8.2.
func TestSuperEdge(t *testing.T) {
	gone := func(key, path string) string {
		return fmt.Sprintf("%s: file %s does not exist: create it, or correct the path", key, path)
	}
	const (
		etc   = "/etc/superedge/tunnel/"
		allow = `mode.cloud.tcp."0.0.0.0:6443": it is not on loopback, and nobody is allowed to connect: ` +
			`add "0.0.0.0:6443" = ["10.0.0.0/8"] (who may connect) to [mode.cloud.tcpallow]`
		dns = "mode.cloud.stream.dns.configmap: POD_"
	)
	for file, want := range map[string][]string{
		"cloud-docs.toml": {
			"8: " + gone("mode.cloud.stream.server.cert", "../conf/certs/cloud.pem"),
			"9: " + gone("mode.cloud.stream.server.key", "../conf/certs/cloud-key.pem"),
			"10: " + gone("mode.cloud.stream.server.tokenfile", "../conf/token"),
			"17: " + allow,
			"19: " + gone("mode.cloud.https.cert", "../conf/certs/kubelet.crt"),
			"20: " + gone("mode.cloud.https.key", "../conf/certs/kubelet.key"),
		},
		"cloud-v0.7.toml": {
			"8: " + gone("mode.cloud.stream.server.key", etc+"certs/tunnel-cloud-server.key"),
			"9: " + gone("mode.cloud.stream.server.cert", etc+"certs/tunnel-cloud-server.crt"),
			"10: " + gone("mode.cloud.stream.server.tokenfile", etc+"token/token"),
			"12: " + dns + "NAMESPACE does not say in which namespace it is: " +
				"set it from the pod's metadata.namespace, or set debug = true to do without Kubernetes",
			"12: " + dns + "IP does not say which address the names are to lead to: " +
				"set it from the pod's status.podIP or status.podIPs",
			"16: " + allow,
			"18: " + gone("mode.cloud.https.cert", etc+"certs/apiserver-kubelet-server.crt"),
			"19: " + gone("mode.cloud.https.key", etc+"certs/apiserver-kubelet-server.key"),
			"24: " + gone("mode.cloud.egress.cert", etc+"certs/tunnel-server.crt"),
			"25: " + gone("mode.cloud.egress.key", etc+"certs/tunnel-server.key"),
			`26: mode.cloud.egress.egressport: SuperEdge's egress port is a line of grpc here: ` +
				`write grpc = ["tls://0.0.0.0:PORT"]`,
		},
		"cloud-v0.9.toml": {
			`6: mode.cloud.stream.server.cert: missing: write the server's certificate, such as cert = "cloud.crt"`,
			`6: mode.cloud.stream.server.key: missing: write the certificate's private key, such as key = "cloud.key"`,
			`6: mode.cloud.stream.server.tokenfile: missing: without tokens nobody can join: ` +
				`write tokenfile = "tokens", a file with a line node:token for each edge`,
			`11: mode.cloud.stream.register: SuperEdge's [mode.cloud.stream.register] is [mode.cloud.stream.dns] ` +
				`here: write configmap, hosts and service there`,
			`14: mode.cloud.egress.port: SuperEdge's egress port is a line of grpc here: ` +
				`write grpc = ["tls://0.0.0.0:PORT"]`,
			`15: mode.cloud.http_proxy: there is no such proxy here: ` +
				`remove it; [mode.cloud.egress] httpconnect is what speaks HTTP CONNECT`,
			`17: mode.cloud.ssh: there is no such proxy here: ` +
				`remove it, and write a line per node in [mode.cloud.tcp], "127.0.0.1:2222" = "NODE/127.0.0.1:22"`,
		},
		"edge-v0.7.toml": {
			"6: " + gone("mode.edge.stream.client.cert", "superedge/certs/cluster-ca.crt"),
			"12: " + gone("mode.edge.https.cert", "superedge/certs/apiserver-kubelet-client.crt"),
			"13: " + gone("mode.edge.https.key", "superedge/certs/apiserver-kubelet-client.key"),
		},
		"edge-v0.9.toml": {
			`4: mode.edge.stream.client.cert: missing: ` +
				`write the CA that signed the cloud's certificate, such as cert = "ca.crt"`,
			"9: mode.edge.http_proxy: an edge has no HTTP proxy here: remove it; " +
				"pods reach Services of other nodes by [mode.edge.services]",
		},
	} {
		t.Run(file, func(t *testing.T) {
			t.Chdir("testdata")
			path := filepath.Join("superedge", file)
			for i := range want {
				want[i] = path + ":" + want[i]
			}
			_, err := Check(path, testEnv())
			if got := fmt.Sprint(err); got != strings.Join(want, "\n") {
				t.Errorf("got\n%s\nwant\n%s", got, strings.Join(want, "\n"))
			}
		})
	}
}

// TestSuperEdgeRuns: a migrated file loads if its files exist and it says who may connect. Warnings name
// what should be changed.
func TestSuperEdgeRuns(t *testing.T) {
	docs, err := os.ReadFile("testdata/superedge/cloud-docs.toml")
	if err != nil {
		t.Fatal(err)
	}
	edge, err := os.ReadFile("testdata/superedge/edge-v0.7.toml")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	for _, f := range []string{"cloud.pem", "cloud-key.pem", "kubelet.crt", "kubelet.key"} {
		write(t, "conf/certs/"+f, "x")
	}
	for _, f := range []string{"cluster-ca.crt", "apiserver-kubelet-client.crt", "apiserver-kubelet-client.key"} {
		write(t, "a/b/certs/"+f, "x")
	}
	write(t, "conf/token", "x")
	write(t, "a/b/cloud.toml", string(docs)+"[mode.cloud.tcpallow]\n\"0.0.0.0:6443\" = [\"10.0.0.0/8\"]\n")
	write(t, "a/b/edge.toml", string(edge))

	c, err := LoadCloud("a/b/cloud.toml", testEnv())
	if err != nil {
		t.Fatal(err)
	}
	if c.Server.ChannelzAddr != "127.0.0.1:6000" {
		t.Errorf("channelz is served on %s", c.Server.ChannelzAddr)
	}
	wantEqual(t, c.Warnings, []string{
		`a/b/cloud.toml:7: mode.cloud.stream.server.channelzaddr: ` +
			`channelz shows every connection to whoever asks, so it is served on loopback only: write "127.0.0.1:6000"`,
		`a/b/cloud.toml:18: mode.cloud.https.clientca: missing, so cert is not used: ` +
			`connections whose SNI is a node's name are passed through, ` +
			`all others are closed (kubectl exec without --kubelet-certificate-authority among them)`,
	})
	// The file holds a token, so others should not be able to read it.
	if err = os.Chmod("a/b/edge.toml", 0o644); err != nil {
		t.Fatal(err)
	}
	e, err := LoadEdge("a/b/edge.toml", testEnv())
	if err != nil {
		t.Fatal(err)
	}
	if all := strings.Join(e.Warnings, "\n"); !strings.Contains(all, "client.token: "+
		"a/b/edge.toml can be read by others (mode 0644)") {
		t.Errorf("warnings:\n%s", all)
	}
	if e.Node != "edge1" || e.Token.Reveal() != "6ff2a1ea0f1611eb9896362096106d9d" {
		t.Errorf("node %q, or the token, is not the file's", e.Node)
	}
}

func wantEqual(t *testing.T, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// Every mistake in the list of callers is reported, with the words that are allowed.
func TestCallers(t *testing.T) {
	for _, c := range []struct {
		lines string
		want  []string
	}{
		{`callers = [{name = "metrics-server", may = ["metrics"]}, {name = "b", may = ["logs", "all"]}]`, nil},
		{"[[mode.cloud.https.callers]]\nname = \"metrics-server\"\nmay = [\"metrics\"]", nil},
		{`callers = []`, nil},
		{`callers = [{name = "a", may = ["metric"]}]`, []string{`"a" may do "metric", which is not known: ` +
			`write some of ["metrics" "health" "pods" "logs" "exec" "all"]`}},
		{`callers = [{name = "a", may = []}]`, []string{`"a" may do nothing`}},
		{`callers = [{name = "a"}]`, []string{`"a" may do nothing`}},
		{`callers = [{may = ["metrics"]}]`, []string{`a caller has no name`}},
		{`callers = [{name = "a", may = ["logs"]}, {name = "a", may = ["metrics"]}]`, []string{`"a" is there twice`}},
		{
			`callers = [{name = "kube-apiserver-kubelet-client", may = ["logs"]}]`,
			[]string{`"kube-apiserver-kubelet-client" is in clientnames`},
		},
		{"clientnames = [\"a\"]\n" +
			"callers = [{name = \"a\", may = [\"logs\"]}, {name = \"kube-apiserver-kubelet-client\", " +
			"may = [\"logs\"]}]", []string{`"a" is in clientnames`}},
		{`callers = [{name = "a", can = ["logs"]}]`, []string{`unknown key`, `"a" may do nothing`}},
		{
			`callers = [{name = "a", may = "logs"}]`,
			[]string{`expected an array of strings, found a string`, `"a" may do nothing`},
		},
		{`callers = ["a"]`, []string{`expected an array of tables, found an array of strings: ` +
			`write every element in braces`}},
		{`callers = "a"`, []string{`expected an array of tables, found a string`}},
	} {
		r := newReport(&source{file: "cloud.toml"})
		table := decode([]byte("[mode.cloud.https]\n"+c.lines+"\n"), r)
		newCloud(table.Mode.Cloud, Env{}, r)
		var got []string
		if err := r.err(); err != nil {
			got = strings.Split(err.Error(), "\n")
		}
		if len(got) != len(c.want) {
			t.Errorf("%s:\n%q, want %q", c.lines, got, c.want)
			continue
		}
		for i, want := range c.want {
			if !strings.Contains(got[i], want) {
				t.Errorf("%s:\n%q, want %q in it", c.lines, got[i], want)
			}
		}
	}
}

// A TCP port may lead to one node, to any of a list of nodes, or to any node.
func TestAmong(t *testing.T) {
	r := newReport(&source{file: "cloud.toml"})
	got := r.tcpListeners(&cloudTable{TCP: map[string]string{
		":1": "host:1", ":2": "edge1/host:1", ":3": "edge1,gw-*/host:1", ":4": "*/host:1",
		":5": "edge1,,b/host:1", ":6": "Edge*/host:1",
	}})
	want := []TCPListener{
		{Listen: ":1", Target: "host:1"}, {Listen: ":2", Node: "edge1", Target: "host:1"},
		{Listen: ":3", Among: tunnel.Selector{"edge1", "gw-*"}, Target: "host:1"}, {Listen: ":4", Target: "host:1"},
		{Listen: ":5", Target: "host:1"}, {Listen: ":6", Target: "host:1"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if err := r.err(); err == nil || strings.Count(err.Error(), "\n") != 1 ||
		!strings.Contains(err.Error(), `"Edge*" is not a node's name or a pattern such as "gw-*"`) {
		t.Error(err)
	}
}

// The lines of UDP ports are read as those of TCP ports.
func TestUDP(t *testing.T) {
	inDir(t)
	write(t, "f.toml", server+`[mode.cloud.udp]
"127.0.0.1:5353" = "edge1/127.0.0.1:53"
"0.0.0.0:161" = "gw-*/10.0.0.9:161"
[mode.cloud.udpallow]
"0.0.0.0:161" = ["10.0.0.0/8"]
`)
	c, err := LoadCloud("f.toml", testEnv())
	if err != nil {
		t.Fatal(err)
	}
	want := []UDPListener{
		{
			Listen: "0.0.0.0:161", Among: tunnel.Selector{"gw-*"}, Target: "10.0.0.9:161",
			Allow: auth.Sources{netip.MustParsePrefix("10.0.0.0/8")},
		},
		{Listen: "127.0.0.1:5353", Node: "edge1", Target: "127.0.0.1:53"},
	}
	if !reflect.DeepEqual(c.UDP, want) {
		t.Errorf("got  %+v\nwant %+v", c.UDP, want)
	}
}

// TestBalancers: a file may name balancers for each port, and leave grpcport out beside the one port.
func TestBalancers(t *testing.T) {
	inDir(t)
	write(t, "cloud.toml", strings.Replace(server, "grpcport = 9000", `listen = ":443"`, 1)+`proxyfrom = ["10.0.0.5"]
[mode.cloud.https]
proxyfrom = ["10.0.0.6", "fd00::/64"]
[mode.cloud.https.addr]
"10250" = "127.0.0.1:10250"
[mode.cloud.egress]
agentport = 8091
proxyfrom = ["10.0.0.7"]
[mode.cloud.tcp]
"0.0.0.0:1" = "127.0.0.1:1"
[mode.cloud.tcpallow]
"0.0.0.0:1" = ["10.0.0.0/8"]
[mode.cloud.tcpproxyfrom]
"0.0.0.0:1" = ["10.0.0.8"]
[mode.cloud.tcpsendproxy]
"0.0.0.0:1" = "v2"
`)
	c, err := LoadCloud("cloud.toml", testEnv())
	if err != nil {
		t.Fatal(err)
	}
	if c.Server.GRPCPort != 0 || c.Server.Listen != ":443" {
		t.Errorf("the ports are %+v", c.Server)
	}
	for want, got := range map[string]auth.Sources{
		"10.0.0.5/32": c.Server.ProxyFrom, "10.0.0.6/32,fd00::/64": c.HTTPS.ProxyFrom, "10.0.0.7/32": c.Egress.ProxyFrom,
		"10.0.0.8/32": c.TCP[0].ProxyFrom,
	} {
		if got.String() != want {
			t.Errorf("balancers %s, want %s", got, want)
		}
	}
	if c.TCP[0].SendProxy != 2 {
		t.Errorf("the target gets version %d", c.TCP[0].SendProxy)
	}
	wantEqual(t, c.Warnings, nil)
}

// TestOnePort: the one port leads to kubelets, or else to the lowest port.
func TestOnePort(t *testing.T) {
	for want, ports := range map[string][]string{"": nil, "10250": {"443", "10250", "9100"}, "9100": {"10251", "9100"}} {
		h := HTTPS{Ports: make(map[string]string)}
		for _, p := range ports {
			h.Ports[p] = "127.0.0.1:" + p
		}
		if got := h.OnePort(); got != want {
			t.Errorf("of %v it leads to %q, want %q", ports, got, want)
		}
	}
}

// A node may not have a name by which callers reach something else.
func TestReservedNode(t *testing.T) {
	for node, want := range map[tunnel.NodeName]string{
		"edge1": "", "10.0.0.1": "is an IP address", "localhost": "is reserved",
	} {
		err := (&Edge{Node: node}).Validate()
		if got := err != nil && strings.Contains(err.Error(), "node name "+string(node)+" "+want); got != (want != "") {
			t.Errorf("%s: %v", node, err)
		}
	}
}

// The https front door uses Kubernetes only if it terminates connections of some port and the file does
// not forbid it.
func TestHTTPSAsksKubernetes(t *testing.T) {
	const ca, port = "clientca = \"ca\"\n", "[mode.cloud.https.addr]\n\"10250\" = \"127.0.0.1:10250\"\n"
	for text, want := range map[string][2]bool{ // AsksKubernetes, MayAskKubernetes
		ca + port:                             {false, true},
		ca + "kubernetes = true\n" + port:     {true, true},
		ca + "kubernetes = false\n" + port:    {false, false},
		ca + "kubernetes = true\n":            {false, false},
		"kubernetes = true\n" + port:          {false, false},
		"tls = \"passthrough\"\n" + ca + port: {false, false},
	} {
		r := newReport(&source{file: "cloud.toml"})
		table := decode([]byte("[mode.cloud.https]\n"+text), r)
		h := newCloud(table.Mode.Cloud, Env{}, r).HTTPS
		if got := [2]bool{h.AsksKubernetes(), h.MayAskKubernetes()}; got != want {
			t.Errorf("%s: %v, want %v", text, got, want)
		}
	}
}

// Lists of callers have no effect if no connection is terminated.
func TestCallersWithoutCA(t *testing.T) {
	inDir(t)
	const port = "[mode.cloud.https.addr]\n\"10250\" = \"127.0.0.1:10250\"\n"
	for key, line := range map[string]string{
		"callers": `callers = [{name = "a", may = ["logs"]}]`, "clientnames": `clientnames = ["a"]`,
	} {
		write(t, "f.toml", server+"[mode.cloud.https]\n"+line+"\n"+port)
		c, err := LoadCloud("f.toml", testEnv())
		if err != nil {
			t.Fatal(err)
		}
		wantEqual(t, c.Warnings, []string{"f.toml:7: mode.cloud.https." + key + ": not used without clientca: " +
			"no connection is terminated, so no caller is known by name"})
	}
}
