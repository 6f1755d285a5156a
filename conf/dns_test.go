package conf

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"tunnel.example/tunnel/pkg/auth"
)

const dns = "[mode.cloud.stream.dns]\n"

// podEnv is the environment of a pod.
func podEnv() Env {
	return Env{PodIP: "10.0.0.5", PodName: "tunnel-0", PodNamespace: "tunnel", HostName: "node7"}
}

func addrs(list ...string) []netip.Addr {
	var all []netip.Addr
	for _, s := range list {
		all = append(all, netip.MustParseAddr(s))
	}
	return all
}

func servers(list ...string) []netip.AddrPort {
	var all []netip.AddrPort
	for _, s := range list {
		all = append(all, netip.MustParseAddrPort(s))
	}
	return all
}

// TestDNS: the configuration that results from the table and the environment.
func TestDNS(t *testing.T) {
	inDir(t)
	const open = "f.toml:9: mode.cloud.stream.dns.allowfrom: " +
		"any name is resolved for whoever reaches %s, also to flood others with the answers: " +
		"write the networks of those who may ask"
	env := func(podIP string) Env { e := podEnv(); e.PodIP = podIP; return e }
	for _, c := range []struct {
		name, text string
		env        Env
		want       DNS
		warn       string
	}{
		{name: "nothing", env: env("not looked at")},
		{
			name: "SuperEdge's without Kubernetes", env: testEnv(),
			text: "configmap = \"Not A Name\"\nhosts = \"h\"\nservice = \"Nor This\"\nnodeselector = \"=\"\n" +
				"debug = true\n",
		},
		{
			name: "debug keeps the DNS server", env: testEnv(),
			text: "debug = true\nconfigmap = \"n\"\nlisten = \"127.0.0.1:53\"\n",
			want: DNS{Listen: "127.0.0.1:53", Addrs: addrs("127.0.0.1")},
		},
		{
			name: "Kubernetes", env: env("fd00::5, 10.0.0.5"),
			text: "configmap = \"tunnel.nodes-1\"\nhosts = \"mnt/hosts\"\nservice = \"tunnel-cloud\"\n" +
				"nodeselector = \"a in (b)\"\n",
			want: DNS{
				ConfigMap: "tunnel.nodes-1", Namespace: "tunnel", Identity: "tunnel-0", Service: "tunnel-cloud",
				NodeSelector: "a in (b)", Hosts: "mnt/hosts", Addrs: addrs("10.0.0.5", "fd00::5"),
			},
		},
		{
			name: "POD_NAME is not set",
			env:  Env{PodIP: "fd00::5", PodNamespace: "tunnel", HostName: "node7"},
			text: "configmap = \"n\"\n",
			want: DNS{ConfigMap: "n", Namespace: "tunnel", Identity: "node7", Addrs: addrs("fd00::5")},
		},
		{
			name: "ConfigMap and DNS server", env: env("::ffff:10.0.0.5"),
			text: "configmap = \"n\"\nlisten = \"127.0.0.1:53\"\n",
			want: DNS{
				ConfigMap: "n", Namespace: "tunnel", Identity: "tunnel-0",
				Listen: "127.0.0.1:53", Addrs: addrs("10.0.0.5"),
			},
		},
		{
			name: "POD_IP takes precedence over listen", env: env("10.0.0.5"),
			text: "listen = \"10.0.0.6:53\"\n",
			want: DNS{Listen: "10.0.0.6:53", Addrs: addrs("10.0.0.5")},
		},
		{
			name: "POD_IP on loopback, without Kubernetes", env: env("127.0.0.1"),
			text: "listen = \":53\"\n",
			want: DNS{Listen: ":53", Addrs: addrs("127.0.0.1")},
		},
		{
			name: "upstream", env: env("10.0.0.5"),
			text: "listen = \"0.0.0.0:53\"\n" +
				"upstream = [\"10.96.0.10\", \"10.0.0.5:5353\", \"[fd00::1]:53\", \"fd00::1\", \"::ffff:1.1.1.1\"]\n",
			want: DNS{
				Listen: "0.0.0.0:53", Addrs: addrs("10.0.0.5"),
				Upstream: servers("10.96.0.10:53", "10.0.0.5:5353", "[fd00::1]:53", "[fd00::1]:53", "1.1.1.1:53"),
			},
		},
		{
			name: "upstream with allowfrom", env: env("10.0.0.5"),
			text: "listen = \"0.0.0.0:53\"\nupstream = [\"10.96.0.10\"]\nallowfrom = [\"192.0.2.0/24\", \"::1\"]\n",
			want: DNS{
				Listen: "0.0.0.0:53", Addrs: addrs("10.0.0.5"), Upstream: servers("10.96.0.10:53"),
				AllowFrom: auth.Sources{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("::1/128")},
			},
		},
		{
			name: "upstream for anybody", env: env("10.0.0.5"),
			text: "listen = \"0.0.0.0:53\"\nupstream = [\"10.96.0.10\"]\nallowfrom = [\"::/0\"]\n",
			want: DNS{
				Listen: "0.0.0.0:53", Addrs: addrs("10.0.0.5"), Upstream: servers("10.96.0.10:53"),
				AllowFrom: auth.Sources{netip.MustParsePrefix("::/0")},
			},
			warn: fmt.Sprintf(open, "0.0.0.0:53"),
		},
		{
			name: "upstream on loopback", env: testEnv(),
			text: "listen = \"[::1]:53\"\nupstream = [\"127.0.0.1:53\"]\n",
			want: DNS{Listen: "[::1]:53", Addrs: addrs("::1"), Upstream: servers("127.0.0.1:53")},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			write(t, "f.toml", server+dns+c.text)
			got, err := LoadCloud("f.toml", c.env)
			if err != nil {
				t.Fatal(err)
			}
			if err := got.Validate(); err != nil {
				t.Errorf("Validate after loading: %v", err)
			}
			if !reflect.DeepEqual(got.DNS, c.want) {
				t.Errorf("got  %+v\nwant %+v", got.DNS, c.want)
			}
			if warned := strings.Join(got.Warnings, "\n"); warned != c.warn {
				t.Errorf("warned %q, want %q", warned, c.warn)
			}
		})
	}
}

// TestBadDNS: refused tables, by the value of POD_IP.
func TestBadDNS(t *testing.T) {
	inDir(t)
	const (
		podIPs = "set it from the pod's status.podIP or status.podIPs"
		no     = " is not an IP address, or one IPv4 and one IPv6 address with a comma between: " + podIPs
		as     = `: write configmap as well, or remove it`
		t7     = "7: mode.cloud.stream.dns."
		t8     = "8: mode.cloud.stream.dns."
		first  = `7: mode.cloud.stream.dns.configmap: `
		cm     = "configmap = \"n\"\n"
	)
	for podIP, cases := range map[string][]bad{
		"10.0.0.5": {
			{"bad names", "configmap = \"tunnel_nodes\"\nservice = \"tunnel.cloud\"\n", []string{
				first + `"tunnel_nodes" is not the name of a ConfigMap: ` +
					`use lower-case letters, digits, '-' and '.', at most 253 of them, such as "tunnel-nodes"`,
				t8 + `service: "tunnel.cloud" is not the name of a Service: ` +
					`use lower-case letters, digits and '-', at most 63 of them, such as "tunnel-cloud"; ` +
					`its namespace is POD_NAMESPACE`}},
			{"no configmap", "hosts = \"h\"\nservice = \"s\"\nnodeselector = \"x\"\n", []string{
				t7 + `hosts: it is configmap as CoreDNS mounts it, and there is none` + as,
				t8 + `service: it is looked up in Kubernetes, which is used with configmap only` + as,
				`9: mode.cloud.stream.dns.nodeselector: ` +
					`it selects among the nodes in Kubernetes, which is used with configmap only` + as}},
			{"no further problems after a wrong type", "configmap = 1\nhosts = \"h\"\nlisten = 1\n" +
				"upstream = [\"1.1.1.1\"]\n", []string{
				first + `expected a string, found a whole number: write it in double quotes`,
				`9: mode.cloud.stream.dns.listen: expected a string, found a whole number: write it in double quotes`}},
			{"no further problems after a wrong type of debug", "debug = \"true\"\nhosts = \"h\"\n" +
				"listen = \"x\"\n", []string{
				t7 + `debug: expected true or false, found a string: write it without quotes`}},
			{"upstream alone", "upstream = [\"1.1.1.1:53\"]\n", []string{
				t7 + `upstream: nobody asks us, so we ask nobody: ` +
					`write listen = "127.0.0.1:5353", where to answer DNS, or remove it`}},
			{"allowfrom alone", "listen = \"127.0.0.1:53\"\nallowfrom = [\"10.0.0.0/8\"]\n", []string{
				t8 + `allowfrom: it is for whom upstream is asked, and there is none: ` +
					`write upstream = ["10.96.0.10:53"], or remove it`}},
			{"allowfrom that is empty", "listen = \"127.0.0.1:53\"\nupstream = [\"1.1.1.1\"]\n" +
				"allowfrom = []\n", []string{
				`9: mode.cloud.stream.dns.allowfrom: the list is empty, and nobody could connect: ` +
					`write networks such as "10.0.0.0/8", or remove it`}},
			{"debug does not excuse the DNS server", "debug = true\nlisten = \"53\"\n" +
				"upstream = [\"dns.example:53\", \"\"]\n", []string{
				t8 + `listen: "53" is not an address to listen on: ` +
					`write "host:port" with a port from 1 to 65535, such as "127.0.0.1:5353"`,
				`9: mode.cloud.stream.dns.upstream: "dns.example:53" is not an IP address with a port: ` +
					`write the DNS server as "10.96.0.10:53"`,
				`9: mode.cloud.stream.dns.upstream: "" is not an IP address with a port: ` +
					`write the DNS server as "10.96.0.10:53"`}},
			{"multicast", "listen = \"224.0.0.251:5353\"\n", []string{
				t7 + `listen: 224.0.0.251 is a multicast address, and what is asked there has no one answer: ` +
					`write an address of this machine`}},
			{"upstream that is no server", "listen = \":53\"\n" +
				"upstream = [\"0.0.0.0\", \"224.0.0.251\", \"1.1.1.1:0\"]\n", []string{
				t8 + `upstream: "0.0.0.0:53" is not the address of a DNS server: write one such as "10.96.0.10:53"`,
				t8 + `upstream: "224.0.0.251:53" is not the address of a DNS server: write one such as "10.96.0.10:53"`,
				t8 + `upstream: "1.1.1.1:0" is not the address of a DNS server: write one such as "10.96.0.10:53"`}},
			{"upstream is this server", "listen = \"localhost:53\"\nupstream = [\"127.0.0.1\"]\n", []string{
				t8 + `upstream: 127.0.0.1:53 is this server itself (listen = "localhost:53"), ` +
					`and a question would go round in circles: write another DNS server, or remove it`}},
			{"upstream is this server, which listens everywhere", "listen = \":53\"\n" +
				"upstream = [\"127.0.0.1:53\", \"10.0.0.5\", \"10.0.0.6\"]\n", []string{
				t8 + `upstream: 127.0.0.1:53 is this server itself (listen = ":53"), ` +
					`and a question would go round in circles: write another DNS server, or remove it`,
				t8 + `upstream: 10.0.0.5:53 is this server itself (listen = ":53"), ` +
					`and a question would go round in circles: write another DNS server, or remove it`}},
		},
		"": {
			{"no POD_IP", cm, []string{
				first + "POD_IP does not say which address the names are to lead to: " + podIPs}},
			{"listen does not help Kubernetes", cm + "listen = \"10.0.0.5:53\"\n", []string{
				first + "POD_IP does not say which address the names are to lead to: " + podIPs}},
			{"listen everywhere", "listen = \":53\"\n", []string{
				t7 + `listen: :53 does not say which address the names are to lead to: ` +
					`set POD_IP to one of this machine, or listen on one`}},
			{"listen everywhere, spelt out", "listen = \"[::]:53\"\n", []string{
				t7 + `listen: [::]:53 does not say which address the names are to lead to: ` +
					`set POD_IP to one of this machine, or listen on one`}},
			{"listen on a name", "listen = \"localhost:53\"\n", []string{
				t7 + `listen: localhost:53 does not say which address the names are to lead to: ` +
					`set POD_IP to one of this machine, or listen on one`}},
			{"listen on a link-local address", "listen = \"[fe80::1%eth0]:53\"\n", []string{
				t7 + `listen: [fe80::1%eth0]:53 does not say which address the names are to lead to: ` +
					`set POD_IP to one of this machine, or listen on one`}},
		},
		"node7": {
			{"POD_IP is no address", cm, []string{first + `POD_IP "node7"` + no}},
			{"POD_IP is no address, DNS server", "listen = \"10.0.0.5:53\"\n", []string{
				t7 + `listen: POD_IP "node7"` + no}},
		},
		"10.0.0.5,": {{"half a list", cm, []string{first + `POD_IP "10.0.0.5,"` + no}}},
		"127.0.0.1": {{"loopback", cm, []string{first + "kube-apiserver goes to no node at 127.0.0.1, " +
			"which POD_IP holds: " + podIPs}}},
		"fe80::1": {{"link-local", cm, []string{first + "kube-apiserver goes to no node at fe80::1, " +
			"which POD_IP holds: " + podIPs}}},
		"fd00::5%eth0,0.0.0.0": {{"nowhere", "listen = \":53\"\n", []string{
			t7 + "listen: names cannot lead to 0.0.0.0, which POD_IP holds: " + podIPs,
			t7 + "listen: names cannot lead to fd00::5%eth0, which POD_IP holds: " + podIPs}}},
		"10.0.0.5,fd00::5,10.0.0.6": {{"two of a family", cm, []string{
			first + "POD_IP holds two addresses of one family, 10.0.0.5 and 10.0.0.6: " +
				"set it to one IPv4 and one IPv6 address at most"}}},
	} {
		for _, b := range cases {
			b.text = server + dns + b.text
			b.run(t, func(path string) error {
				env := podEnv()
				env.PodIP = podIP
				_, err := LoadCloud(path, env)
				return err
			})
		}
	}
	for env, want := range map[Env]string{
		{PodIP: "10.0.0.5", PodName: "x"}: "POD_NAMESPACE does not say in which namespace it " +
			"is: set it from the pod's metadata.namespace, or set debug = true to do without Kubernetes",
		{PodIP: "10.0.0.5", PodName: "x", PodNamespace: "a.b"}: `POD_NAMESPACE "a.b" is not the name of a ` +
			`namespace: set it from the pod's metadata.namespace`,
		{PodIP: "10.0.0.5", PodNamespace: "a"}: "neither POD_NAME nor the host name tells this " +
			"replica from others: set POD_NAME from the pod's metadata.name",
	} {
		b := bad{fmt.Sprintf("%+v", env), server + dns + cm, []string{first + want}}
		b.run(t, func(path string) error { _, err := LoadCloud(path, env); return err })
	}
}

// TestElsewhere: a command beside the daemon lacks the variables of the daemon's unit, and takes the file nevertheless.
func TestElsewhere(t *testing.T) {
	inDir(t)
	for name, text := range map[string]string{
		"configmap": "configmap = \"tunnel-nodes\"\n", "listen": "listen = \"0.0.0.0:53\"\n",
	} {
		write(t, "cloud.toml", server+dns+text)
		if _, err := LoadCloud("cloud.toml", Env{HostName: "host"}); err == nil {
			t.Errorf("%s: the daemon starts without POD_IP", name)
		}
		if _, err := LoadCloud("cloud.toml", Env{HostName: "host", Elsewhere: true}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestDNSByHand: mistakes that only a value made by hand can have.
func TestDNSByHand(t *testing.T) {
	inDir(t)
	c := &Cloud{Server: Server{GRPCPort: 9000, Cert: "crt", Key: "key", TokenFile: "tokens"}}
	c.DNS = DNS{Listen: "127.0.0.1:53", Addrs: addrs("fd00::5", "10.0.0.5"), Upstream: make([]netip.AddrPort, 1)}
	want := "mode.cloud.stream.dns.upstream: \"invalid AddrPort\" is not the address of a DNS server: " +
		"write one such as \"10.96.0.10:53\"\n" +
		"mode.cloud.stream.dns.listen: the IPv6 address is before the IPv4 address: write IPv4 first"
	if err := c.Validate(); err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}
