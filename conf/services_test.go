package conf

import (
	"slices"
	"testing"
)

func TestCloudServices(t *testing.T) {
	inDir(t)
	const table = server + "[mode.cloud.services]\n"
	const key = "f.toml:7: mode.cloud.services."
	for text, want := range map[string]struct {
		services CloudServices
		err      string
	}{
		server:                           {},
		table:                            {services: CloudServices{On: true}},
		table + "namespaces = [\"*\"]\n": {services: CloudServices{On: true}},
		table + "namespaces = [\"shop\", \"bank\"]\nallow = [\"edge\"]\n": {
			services: CloudServices{On: true, Namespaces: []string{"shop", "bank"}}},
		table + "allow = [\"edge\", \"cluster\"]\n": {services: CloudServices{On: true, Cluster: true}},
		table + "allow = [\"cluster\"]\n":           {services: CloudServices{On: true, Cluster: true}},
		table + "namespaces = []\n": {err: key + `namespaces: the list is empty, and no Service would be told: ` +
			`write namespaces such as "shop", or remove it for all`},
		table + "namespaces = [\"*\", \"shop\"]\n": {
			err: key + `namespaces: "*" means all namespaces: remove it, or remove the others`},
		table + "namespaces = [\"Shop\"]\n": {
			err: key + `namespaces: "Shop" is not the name of a namespace: write one such as "shop"`},
		table + "allow = []\n": {err: key + `allow: the list is empty, and edges could reach nothing: ` +
			`write "edge" or "cluster", or remove it`},
		table + "allow = [\"all\"]\n": {err: key + `allow: "all" is neither "edge" nor "cluster": write one of them`},
	} {
		write(t, "f.toml", text)
		c, err := LoadCloud("f.toml", testEnv())
		if err != nil {
			if err.Error() != want.err {
				t.Errorf("%s\n%q, want %q", text, err, want.err)
			}
			continue
		}
		got := c.Services
		if want.err != "" || got.On != want.services.On || got.Cluster != want.services.Cluster ||
			!slices.Equal(got.Namespaces, want.services.Namespaces) {
			t.Errorf("%s\n%+v, want %+v %s", text, got, want.services, want.err)
		}
	}
}
