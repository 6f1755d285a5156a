package conf

import (
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// bad is a file that does not load. want has every problem as the user reads it, without the file's name.
type bad struct {
	name string
	text string
	want []string
}

func (b bad) run(t *testing.T, load func(path string) error) {
	t.Run(b.name, func(t *testing.T) {
		write(t, "f.toml", b.text)
		err := load("f.toml")
		if err == nil {
			t.Fatal("it loads")
		}
		got := strings.ReplaceAll(err.Error(), "f.toml:", "")
		if want := strings.Join(b.want, "\n"); got != want {
			t.Errorf("%s\ngot\n%s\nwant\n%s", b.text, got, want)
		}
	})
}

// TestSyntax: what the parser or the type check refuses is reported with its line.
func TestSyntax(t *testing.T) {
	inDir(t)
	for _, b := range []bad{
		{"no value", "[mode.cloud.stream.server]\ngrpcport =\nlogport = 1\n", []string{
			`2: mode.cloud.stream.server.grpcport: not valid TOML: expected value but found '\n' instead`}},
		{"no quotes", "[mode.cloud.stream.server]\ncert = a.crt\n", []string{
			`2: mode.cloud.stream.server.cert: not valid TOML: expected value but found "a" instead`}},
		{"a key twice", server + "grpcport = 1\n", []string{
			`6: mode.cloud.stream.server.grpcport: not valid TOML: ` +
				`key 'mode.cloud.stream.server.grpcport' has already been defined`}},
		{"not UTF-8", "\xff\xfea\x00", []string{`1: not valid TOML: ` +
			`files cannot contain NULL bytes; probably using UTF-16; TOML files must be UTF-8`}},
		{"all types at once", `[mode.cloud.stream.server]
grpcport = "9000"
cert = 1
key = ["key"]
tokenfile = { a = 1 }
allowshared = "true"
logport = 1.5
[mode.cloud.https]
clientnames = "me"
allowfrom = [1, 2]
tls = 2026-11-20
addr = []
[[mode.cloud.tcp]]
"127.0.0.1:1" = "127.0.0.1:1"
`, []string{
			`2: mode.cloud.stream.server.grpcport: expected a whole number, found a string: write it without quotes`,
			`3: mode.cloud.stream.server.cert: expected a string, found a whole number: write it in double quotes`,
			`4: mode.cloud.stream.server.key: expected a string, found an array of strings`,
			`5: mode.cloud.stream.server.tokenfile: expected a string, found a table`,
			`6: mode.cloud.stream.server.allowshared: expected true or false, found a string: write it without quotes`,
			`7: mode.cloud.stream.server.logport: expected a whole number, found a number with a fraction`,
			`9: mode.cloud.https.clientnames: expected an array of strings, found a string: ` +
				`write it in brackets, ["…"]`,
			`10: mode.cloud.https.allowfrom: expected an array of strings, ` +
				`found an array that holds something else: write every element in double quotes`,
			`11: mode.cloud.https.tls: expected a string, found a date: write it in double quotes`,
			`12: mode.cloud.https.addr: expected a table, found an array of strings`,
			`13: mode.cloud.tcp: expected a table, found an array of tables: write [name], not [[name]]`,
		}},
		{"a number that an int of 32 bits cannot hold", server + "[mode.cloud.limits]\nconns = 4294967297\n", []string{
			`7: mode.cloud.limits.conns: ` + map[int]string{
				32: `expected a whole number, found a whole number that is too large`,
				64: `4294967297 is not from 1 to 65536: write a number between them, or remove it for the default`,
			}[strconv.IntSize],
		}},
		{"types in free tables", server + `[mode.cloud.tcp]
"127.0.0.1:1" = 1
[mode.cloud.tcpallow]
"127.0.0.1:1" = "10.0.0.0/8"
`, []string{
			`7: mode.cloud.tcp."127.0.0.1:1": expected a string, found a whole number: write it in double quotes`,
			`9: mode.cloud.tcpallow."127.0.0.1:1": expected an array of strings, found a string: ` +
				`write it in brackets, ["…"]`,
		}},
	} {
		b.run(t, func(path string) error { _, err := LoadCloud(path, testEnv()); return err })
	}
}

// TestUnknown: the problem of an unknown key suggests the key that was probably meant.
func TestUnknown(t *testing.T) {
	inDir(t)
	for _, b := range []bad{
		{"a spelling mistake", strings.Replace(server, "grpcport", "grpcprot", 1), []string{
			`2: mode.cloud.stream.server.grpcprot: unknown key: did you mean grpcport?`}},
		{"case", strings.Replace(server, "tokenfile", "TokenFile", 1), []string{
			`5: mode.cloud.stream.server.TokenFile: unknown key: did you mean tokenfile?`}},
		{"a wrong table", server + "[mode.cloud.stream]\nlogport = 1\n[mode.cloud]\nclientnames = []\n", []string{
			`7: mode.cloud.stream.logport: unknown key here: logport belongs in [mode.cloud.stream.server]`,
			`9: mode.cloud.clientnames: unknown key here: ` +
				`clientnames belongs in [mode.cloud.https] or [mode.cloud.egress]`}},
		{"no similar key", server + "[mode.cloud.https.kubelet]\npassword = 1\n", []string{
			`7: mode.cloud.https.kubelet.password: unknown key: ` +
				`[mode.cloud.https.kubelet] has ca, cert, insecure, key`}},
		{"a table", server + "[mode.cloud.streams.x.y]\nz = 1\n", []string{
			`6: mode.cloud.streams: unknown table: did you mean stream?`}},
		{"a table without its parent", server + "[https.addr]\n\"10250\" = \"x\"\n[cloud]\n[other]\n", []string{
			`6: https: unknown table here: write [mode.cloud.https]`,
			`8: cloud: unknown table here: write [mode.cloud]`,
			`9: other: unknown table: a file has mode`}},
		{"dotted, quoted, inline", server + `[mode]
cloud."https".kubelet.'insecur' = true
[mode.edge]
stream = { client = { tokn = "canary" } }
"no de" = """
x"""
`, []string{
			`7: mode.cloud.https.kubelet.insecur: unknown key: did you mean insecure?`,
			`9: mode.edge.stream.client.tokn: unknown key: did you mean token?`,
			`11: mode.edge."no de": unknown key: did you mean node?`}},
		{"the names of SuperEdge and of ours", server + "grpc_port = 9000\n", []string{
			`6: mode.cloud.stream.server.grpc_port: this is SuperEdge's newer name of grpcport, ` +
				`which is there as well: remove one of them`}},
	} {
		b.run(t, func(path string) error { _, err := LoadCloud(path, testEnv()); return err })
	}
}

func TestBadCloud(t *testing.T) {
	inDir(t)
	if err := os.Mkdir("dir", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo("fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	for _, b := range []bad{
		{"servers for edges", server + "[mode.cloud.join]\nservers = [\"a:1\"]\n", []string{
			`7: mode.cloud.join.servers: edges are told them with a certificate, and this cloud signs none: ` +
				`remove it, or write ca and cakey`}},
		{"empty server", "[mode.cloud]\n", []string{
			`1: mode.cloud.stream.server.grpcport: missing: write the port that edges dial, such as grpcport = 9000`,
			`1: mode.cloud.stream.server.cert: missing: write the server's certificate, such as cert = "cloud.crt"`,
			`1: mode.cloud.stream.server.key: missing: write the certificate's private key, such as key = "cloud.key"`,
			`1: mode.cloud.stream.server.tokenfile: missing: without tokens nobody can join: ` +
				`write tokenfile = "tokens", a file with a line node:token for each edge`}},
		{"server", `[mode.cloud.stream.server]
grpcport = 65536
cert = "dir"
key = "fifo"
tokenfile = "crt/tokens"
logport = -1
channelzaddr = "10.0.0.1:7001"
`, []string{
			`2: mode.cloud.stream.server.grpcport: 65536 is not a port: write a number from 1 to 65535`,
			`3: mode.cloud.stream.server.cert: dir is a directory: name a file in it`,
			`4: mode.cloud.stream.server.key: fifo is not a regular file: name one`,
			`5: mode.cloud.stream.server.tokenfile: file crt/tokens cannot be opened: not a directory`,
			`6: mode.cloud.stream.server.logport: -1 is not a port: write a number from 1 to 65535`,
			`7: mode.cloud.stream.server.channelzaddr: "10.0.0.1:7001" is not an address on loopback: ` +
				`write one such as "127.0.0.1:7001", or remove it`}},

		{"the inventory's name", server + "[mode.cloud.admin]\ninventory = \"configmap:ns/nodes\"\n", []string{
			`7: mode.cloud.admin.inventory: "ns/nodes" is not the name of a ConfigMap: use lower-case letters, digits, ` +
				`'-' and '.', at most 253 of them, such as "configmap:tunnel-inventory"`}},
		{"nodes of no cluster", server + "[mode.cloud.admin]\nnodeselector = \"edge=\"\n", []string{
			`7: mode.cloud.admin.nodeselector: it selects among the nodes in Kubernetes, and this cloud reads none: remove it`}},
		{"a long socket", server + "[mode.cloud.admin]\nsocket = \"/run/" + strings.Repeat("x", 103) + "\"\n", []string{
			`7: mode.cloud.admin.socket: "/run/` + strings.Repeat("x", 103) + `" is too long for a socket: ` +
				`107 bytes are allowed`}},
		{"the inventory's namespace", server + "[mode.cloud.admin]\ninventory = \"configmap:nodes\"\n", []string{
			`7: mode.cloud.admin.inventory: POD_NAMESPACE "" is not the namespace of the ConfigMap: ` +
				`set it from the pod's metadata.namespace, or write the path of a file`}},
		{"the page is not on loopback", server + "[mode.cloud.admin]\npage = \"0.0.0.0:9790\"\n", []string{
			`7: mode.cloud.admin.page: "0.0.0.0:9790" is not an address on loopback, and the page shows every node without ` +
				`a password: write page = "127.0.0.1:9790", and reach it by ssh -L 9790:127.0.0.1:9790 CLOUD, ` +
				`or by kubectl port-forward POD 9790`}},
		// systemd may make the folder of a socket later, so a missing folder is no problem.
		{"the page takes a port", server + "[mode.cloud.admin]\nsocket = \"/none/s\"\npage = \"127.0.0.1:9000\"\n", []string{
			`8: mode.cloud.admin.page: port 9000 is taken by mode.cloud.stream.server.grpcport: choose another`}},

		{"https addresses", server + `[mode.cloud.https]
listen = "0.0.0.0:10250"
tls = "Auto"
clientnames = []
allowfrom = []
[mode.cloud.https.addr]
"https" = "127.0.0.1:10250"
"010250" = "127.0.0.1:10250"
"10251" = "10250"
"10252" = "127.0.0.1:"
"10253" = "10.0.0.256:1"
"10254" = "a host:1"
`, []string{
			`7: mode.cloud.https.listen: "0.0.0.0:10250" is not an IP address: ` +
				`write one without a port, such as "127.0.0.1"; the ports are in [mode.cloud.https.addr]`,
			`8: mode.cloud.https.tls: "Auto" is none of "auto", "passthrough", "terminate": write one of them`,
			`9: mode.cloud.https.clientnames: the list is empty or holds an empty name: ` +
				`name who may call, or remove it for the default, ["kube-apiserver-kubelet-client"]`,
			`10: mode.cloud.https.allowfrom: the list is empty, and nobody could connect: ` +
				`write networks such as "10.0.0.0/8", or remove it`,
			`12: mode.cloud.https.addr.https: the key is not a port from 1 to 65535: write "10250" = "127.0.0.1:10250"`,
			`13: mode.cloud.https.addr.010250: the key is not a port from 1 to 65535: ` +
				`write "10250" = "127.0.0.1:10250"`,
			`14: mode.cloud.https.addr.10251: "10250" is not host:port: write an address such as "127.0.0.1:10250"`,
			`15: mode.cloud.https.addr.10252: "127.0.0.1:" is not host:port: ` +
				`write an address such as "127.0.0.1:10250"`,
			`16: mode.cloud.https.addr.10253: "10.0.0.256:1" is not host:port: ` +
				`write an address such as "127.0.0.1:10250"`,
			`17: mode.cloud.https.addr.10254: "a host:1" is not host:port: ` +
				`write an address such as "127.0.0.1:10250"`}},
		{"networks", server + "[mode.cloud.https]\n" +
			"allowfrom = [\"10.0.0.1/8\", \"factory\", \"10.0.0.0/33\"]\n", []string{
			`7: mode.cloud.https.allowfrom: source "10.0.0.1/8": ` +
				`the address has bits outside its network; ` +
				`write 10.0.0.0/8 for the network or 10.0.0.1 for the address`,
			`7: mode.cloud.https.allowfrom: source "factory": not an IP address or a CIDR network such as 10.0.0.0/8`,
			`7: mode.cloud.https.allowfrom: source "10.0.0.0/33": ` +
				`not an IP address or a CIDR network such as 10.0.0.0/8`}},
		{"terminate without a CA", server + "[mode.cloud.https]\ntls = \"terminate\"\n" +
			"addr.10250 = \"127.0.0.1:10250\"\n", []string{
			`6: mode.cloud.https.clientca: tls = "terminate" needs it, or anybody could call the kubelets: ` +
				`write the CA that signs the callers' certificates`,
			`6: mode.cloud.https.cert: tls = "terminate" needs a certificate to terminate connections with: ` +
				`write cert and key`}},
		{"auto without a certificate", server + "[mode.cloud.https]\nclientca = \"ca\"\n", []string{
			`6: mode.cloud.https.cert: clientca needs a certificate to terminate connections with: ` +
				`write cert and key`}},
		{"certificates and keys without each other", server + "[mode.cloud.https]\ncert = \"crt\"\n" +
			"kubelet.key = \"key\"\n", []string{
			`6: mode.cloud.https.key: missing: cert is useless without its private key, write key or remove cert`,
			`8: mode.cloud.https.kubelet.cert: missing: ` +
				`key is useless without its certificate, write cert or remove key`}},
		{"kubelet not verified", server + "[mode.cloud.https.kubelet]\ncert = \"crt\"\nkey = \"key\"\n", []string{
			`6: mode.cloud.https.kubelet.ca: missing: write the CA that signs the kubelets' certificates, ` +
				`or insecure = true if they sign their own`}},
		{"kubelet with ca and insecure", server + "[mode.cloud.https.kubelet]\ncert = \"crt\"\nkey = \"key\"\n" +
			"ca = \"ca\"\ninsecure = true\n", []string{
			`10: mode.cloud.https.kubelet.insecure: the kubelet's certificate is either verified with ca or not at ` +
				`all: remove one of them`}},
		{"kubelet without a certificate", server + "[mode.cloud.https.kubelet]\nca = \"nowhere\"\n", []string{
			`6: mode.cloud.https.kubelet.cert: missing: write the client certificate that kubelets accept, and its key`,
			`7: mode.cloud.https.kubelet.ca: file nowhere does not exist: create it, or correct the path`}},

		{"tcp addresses", server + `[mode.cloud.tcp]
"6443" = "127.0.0.1:6443"
"127.0.0.1:0" = "127.0.0.1:6443"
"127.0.0.1:1" = "Edge1/127.0.0.1:22"
"127.0.0.1:2" = "edge1/22"
"127.0.0.1:3" = "/127.0.0.1:22"
"127.0.0.1:4" = "tcp://127.0.0.1:22"
`, []string{
			`7: mode.cloud.tcp.6443: the key is not an address to listen on: ` +
				`write "host:port" with a port from 1 to 65535, such as "127.0.0.1:6443"`,
			`8: mode.cloud.tcp."127.0.0.1:0": the key is not an address to listen on: ` +
				`write "host:port" with a port from 1 to 65535, such as "127.0.0.1:6443"`,
			`9: mode.cloud.tcp."127.0.0.1:1": node name "Edge1" is not an RFC 1123 subdomain: ` +
				`use lower-case letters, digits, '-' and '.': write "node/host:port", or "host:port" for any node`,
			`10: mode.cloud.tcp."127.0.0.1:2": "22" is not host:port: write an address such as "127.0.0.1:10250"`,
			`11: mode.cloud.tcp."127.0.0.1:3": node name is empty: write "node/host:port", or "host:port" for any node`,
			`12: mode.cloud.tcp."127.0.0.1:4": node name "tcp:" is not an RFC 1123 subdomain: ` +
				`use lower-case letters, digits, '-' and '.': write "node/host:port", or "host:port" for any node`}},
		{"congestion", server + `congestion = "the-best-there-is"
`, []string{
			`6: mode.cloud.stream.server.congestion: "the-best-there-is" is not the name of a congestion control: ` +
				`write "auto", "system", or a name such as "bbr"`}},
		{"tcp open to all", server + `[mode.cloud.tcp]
"0.0.0.0:1" = "127.0.0.1:1"
":2" = "127.0.0.1:1"
"[::]:3" = "127.0.0.1:1"
"cloud.example:4" = "127.0.0.1:1"
"127.0.0.1:5" = "127.0.0.1:1"
"[::1]:6" = "127.0.0.1:1"
"localhost:7" = "127.0.0.1:1"
"0.0.0.0:8" = "127.0.0.1:1"
[mode.cloud.tcpallow]
"0.0.0.0:8" = []
`, []string{
			`7: mode.cloud.tcp."0.0.0.0:1": it is not on loopback, and nobody is allowed to connect: ` +
				`add "0.0.0.0:1" = ["10.0.0.0/8"] (who may connect) to [mode.cloud.tcpallow]`,
			`8: mode.cloud.tcp.":2": it is not on loopback, and nobody is allowed to connect: ` +
				`add ":2" = ["10.0.0.0/8"] (who may connect) to [mode.cloud.tcpallow]`,
			`9: mode.cloud.tcp."[::]:3": it is not on loopback, and nobody is allowed to connect: ` +
				`add "[::]:3" = ["10.0.0.0/8"] (who may connect) to [mode.cloud.tcpallow]`,
			`10: mode.cloud.tcp."cloud.example:4": it is not on loopback, and nobody is allowed to connect: ` +
				`add "cloud.example:4" = ["10.0.0.0/8"] (who may connect) to [mode.cloud.tcpallow]`,
			`16: mode.cloud.tcpallow."0.0.0.0:8": the list is empty, and nobody could connect: ` +
				`write networks such as "10.0.0.0/8", or remove it`}},
		{"tcpallow without a listener", server + "[mode.cloud.tcp]\n\"127.0.0.1:6443\" = \"127.0.0.1:1\"\n" +
			"[mode.cloud.tcpallow]\n\"127.0.0.1:6444\" = [\"::1\"]\n\"[::]:80\" = [\"::1\"]\n", []string{
			`9: mode.cloud.tcpallow."127.0.0.1:6444": [mode.cloud.tcp] has no such listener: ` +
				`did you mean "127.0.0.1:6443"?`,
			`10: mode.cloud.tcpallow."[::]:80": [mode.cloud.tcp] has no such listener: ` +
				`add it there, or remove this line`}},
		{"balancers", server + `proxyfrom = []
listen = "443"
[mode.cloud.https]
proxyfrom = ["10.0.0.5/8"]
[mode.cloud.egress]
grpc = ["unix:///run/egress.sock"]
proxyfrom = ["0.0.0.0/0"]
[mode.cloud.tcp]
"127.0.0.1:6443" = "127.0.0.1:1"
"127.0.0.1:6444" = "127.0.0.1:1"
[mode.cloud.tcpproxyfrom]
"127.0.0.1:6443" = ["10.0.0.5"]
"127.0.0.1:6445" = ["10.0.0.5"]
[mode.cloud.tcpsendproxy]
"127.0.0.1:6444" = "2"
"[::]:80" = "v2"
`, []string{
			`6: mode.cloud.stream.server.proxyfrom: the list is empty: ` +
				`write the addresses of the balancers that send a PROXY header, such as "10.0.0.5", or remove it`,
			`7: mode.cloud.stream.server.listen: "443" has no address to listen on: write one such as ":443"`,
			`9: mode.cloud.https.proxyfrom: source "10.0.0.5/8": the address has bits outside its network; ` +
				`write 10.0.0.0/8 for the network or 10.0.0.5 for the address`,
			`12: mode.cloud.egress.proxyfrom: with 0.0.0.0/0 every caller could pretend to be another one: ` +
				`write the addresses of the balancers`,
			`14: mode.cloud.tcp."127.0.0.1:6443": callers behind a balancer are not on loopback, ` +
				`so nobody could connect: add "127.0.0.1:6443" = ["10.0.0.0/8"] (who may connect) to [mode.cloud.tcpallow]`,
			`18: mode.cloud.tcpproxyfrom."127.0.0.1:6445": [mode.cloud.tcp] has no such listener: ` +
				`did you mean "127.0.0.1:6443"?`,
			`20: mode.cloud.tcpsendproxy."127.0.0.1:6444": "2" is neither "v1" nor "v2": ` +
				`write the version of the PROXY protocol that the target expects`,
			`21: mode.cloud.tcpsendproxy."[::]:80": [mode.cloud.tcp] has no such listener: ` +
				`add it there, or remove this line`}},
		{"replicas among balancers", server + `proxyfrom = ["10.0.0.0/24"]
[mode.cloud.stream.peers]
addresses = ["10.0.0.2:9000", "10.0.1.2:9000", "cloud2:9000"]
ca = "ca"
servername = "tunnel.cloud.io"
`, []string{
			`6: mode.cloud.stream.server.proxyfrom: the replica 10.0.0.2:9000 is in it, ` +
				`and a replica sends no PROXY header: write the addresses of the balancers alone`}},
		{"one port", server + `listen = ":9000"
[mode.cloud.https.addr]
"10250" = "127.0.0.1:10250"
`, []string{
			`6: mode.cloud.stream.server.listen: port 9000 is taken by mode.cloud.stream.server.grpcport: choose another`}},

		{"udp", server + `[mode.cloud.udp]
5353 = "127.0.0.1:1"
"0.0.0.0:1" = "127.0.0.1:1"
"127.0.0.1:2" = "Edge1/127.0.0.1:1"
[mode.cloud.udpallow]
"0.0.0.0:2" = ["::1"]
`, []string{
			`7: mode.cloud.udp.5353: the key is not an address to listen on: ` +
				`write "host:port" with a port from 1 to 65535, such as "127.0.0.1:5353"`,
			`8: mode.cloud.udp."0.0.0.0:1": it is not on loopback, and nobody is allowed to send: ` +
				`add "0.0.0.0:1" = ["10.0.0.0/8"] (who may send) to [mode.cloud.udpallow]`,
			`9: mode.cloud.udp."127.0.0.1:2": node name "Edge1" is not an RFC 1123 subdomain: ` +
				`use lower-case letters, digits, '-' and '.': write "node/host:port", or "host:port" for any node`,
			`11: mode.cloud.udpallow."0.0.0.0:2": [mode.cloud.udp] has no such listener: did you mean "0.0.0.0:1"?`}},

		{"udp ports taken", server + `[mode.cloud.stream.dns]
listen = "127.0.0.1:5353"
[mode.cloud.tcp]
"127.0.0.1:1000" = "127.0.0.1:1"
[mode.cloud.udp]
"127.0.0.1:1000" = "127.0.0.1:1"
"127.0.0.1:5353" = "127.0.0.1:1"
"localhost:1000" = "127.0.0.1:1"
`, []string{
			`12: mode.cloud.udp."127.0.0.1:5353": port 5353 is taken by mode.cloud.stream.dns.listen: choose another`,
			`13: mode.cloud.udp."localhost:1000": port 1000 is taken by mode.cloud.udp."127.0.0.1:1000": ` +
				`choose another`}},

		{"ports taken", server + `logport = 9000
channelzaddr = "127.0.0.1:10250"
[mode.cloud.stream.dns]
listen = "127.0.0.1:9000"
[mode.cloud.https.addr]
"10250" = "127.0.0.1:10250"
"9000" = "127.0.0.1:9000"
[mode.cloud.tcp]
"127.0.0.1:10250" = "127.0.0.1:1"
"127.0.0.1:1000" = "127.0.0.1:1"
"[::1]:1000" = "127.0.0.1:1"
"127.0.0.2:1000" = "127.0.0.1:1"
"localhost:1000" = "127.0.0.1:1"
`, []string{
			`6: mode.cloud.stream.server.logport: port 9000 is taken by mode.cloud.stream.server.grpcport: ` +
				`choose another`,
			`9: mode.cloud.stream.dns.listen: port 9000 is taken by mode.cloud.stream.server.grpcport: choose another`,
			`11: mode.cloud.https.addr.10250: port 10250 is taken by mode.cloud.stream.server.channelzaddr: ` +
				`choose another`,
			`12: mode.cloud.https.addr.9000: port 9000 is taken by mode.cloud.stream.server.grpcport: choose another`,
			`14: mode.cloud.tcp."127.0.0.1:10250": port 10250 is taken by mode.cloud.stream.server.channelzaddr: ` +
				`choose another`,
			`18: mode.cloud.tcp."localhost:1000": port 1000 is taken by mode.cloud.tcp."127.0.0.1:1000": ` +
				`choose another`}},

		// 0.0.0.0 of the https front door and of egress opens all IPv6 addresses, too; 0.0.0.0 of a TCP port and
		// of the responder does not.
		{"ports taken in the other family", server + `[mode.cloud.stream.dns]
listen = "0.0.0.0:5353"
[mode.cloud.https.addr]
"10250" = "127.0.0.1:10250"
[mode.cloud.tcp]
"127.0.0.1:10250" = "127.0.0.1:1"
"[::1]:10250" = "127.0.0.1:1"
"[::1]:5353" = "127.0.0.1:1"
"[::1]:8090" = "127.0.0.1:1"
"0.0.0.0:2222" = "127.0.0.1:1"
"[::1]:2222" = "127.0.0.1:1"
"[::]:10250" = "127.0.0.1:1"
[mode.cloud.tcpallow]
"0.0.0.0:2222" = ["10.0.0.0/8"]
"[::]:10250" = ["10.0.0.0/8"]
[mode.cloud.egress]
httpconnect = ["tls://0.0.0.0:8090"]
cert = "crt"
key = "key"
clientca = "ca"
clientnames = ["kube-apiserver"]
`, []string{
			`7: mode.cloud.stream.dns.listen: 0.0.0.0:5353 does not say which address the names are to lead to: ` +
				`set POD_IP to one of this machine, or listen on one`,
			`11: mode.cloud.tcp."127.0.0.1:10250": port 10250 is taken by mode.cloud.https.addr.10250: choose another`,
			`12: mode.cloud.tcp."[::1]:10250": port 10250 is taken by mode.cloud.https.addr.10250: choose another`,
			`17: mode.cloud.tcp."[::]:10250": port 10250 is taken by mode.cloud.https.addr.10250: choose another`,
			`22: mode.cloud.egress.httpconnect: port 8090 is taken by mode.cloud.tcp."[::1]:8090": choose another`}},
		{"peers", server + `[mode.cloud.stream.peers]
service = "tunnel-cloud-peers"
addresses = ["10.0.0.2"]
cert = "crt"
`, []string{
			`6: mode.cloud.stream.peers.ca: missing: write the CA that signs the replicas' certificates: ` +
				`without it anybody could be one`,
			`6: mode.cloud.stream.peers.servername: missing: ` +
				`write the name that stands in the replicas' certificates, and in no other that ca signs`,
			`6: mode.cloud.stream.peers.key: missing: cert is useless without its private key, ` +
				`write key or remove cert`,
			`7: mode.cloud.stream.peers.service: "tunnel-cloud-peers" is not host:port: ` +
				`write an address such as "tunnel-cloud-peers:9000"`,
			`8: mode.cloud.stream.peers.addresses: "10.0.0.2" is not host:port: ` +
				`write an address such as "10.0.0.2:9000"`}},
		{"egress", server + `[mode.cloud.egress]
grpc = ["unix://egress.sock", "tls://:8090", "127.0.0.1:8091", "unix:///run/` + strings.Repeat("x", 103) + `"]
httpconnect = ["tls://:8090", "tls://0.0.0.0:9000", "tls://10.0.0.1"]
cert = "crt"
clientnames = []
strategies = ["desthost", "cidr", "default", "cidr"]
`, []string{
			`6: mode.cloud.egress.key: missing: cert is useless without its private key, write key or remove cert`,
			`6: mode.cloud.egress.clientca: missing: anybody who reaches tls:// could reach every node: ` +
				`write the CA that signs the callers' certificates`,
			`7: mode.cloud.egress.grpc: "unix://egress.sock" has no absolute path: ` +
				`write one such as "unix:///run/tunnel/egress.sock"`,
			`7: mode.cloud.egress.grpc: "127.0.0.1:8091" is neither unix:///PATH nor tls://HOST:PORT: ` +
				`write one of them`,
			`7: mode.cloud.egress.grpc: "/run/` + strings.Repeat("x", 103) + `" is too long for a socket: ` +
				`107 bytes are allowed`,
			`8: mode.cloud.egress.httpconnect: "tls://:8090" is there twice: each listener needs an address of its own`,
			`8: mode.cloud.egress.httpconnect: "tls://10.0.0.1" has no address to listen on: ` +
				`write one such as "tls://0.0.0.0:8090"`,
			`8: mode.cloud.egress.httpconnect: port 8090 is taken by mode.cloud.egress.grpc: choose another`,
			`8: mode.cloud.egress.httpconnect: port 9000 is taken by mode.cloud.stream.server.grpcport: choose another`,
			`10: mode.cloud.egress.clientnames: the list is empty or holds an empty name: ` +
				`write the common names of the callers' certificates, such as ["kube-apiserver"]`,
			`11: mode.cloud.egress.strategies: "desthost" is not known: ` +
				`write some of "destHost", "cidr", "defaultRoute", "default"`,
			`11: mode.cloud.egress.strategies: "cidr" is there twice: ` +
				`each is asked once, in the order in which they stand`}},
		{"egress without strategies", server + "[mode.cloud.egress]\nhttpconnect = [\"unix:///run/t/s\"]\nstrategies = []\n",
			[]string{`8: mode.cloud.egress.strategies: the list is empty, and without an entry all strategies are used: ` +
				`name some, or remove it`}},
		{"egress without clientnames", server + `[mode.cloud.egress]
httpconnect = ["tls://0.0.0.0:8090"]
cert = "crt"
key = "key"
clientca = "ca"
`, []string{
			`6: mode.cloud.egress.clientnames: missing: ` +
				`whoever has a client certificate of clientca could reach every node: ` +
				`write the common names of the callers' certificates, such as ["kube-apiserver"]`}},
		{"agents", server + `[mode.cloud.egress]
httpconnect = ["unix:///run/x.sock"]
agentport = 9000
`, []string{
			`8: mode.cloud.egress.agentport: port 9000 is taken by mode.cloud.stream.server.grpcport: choose another`}},
	} {
		b.run(t, func(path string) error { _, err := LoadCloud(path, testEnv()); return err })
	}
}

func TestBadEdge(t *testing.T) {
	inDir(t)
	for _, b := range []bad{
		{"empty", "[mode.edge]\n", []string{
			`1: mode.edge.stream.client.servername: missing: ` +
				`write the address of the cloud to dial, such as servername = "tunnel.example.com:9000"`,
			`1: mode.edge.stream.client.dns: missing: write the name that the cloud's certificate is made out to, ` +
				`such as dns = "tunnel.cloud.io"`,
			`1: mode.edge.stream.client.cert: missing: ` +
				`write the CA that signed the cloud's certificate, such as cert = "ca.crt"`,
			`1: mode.edge.stream.client.tokenfile: missing: ` +
				`run tunnel join, which writes all of this; ` +
				`or write tokenfile, a file that holds this node's token alone, or token, or nodecert`}},
		{"client", `[mode.edge.stream.client]
servername = "tunnel.example.com"
dns = "tunnel.cloud.io:9000"
cert = "nowhere.crt"
token = "canary"
tokenfile = "token"
sessions = "two"
connections = 65
logport = 7011
channelzaddr = "0.0.0.0:7011"
congestion = "tcp bbr"
[mode.edge.admin]
socket = "/run/` + strings.Repeat("x", 103) + `"
`, []string{
			`2: mode.edge.stream.client.servername: "tunnel.example.com" is not host:port: ` +
				`write an address such as "tunnel.example.com:9000"`,
			`3: mode.edge.stream.client.dns: "tunnel.cloud.io:9000" is neither a name nor an address: ` +
				`write the one that the cloud's certificate is made out to, without a port`,
			`4: mode.edge.stream.client.cert: file nowhere.crt does not exist: create it, or correct the path`,
			`6: mode.edge.stream.client.tokenfile: there is a token as well: remove one of them`,
			`7: mode.edge.stream.client.sessions: "two" is neither "one" nor "all": write one of them`,
			`8: mode.edge.stream.client.connections: 65 is not from 1 to 64: ` +
				`write a number between them, or remove it for the default`,
			`10: mode.edge.stream.client.channelzaddr: port 7011 is taken by mode.edge.stream.client.logport: ` +
				`choose another`,
			`11: mode.edge.stream.client.congestion: "tcp bbr" is not the name of a congestion control: ` +
				`write "auto", "system", or a name such as "bbr"`,
			`13: mode.edge.admin.socket: "/run/` + strings.Repeat("x", 103) + `" is too long for a socket: ` +
				`107 bytes are allowed`}},
		{"services", client + "[mode.edge.services]\nmode = \"full\"\ndirect = [\"10.0.0.1/8\", \"home\"]\n", []string{
			`8: mode.edge.services.direct: "10.0.0.1/8": did you mean "10.0.0.0/8"?`,
			`8: mode.edge.services.direct: "home" is not a network: write one such as "10.88.1.0/24"`}},
		{"no mode of services", client + "[mode.edge.services]\nmode = \"proxy\"\n", []string{
			`7: mode.edge.services.mode: "proxy" is no mode: write mode = "relay" or "full"`}},
		{"the domain of services", client + "[mode.edge.services]\ndns = true\nclusterdomain = \"cluster local\"\n", []string{
			`8: mode.edge.services.clusterdomain: "cluster local" is no domain: write that of the cluster, such as ` +
				`"cluster.local"`}},
		{"a domain without dns", client + "[mode.edge.services]\nclusterdomain = \"k8s.example\"\n", []string{
			`7: mode.edge.services.clusterdomain: not used: write dns = true, or remove the key`}},
		{"near without proof", client + "[mode.edge.services]\nnear = \"0.0.0.0:9443\"\n", []string{
			`6: mode.edge.services.nearca: missing: write updates = true into [mode.edge.stream.client], so that the ` +
				`cloud tells the CA of the nodes' certificates, or name a copy of ca of [mode.cloud.join], such as ` +
				`nearca = "nodes-ca.crt"`,
			`7: mode.edge.services.near: edges prove to each other which nodes they are by nodecert of ` +
				`[mode.edge.stream.client]: tunnel join gets a certificate, or remove near and nearca`}},
		{"near nowhere", client + "[mode.edge.services]\nnear = \"eth0:9443\"\nnearca = \"nowhere.crt\"\n", []string{
			`7: mode.edge.services.near: "eth0:9443" is no address with a port: write one such as "0.0.0.0:9443"`}},
		{"a CA without near", client + "[mode.edge.services]\nnearca = \"nowhere.crt\"\n", []string{
			`7: mode.edge.services.nearca: not used: write near, or remove the key`}},
		{"near at the port of health", client + "logport = 9443\n[mode.edge.services]\n" +
			"near = \"[::]:9443\"\nnearca = \"nowhere.crt\"\n", []string{
			`8: mode.edge.services.near: edges prove to each other which nodes they are by nodecert of ` +
				`[mode.edge.stream.client]: tunnel join gets a certificate, or remove near and nearca`,
			`8: mode.edge.services.near: port 9443 is taken by mode.edge.stream.client.logport: choose another`,
			`9: mode.edge.services.nearca: file nowhere.crt does not exist: create it, or correct the path`}},
		{"updates", client + "updates = true\n", []string{
			`6: mode.edge.stream.client.updates: the cloud tells them when the edge renews its certificate, ` +
				`and this edge renews none: remove it, or join with tunnel join`}},
		{"allow", client + "[mode.edge]\n" +
			"allow = [\"10.0.0.0/8\", \"kubelet:10250\", \"self:10250\", \"10.0.0.0/8:99999\"]\n", []string{
			`7: mode.edge.allow: allow entry "10.0.0.0/8": no port; write 10.0.0.0/8:PORT, or 10.0.0.0/8:* for any`,
			`7: mode.edge.allow: allow entry "kubelet:10250": not an IP address or a CIDR network such as 10.0.0.0/8`,
			`7: mode.edge.allow: allow entry "10.0.0.0/8:99999": ` +
				`port "99999" is not a number from 1 to 65535 (or * for any)`}},
		{"the way to the cloud", client + `servers = ["a:9000", "b", "wss://me:canary@c/tunnel", "a:9000"]
proxy = "ftp://me:canary@proxy"
proxyfile = "nowhere"
proxyca = "nowhere.crt"
`, []string{
			`6: mode.edge.stream.client.servers: there is servername as well: remove one of them, ` +
				`with its address in the list if the edge may use it`,
			`6: mode.edge.stream.client.servers: "b" is neither host:port nor wss://host/path: ` +
				`write an address such as "tunnel.example.com:9000"`,
			`6: mode.edge.stream.client.servers: the URL of a server has no user and no password: ` +
				`the node's token or certificate proves who it is`,
			`6: mode.edge.stream.client.servers: "a:9000" is there twice: remove one of them`,
			`7: mode.edge.stream.client.proxy: proxy in [mode.edge.stream.client] is not the URL of a proxy: ` +
				`write http://HOST:PORT, https://HOST:PORT or socks5://HOST:PORT; USER:PASSWORD@ may stand before HOST, ` +
				`with %40 for @, %3A for : and %2F for / in them; or write "env" or "none"`,
			`8: mode.edge.stream.client.proxyfile: there is proxy as well: remove one of them`,
			`8: mode.edge.stream.client.proxyfile: file nowhere does not exist: create it, or correct the path`,
			`9: mode.edge.stream.client.proxyca: file nowhere.crt does not exist: create it, or correct the path`}},
		{"an empty list", "[mode.edge]\nallow = []\n" + client, []string{
			`2: mode.edge.allow: the list is empty, and without an entry the edge dials its own machine at every port: ` +
				`name what it may dial, or remove it`}},
		{"no server", client + "servers = []\n", []string{
			`6: mode.edge.stream.client.servers: the list is empty: write the addresses of the cloud, or remove it`}},
		{"a key without a certificate", client + "[mode.edge.https]\nkey = \"key\"\n", []string{
			`6: mode.edge.https.cert: missing: key is useless without its certificate, write cert or remove key`}},
		{"proxy-servers", client + `[mode.edge.konnectivity]
servers = ["10.0.0.1:8091", "tls://10.0.0.1", "tls://10.0.0.2:8091", "tls://10.0.0.2:8091"]
ca = "nowhere.crt"
`, []string{
			`6: mode.edge.konnectivity.cert: missing: a proxy-server takes a client certificate or a token, ` +
				`write cert and key, or tokenfile`,
			`7: mode.edge.konnectivity.servers: "10.0.0.1:8091" is not tls://HOST:PORT: ` +
				`write one such as "tls://10.0.0.1:8091"`,
			`7: mode.edge.konnectivity.servers: "10.0.0.1" is not host:port: write an address such as "10.0.0.1:8091"`,
			`7: mode.edge.konnectivity.servers: "tls://10.0.0.2:8091" is there twice: remove one of them`,
			`8: mode.edge.konnectivity.ca: file nowhere.crt does not exist: create it, or correct the path`}},
	} {
		b.run(t, func(path string) error { _, err := LoadEdge(path, testEnv()); return err })
	}
}

// TestTokenStaysSecret: no message shows a token, whatever mistake is near it.
func TestTokenStaysSecret(t *testing.T) {
	inDir(t)
	for _, line := range []string{
		`token = canary`,
		`canary0123 = "edge1"`,
		`"canary:/+" = "edge1"`,
		`canarycanarycanarycanarycanarycanary = "edge1"`,
		`token = "canary`,
		`token = 'canary`,
		`token = "canary\q"`,
		`token = canary"`,
		`token = "x" canary`,
		`token = ["canary"]`,
		`token = { canary = 1, x = "canary" }`,
		"token = \"canary\nx\"",
		`token = 12canary`,
		`token canary`,
		`proxy = "ftp://me:canary@proxy"`,
		`proxy = "http://me:canary@proxy:port"`,
		`proxy = "http://me:canary`,
		`proxy = ["http://me:canary@proxy"]`,
		`servers = ["wss://me:canary@cloud/tunnel"]`,
		`tokn = "canary"`,
		`token = "canary"` + "\ntokenfile = \"token\"",
	} {
		write(t, "f.toml", "[mode.edge.stream.client]\n"+line+"\n")
		_, err := LoadEdge("f.toml", testEnv())
		if s := fmt.Sprintf("%v %+v %#v", err, err, err); err == nil || strings.Contains(s, "canary") {
			t.Errorf("%s\n%s", line, s)
		}
	}
}

// TestUnreadable: the test may run as root, which reads everything, so the error is made up.
func TestUnreadable(t *testing.T) {
	got := fileProblem("key", nil, &fs.PathError{Op: "open", Path: "key", Err: syscall.EACCES}, "create it")
	if want := "file key may not be read by this user: " +
		"run this as its owner, such as with sudo, or change its mode"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
