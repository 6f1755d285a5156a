package conf

import "testing"

// A warning says if the cloud believes edges about what they reach, and which settings have no effect.
func TestEgressWarnings(t *testing.T) {
	inDir(t)
	const table = server + "[mode.cloud.egress]\n"
	const door = table + "grpc = [\"unix:///run/x.sock\"]\n"
	const off = `f.toml:6: mode.cloud.egress: off: write grpc = ["unix:///run/tunnel/egress-grpc.sock"], or httpconnect`
	for text, want := range map[string][]string{
		door + "kubernetes = true\n": nil,
		door: {"f.toml:6: mode.cloud.egress.kubernetes: missing: " +
			"what edges say they reach is believed, and one that lies attracts what is meant for others; " +
			"write kubernetes = true where nodes have Node objects"},
		table + "kubernetes = true\n":          {off},
		table + "clientnames = [\"a\"]\n":      {off},
		table + "konnectivitymetrics = true\n": {off},
		table + "agentport = 8091\n":           nil,
		table + "agentport = 8091\nkubernetes = true\nclientnames = [\"a\"]\n": {`f.toml:6: mode.cloud.egress: ` +
			`agentport alone: what else stands here is for callers: ` +
			`write grpc = ["unix:///run/tunnel/egress-grpc.sock"], or httpconnect`},
		door + "kubernetes = true\nclientnames = [\"a\"]\n": {"f.toml:6: mode.cloud.egress.cert: " +
			"not used: cert, key, clientca and clientnames are for tls://, " +
			"and callers of a unix socket are known by its permissions"},
	} {
		write(t, "f.toml", text)
		c, err := LoadCloud("f.toml", testEnv())
		if err != nil {
			t.Fatal(err)
		}
		wantEqual(t, c.Warnings, want)
	}
}

// A list that selects no node, or more nodes than its author may expect, is refused.
func TestDefaultNodes(t *testing.T) {
	inDir(t)
	const door = server + "[mode.cloud.egress]\ngrpc = [\"unix:///run/x.sock\"]\nkubernetes = true\ndefaultnodes = "
	const key = "f.toml:9: mode.cloud.egress.defaultnodes: "
	for list, want := range map[string]string{
		`["gw-1", " gw-2"]`: "", `["*"]`: "", `["gw-*"]`: "",
		`[]`:            key + `the list is empty: name nodes, or remove "default" from strategies`,
		`["a,b"]`:       key + `"a,b" holds a comma: put each name into quotes of its own`,
		`["gw-1", "*"]`: key + `"*" is every node: write it alone, or remove it`,
		`[""]`:          key + `"" is not a node's name or a pattern such as "gw-*"`,
	} {
		write(t, "f.toml", door+list+"\n")
		got := ""
		if _, err := LoadCloud("f.toml", testEnv()); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", list, got, want)
		}
	}
}
