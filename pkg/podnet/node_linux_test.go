package podnet

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/pkg/cni"
)

var (
	net4 = netip.MustParsePrefix("10.88.1.0/24")
	net6 = netip.MustParsePrefix("fd00:88:1::/64")
)

// fake is a kernel that notes what it is told.
type fake struct {
	mu     sync.Mutex // guards the following
	rules  []netip.Prefix
	direct []netip.Prefix // not hidden from
	routed []route
	here   []link // what links answers
	calls  int
	broken error          // what bridge answers
	exists error          // what routes answers; then its first route is not made
	lost   error          // what links answers
	others []netip.Prefix // what foreign answers
	pods   int            // what attached answers; below 0: an error
	freed  int            // how often the bridge was made before release; -1 without release
}

func (f *fake) bridge(*cni.Conf) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls++
	return f.broken
}

func (f *fake) masquerade(_ string, subnets, direct []netip.Prefix) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules, f.direct = subnets, direct
	return nil
}

func (f *fake) links(string) ([]link, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.here, f.lost
}

func (f *fake) foreign(string) ([]netip.Prefix, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.others, nil
}

func (f *fake) routes(want []route) ([]netip.Prefix, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.routed = want
	if f.exists != nil && len(want) > 0 {
		f.routed = want[1:]
	}
	made := []netip.Prefix{}
	for _, r := range f.routed {
		made = append(made, r.to)
	}
	return made, f.exists
}

func (f *fake) attached() (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pods < 0 {
		return 0, errors.New("the links cannot be listed")
	}
	return f.pods, nil
}

func (f *fake) hold(pods int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pods = pods
}

func (f *fake) release() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.freed = f.calls
	return errors.New("a folder that the edge cannot write to")
}

// called returns how often the bridge was made.
func (f *fake) called() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls
}

func (f *fake) breakBy(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.broken = err
}

// newNode returns a Node with folders of its own and the plugin in one of them.
func newNode(t *testing.T, subnets ...netip.Prefix) (*Node, *fake) {
	t.Helper()
	dir := t.TempDir()
	n, err := New(Config{ConfDir: filepath.Join(dir, "net.d"), BinDir: filepath.Join(dir, "bin"), Subnets: subnets,
		Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	k := &fake{freed: -1}
	n.kernel = k
	install(t, n, cni.Program)
	return n, k
}

// install writes a plugin that speaks these versions of the specification.
func install(t *testing.T, n *Node, program string, versions ...string) {
	t.Helper()
	answer, err := json.Marshal(map[string][]string{"supportedVersions": versions})
	if err != nil {
		t.Fatal(err)
	}
	if err = os.MkdirAll(n.cfg.BinDir, 0o755); err == nil {
		file := filepath.Join(n.cfg.BinDir, program)
		err = os.WriteFile(file, []byte("#!/bin/sh\necho '"+string(answer)+"'\n"), 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// runs runs f while the Node runs, in a bubble whose clock f moves.
func runs(t *testing.T, n *Node, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n.wake = make(chan struct{}, 1) // a bubble waits only at channels that are made in it
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1) // capacity 1: Run has an end that nobody awaits if f fails
		go func() { done <- n.Run(ctx) }()
		synctest.Wait()
		f(t)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// written returns the networks in the file, as text.
func written(t *testing.T, n *Node) string {
	t.Helper()
	data, err := os.ReadFile(n.file())
	if errors.Is(err, os.ErrNotExist) {
		return "no file"
	}
	if err != nil {
		t.Fatal(err)
	}
	list, err := cni.UnmarshalList(data)
	if err != nil {
		t.Fatal(err)
	}
	texts := make([]string, len(list.Subnets))
	for i, s := range list.Subnets {
		texts[i] = s.String()
	}
	return strings.Join(texts, ",")
}

func wantWritten(t *testing.T, n *Node, want string) {
	t.Helper()
	if got := written(t, n); got != want {
		t.Errorf("the file has %s, want %s", got, want)
	}
}

func wantNote(t *testing.T, n *Node, want string) {
	t.Helper()
	if got := n.Note(); want == "" && got != "" || !strings.Contains(got, want) {
		t.Errorf("the note is %q, want %q", got, want)
	}
}

func TestConfigured(t *testing.T) {
	n, k := newNode(t, net4, net6)
	runs(t, n, func(t *testing.T) {
		wantWritten(t, n, "10.88.1.0/24,fd00:88:1::/64")
		wantNote(t, n, "")
		if !slices.Equal(k.rules, []netip.Prefix{net4, net6}) {
			t.Errorf("hidden behind the node are %v", k.rules)
		}
		if k.freed != 0 { // and that it fails changes nothing
			t.Errorf("addresses of an earlier boot were released after %d calls for the bridge, want before all", k.freed)
		}
		n.SetSubnets([]netip.Prefix{netip.MustParsePrefix("10.99.0.0/24")})
		synctest.Wait()
		wantWritten(t, n, "10.88.1.0/24,fd00:88:1::/64")
	})
	wantWritten(t, n, "10.88.1.0/24,fd00:88:1::/64") // it stays when the edge stops
}

// The cloud tells the networks, changes them, and is away at the next start.
func TestToldByTheCloud(t *testing.T) {
	n, k := newNode(t)
	runs(t, n, func(t *testing.T) {
		wantWritten(t, n, "no file")
		wantNote(t, n, "no networks for pods")
		n.SetSubnets(nil)
		n.SetSubnets([]netip.Prefix{netip.MustParsePrefix("10.88.1.7/24")})
		synctest.Wait()
		wantWritten(t, n, "no file")
		n.SetSubnets([]netip.Prefix{net4})
		synctest.Wait()
		wantWritten(t, n, "10.88.1.0/24")
		n.SetSubnets(nil) // another cloud, which does not know
		n.SetSubnets([]netip.Prefix{net4, net6})
		synctest.Wait()
		wantWritten(t, n, "10.88.1.0/24,fd00:88:1::/64")
		wantNote(t, n, "")
	})
	again, err := New(n.cfg)
	if err != nil {
		t.Fatal(err)
	}
	again.kernel, k.rules = k, nil
	runs(t, again, func(t *testing.T) {
		wantNote(t, again, "")
		if !slices.Equal(k.rules, []netip.Prefix{net4, net6}) {
			t.Errorf("after a start without the cloud, hidden behind the node are %v", k.rules)
		}
		if got := again.Status(); got != "networks of pods: 10.88.1.0/24, fd00:88:1::/64" {
			t.Errorf("the status is %q", got)
		}
	})
}

// A file that was cut off by a loss of power is no memory; it is written anew.
func TestDamagedFile(t *testing.T) {
	n, _ := newNode(t)
	if err := os.MkdirAll(n.cfg.ConfDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(n.file(), []byte(`{"cniVersion": "1.0.0", "plug`), 0o600); err != nil {
		t.Fatal(err)
	}
	runs(t, n, func(t *testing.T) {
		wantNote(t, n, "no networks for pods")
		n.SetSubnets([]netip.Prefix{net6})
		synctest.Wait()
		wantWritten(t, n, "fd00:88:1::/64")
	})
}

// What is missing is named; once it is there, or was removed, the Node goes on by itself.
func TestHeals(t *testing.T) {
	n, k := newNode(t, net4)
	program := filepath.Join(n.cfg.BinDir, cni.Program)
	if err := os.Remove(program); err != nil {
		t.Fatal(err)
	}
	k.breakBy(errors.New("link tunnel0 is a dummy"))
	runs(t, n, func(t *testing.T) {
		wantNote(t, n, "link tunnel0 is a dummy")
		k.breakBy(nil)
		time.Sleep(interval)
		synctest.Wait()
		wantNote(t, n, "has no program tunnel-cni")
		wantWritten(t, n, "no file")
		install(t, n, cni.Program)
		time.Sleep(interval)
		synctest.Wait()
		wantNote(t, n, "")
		wantWritten(t, n, "10.88.1.0/24")
		if err := os.Remove(n.file()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(interval)
		synctest.Wait()
		wantWritten(t, n, "10.88.1.0/24")
		other := filepath.Join(n.cfg.ConfDir, "05-other.conflist")
		if err := os.WriteFile(other, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		time.Sleep(interval)
		synctest.Wait()
		wantNote(t, n, "05-other.conflist, which sorts before 10-tunnel.conflist")
		if err := os.Remove(other); err != nil {
			t.Fatal(err)
		}
		time.Sleep(interval)
		synctest.Wait()
		wantNote(t, n, "")
	})
}

// In a container without libraries, a portmap that needs some cannot say its versions. The runtime can execute it.
func TestPortmapLinkedElsewhere(t *testing.T) {
	n, _ := newNode(t, net4)
	file := filepath.Join(n.cfg.BinDir, "portmap")
	if err := os.WriteFile(file, []byte("#!/nowhere/ld.so\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	runs(t, n, func(t *testing.T) {
		wantNote(t, n, "")
		data, err := os.ReadFile(n.file())
		if err != nil || !strings.Contains(string(data), `"portMappings": true`) || strings.Contains(string(data), "1.1.0") {
			t.Errorf("the file is %s, %v; want portmap, and no version after 1.0.0", data, err)
		}
	})
}

// An edge that cannot write to /proc/sys does everything else, and says which setting is wrong.
func TestReadOnlySettings(t *testing.T) {
	n, k := newNode(t, net4)
	k.breakBy(readOnlyError{errors.New("setting net.ipv4.ip_forward to 1: read-only")})
	runs(t, n, func(t *testing.T) {
		wantWritten(t, n, "10.88.1.0/24")
		wantNote(t, n, "ip_forward to 1: read-only: set it on the node")
		if !slices.Equal(k.rules, []netip.Prefix{net4}) {
			t.Errorf("hidden behind the node are %v", k.rules)
		}
	})
}

// Another plugin serves the node: its file comes first. The edge changes nothing until the file is gone. Runtimes read
// files whose names begin with a dot, too, and leave folders out.
func TestAnotherPlugin(t *testing.T) {
	for _, name := range []string{"05-other.conflist", ".05-other.conflist", "05-other.conf", "05-other.json"} {
		t.Run(name, func(t *testing.T) {
			n, k := newNode(t, net4)
			other := filepath.Join(n.cfg.ConfDir, name)
			if err := os.MkdirAll(filepath.Join(n.cfg.ConfDir, "01-folder.conflist"), 0o755); err != nil {
				t.Fatal(err)
			}
			for _, file := range []string{other, filepath.Join(n.cfg.ConfDir, "20-later.conflist"),
				filepath.Join(n.cfg.ConfDir, "00-notes.txt")} {
				if err := os.WriteFile(file, nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			runs(t, n, func(t *testing.T) {
				wantNote(t, n, filepath.Join(n.cfg.ConfDir, name)+", which sorts before 10-tunnel.conflist")
				wantWritten(t, n, "no file")
				if k.called() != 0 {
					t.Errorf("the kernel was changed %d times", k.called())
				}
				if err := os.Remove(other); err != nil {
					t.Fatal(err)
				}
				time.Sleep(interval)
				synctest.Wait()
				wantNote(t, n, "")
				wantWritten(t, n, "10.88.1.0/24")
			})
		})
	}
}

// The plugin portmap is chained when it is installed: a runtime fails every pod whose chain names a missing one.
func TestPortmap(t *testing.T) {
	n, _ := newNode(t, net4)
	runs(t, n, func(t *testing.T) {
		before, err := os.ReadFile(n.file())
		if err != nil || strings.Contains(string(before), "portmap") {
			t.Errorf("without portmap, the file is %s, %v", before, err)
		}
		install(t, n, "portmap", "0.4.0", "1.0.0", "1.1.0")
		time.Sleep(interval)
		synctest.Wait()
		after, err := os.ReadFile(n.file())
		if err != nil || !strings.Contains(string(after), `"portMappings": true`) {
			t.Errorf("with portmap, the file is %s, %v", after, err)
		}
		wantNote(t, n, "")
	})
}

// While portmap is upgraded, it is missing for a moment, or does not run. The file keeps it: without it, pods that
// start now would never get their ports.
func TestPortmapMissing(t *testing.T) {
	n, _ := newNode(t, net4)
	install(t, n, "portmap", "1.0.0")
	runs(t, n, func(t *testing.T) {
		before, err := os.ReadFile(n.file())
		if err != nil || !strings.Contains(string(before), "portmap") {
			t.Fatalf("with portmap, the file is %s, %v", before, err)
		}
		check := func(note string) {
			t.Helper()
			time.Sleep(interval)
			synctest.Wait()
			wantNote(t, n, note)
			if after, err := os.ReadFile(n.file()); err != nil || string(after) != string(before) {
				t.Errorf("the file is %s, %v; want %s", after, err, before)
			}
		}
		if err := os.Remove(filepath.Join(n.cfg.BinDir, "portmap")); err != nil {
			t.Fatal(err)
		}
		check("has no program portmap, which")
		install(t, n, "portmap")
		check("portmap does not answer VERSION")
		install(t, n, "portmap", "1.0.0")
		check("")
	})
}

// The plugin bandwidth is chained if the configuration asks for it. Without the program, pods start without limits, and
// the note says so. Without the key, the chain is as before.
func TestBandwidth(t *testing.T) {
	n, k := newNode(t, net4)
	n.cfg.Bandwidth = true
	chain := func(want bool) {
		t.Helper()
		data, err := os.ReadFile(n.file())
		if err != nil || strings.Contains(string(data), `"bandwidth": true`) != want {
			t.Errorf("the file is %s, %v; with bandwidth: %t", data, err, want)
		}
	}
	runs(t, n, func(t *testing.T) {
		look := func(note string, want bool) {
			t.Helper()
			time.Sleep(interval)
			synctest.Wait()
			wantNote(t, n, note)
			chain(want)
		}
		look("has no program bandwidth: install it, or remove bandwidth", false)
		install(t, n, "bandwidth", "1.0.0", "1.1.0")
		look("", true)
		if err := os.Remove(filepath.Join(n.cfg.BinDir, "bandwidth")); err != nil {
			t.Fatal(err)
		}
		look("has no program bandwidth, which", true)
		install(t, n, "bandwidth", "9.9.9")
		look("limits of bandwidth do not work: install another bandwidth", false)
		install(t, n, "bandwidth", "1.0.0")
		look("", true)
	})
	// The plugin bandwidth stays in the list while pods run: only its DEL removes the links of a pod with limits.
	n.cfg.Bandwidth = false
	k.hold(-1)
	runs(t, n, func(t *testing.T) {
		look := func(pods int, want bool) {
			t.Helper()
			k.hold(pods)
			time.Sleep(interval)
			synctest.Wait()
			wantNote(t, n, "")
			chain(want)
			if got := strings.Contains(n.Status(), "limits of bandwidth stay"); got != want {
				t.Errorf("with %d pods, the status is %q", pods, n.Status())
			}
		}
		chain(true) // it is not known whether there are pods
		look(1, true)
		look(0, false)
		look(1, false) // a pod that started without limits
	})
}

// A person has written the file: the edge changes neither the file nor the node, and says so.
func TestWrittenByHand(t *testing.T) {
	const byHand = `{"cniVersion": "1.0.0", "name": "tunnel", "plugins": [
		{"type": "tunnel-cni", "subnets": ["10.88.1.0/24"], "bridge": "br9"}]}`
	for name, subnets := range map[string][]netip.Prefix{"configured networks": {net4}, "networks from the file": nil} {
		t.Run(name, func(t *testing.T) {
			n, k := newNode(t, subnets...)
			if err := os.MkdirAll(n.cfg.ConfDir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(n.file(), []byte(byHand), 0o600); err != nil {
				t.Fatal(err)
			}
			runs(t, n, func(t *testing.T) {
				wantNote(t, n, `10-tunnel.conflist (json: unknown field "bridge"), so it changes nothing on this node`)
				if data, err := os.ReadFile(n.file()); err != nil || string(data) != byHand || k.called() != 0 {
					t.Errorf("the file is %s, %v; the kernel was changed %d times", data, err, k.called())
				}
				if err := os.Remove(n.file()); err != nil {
					t.Fatal(err)
				}
				time.Sleep(interval)
				synctest.Wait()
				wantNote(t, n, "")
				wantWritten(t, n, "10.88.1.0/24")
			})
		})
	}
}

// A runtime takes the highest announced version for the whole chain: only versions that portmap speaks are announced.
func TestOldPortmap(t *testing.T) {
	for name, test := range map[string]struct {
		speaks    []string
		announced []string
		chained   bool
		note      string
	}{
		"portmap of 2022":    {[]string{"0.3.1", "0.4.0", "1.0.0"}, []string{"1.0.0"}, true, ""},
		"portmap of 2019":    {[]string{"0.1.0", "0.3.1", "0.4.0"}, []string{"0.4.0"}, true, ""},
		"nothing in common":  {[]string{"0.1.0"}, []string{"1.0.0", "1.1.0"}, false, "no version of the CNI specification"},
		"it does not answer": {nil, []string{"1.0.0", "1.1.0"}, false, "portmap does not answer VERSION"},
	} {
		t.Run(name, func(t *testing.T) {
			n, _ := newNode(t, net4)
			install(t, n, "portmap", test.speaks...)
			runs(t, n, func(t *testing.T) {
				var l struct {
					CNIVersions []string
					Plugins     []json.RawMessage
				}
				data, err := os.ReadFile(n.file())
				if err == nil {
					err = json.Unmarshal(data, &l)
				}
				if err != nil || !slices.Equal(l.CNIVersions, test.announced) || (len(l.Plugins) == 2) != test.chained {
					t.Errorf("the file is %s, %v; want the versions %q", data, err, test.announced)
				}
				wantNote(t, n, test.note)
				install(t, n, "portmap", "1.0.0", "1.1.0", "9.9.9")
				time.Sleep(interval)
				synctest.Wait()
				wantNote(t, n, "")
				if data, err := os.ReadFile(n.file()); err != nil || !strings.Contains(string(data), `"1.1.0"`) {
					t.Errorf("with a new portmap, the file is %s, %v", data, err)
				}
			})
		})
	}
}

func TestNewRefuses(t *testing.T) {
	if _, err := New(Config{Subnets: []netip.Prefix{net4, net4}, Log: slog.New(slog.DiscardHandler)}); err == nil {
		t.Error("two networks of IPv4 are accepted")
	}
}
