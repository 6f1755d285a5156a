package conf

import (
	"slices"
	"strings"
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

func TestMirror(t *testing.T) {
	inDir(t)
	const egress = "[mode.cloud.egress]\nkubernetes = true\n"
	const table = server + egress + "[mode.cloud.services.mirror]\n"
	const service = "service = \"cloud\"\n"
	const ports = "ports = \"20000-20999\"\n"
	const key = "mode.cloud.services.mirror"
	env := testEnv()
	env.PodNamespace, env.PodName = "tunnel-system", "cloud-1"
	for name, c := range map[string]struct {
		text string
		env  Env
		want string // a part of the error; "": there is none
	}{
		"right":           {table + ports + service, env, ""},
		"no range":        {table + service, env, key + `.ports: "" is not a range of ports`},
		"a port":          {table + "ports = \"20000\"\n" + service, env, key + `.ports: "20000" is not a range of ports`},
		"backwards":       {table + "ports = \"2-1\"\n" + service, env, key + `.ports: "2-1" is not a range of ports`},
		"no Service":      {table + ports, env, key + `.service: "" is not the name of a Service`},
		"no namespace":    {table + ports + service, Env{PodName: "cloud-1"}, key + `: POD_NAMESPACE "" is not`},
		"no name":         {table + ports + service, Env{PodNamespace: "x"}, key + ": neither POD_NAME nor the host name"},
		"a port twice":    {table + "ports = \"8000-9500\"\n" + service, env, ".ports: port 9000 is taken by mode."},
		"egress believes": {server + "[mode.cloud.services.mirror]\n" + ports + service, env, "write kubernetes = true"},
	} {
		write(t, "f.toml", c.text)
		got, err := LoadCloud("f.toml", c.env)
		if c.want != "" {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v, want %q", name, err, c.want)
			}
			continue
		}
		want := Mirror{First: 20000, Last: 20999, Service: "cloud", Namespace: "tunnel-system", Identity: "cloud-1"}
		if err != nil || got.Services.Mirror != want || !got.Services.On || !got.Egress.Configured() ||
			!got.Egress.AsksKubernetes() || got.Egress.Listens() || len(got.Warnings) > 0 {
			t.Errorf("%s: %+v, %+v, warnings %q, %v", name, got.Services, got.Egress, got.Warnings, err)
		}
	}
}
