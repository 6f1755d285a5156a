package page

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"tunnel.example/tunnel/pkg/api"
)

// patience bounds every wait.
const patience = 30 * time.Second

var (
	program string          // the program under test
	browser context.Context // of the browser that all tests share
)

func TestMain(m *testing.M) { os.Exit(prepareAndRun(m)) }

// prepareAndRun builds the program, starts the browser and runs the tests.
func prepareAndRun(m *testing.M) (exitCode int) {
	dir, err := os.MkdirTemp("", "tunnel-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	program = filepath.Join(dir, "tunnel")
	build := exec.Command("go", "build", "-trimpath", "-tags=grpcnotrace", "-o", program, "./cmd/tunnel")
	build.Dir, build.Env = filepath.Join("..", ".."), append(os.Environ(), "CGO_ENABLED=0")
	if out, buildErr := build.CombinedOutput(); buildErr != nil {
		fmt.Fprintf(os.Stderr, "building the program: %v\n%s", buildErr, out)
		return 1
	}
	chromium, err := exec.LookPath("chromium")
	if err != nil {
		fmt.Fprintln(os.Stderr, "chromium is missing: make page installs it")
		return 1
	}
	flag := func(name string) chromedp.ExecAllocatorOption { return chromedp.Flag(name, true) }
	ctx, stop := chromedp.NewExecAllocator(context.Background(),
		chromedp.ExecPath(chromium), chromedp.UserDataDir(filepath.Join(dir, "browser")), chromedp.WindowSize(1280, 800),
		// Root has no sandbox to give away. The page needs nothing but its own server.
		flag("headless"), flag("no-sandbox"), flag("disable-gpu"), flag("disable-quic"), flag("no-first-run"),
		flag("disable-background-networking"), flag("disable-component-update"), flag("disable-sync"),
		flag("disable-dev-shm-usage"), flag("hide-scrollbars"),
	)
	defer stop()
	browser, stop = chromedp.NewContext(ctx)
	defer stop()
	if err = chromedp.Do(browser); err != nil {
		fmt.Fprintln(os.Stderr, "starting chromium:", err)
		return 1
	}
	return m.Run()
}

// nodes is a page.Source with nodes that tests make up.
type nodes struct {
	mu       sync.Mutex // guards the following
	list     []api.Node
	statuses []*api.Status
	ahead    time.Duration // of the clock of the cloud, before that of the browser
}

func (n *nodes) Nodes(context.Context) *api.NodeList {
	n.mu.Lock()
	defer n.mu.Unlock()
	return &api.NodeList{APIVersion: "v1", Time: time.Now().UTC().Add(n.ahead), Replica: "cloud-0", Nodes: n.list}
}

func (n *nodes) Statuses(context.Context) (all []*api.Status, incomplete []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.statuses != nil {
		return n.statuses, nil
	}
	return []*api.Status{{Replica: "cloud-0", Ready: true, Checks: []api.Check{}}}, nil
}

// serve serves the page with made-up nodes, and returns its URL.
func serve(t *testing.T, source *nodes) string { return servePage(t, source) }

// tab is a tab of the browser. At the end of the test, the page may have complained of nothing, and may have asked
// nobody but its own server.
type tab struct {
	t   *testing.T
	ctx context.Context
}

// action is something that a tab does.
type action = chromedp.Action[chromedp.Void]

// visit opens the page in a new tab, after actions that prepare the tab.
func visit(t *testing.T, address string, before ...action) *tab {
	t.Helper()
	var mu sync.Mutex
	var complaints []string
	complain := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		complaints = append(complaints, fmt.Sprintf(format, args...))
	}
	ctx, done := chromedp.NewContext(browser, chromedp.WithListener(func(event any) {
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			complain("exception: %+v", e.ExceptionDetails)
		case *log.EventEntryAdded:
			complain("%s: %s", e.Entry.Level, e.Entry.Text)
		case *network.EventRequestWillBeSent:
			u, err := url.Parse(e.Request.URL)
			if err != nil || u.Scheme != "data" && !strings.HasPrefix(e.Request.URL, address) {
				complain("request to %s", e.Request.URL)
			}
		}
	}))
	t.Cleanup(done)
	b := &tab{t: t, ctx: ctx}
	t.Cleanup(func() {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range complaints {
			t.Error(c)
		}
	})
	if err := chromedp.Do(ctx); err != nil { // starts the tab, without a timeout that would end it
		t.Fatal(err)
	}
	b.run(call(network.Enable, network.EnableParams{}), call(log.Enable, cdp.Empty{}))
	b.run(append(before, chromedp.Navigate(address))...)
	return b
}

// call is a command of the browser as an action.
func call[P, R any](command cdp.Command[P, R], params P) action {
	return chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, command, params)
		return err
	})
}

// size sets the size of the tab in CSS pixels.
func size(width, height int64, mobile bool) action {
	return call(emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{
		Width: width, Height: height, DeviceScaleFactor: 1, Mobile: mobile,
	})
}

// colours has the tab prefer a scheme: light or dark.
func colours(scheme string) action {
	return call(emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
	})
}

// do evaluates an expression, whatever its value.
func do(expression string) action { return chromedp.Evaluate[chromedp.Void](expression) }

// click clicks on an element.
func click(selector string) action { return chromedp.Click(chromedp.CSS(selector)) }

func (b *tab) run(actions ...action) {
	b.t.Helper()
	ctx, stop := context.WithTimeout(b.ctx, patience)
	defer stop()
	if err := chromedp.Do(ctx, actions...); err != nil {
		b.t.Fatal(err)
	}
}

// value returns the value of an expression, or of the promise that it returns.
func value[T any](b *tab, expression string) T {
	b.t.Helper()
	ctx, stop := context.WithTimeout(b.ctx, patience)
	defer stop()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		b.t.Fatalf("%s: %v", expression, err)
	}
	return v
}

// until waits until an expression is true.
func (b *tab) until(what, expression string) {
	b.t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		if value[bool](b, "!!("+expression+")") {
			return
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("not yet: %s\n%s", what, value[string](b, "document.body.innerText"))
		}
	}
}

// press presses keys, one after the other.
func (b *tab) press(keys ...string) {
	b.t.Helper()
	for _, k := range keys {
		if len(k) > 1 || k < " " {
			b.run(chromedp.KeyEvent(k))
			continue
		}
		// As a keyboard does: if the page handles the key itself, no character follows.
		b.run(call(input.DispatchKeyEvent, input.DispatchKeyEventParams{
			Type: input.DispatchKeyEventTypeKeyDown, Key: k, Text: k,
		}), call(input.DispatchKeyEvent, input.DispatchKeyEventParams{Type: input.DispatchKeyEventTypeKeyUp, Key: k}))
	}
}

// names returns the nodes of the first rows.
func (b *tab) names(most int) string {
	b.t.Helper()
	return value[string](b, fmt.Sprintf(
		`[...document.querySelectorAll("#list tr.node a")].slice(0, %d).map(a => a.textContent).join(" ")`, most))
}
