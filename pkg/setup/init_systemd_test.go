package setup

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"tunnel.example/tunnel/conf"
)

// newFolder returns what Init makes for systemd, without systemd.
func newFolder(t *testing.T, dir string) *cloudFolder {
	t.Helper()
	cfg := newInit(dir)
	cfg.Systemd = true
	return &cloudFolder{
		InitConfig: cfg, dir: dir, state: filepath.Join(t.TempDir(), "tunnel-cloud"),
		port: 9000, hosts: []string{"tunnel.example.com"},
	}
}

func filesIn(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// What only the cloud may read is where the unit's user can read it, with a new folder and with the folder
// of an earlier init. In both cases the cloud's configuration is good, and another run changes nothing.
func TestInitForSystemd(t *testing.T) {
	for name, earlier := range map[string]bool{"new": false, "earlier": true} {
		t.Run(name, func(t *testing.T) {
			c := newFolder(t, filepath.Join(t.TempDir(), "etc"))
			var key []byte
			if earlier {
				if err := Init(t.Context(), newInit(c.dir)); err != nil {
					t.Fatal(err)
				}
				var err error
				if key, err = os.ReadFile(filepath.Join(c.dir, nodesKeyFile)); err != nil {
					t.Fatal(err)
				}
				// A warning about the file, here of a target without a node, does not matter.
				text, err := os.ReadFile(filepath.Join(c.dir, cloudFile))
				if err == nil {
					text = append(text, "\n[mode.cloud.tcp]\n\"127.0.0.1:5432\" = \"db:5432\"\n"...)
					err = os.WriteFile(filepath.Join(c.dir, cloudFile), text, 0o600)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if err := c.fill(); err != nil {
				t.Fatal(err)
			}
			public := []string{"ca.crt", "ca.key", "cloud.crt", "cloud.toml", "nodes-ca.crt"}
			if got := filesIn(t, c.dir); !slices.Equal(got, public) {
				t.Errorf("the folder holds %q, want %q", got, public)
			}
			if got, want := filesIn(t, c.state), []string{cloudKeyFile, nodesKeyFile, tokensFile}; !slices.Equal(got, want) {
				t.Errorf("the state folder holds %q, want %q", got, want)
			}
			for _, name := range filesIn(t, c.state) {
				info, err := os.Stat(filepath.Join(c.state, name))
				if err != nil || info.Mode().Perm() != fs.FileMode(0o600) {
					t.Errorf("%s has mode %v, %v", name, info.Mode(), err)
				}
			}
			if _, err := conf.LoadCloud(filepath.Join(c.dir, cloudFile), conf.Env{}); err != nil {
				t.Errorf("the cloud would not start: %v", err)
			}
			now, err := os.ReadFile(filepath.Join(c.state, nodesKeyFile))
			if err != nil || earlier && string(now) != string(key) {
				t.Errorf("the key of the nodes' CA has changed, %v", err)
			}

			again := &cloudFolder{InitConfig: c.InitConfig, dir: c.dir, state: c.state, port: c.port, hosts: c.hosts}
			if err := again.fill(); err != nil || len(again.files) != 0 {
				t.Errorf("another run writes %d files, %v", len(again.files), err)
			}
			after, err := os.ReadFile(filepath.Join(c.state, nodesKeyFile))
			if err != nil || string(after) != string(now) {
				t.Errorf("another run changes the key, %v", err)
			}
		})
	}
}

// The folder of another cloud, names that its certificate lacks, and an edited cloud.toml are errors that
// leave every file as it was.
func TestInitForSystemdRefuses(t *testing.T) {
	edit := func(old, now string) func(*testing.T, *cloudFolder) {
		return func(t *testing.T, c *cloudFolder) {
			path := filepath.Join(c.dir, cloudFile)
			text, err := os.ReadFile(path)
			if err != nil || !strings.Contains(string(text), old) {
				t.Fatalf("cloud.toml lacks %q, %v", old, err)
			}
			if err := os.WriteFile(path, []byte(strings.Replace(string(text), old, now, 1)), publicFile); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, tt := range map[string]struct {
		change func(*testing.T, *cloudFolder)
		says   []string
	}{
		"another address": {
			func(_ *testing.T, c *cloudFolder) { c.Address = "elsewhere.example.com:9000" },
			[]string{`is for the address "tunnel.example.com:9000": write --address "tunnel.example.com:9000"`},
		},
		"a new name": {
			func(_ *testing.T, c *cloudFolder) { c.hosts = append(c.hosts, "new.example.com") },
			[]string{"cloud.crt exists and stays as it is, so --san changes nothing", "new.example.com"},
		},
		"an edited line": {
			edit("tokenfile = \"tokens\"\n", "tokenfile = \"tokens\" # mine\n"),
			[]string{"the unit's user cannot read tokens: move that file to ", "write tokenfile = "},
		},
		"a broken file": {edit("grpcport", "grpcprot"), []string{"exists and cannot be used", "grpcport"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := newFolder(t, filepath.Join(t.TempDir(), "etc"))
			if err := Init(t.Context(), newInit(c.dir)); err != nil {
				t.Fatal(err)
			}
			tt.change(t, c)
			before := filesIn(t, c.dir)
			err := c.fill()
			for _, want := range tt.says {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%v, want %q", err, want)
				}
			}
			if got := filesIn(t, c.dir); !slices.Equal(got, before) {
				t.Errorf("the folder holds %q, want %q", got, before)
			}
			if _, err := os.Stat(c.state); err == nil {
				t.Errorf("the state folder holds %q", filesIn(t, c.state))
			}
		})
	}
}

// A path that an operator has changed stays as it is.
func TestInitForSystemdKeepsAnOperatorsPath(t *testing.T) {
	c := newFolder(t, filepath.Join(t.TempDir(), "etc"))
	if err := Init(t.Context(), newInit(c.dir)); err != nil {
		t.Fatal(err)
	}
	mine := filepath.Join(t.TempDir(), "mine")
	if err := os.Rename(filepath.Join(c.dir, tokensFile), mine); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(c.dir, cloudFile)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text = []byte(strings.Replace(string(text), `tokenfile = "tokens"`, `tokenfile = "`+mine+`"`, 1))
	if err = os.WriteFile(path, text, publicFile); err != nil {
		t.Fatal(err)
	}
	if err = c.fill(); err != nil {
		t.Fatal(err)
	}
	if got, want := filesIn(t, c.state), []string{cloudKeyFile, nodesKeyFile}; !slices.Equal(got, want) {
		t.Errorf("the state folder holds %q, want %q", got, want)
	}
	if is, err := conf.LoadCloud(path, conf.Env{}); err != nil || is.Server.TokenFile != mine {
		t.Errorf("the token file is %v, %v; want %s", is, err, mine)
	}
}

// If adopt cannot write cloud.toml, it leaves every file as it was. So init can be run again when the cause is gone.
func TestInitForSystemdCanBeRunAgain(t *testing.T) {
	c := newFolder(t, filepath.Join(t.TempDir(), "etc"))
	if err := Init(t.Context(), newInit(c.dir)); err != nil {
		t.Fatal(err)
	}
	blocked := filepath.Join(c.dir, cloudFile+".new")
	put(t, filepath.Join(blocked, "file"), "")
	before := filesIn(t, c.dir)
	again := *c
	if err := c.fill(); err == nil {
		t.Fatal("fill has written cloud.toml, where a folder is in the way")
	}
	if got := filesIn(t, c.dir); !slices.Equal(got, before) {
		t.Errorf("the folder holds %q, want %q", got, before)
	}
	if got := filesIn(t, c.state); len(got) != 0 {
		t.Errorf("the state folder holds %q", got)
	}
	if err := os.RemoveAll(blocked); err != nil {
		t.Fatal(err)
	}
	if err := again.fill(); err != nil {
		t.Errorf("the next init fails: %v", err)
	}
}

// A file in the state folder, as of another cloud, stays, and init writes nothing.
func TestInitForSystemdReplacesNothing(t *testing.T) {
	c := newFolder(t, filepath.Join(t.TempDir(), "etc"))
	if err := os.MkdirAll(c.state, 0o755); err != nil {
		t.Fatal(err)
	}
	tokens := filepath.Join(c.state, tokensFile)
	if err := os.WriteFile(tokens, []byte("mine"), secretFile); err != nil {
		t.Fatal(err)
	}
	err := c.fill()
	if err == nil || !strings.Contains(err.Error(), "this machine has "+tokens+" already") {
		t.Errorf("%v, want that %s exists", err, tokens)
	}
	if _, err := os.Stat(c.dir); err == nil {
		t.Errorf("the folder holds %q", filesIn(t, c.dir))
	}
	if text, err := os.ReadFile(tokens); err != nil || string(text) != "mine" {
		t.Errorf("the token file is %q, %v", text, err)
	}
}

// The commands that Init prints are those that fit the way in which the cloud is started.
func TestInitExplains(t *testing.T) {
	for _, systemd := range []bool{false, true} {
		var out strings.Builder
		c := newFolder(t, "/etc/tunnel")
		c.Systemd, c.Out, c.Host.Sudo = systemd, &out, true
		c.explain()
		for text, want := range map[string]bool{
			"open TCP port 9000": true, "sudo tunnel cloud -c /etc/tunnel/cloud.toml": !systemd, "--systemd": !systemd,
			"sudo tunnel token create -c /etc/tunnel/cloud.toml --node NAME": true,
		} {
			if strings.Contains(out.String(), text) != want {
				t.Errorf("systemd %t: that %q is printed is %t in\n%s", systemd, text, !want, &out)
			}
		}
	}
}
