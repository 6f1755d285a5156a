package conf

import (
	"os"
	"path/filepath"
	"testing"
)

// FuzzLoad: no file makes the package panic, each problem has a text, and what was loaded stays valid.
func FuzzLoad(f *testing.F) {
	seeds, err := filepath.Glob("testdata/superedge/*.toml")
	if err != nil {
		f.Fatal(err)
	}
	for _, path := range append(seeds, "cloud.toml", "edge.toml") {
		data, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, "")
		f.Add(commented.ReplaceAll(data, []byte("$1")), "10.0.0.5,fd00::5")
	}
	f.Add([]byte(server), "")
	f.Add([]byte(client), "")
	f.Add([]byte(server+"[mode.cloud.tcp]\n\"127.0.0.1:1\" = \"n/[::1]:1\"\n[mode.cloud.tcpallow]\n"+
		"\"127.0.0.1:1\" = [\"::1\"]\n"), "")
	f.Add([]byte(server+"[mode.cloud.udp]\n\"0.0.0.0:1\" = \"n/[::1]:1\"\n[mode.cloud.udpallow]\n"+
		"\"0.0.0.0:1\" = [\"::1\"]\n"), "")
	f.Add([]byte("a.b = {c = [1, {d = 2}]}\n[[x]]\n[[x.y]]\nz = 1979-05-27\n"), "")
	f.Add([]byte(server+dns+"configmap = \"n\"\nservice = \"s\"\nhosts = \"h\"\n"+
		"nodeselector = \"a in (b, c),!d\"\n"), "fd00::5, 10.0.0.5")
	f.Add([]byte(server+dns+"listen = \"[::]:53\"\n"+
		"upstream = [\"fd00::1\", \"[fe80::1%eth0]:53\", \"::ffff:10.96.0.10\"]\n"), "::ffff:10.0.0.5")
	f.Add([]byte(server+dns+"listen = \"10.0.0.5:53\"\nupstream = [\"10.0.0.5\"]\n"), "")
	f.Add([]byte(server+dns+"debug = true\nconfigmap = \"N\"\nlisten = \":53\"\n"), "fe80::1%eth0,")

	dir := f.TempDir()
	for _, name := range []string{"ca", "crt", "key", "tokens", "token"} {
		write(f, filepath.Join(dir, name), "")
	}
	f.Fuzz(func(t *testing.T, data []byte, podIP string) {
		t.Chdir(dir)
		r := newReport(&source{file: "f.toml"})
		d := decode(data, r)
		if d == nil && r.err() == nil {
			t.Fatal("nothing, and no problem")
		}
		if d == nil {
			return
		}
		if d.Mode.Cloud != nil {
			c := newCloud(d.Mode.Cloud, Env{PodIP: podIP, PodName: "tunnel-0", PodNamespace: "tunnel"}, r)
			c.check(r)
			checkValid(t, r, c.Validate)
		}
		r = newReport(r.src)
		if d.Mode.Edge != nil {
			e := newEdge(d.Mode.Edge, testEnv(), r)
			e.check(r)
			checkValid(t, r, e.Validate)
		}
	})
}

func checkValid(t *testing.T, r *report, validate func() error) {
	t.Helper()
	if err := r.err(); err != nil {
		if err.Error() == "" {
			t.Error("a problem without a word")
		}
		return
	}
	for range 2 {
		if err := validate(); err != nil {
			t.Errorf("it loads, and Validate says %v", err)
		}
	}
}
