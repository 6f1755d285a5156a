package tunnel

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// module is a Module whose methods the test sets.
type module struct {
	name   string
	routes map[string]Handler
	run    func(ctx context.Context) error
}

func (m *module) Name() string                  { return m.name }
func (m *module) Routes() map[string]Handler    { return m.routes }
func (m *module) Run(ctx context.Context) error { return m.run(ctx) }

func ignore(context.Context, *Incoming) error { return nil }

// deaf is a module without messages.
type deaf struct{}

func (deaf) Name() string              { return "deaf" }
func (deaf) Run(context.Context) error { return nil }

// NewRouter reports everything that is wrong with the modules in one error.
func TestRouterReportsEveryConflict(t *testing.T) {
	r, err := NewRouter(
		&module{name: "a", routes: map[string]Handler{"ok": ignore, "none": nil, "": ignore}},
		&module{name: "a"},
		&module{name: ""},
		&module{name: "b", routes: map[string]Handler{"none": nil}},
		deaf{}, deaf{},
	)
	if r != nil || err == nil {
		t.Fatalf("router %v, error %v", r, err)
	}
	for _, want := range []string{
		"route a/none has no handler", `module "a" has a route with an empty type`,
		`two modules are named "a"`, `two modules are named "deaf"`, "a *tunnel.module has no name",
		"route b/none has no handler",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
}

func TestRouter(t *testing.T) {
	var got []string
	note := func(_ context.Context, in *Incoming) error {
		got = append(got, string(in.From.Node)+" "+in.Category+"/"+in.Type)
		return nil
	}
	broken := errors.New("broken")
	routes := map[string]Handler{"x": note, "bad": func(context.Context, *Incoming) error { return broken }}
	r, err := NewRouter(
		&module{name: "a", routes: routes}, &module{name: "b", routes: map[string]Handler{"x": note}},
		&module{name: "c"}, deaf{},
	)
	if err != nil {
		t.Fatal(err)
	}
	delete(routes, "x") // no effect: NewRouter has read the routes
	from := &Session{Node: "n1"}
	for _, c := range []struct {
		category, typ string
		known         bool
		err           error
	}{
		{"a", "x", true, nil},
		{"b", "x", true, nil},
		{"a", "bad", true, broken},
		{"b", "bad", false, nil}, // another module's type
		{"c", "x", false, nil},
		{"deaf", "x", false, nil}, // it takes no messages
		{"", "", false, nil},
	} {
		known, err := r.Handle(t.Context(), &Incoming{Message: &Message{Category: c.category, Type: c.typ}, From: from})
		if known != c.known || !errors.Is(err, c.err) {
			t.Errorf("%s/%s: known %t, error %v; want %t, %v", c.category, c.typ, known, err, c.known, c.err)
		}
		if c.err != nil && !strings.Contains(err.Error(), "a/bad") {
			t.Errorf("%v does not name its route", err)
		}
	}
	if want := []string{"n1 a/x", "n1 b/x"}; !slices.Equal(got, want) {
		t.Errorf("handled %q, want %q", got, want)
	}
	if want := []string{"a/bad", "a/x", "b/x"}; !slices.Equal(r.Routes(), want) {
		t.Errorf("routes are %q, want %q", r.Routes(), want)
	}
}

// When one module returns, Run stops the others, waits for them, and names the first in its error.
func TestRun(t *testing.T) {
	broken := errors.New("port taken")
	for name, c := range map[string]struct {
		ends error
		want string
	}{
		"with an error": {broken, "b: port taken"},
		"by itself":     {nil, "b: module stopped unexpectedly"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				stopped := false
				sibling := &module{name: "a", run: func(ctx context.Context) error {
					<-ctx.Done()
					time.Sleep(time.Minute) // it drains
					stopped = true
					return nil
				}}
				err := Run(t.Context(), sibling, &module{name: "b", run: func(context.Context) error { return c.ends }})
				if err == nil || err.Error() != c.want || c.ends != nil && !errors.Is(err, c.ends) {
					t.Errorf("Run returns %v, want %q", err, c.want)
				}
				if !stopped {
					t.Error("Run does not wait for the sibling")
				}
			})
		})
	}
	t.Run("context done", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		wait := &module{name: "a", run: func(ctx context.Context) error { <-ctx.Done(); return nil }}
		time.AfterFunc(time.Millisecond, cancel)
		if err := Run(ctx, wait, wait); err != nil {
			t.Errorf("Run returns %v", err)
		}
	})
}

// The context of Grace ends its grace period after the first context ended, or when it is cancelled.
func TestGrace(t *testing.T) {
	type key struct{}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "v"))
		graced, end := Grace(ctx, time.Minute)
		defer end()
		if graced.Value(key{}) != "v" {
			t.Error("the values of the context are gone")
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if graced.Err() != nil {
			t.Error("done although neither context was cancelled")
		}
		cancel()
		time.Sleep(time.Minute - 1)
		synctest.Wait()
		if graced.Err() != nil {
			t.Error("done before the grace period is over")
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if graced.Err() == nil {
			t.Error("goes on after the grace period")
		}
	})
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		graced, end := Grace(ctx, time.Hour)
		cancel()
		synctest.Wait()
		start := time.Now()
		end()
		<-graced.Done()
		synctest.Wait() // no goroutine may be left that waits for an hour
		if d := time.Since(start); d != 0 {
			t.Errorf("cancel takes effect after %s", d)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		start := time.Now()
		graced, end := Grace(ctx, time.Minute)
		defer end()
		<-graced.Done()
		if d := time.Since(start); d != time.Minute {
			t.Errorf("from a context that has ended: %s of grace, want a minute", d)
		}
	})
}
