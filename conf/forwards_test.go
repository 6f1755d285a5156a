package conf

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

const withForwards = server + "[mode.cloud.admin]\nforwards = \"forwards.toml\"\n" +
	"[mode.cloud.tcp]\n\"127.0.0.1:2222\" = \"edge1/127.0.0.1:22\"\n"

// TestForwards: the lines of the file count as those of the main file, and WriteForwards writes what
// ReadForwards reads.
func TestForwards(t *testing.T) {
	inDir(t)
	const main = "cloud.toml"
	write(t, main, withForwards)
	load := func() *Cloud {
		t.Helper()
		c, err := LoadCloud(main, testEnv())
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := load()
	if got, err := c.ReadForwards(); err != nil || got != nil {
		t.Fatalf("without a file there is %v, %v", got, err)
	}
	want := []Forward{
		{Listen: "0.0.0.0:502", Target: "plc/192.168.0.9:502", Allow: []string{"10.0.0.0/8", "::1"},
			ProxyFrom: []string{"10.0.0.5"}, SendProxy: "v2"},
		{Listen: "127.0.0.1:5432", Target: "edge1/127.0.0.1:5432"},
	}
	next, err := c.WithForwards([]Forward{want[1], want[0]})
	if err != nil {
		t.Fatal(err)
	}
	if err = c.WriteForwards([]Forward{want[1], want[0]}); err != nil {
		t.Fatal(err)
	}
	if got, err := c.ReadForwards(); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("read back: %+v, %v", got, err)
	}
	loaded := load()
	if len(loaded.TCP) != 3 || !reflect.DeepEqual(loaded.TCP, next.TCP) {
		t.Errorf("the file has %+v\nWithForwards has %+v", loaded.TCP, next.TCP)
	}
	if l := loaded.TCP[0]; l.Node != "plc" || l.SendProxy != 2 || l.Allow.String() != "10.0.0.0/8,::1/128" {
		t.Errorf("the first listener is %+v", l)
	}
	if changes := c.Settings().Changes(loaded.Settings()); len(changes) != 5 ||
		!reflect.DeepEqual(loaded.Settings(), next.Settings()) {
		t.Errorf("what is new: %v", changed(changes))
	}
	if left, _ := filepath.Glob(".forwards-*"); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	// An edit of the main file does not count before a reload.
	write(t, main, "nonsense")
	if again, err := loaded.WithForwards(nil); err != nil || len(again.TCP) != 1 {
		t.Errorf("without forwards: %+v, %v", again, err)
	}
}

// TestBadForwards: problems name the file of forwards and its line.
func TestBadForwards(t *testing.T) {
	for name, tc := range map[string]struct{ file, want string }{
		"syntax":          {"[mode.cloud.tcp]\nx =\n", "mode.cloud.tcp.x: not valid TOML"},
		"other keys":      {"[mode.cloud.https]\ntls = \"auto\"\n", "mode.cloud.https.tls: this file holds"},
		"of an edge":      {"[mode.edge]\nnode = \"n\"\n", "mode.edge.node: this file holds"},
		"not permitted":   {"[mode.cloud.tcp]\n\"0.0.0.0:1\" = \"a:1\"\n", "mode.cloud.tcp.\"0.0.0.0:1\": it is not"},
		"twice":           {"[mode.cloud.tcp]\n\"127.0.0.1:2222\" = \"a:1\"\n", "mode.cloud.tcp.\"127.0.0.1:2222\": cloud"},
		"overlaps":        {"[mode.cloud.tcp]\n\"127.0.0.1:9000\" = \"a:1\"\n", "mode.cloud.tcp.\"127.0.0.1:9000\": port"},
		"allow of nobody": {"[mode.cloud.tcpallow]\n\"127.0.0.1:7\" = [\"::1\"]\n", "mode.cloud.tcpallow."},
	} {
		t.Run(name, func(t *testing.T) {
			inDir(t)
			write(t, "cloud.toml", withForwards)
			write(t, "forwards.toml", tc.file)
			_, err := LoadCloud("cloud.toml", testEnv())
			if err == nil || !strings.Contains(err.Error(), "forwards.toml:2: "+tc.want) {
				t.Errorf("got %v\nwant %q in line 2 of the forwards", err, tc.want)
			}
			if _, checked := Check("cloud.toml", testEnv()); checked == nil || err != nil &&
				checked.Error() != err.Error() {
				t.Errorf("Check reports %v\nLoadCloud %v", checked, err)
			}
			if _, _, err = ReadCloud("cloud.toml", testEnv()); err != nil {
				t.Errorf("ReadCloud, by which a node is revoked, fails: %v", err)
			}
		})
	}
}

// TestReadSockets: the sockets are found although the file has problems.
func TestReadSockets(t *testing.T) {
	path := filepath.Join(t.TempDir(), "both.toml")
	write(t, path, "[mode.cloud]\nnonsense = 1\n[mode.cloud.admin]\nsocket = \"c.sock\"\n"+
		"[mode.edge.admin]\nsocket = \"/e.sock\"\n")
	s, err := ReadSockets(path)
	want := Sockets{Cloud: filepath.Join(filepath.Dir(path), "c.sock"), Edge: "/e.sock", HasCloud: true, HasEdge: true}
	if err != nil || s != want {
		t.Errorf("%+v, %v", s, err)
	}
	if err := os.WriteFile(path, []byte("x ="), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err = ReadSockets(path); err == nil || !strings.Contains(err.Error(), "not valid TOML") {
		t.Errorf("of a file that is not TOML: %v", err)
	}
}
