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
		announced []string
	}{
		"no portmap":                    {nil, []string{"1.0.0", "1.1.0"}},
		"portmap 1.9":                   {[]string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}, []string{"1.0.0", "1.1.0"}},
		"portmap 1.1":                   {[]string{"0.3.1", "0.4.0", "1.0.0"}, []string{"1.0.0"}},
		"portmap 0.8":                   {[]string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0"}, []string{"0.4.0"}},
		"a later portmap":               {[]string{"1.1.0", "2.0.0"}, []string{"1.1.0"}},
		"a portmap without common ones": {[]string{"0.1.0", "2.0.0"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			data, err := List{subnets, test.portmap}.Marshal()
			if test.announced == nil {
				if err == nil || !strings.Contains(err.Error(), "no version of the CNI specification is common") {
					t.Errorf("%s, %v", data, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			again, err := UnmarshalList(data)
			if err != nil || !slices.Equal(again.Subnets, subnets) || (again.Portmap == nil) != (test.portmap == nil) {
				t.Errorf("%s is read as %v, %v", data, again, err)
			}
			if same, err := again.Marshal(); err != nil || string(same) != string(data) {
				t.Errorf("%s is written again as %s, %v", data, same, err)
			}
			var l struct {
				CNIVersion  string
				CNIVersions []string
				Plugins     []json.RawMessage
			}
			err = json.Unmarshal(data, &l)
			if err != nil || len(l.Plugins) != map[bool]int{true: 1, false: 2}[test.portmap == nil] {
				t.Errorf("the plugins are %s, %v", l.Plugins, err)
			}
			if !slices.Equal(l.CNIVersions, test.announced) || l.CNIVersion != test.announced[0] {
				t.Errorf("announced are %q and %q, want %q", l.CNIVersion, l.CNIVersions, test.announced)
			}
			conf, err := parseConf(l.Plugins[0])
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
	own, err := List{[]netip.Prefix{netip.MustParsePrefix("10.88.1.0/24")}, []string{"1.0.0"}}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	const plugin = `{"type": "tunnel-cni", "subnets": ["10.88.1.0/24"]`
	for data, want := range map[string]string{
		string(own): "", "": "", "\x00\x00": "", string(own[:len(own)/2]): "",
		`{"name": "tunnel", "plugins": [` + plugin + `}]}`:                              "",
		`{"name": "tunnel", "plugins": [` + plugin + `, "mtu": 1400}]}`:                 `unknown field "mtu"`,
		`{"name": "tunnel", "disableCheck": true, "plugins": [` + plugin + `}]}`:        `unknown field "disableCheck"`,
		`{"name": "pods", "plugins": [` + plugin + `}]}`:                                `the name "pods"`,
		`{"name": "tunnel", "plugins": [` + plugin + `}, {"type": "bandwidth"}]}`:       `the plugin "bandwidth"`,
		`{"name": "tunnel", "plugins": [` + plugin + `, "capabilities": {"x": true}}]}`: `the capability "x"`,
		`[]`: "cannot unmarshal array",
	} {
		if got := Foreign([]byte(data)); want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("in %s, foreign is %q, want %q", data, got, want)
		}
	}
}
