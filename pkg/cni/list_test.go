package cni

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestList(t *testing.T) {
	subnets := []netip.Prefix{netip.MustParsePrefix("10.88.1.0/24"), netip.MustParsePrefix("fd00:88:1::/64")}
	for name, test := range map[string]struct {
		portmap   []string
		bandwidth []string
		announced []string
	}{
		"no portmap":                    {nil, nil, []string{"1.0.0", "1.1.0"}},
		"portmap 1.9":                   {[]string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}, nil, []string{"1.0.0", "1.1.0"}},
		"portmap 1.1":                   {[]string{"0.3.1", "0.4.0", "1.0.0"}, nil, []string{"1.0.0"}},
		"portmap 0.8":                   {[]string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0"}, nil, []string{"0.4.0"}},
		"a later portmap":               {[]string{"1.1.0", "2.0.0"}, nil, []string{"1.1.0"}},
		"a portmap without common ones": {[]string{"0.1.0", "2.0.0"}, nil, nil},
		"bandwidth alone":               {nil, []string{"0.4.0", "1.0.0"}, []string{"1.0.0"}},
		"portmap and bandwidth":         {[]string{"1.0.0", "1.1.0"}, []string{"0.4.0", "1.0.0"}, []string{"1.0.0"}},
		"nothing common to both":        {[]string{"1.1.0"}, []string{"1.0.0"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			l, plugins := List{Subnets: subnets}, 1
			for program, versions := range map[string][]string{Portmap: test.portmap, Bandwidth: test.bandwidth} {
				if versions != nil {
					l, plugins = l.With(program, versions), plugins+1
				}
			}
			data, err := l.Marshal()
			if test.announced == nil {
				if err == nil || !strings.Contains(err.Error(), "the plugins have no version of the CNI specification in common") {
					t.Errorf("%s, %v", data, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			again, err := UnmarshalList(data)
			if err != nil || !slices.Equal(again.Subnets, subnets) || len(again.Chained) != len(l.Chained) {
				t.Errorf("%s is read as %v, %v", data, again, err)
			}
			if same, err := again.Marshal(); err != nil || string(same) != string(data) {
				t.Errorf("%s is written again as %s, %v", data, same, err)
			}
			var written struct {
				CNIVersion  string
				CNIVersions []string
				Plugins     []json.RawMessage
			}
			err = json.Unmarshal(data, &written)
			if err != nil || len(written.Plugins) != plugins || Foreign(data) != "" {
				t.Errorf("the plugins are %s, %v; foreign: %q", written.Plugins, err, Foreign(data))
			}
			if !slices.Equal(written.CNIVersions, test.announced) || written.CNIVersion != test.announced[0] {
				t.Errorf("announced are %q and %q, want %q", written.CNIVersion, written.CNIVersions, test.announced)
			}
			conf, err := parseConf(written.Plugins[0])
			if err != nil || conf.Bridge != DefaultBridge || !slices.Equal(conf.Subnets, subnets) {
				t.Errorf("the plugin reads %+v, %v", conf, err)
			}
		})
	}
	if data, err := (List{}).Marshal(); err == nil {
		t.Errorf("without subnets: %s", data)
	}
	for _, bad := range []string{``, `[]`, `{}`, `{"plugins": [{"type": "bridge"}]}`,
		`{"plugins": [{"type": "tunnel-cni"}]}`, `{"plugins": [{"type": "tunnel-cni", "subnets": ["10.88.1.7/24"]}]}`} {
		if got, err := UnmarshalList([]byte(bad)); err == nil {
			t.Errorf("%s is read as %v", bad, got)
		}
	}
}

// A file that a person has written is told from one that an edge has written, or that a loss of power has cut off.
func TestForeign(t *testing.T) {
	l := List{Subnets: []netip.Prefix{netip.MustParsePrefix("10.88.1.0/24")}}
	own, err := l.With(Portmap, []string{"1.0.0"}).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	const list = `{"name": "tunnel", "plugins": [`
	const plugin = `{"type": "tunnel-cni", "subnets": ["10.88.1.0/24"]`
	for data, want := range map[string]string{
		string(own): "", "": "", "\x00\x00": "", string(own[:len(own)/2]): "",
		list + plugin + `}]}`:              "",
		list + plugin + `, "mtu": 1400}]}`: `unknown field "mtu"`,
		`{"name": "tunnel", "disableCheck": true, "plugins": [` + plugin + `}]}`: `unknown field "disableCheck"`,
		`{"name": "pods", "plugins": [` + plugin + `}]}`:                         `the name "pods"`,
		list + plugin + `}, {"type": "tuning"}]}`:                                `the plugin "tuning"`,
		list + `{"type": "bandwidth", "ingressRate": 8}]}`:                       `unknown field "ingressRate"`,
		list + `{"type": "bandwidth", "capabilities": {"portMappings": true}}]}`: `the capability`,
		list + plugin + `, "capabilities": {"x": true}}]}`:                       `the capability "x"`,
		`[]`: "cannot unmarshal array",
	} {
		if got := Foreign([]byte(data)); want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("in %s, foreign is %q, want %q", data, got, want)
		}
	}
}
