package conf

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func changed(changes []Change) (lines []string) {
	for _, c := range changes {
		lines = append(lines, c.String())
	}
	return lines
}

// TestChanges: each changed key is named with both values; what means the same is no change.
func TestChanges(t *testing.T) {
	inDir(t)
	cloud := func(text string) Settings {
		t.Helper()
		write(t, "cloud.toml", server+text)
		c, err := LoadCloud("cloud.toml", testEnv())
		if err != nil {
			t.Fatal(err)
		}
		return c.Settings()
	}
	for name, tc := range map[string]struct {
		old, now string
		want     []string
	}{
		"nothing": {"[mode.cloud.tcp]\n", "", nil},
		"lines": {
			"[mode.cloud.tcp]\n\"127.0.0.1:1\" = \"a:1\"\n\"127.0.0.1:2\" = \"a:2\"\n",
			"[mode.cloud.tcp]\n\"127.0.0.1:2\" = \"b:2\"\n\"127.0.0.1:3\" = \"a:3\"\n",
			[]string{
				`mode.cloud.tcp."127.0.0.1:1": "a:1" -> absent`,
				`mode.cloud.tcp."127.0.0.1:2": "a:2" -> "b:2"`,
				`mode.cloud.tcp."127.0.0.1:3": absent -> "a:3"`,
			},
		},
		"lists and numbers": {
			"[mode.cloud.limits]\nconns = 5\n[mode.cloud.https]\nallowfrom = [\"10.0.0.0/8\"]\n",
			"[mode.cloud.limits]\nconns = 0\n[mode.cloud.https]\nallowfrom = [\"10.0.0.0/8\", \"::1\"]\n" +
				"callers = [{name = \"p\", may = [\"metrics\"]}]\nkubernetes = false\n",
			[]string{
				`mode.cloud.https.allowfrom: ["10.0.0.0/8"] -> ["10.0.0.0/8", "::1"]`,
				`mode.cloud.https.callers: absent -> [{name = "p", may = ["metrics"]}]`,
				`mode.cloud.https.kubernetes: absent -> false`,
				`mode.cloud.limits.conns: 5 -> absent`,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := changed(cloud(tc.old).Changes(cloud(tc.now))); !slices.Equal(got, tc.want) {
				t.Errorf("got  %q\nwant %q", got, tc.want)
			}
		})
	}
}

// TestChangesHideSecrets: a secret that changes is seen, and is not shown.
func TestChangesHideSecrets(t *testing.T) {
	inDir(t)
	edge := func(token, proxy string) Settings {
		text := strings.Replace(client, "tokenfile = \"token\"", "token = \""+token+"\"", 1) + "proxy = \"" + proxy + "\"\n"
		write(t, "edge.toml", text)
		e, err := LoadEdge("edge.toml", testEnv())
		if err != nil {
			t.Fatal(err)
		}
		return e.Settings()
	}
	old, now := edge("canary1", "http://me:canary2@proxy:3128"), edge("canary3", "http://me:canary4@proxy:3128")
	changes := old.Changes(now)
	want := []string{
		`mode.edge.stream.client.proxy: "***" -> "***"`,
		`mode.edge.stream.client.token: "***" -> "***"`,
	}
	if got := changed(changes); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if text := fmt.Sprintf("%v %+v %#v %v", old, now, now, changes); strings.Contains(text, "canary") {
		t.Errorf("a secret shows in %s", text)
	}
}
