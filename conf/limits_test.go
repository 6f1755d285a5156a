package conf

import (
	"testing"
	"time"
)

func TestLimits(t *testing.T) {
	inDir(t)
	write(t, "f.toml", server+`[mode.cloud.limits]
joining = 1
joiningperaddress = 2
jointimeout = 3
metadata = 4
conns = 5
opens = 6
dials = 7
strangers = 8
strangersperaddress = 9
handshaketimeout = 10
connsperaddress = 11
headers = 12
dns = 13
lookups = 14
health = 15
flows = 16
flowsperaddress = 17
`)
	c, err := LoadCloud("f.toml", testEnv())
	if err != nil {
		t.Fatal(err)
	}
	if want := (Limits{
		Joining: 1, JoiningPerAddress: 2, JoinTimeout: 3 * time.Second, Metadata: 4 << 10, Conns: 5, Opens: 6, Dials: 7,
		Strangers: 8, StrangersPerAddress: 9, HandshakeTimeout: 10 * time.Second,
		ConnsPerAddress: 11, Headers: 12 << 10,
		DNS: 13, Lookups: 14, Health: 15, Flows: 16, FlowsPerAddress: 17,
	}); c.Limits != want {
		t.Errorf("got %+v, want %+v", c.Limits, want)
	}
	write(t, "f.toml", client+"[mode.edge.limits]\nconns = 1\ndials = 2\nflows = 4\nhealth = 3\n")
	e, err := LoadEdge("f.toml", testEnv())
	if err != nil {
		t.Fatal(err)
	}
	if want := (EdgeLimits{Conns: 1, Dials: 2, Flows: 4, Health: 3}); e.Limits != want {
		t.Errorf("got %+v, want %+v", e.Limits, want)
	}

	write(t, "f.toml", server+"[mode.cloud.limits]\nconns = 0\n")
	if c, err = LoadCloud("f.toml", testEnv()); err != nil {
		t.Fatal(err)
	}
	if c.Limits != (Limits{}) { // 0 and a missing key mean the default
		t.Errorf("got %+v, want zeros", c.Limits)
	}
}

func TestBadLimits(t *testing.T) {
	inDir(t)
	bad{"cloud", server + `[mode.cloud.limits]
joining = -1
jointimeout = 301
metadata = 1
opens = 1000001
dials = 65537
headers = 1025
conn = 5
`, []string{
		`7: mode.cloud.limits.joining: -1 is not from 1 to 65536: ` +
			`write a number between them, or remove it for the default`,
		`8: mode.cloud.limits.jointimeout: 301 is not from 1 to 300: ` +
			`write a number between them, or remove it for the default`,
		`9: mode.cloud.limits.metadata: 1 is not from 4 to 1024: ` +
			`write a number between them, or remove it for the default`,
		`10: mode.cloud.limits.opens: 1000001 is not from 1 to 1000000: ` +
			`write a number between them, or remove it for the default`,
		`11: mode.cloud.limits.dials: 65537 is not from 1 to 65536: ` +
			`write a number between them, or remove it for the default`,
		`12: mode.cloud.limits.headers: 1025 is not from 4 to 1024: ` +
			`write a number between them, or remove it for the default`,
		`13: mode.cloud.limits.conn: unknown key: did you mean conns?`,
	}}.run(t, func(path string) error { _, err := LoadCloud(path, testEnv()); return err })
	bad{"edge", client + "[mode.edge.limits]\nconns = 65537\n", []string{
		`7: mode.edge.limits.conns: 65537 is not from 1 to 65536: ` +
			`write a number between them, or remove it for the default`,
	}}.run(t, func(path string) error { _, err := LoadEdge(path, testEnv()); return err })
}
