package relay

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	bolt "go.etcd.io/bbolt"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

// put applies changes to a state, and has them kept.
func put(t testing.TB, f *file, s *services.State, changes *pb.Changes) {
	t.Helper()
	d, err := s.Apply(changes)
	if err != nil {
		t.Fatal(err)
	}
	f.add(d, s.Digests(), time.Now())
}

func open(t testing.TB, path string) (*file, *services.State) {
	t.Helper()
	f, s, err := openFile(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return f, s
}

// newFile makes a file that holds a state, and returns the state.
func newFile(t testing.TB, path string) *services.State {
	t.Helper()
	f, s := open(t, path)
	put(t, f, s, shop(t))
	nodes := new(pb.Changes)
	for i := range 500 { // several pages
		nodes.Set = append(nodes.Set, item(t, services.NodePath("n"+strconv.Itoa(i)), &services.Node{Zone: "z"}))
	}
	put(t, f, s, nodes)
	f.close(time.Now())
	return s
}

// BenchmarkFirstState writes the state of a large cluster for the first time.
func BenchmarkFirstState(b *testing.B) {
	changes := manyServices(b)
	for b.Loop() {
		b.StopTimer()
		f, s := open(b, filepath.Join(b.TempDir(), "services.db"))
		put(b, f, s, changes)
		b.StartTimer()
		if err := f.write(); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		f.close(time.Time{})
		b.StartTimer()
	}
}

// Changes of one second are one transaction, and the last ones are written at the end.
func TestOneTransactionASecond(t *testing.T) {
	path := filepath.Join(t.TempDir(), "services.db")
	synctest.Test(t, func(t *testing.T) {
		f, s := open(t, path)
		id := func() (n int) {
			if err := f.db.View(func(tx *bolt.Tx) error { n = tx.ID(); return nil }); err != nil {
				t.Fatal(err)
			}
			return n
		}
		before := id()
		done := make(chan struct{}) // closed when keep has returned
		ctx, cancel := context.WithCancel(t.Context())
		go func() { defer close(done); f.keep(ctx, func(error) {}, nil, never) }()
		const seconds = 5
		for i := range seconds * 100 {
			zone := strconv.Itoa(i)
			put(t, f, s, &pb.Changes{Set: []*pb.Item{item(t, services.NodePath("n"), &services.Node{Zone: zone})}})
			time.Sleep(10 * time.Millisecond)
		}
		synctest.Wait()
		if n := id() - before; n < seconds || n > seconds+1 {
			t.Errorf("%d transactions in %d seconds", n, seconds)
		}
		cancel()
		<-done
		f.close(time.Now())
		again, after := open(t, path)
		again.close(time.Time{})
		if after.Node("n").GetZone() != "499" {
			t.Errorf("the file has %v", after.Node("n"))
		}
	})
}

// A file that is damaged is set aside with a warning, and the node starts empty; or the damage changes nothing.
func TestDamagedFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "services.db")
	want := newFile(t, path).Digests()
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	damages := map[string][]byte{"empty": {}, "text": []byte("hello"), "zeros": make([]byte, len(good))}
	for size := 1; size < len(good); size += 1 + len(good)/40 {
		damages["truncated to "+strconv.Itoa(size)] = good[:size]
	}
	for at := 0; at < len(good); at += 1 + len(good)/200 {
		b := slices.Clone(good)
		b[at] ^= 0xff
		damages["flipped at "+strconv.Itoa(at)] = b
	}
	aside := 0
	for name, data := range damages {
		path := filepath.Join(dir, strings.ReplaceAll(name, " ", "-"), "services.db")
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		log, lines := testkit.NewLog()
		f, s, err := openFile(path, log)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		_, asideErr := os.Stat(path + ".broken")
		warned := len(lines.Lines("WARN", "cannot be read")) == 1
		switch {
		case asideErr == nil && warned && s.Len() == 0:
			aside++
		case asideErr == nil || warned || s.Len() > 0 && s.Digests() != want:
			t.Errorf("%s: %d items, warned: %v, aside: %v", name, s.Len(), warned, asideErr)
		}
		// It works from here on; or it says why it does not.
		put(t, f, s, shop(t))
		writeErr := f.write()
		f.close(time.Now())
		again, after := open(t, path)
		again.close(time.Time{})
		if writeErr == nil && after.Digests() != s.Digests() {
			t.Errorf("%s: what was written then is not there", name)
		}
	}
	if aside == 0 {
		t.Error("no damage was noticed; this test would never fail")
	}
}

// A file of another version is not read.
func TestFileOfAnotherVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "services.db")
	newFile(t, path)
	db, err := bolt.Open(path, 0o600, nil)
	if err == nil {
		err = db.Update(func(tx *bolt.Tx) error { return tx.Bucket(bucketFacts).Put(keyVersion, []byte("2")) })
	}
	if err == nil {
		err = db.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	log, lines := testkit.NewLog()
	f, s, err := openFile(path, log)
	if err != nil {
		t.Fatal(err)
	}
	f.close(time.Time{})
	if s.Len() != 0 || len(lines.Lines("WARN", `version \"2\"`)) != 1 {
		t.Errorf("%d items; log: %s", s.Len(), lines)
	}
}

// Two edges cannot have one file, and the second one says so.
func TestFileOfAnotherProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "services.db")
	f, _ := open(t, path)
	defer f.close(time.Time{})
	if _, _, err := openFile(path, slog.New(slog.DiscardHandler)); err == nil ||
		!strings.Contains(err.Error(), "another process has "+path) {
		t.Errorf("the second one says %v", err)
	}
}

// An edge runs without its file, says so, and keeps the state as soon as it can.
func TestFileLater(t *testing.T) {
	k, c := new(fake), newCloud()
	r, _ := newTestRelay(t, k, c)
	r.every = time.Millisecond
	folder := filepath.Dir(r.cfg.File)
	link := func(to string) { // at once
		t.Helper()
		err := os.Symlink(to, folder+".next")
		if err == nil {
			err = os.Rename(folder+".next", folder)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	link("nowhere") // so that it cannot be made
	running := testkit.Run(t, r.Run)
	<-c.nexts
	c.batches <- batch(t, false, shop(t))
	<-c.nexts
	c.batches <- batch(t, false, &pb.Changes{Deleted: []services.Path{far6}})
	<-c.nexts
	wantRedirected(t, k, web4)
	if note := r.Note(); !strings.Contains(note, "state in [mode.edge.services]") {
		t.Errorf("note: %q", note)
	}
	// Now there is a file, with another state.
	there := t.TempDir()
	newFile(t, filepath.Join(there, "services.db"))
	link(there)
	testkit.Eventually(t, "the file is opened", func() bool { return r.Note() == "" })
	c.batches <- batch(t, false, &pb.Changes{Set: []*pb.Item{item(t, services.NodePath("last"), new(services.Node))}})
	<-c.nexts
	running.Stop()
	f, got := open(t, r.cfg.File)
	f.close(time.Time{})
	if got.Digests() != r.state.Digests() || got.Len() != 6 {
		t.Errorf("the file has %d items, and the edge %d", got.Len(), r.state.Len())
	}

	// An edge whose cloud is away takes the state of a file that another process had.
	f, _ = open(t, r.cfg.File)
	away := newCloud()
	offline := again(r, k, away)
	offline.cfg.Watch = func(ctx context.Context) (Stream, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	offline.every = time.Millisecond
	second := testkit.Run(t, offline.Run)
	testkit.Within(t, 2*lockTime+20*time.Second, "the note says who has the file", func() error {
		if note := offline.Note(); !strings.Contains(note, "another process has") {
			return errors.New(note)
		}
		return nil
	})
	f.close(time.Time{})
	wantRedirected(t, k, web4)
	second.Stop()
}

// never is when a state was that of the cloud, if it never was.
func never() time.Time { return time.Time{} }

// An edge whose cloud sends no change for weeks still knows after a loss of power that its state is young.
func TestSinceIsWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "services.db")
	synctest.Test(t, func(t *testing.T) {
		f, s := open(t, path)
		put(t, f, s, &pb.Changes{Set: []*pb.Item{item(t, services.NodePath("n"), &services.Node{})}})
		done := make(chan struct{}) // closed when keep has returned
		ctx, cancel := context.WithCancel(t.Context())
		go func() { defer close(done); f.keep(ctx, func(error) {}, nil, time.Now) }()
		time.Sleep(21 * 24 * time.Hour)
		cancel()
		<-done
		f.db.Close() // as when the power is lost: nothing more is written
		again, _ := open(t, path)
		defer again.close(time.Time{})
		if old := time.Since(again.since); old > 2*stampInterval {
			t.Errorf("the file says that its state was last that of the cloud %s ago", old)
		}
	})
}

// killed marks a process that TestKilled starts.
const killed = "TUNNEL_TEST_SERVICES_FILE"

// A process that is killed at any moment leaves a state that was complete.
func TestKilled(t *testing.T) {
	if path := os.Getenv(killed); path != "" {
		f, s := open(t, path)
		f.every = time.Millisecond
		go f.keep(t.Context(), func(err error) {
			if err != nil {
				fmt.Println(err)
			}
		}, nil, never)
		for i := s.Len(); ; i++ {
			zone := strconv.Itoa(i)
			put(t, f, s, &pb.Changes{Set: []*pb.Item{
				item(t, services.NodePath("a"), &services.Node{Zone: zone}),
				item(t, services.NodePath("b"), &services.Node{Zone: zone}),
				item(t, services.NodePath("n"+strconv.Itoa(i%1000)), &services.Node{Zone: zone}),
			}})
			fmt.Println("ready")
			time.Sleep(100 * time.Microsecond)
		}
	}
	path, written := filepath.Join(t.TempDir(), "services.db"), false
	for range 8 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKilled$", "-test.v")
		cmd.Env = append(os.Environ(), killed+"="+path)
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 0; n < 1000 && lines.Scan(); n++ {
			if text := lines.Text(); n > 5 && text != "ready" {
				t.Errorf("it says %s", text)
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait() // it was killed
		log, warned := testkit.NewLog()
		f, s, err := openFile(path, log)
		if err != nil {
			t.Fatal(err)
		}
		f.close(time.Time{})
		empty := s.Len() == 0 && written // on a slow disk, processes may be killed before they have written anything
		written = written || s.Len() > 0
		if warned.String() != "" || empty || s.Node("a").GetZone() != s.Node("b").GetZone() {
			t.Errorf("%d items, a is %v, b is %v, log: %s", s.Len(), s.Node("a"), s.Node("b"), warned)
		}
	}
	if !written {
		t.Error("no process has written anything")
	}
}

// Whatever a file holds, the edge starts.
func FuzzFile(f *testing.F) {
	path := filepath.Join(f.TempDir(), "services.db")
	newFile(f, path)
	good, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(uint32(0), []byte("hello"), uint32(len(good)))
	f.Add(uint32(4096+16), []byte{0xff, 0xff}, uint32(len(good)))
	f.Add(uint32(0), []byte{}, uint32(5000))
	f.Fuzz(func(t *testing.T, at uint32, bytes []byte, size uint32) {
		data := slices.Clone(good[:min(int(size), len(good))])
		if int(at) < len(data) {
			copy(data[at:], bytes)
		}
		path := filepath.Join(t.TempDir(), "services.db")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		file, _ := open(t, path)
		file.close(time.Now())
	})
}

// Whatever a cloud sends, the edge goes on.
func FuzzBatch(f *testing.F) {
	good := batch(f, false, shop(f))
	f.Add(good.GetChanges(), true)
	data, err := inflate(good.GetChanges())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data, false)
	f.Fuzz(func(t *testing.T, data []byte, deflated bool) {
		c := newCloud()
		go func() { c.batches <- &pb.Batch{Changes: data, Deflated: deflated} }()
		series, _, err := receive(stream{c, t.Context()}, 0, 0)
		if err != nil {
			return
		}
		r, _ := newTestRelay(t, new(fake), c)
		r.applySeries(series) // it tells of items that it cannot read
		for at := range r.planner.plan(r.state).frontends {
			if !at.IsValid() || at.Addr().IsLoopback() || at.protocol != protocolTCP && at.protocol != protocolUDP {
				t.Errorf("the node redirects %s (%s)", at, at.protocol)
			}
		}
		for name := range r.state.Services() {
			if r.list(nameOf(name)) == nil {
				t.Errorf("%s cannot be explained", name)
			}
		}
	})
}
