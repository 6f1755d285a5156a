package reload

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"

	"tunnel.example/tunnel/internal/testkit"
)

// watched is a watcher in a synctest bubble; the test sends the file system's notifications.
type watched struct {
	path   string
	events chan fsnotify.Event // nil: no notifications

	mu    sync.Mutex      // guards the following
	calls []time.Duration // times of the calls of changed, since the start
	retry bool            // what changed returns
}

// watch runs a watcher of one file until the end of the bubble.
func watch(t *testing.T, notifies bool) *watched {
	w := &watched{path: filepath.Join(t.TempDir(), "file")}
	writeFile(t, w.path, []byte("1"))
	notify := func([]string) (notifications, error) { return notifications{}, errors.New("no notifications here") }
	if notifies {
		w.events = make(chan fsnotify.Event)
		notify = func([]string) (notifications, error) {
			return notifications{events: w.events, stop: func() error { return nil }}, nil
		}
	}
	started := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		(&watcher{paths: []string{w.path}, log: slog.New(slog.DiscardHandler), notify: notify, changed: func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.calls = append(w.calls, time.Since(started))
			return w.retry
		}}).run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	synctest.Wait()
	return w
}

// wantCalls checks how often changed has been called since the last wantCalls.
func (w *watched) wantCalls(t *testing.T, why string, n int) {
	t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.calls) != n {
		t.Errorf("%s: %d calls, want %d (%v)", why, len(w.calls), n, w.calls)
	}
	w.calls = nil
}

// answers sets what changed returns from now on.
func (w *watched) answers(retry bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.retry = retry
}

func TestWatchWithoutNotifications(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, false)
		w.wantCalls(t, "at the start", 1)
		time.Sleep(time.Minute)
		w.wantCalls(t, "nothing changes", 0)
		writeFile(t, w.path, []byte("22"))
		time.Sleep(time.Second)
		w.wantCalls(t, "written in place", 1)
		writeFile(t, w.path+".new", []byte("22"))
		rename(t, w.path+".new", w.path)
		time.Sleep(time.Second)
		w.wantCalls(t, "another file of the same size", 1)
		if err := os.Remove(w.path); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		w.wantCalls(t, "removed", 1)
		time.Sleep(time.Minute)
		w.wantCalls(t, "still not there", 0)
		writeFile(t, w.path, []byte("22"))
		time.Sleep(time.Second)
		w.wantCalls(t, "back", 1)
	})
}

func TestWatchRetriesOnRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, true)
		w.wantCalls(t, "at the start", 1)
		w.answers(true)
		w.events <- fsnotify.Event{Name: w.path, Op: fsnotify.Write}
		time.Sleep(quietPeriod)
		w.wantCalls(t, "a notification", 1)
		time.Sleep(10 * pollInterval)
		w.wantCalls(t, "it could not be used", 10)
		w.answers(false)
		time.Sleep(pollInterval + quietPeriod)
		w.wantCalls(t, "once more", 1)
		time.Sleep(time.Minute)
		w.wantCalls(t, "it could", 0)
	})
}

func TestWatchWaitsForTheWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, true)
		w.wantCalls(t, "at the start", 1)
		for range 4 {
			w.events <- fsnotify.Event{Name: w.path, Op: fsnotify.Write}
			time.Sleep(quietPeriod - time.Millisecond)
		}
		w.wantCalls(t, "it is being written", 0)
		time.Sleep(quietPeriod)
		w.wantCalls(t, "the writer has left it alone", 1)

		began := time.Now()
		for time.Since(began) < maxQuietWait {
			w.events <- fsnotify.Event{Name: w.path, Op: fsnotify.Write}
			time.Sleep(time.Millisecond)
		}
		w.wantCalls(t, "the writer never leaves it alone", 1)
	})
}

func TestWatchIgnoresOtherFiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, true)
		w.wantCalls(t, "at the start", 1)
		other := fsnotify.Event{Name: filepath.Join(filepath.Dir(w.path), "other"), Op: fsnotify.Write}
		w.events <- other
		time.Sleep(time.Second)
		w.wantCalls(t, "the file is the same", 0)
		writeFile(t, w.path, []byte("22"))
		w.events <- other
		time.Sleep(quietPeriod)
		w.wantCalls(t, "another name, and the path leads to something else", 1)
	})
}

// With the kernel's notifications: a swap of a Secret's links is noticed.
func TestWatchNoticesSwappedLinks(t *testing.T) {
	dir := t.TempDir()
	version(t, dir, "..1", map[string][]byte{"a": []byte("1"), "b": []byte("1")})
	calls := make(chan struct{}, 100)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		log, _ := testkit.NewLog()
		Watch(ctx, []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}, log, func() bool {
			calls <- struct{}{}
			return false
		})
	}()
	<-calls
	version(t, dir, "..2", map[string][]byte{"a": []byte("2"), "b": []byte("2")})
	<-calls
	cancel()
	<-ended
}
