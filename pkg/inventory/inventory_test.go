package inventory

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

func session(node, software string) *tunnel.Session {
	return &tunnel.Session{Node: tunnel.NodeName(node), Remote: "192.0.2.7:4000", Software: software}
}

func ends(i *Inventory, s *tunnel.Session, why string) {
	s.EndedBecause.Store(&why)
	i.Detached(s)
}

// The inventory keeps a node after its session, with the reason of the end, the certificate and the times.
// Another process reads all of it from the file.
func TestRemembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "nodes.json")
		i := New(path, slog.New(slog.DiscardHandler))
		ctx, stop := context.WithCancel(t.Context())
		ran := make(chan error, 1) // capacity 1: Run need not wait for the test
		go func() { ran <- i.Run(ctx) }()
		began := time.Now().UTC()

		i.Issued("edge1", &x509.Certificate{SerialNumber: big.NewInt(0xabc), NotAfter: began.Add(time.Hour)})
		s := session("edge1", "v1.2.3")
		s.CertificateEnds.Store(began.Add(2 * time.Hour).Unix())
		i.Attached(s)
		time.Sleep(time.Minute)
		if r := i.All()["edge1"]; !r.Connected || !r.LastSeen.Equal(began.Add(time.Minute)) {
			t.Errorf("a connected node was last seen at %s: want now", r.LastSeen)
		}
		if had, err := i.Forget("edge1"); !had || err == nil {
			t.Errorf("a connected node was forgotten: %t, %v", had, err)
		}
		ends(i, s, "connection lost")
		time.Sleep(time.Hour)
		stop()
		if err := <-ran; err != nil {
			t.Fatal(err)
		}

		want := Record{
			FirstSeen: began, LastSeen: began.Add(time.Minute), FactsAt: began.Add(time.Minute), Sessions: 1,
			Remote: "192.0.2.7:4000", Software: "v1.2.3", Ended: "connection lost", Issued: 1, IssuedAt: began,
			CertEnds: began.Add(2 * time.Hour), CertShown: "abc",
		}
		for what, all := range map[string]map[tunnel.NodeName]Record{
			"memory": i.All(), "file": New(path, slog.New(slog.DiscardHandler)).All(),
		} {
			if got := all["edge1"]; got != want {
				t.Errorf("%s:\n%+v; want\n%+v", what, got, want)
			}
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("the file has mode %v, %v; want 0600", info.Mode(), err)
		}
		if had, err := i.Forget("edge1"); !had || err != nil || len(i.All()) != 0 {
			t.Errorf("forgetting: %t, %v, then %d nodes", had, err, len(i.All()))
		}
	})
}

// However often nodes come and go, the file is written at most once in writePause.
func TestWritesSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "nodes.json")
		i := New(path, slog.New(slog.DiscardHandler))
		ctx, stop := context.WithCancel(t.Context())
		ran := make(chan error, 1) // capacity 1: Run need not wait for the test
		go func() { ran <- i.Run(ctx) }()
		writes, last := 0, ""
		for n := range 600 { // a minute
			s := session(fmt.Sprintf("edge%d", n), "")
			i.Attached(s)
			ends(i, s, "")
			time.Sleep(100 * time.Millisecond)
			if text, err := os.ReadFile(path); err == nil && string(text) != last {
				writes, last = writes+1, string(text)
			}
		}
		if writes < 2 || writes > 3 {
			t.Errorf("%d writes in a minute; want 2 or 3", writes)
		}
		stop()
		<-ran
		if got := New(path, slog.New(slog.DiscardHandler)).All(); len(got) != 600 {
			t.Errorf("the file has %d nodes after the end; want 600", len(got))
		}
	})
}

// A process that is killed while it writes leaves a file beside the inventory. The next one leaves no second file.
func TestKilledWhileWriting(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nodes.json")
	for range 2 {
		err := save(path, map[tunnel.NodeName]Record{"edge1": {Sessions: 1}})
		if err == nil {
			_, err = load(path)
		}
		if err != nil {
			t.Fatal(err)
		}
		files, err := os.ReadDir(filepath.Dir(path))
		if err != nil || len(files) != 1 {
			t.Errorf("the folder has %v, %v", files, err)
		}
		if err := os.WriteFile(path+asideSuffix, bytes.Repeat([]byte("x"), 10_000), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// A file that is no inventory stops nothing. It is set aside, not overwritten. Until somebody has looked at it, also
// after a restart, the inventory says that it may lack nodes.
func TestBadFile(t *testing.T) {
	for name, text := range map[string]string{
		"cut off": `{"format":1,"nodes":{"edge1":`, "newer": `{"format":2,"nodes":{}}`,
		"name": `{"format":1,"nodes":{"a\nb":{}}}`, "empty": "",
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "nodes.json")
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			log, lines := testkit.NewLog()
			i := New(path, log)
			if len(i.All()) != 0 {
				t.Errorf("%d nodes", len(i.All()))
			}
			if now, err := os.ReadFile(path); err != nil || string(now) != text {
				t.Errorf("New has changed the file: %q, %v", now, err)
			}
			testkit.Run(t, i.Run).Stop()
			if !strings.Contains(lines.String(), "starts empty") {
				t.Errorf("the log has no warning: %s", lines)
			}
			if kept, err := os.ReadFile(path + ".bad"); err != nil || string(kept) != text {
				t.Errorf("set aside: %q, %v", kept, err)
			}
			again := New(path, log)
			for _, i := range []*Inventory{i, again} {
				if note := i.Note(); i.Known() || !strings.Contains(note, path+".bad") {
					t.Errorf("known %t, note %q", i.Known(), note)
				}
			}
			again.Attached(session("edge1", ""))
			testkit.Run(t, again.Run).Stop()
			if kept, err := os.ReadFile(path + ".bad"); err != nil || string(kept) != text {
				t.Errorf("set aside, after a restart: %q, %v", kept, err)
			}
			// A second damaged file does not replace the first one, which has the older nodes.
			if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
			testkit.Run(t, New(path, log).Run).Stop()
			if kept, err := os.ReadFile(path + ".bad"); err != nil || string(kept) != text {
				t.Errorf("set aside, after a second damage: %q, %v", kept, err)
			}
			again.Attached(session("edge1", ""))
			testkit.Run(t, again.Run).Stop()
			if err := os.Remove(path + ".bad"); err != nil {
				t.Fatal(err)
			}
			again.Reload()
			if !again.Known() || again.Note() != "" || !New(path, log).Has("edge1") {
				t.Errorf("after it was removed: known %t, note %q", again.Known(), again.Note())
			}
		})
	}
}

// A file that cannot be read may be sound: it stays as it is, and until then any node may be missing.
func TestUnreadable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nodes.json")
	if err := os.Symlink(path, path); err != nil { // a loop: also root cannot read it, and a rename would replace it
		t.Skip("no links: ", err)
	}
	log, lines := testkit.NewLog()
	i := New(path, log)
	i.Attached(session("edge1", ""))
	testkit.Run(t, i.Run).Stop()
	if note := i.Note(); i.Known() || !strings.Contains(note, "restart the cloud") ||
		!strings.Contains(lines.String(), "starts empty") {
		t.Errorf("known %t, note %q, log %s", i.Known(), note, lines)
	}
	if to, err := os.Readlink(path); err != nil || to != path {
		t.Errorf("the file was replaced: %q, %v", to, err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if i = New(path, log); !i.Known() || i.Note() != "" {
		t.Errorf("without a file: known %t, note %q", i.Known(), i.Note())
	}
}

// A file that cannot be written shows in the log once, and in the note for /readyz.
func TestUnwritable(t *testing.T) {
	log, lines := testkit.NewLog()
	i := New(filepath.Join(t.TempDir(), "missing", "nodes.json"), log)
	i.Attached(session("edge1", ""))
	i.write(t.Context())
	i.write(t.Context())
	if n := strings.Count(lines.String(), "cannot be written"); n != 1 || !strings.Contains(i.Note(), "missing") {
		t.Errorf("%d warnings, note %q", n, i.Note())
	}
}

// A flood of names does not fill the memory, and does not push out nodes that are connected.
func TestBounded(t *testing.T) {
	i := New("", slog.New(slog.DiscardHandler))
	old := time.Now().Add(-time.Hour)
	for n := range maxNodes - 2 {
		i.nodes[tunnel.NodeName(fmt.Sprintf("n%d", n))] = &Record{LastSeen: old.Add(time.Duration(n) * time.Millisecond)}
	}
	i.nodes["connected"] = &Record{LastSeen: old.Add(-time.Hour), Connected: true}
	i.nodes["oldest"] = &Record{LastSeen: old.Add(-time.Minute)}
	i.Attached(session("new", ""))
	all := i.All()
	_, oldest := all["oldest"]
	_, connected := all["connected"]
	_, newest := all[tunnel.NodeName(fmt.Sprintf("n%d", maxNodes-3))]
	if len(all) != maxNodes-maxNodes/100+1 || oldest || !connected || !newest {
		t.Errorf("%d nodes, oldest kept: %t, connected kept: %t, newest kept: %t", len(all), oldest, connected, newest)
	}
	// Nodes of another replica do not push out nodes of this one.
	o := new(others)
	for n := range maxNodes {
		o.names = append(o.names, tunnel.NodeName(fmt.Sprintf("other%d", n)))
	}
	i.Others = o
	i.noteOthers()
	all = i.All()
	if _, newest = all[tunnel.NodeName(fmt.Sprintf("n%d", maxNodes-3))]; len(all) != maxNodes || !newest {
		t.Errorf("%d nodes after those of others, newest kept: %t", len(all), newest)
	}
}

// Facts are as new as the session that they are of, however late another replica has held the node. A clock that is
// ahead makes nothing newer than now.
func TestFactsOfTheNewestSession(t *testing.T) {
	i := New("", slog.New(slog.DiscardHandler))
	now := time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC)
	i.now = func() time.Time { return now }
	s := session("edge1", "old")
	i.Attached(s)
	ends(i, s, "it was updated")
	old := now
	long := session("edge2", strings.Repeat("ü", 100))
	i.Attached(long)
	ends(i, long, strings.Repeat("x", 1000))
	if r := i.All()["edge2"]; r.Software != strings.Repeat("ü", maxSoftware/2) || len(r.Ended) != maxEnded {
		t.Errorf("long texts of a node: %+v", r)
	}
	now = now.Add(24 * time.Hour)
	o := new(others)
	o.names = []tunnel.NodeName{"edge1"}
	i.Others = o
	i.noteOthers()
	if r := i.All()["edge1"]; !r.LastSeen.Equal(now) || !r.FactsAt.Equal(old) || r.Software != "old" {
		t.Errorf("%+v; want facts of %s, seen at %s", r, old, now)
	}
	i.Adopt("edge1", Record{FirstSeen: old, LastSeen: now.Add(-time.Minute), FactsAt: now.Add(time.Hour), Software: "new"})
	if r := i.All()["edge1"]; r.Software != "new" || !r.FactsAt.Equal(now) || !r.LastSeen.Equal(now) {
		t.Errorf("%+v; want the facts of the other replica", r)
	}
}

// Of two replicas' certificates of a node, the one that begins later is the newer, though it may end earlier.
func TestNewestCertificate(t *testing.T) {
	day := func(d int) time.Time { return time.Date(2026, 1, d, 0, 0, 0, 0, time.UTC) }
	long := Record{CertShown: "long", CertFrom: day(1), CertEnds: day(30)}
	short := Record{CertShown: "short", CertFrom: day(2), CertEnds: day(9)}
	old := Record{CertShown: "old", CertEnds: day(20)} // of a version that keeps no beginning
	for _, test := range []struct {
		own, other Record
		want       string
	}{
		{long, short, "short"},
		{short, long, "short"},
		{long, old, "long"},
		{old, long, "long"},
		{short, old, "old"},
		{Record{}, short, "short"},
	} {
		i := New("", slog.New(slog.DiscardHandler))
		i.Adopt("edge1", test.own)
		i.Adopt("edge1", test.other)
		if got := i.All()["edge1"].CertShown; got != test.want {
			t.Errorf("%s, then %s: %s, want %s", test.own.CertShown, test.other.CertShown, got, test.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(`{"format":1,"nodes":{"edge1":{"first_seen":"2026-01-02T03:04:05Z","last_seen":"2026-01-02T03:04:05Z"}}}`)
	f.Add(`{"format":1,"nodes":null}`)
	f.Fuzz(func(t *testing.T, text string) {
		nodes, err := parse([]byte(text))
		for n := range nodes {
			if _, bad := tunnel.ParseNodeName(string(n)); err == nil && bad != nil {
				t.Errorf("%q is taken as a node", n)
			}
		}
	})
}

// others is what other replicas hold.
type others struct {
	mu      sync.Mutex
	names   []tunnel.NodeName
	changed tunnel.Change
}

func (o *others) Connected() []tunnel.NodeName {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.names
}

func (o *others) Holds(tunnel.NodeName) bool { return false } // nobody asks

// ServesServices gives the name of a node its meaning.
func (o *others) ServesServices(n tunnel.NodeName) (connected, serves bool) {
	return !strings.HasPrefix(string(n), "just-gone"), strings.HasPrefix(string(n), "serves")
}

func (o *others) Changed() <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.changed.Next()
}

func (o *others) hold(names ...tunnel.NodeName) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.names = names
	o.changed.Notify()
}

// A replica remembers the nodes that another replica has held, also when that replica is gone.
func TestRemembersNodesOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		i, o := New("", slog.New(slog.DiscardHandler)), new(others)
		i.Others = o
		ctx, stop := context.WithCancel(t.Context())
		ran := make(chan error, 1) // capacity 1: Run need not wait for the test
		go func() { ran <- i.Run(ctx) }()
		synctest.Wait()
		o.hold("edge1", "edge2")
		synctest.Wait()
		time.Sleep(writePause)
		left := time.Now().UTC()
		o.hold("edge2")
		time.Sleep(2 * writePause)
		o.hold()
		time.Sleep(time.Hour)
		all := i.All()
		if one := all["edge1"]; len(all) != 2 || one.LastSeen.Before(left) || one.LastSeen.After(left.Add(2*gather)) ||
			one.Connected || one.Sessions != 0 {
			t.Errorf("%+v; want edge1 last seen at %s", all, left)
		}
		if !all["edge2"].LastSeen.After(left.Add(writePause)) {
			t.Errorf("edge2 was last seen at %s, which is too early", all["edge2"].LastSeen)
		}
		stop()
		<-ran
	})
}

// An inventory that another process takes over leaves the file alone. The other process knows what has happened after
// it had read the file first.
func TestLeave(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nodes.json")
	open := func() *Inventory { return New(path, slog.New(slog.DiscardHandler)) }
	has := func(i *Inventory, n tunnel.NodeName, want bool, what string) {
		t.Helper()
		if i.Has(n) != want {
			t.Errorf("%s: has %s is %t", what, n, !want)
		}
	}
	run := func(i *Inventory) { // it writes a last time when ctx is done
		t.Helper()
		ctx, stop := context.WithCancel(t.Context())
		stop()
		if err := i.Run(ctx); err != nil {
			t.Fatal(err)
		}
	}
	old := open()
	old.Adopt("forgotten", Record{})
	run(old)
	next := open()
	has(next, "forgotten", true, "the new process, when it starts")
	if _, err := old.Forget("forgotten"); err != nil {
		t.Fatal(err)
	}
	old.Attached(session("edge1", "v1"))
	next.Attached(session("edge2", "v1"))
	old.Leave()
	next.Reload()
	has(next, "forgotten", false, "the new process, when it takes over")
	has(next, "edge1", true, "the new process, when it takes over")
	has(next, "edge2", true, "the new process, when it takes over")
	if _, err := old.Forget("edge1"); !errors.Is(err, ErrLeft) {
		t.Errorf("the old process forgets a node: %v", err)
	}

	run(next)
	run(old)
	has(open(), "edge2", true, "the file after the end of the old process")

	old.Return()
	old.Attached(session("edge3", "v1"))
	run(old)
	has(open(), "edge3", true, "the file of a process that has come back")
}

// Which edges serve Services is remembered: of sessions with this replica and with others, in the file and in the map.
func TestServeServices(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nodes.json")
	i := New(path, slog.New(slog.DiscardHandler))
	// The session of a node with another replica may end while noteOthers looks.
	i.Others = &others{names: []tunnel.NodeName{"serves-elsewhere", "elsewhere", "just-gone"}}
	served := session("just-gone", "")
	served.Services = true
	i.Attached(served)
	i.Detached(served)
	for _, node := range []string{"edge1", "edge2", "edge3"} {
		s := session(node, "")
		s.Services = node != "edge2"
		i.Attached(s)
	}
	i.Attached(session("edge3", "")) // its edge has started again, without Services
	i.noteOthers()
	want := []tunnel.NodeName{"edge1", "just-gone", "serves-elsewhere"}
	if got := slices.Sorted(slices.Values(i.ServeServices())); !slices.Equal(got, want) {
		t.Errorf("these serve Services: %v", got)
	}
	i.save(t.Context())
	later := New(path, slog.New(slog.DiscardHandler))
	if got := slices.Sorted(slices.Values(later.ServeServices())); !slices.Equal(got, want) {
		t.Errorf("after a restart, these serve Services: %v", got)
	}
	all := i.merge(map[tunnel.NodeName]Record{"edge4": {FactsAt: i.second(), LastSeen: i.second(), Services: true}})
	if !all["edge1"].Services || all["edge2"].Services || !all["edge4"].Services {
		t.Errorf("the map has %v", all)
	}
	if got := i.ServeServices(); !slices.Contains(got, "edge4") {
		t.Errorf("of the map, %v serve Services", got)
	}
}
