package page

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/page"
	"tunnel.example/tunnel/test/rig"
)

// replay is a page.Source that shows a record of rig.Record again, at the pace of the record.
type replay struct {
	begun  time.Time
	at     []time.Time // of the frames
	frames []page.Data
}

// newReplay reads a record.
func newReplay(t *testing.T, dir string) *replay {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "page-*.json"))
	if err != nil || len(files) < 2 {
		t.Fatalf("%s has %d frames, %v", dir, len(files), err)
	}
	sort.Strings(files) // all times have 13 digits
	r := &replay{begun: time.Now()}
	for _, file := range files {
		ms, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "page-"), ".json"), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var frame page.Data
		if err = json.Unmarshal(text, &frame); err != nil || frame.Nodes == nil || len(frame.Replicas) == 0 {
			t.Fatalf("%s: %v", file, err)
		}
		r.at, r.frames = append(r.at, time.UnixMilli(ms)), append(r.frames, frame)
	}
	return r
}

// lasts returns how long the record is.
func (r *replay) lasts() time.Duration { return r.at[len(r.at)-1].Sub(r.at[0]) }

// now returns the frame that is due; the last one stays.
func (r *replay) now() *page.Data {
	since := time.Since(r.begun)
	i := sort.Search(len(r.at), func(i int) bool { return r.at[i].Sub(r.at[0]) > since })
	return &r.frames[max(0, i-1)]
}

func (r *replay) Nodes(context.Context) *api.NodeList { return r.now().Nodes }

func (r *replay) Statuses(context.Context) (all []*api.Status, incomplete []string) {
	d := r.now()
	return d.Replicas, d.Incomplete
}

// The page shows a record as it showed the cloud. With TUNNEL_PAGE_RECORD, a folder of rig.Record, it shows that
// record, and TUNNEL_PAGE_PICTURES names the folder for the pictures. Else it shows a short record of a cloud of its
// own.
func TestRecord(t *testing.T) {
	dir, pictures := os.Getenv("TUNNEL_PAGE_RECORD"), os.Getenv("TUNNEL_PAGE_PICTURES")
	if dir == "" {
		dir, pictures = recordOfItsOwn(t), ""
	}
	r := newReplay(t, dir)
	b := visit(t, servePage(t, r), size(1280, 720, false))
	b.until("the list has rows", loaded)
	last := &r.frames[len(r.frames)-1]
	if rest := r.lasts() - time.Since(r.begun); rest > 0 {
		time.Sleep(rest + time.Second)
	}
	b.until("all nodes of the last frame are shown", fmt.Sprintf(
		`document.querySelectorAll("#list tr.node").length >= %d`, min(len(last.Nodes.Nodes), 10)))
	if pictures == "" {
		return
	}
	first := b.names(1)
	for name, actions := range map[string][]action{
		"page-cluster.png":      {colours("light")},
		"page-cluster-node.png": {colours("light"), size(1000, 720, false), do(`location.hash = "node/` + first + `"`)},
	} {
		b.run(append(actions, chromedp.Sleep(300*time.Millisecond))...)
		png, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
		if err == nil {
			err = os.WriteFile(filepath.Join(pictures, name), png, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		b.run(size(1280, 720, false), do(`location.hash = "nodes"`))
	}
}

// recordOfItsOwn records a cloud with edges, and returns the folder.
func recordOfItsOwn(t *testing.T) string {
	t.Helper()
	f := newFleet(t, []string{"edge1", "edge2", "edge3"})
	for _, e := range f.edges {
		p, err := e.Start()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Kill)
		testkit.Within(t, patience, "an edge has a session", e.Ready)
	}
	f.load(t)
	dir := t.TempDir()
	ctx, stop := context.WithTimeout(t.Context(), 7*time.Second)
	defer stop()
	host := strings.TrimSuffix(strings.TrimPrefix(f.url, "http://"), "/")
	if err := rig.Record(ctx, dir, host, f.fleet.Replicas[0].Health()); err != nil {
		t.Fatal(err)
	}
	if metrics, _ := filepath.Glob(filepath.Join(dir, "metrics-*.txt")); len(metrics) < 2 {
		t.Errorf("the record has metrics at %d times", len(metrics))
	}
	return dir
}

// servePage serves the page with the nodes of a source, and returns its URL.
func servePage(t *testing.T, source page.Source) string {
	t.Helper()
	s := page.New("127.0.0.1:0", source, slog.New(slog.DiscardHandler))
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	testkit.Within(t, patience, "the page listens", func() error {
		if s.Addr() == nil {
			return fmt.Errorf("it does not listen")
		}
		return nil
	})
	return "http://" + s.Addr().String() + "/"
}
