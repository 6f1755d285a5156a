package conf

import "testing"

// Whose word the cloud takes is said at each start.
func TestEgressWarnings(t *testing.T) {
	inDir(t)
	const door = server + "[mode.cloud.egress]\ngrpc = [\"unix:///run/x.sock\"]\n"
	for text, want := range map[string][]string{
		door + "kubernetes = true\n": nil,
		door:                         {"f.toml:6: mode.cloud.egress.kubernetes: missing: what edges say they reach is believed, and one that lies attracts what is meant for others; write kubernetes = true where nodes have Node objects"},
	} {
		write(t, "f.toml", text)
		c, err := LoadCloud("f.toml", testEnv())
		if err != nil {
			t.Fatal(err)
		}
		same(t, c.Warnings, want)
	}
}
