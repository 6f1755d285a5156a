package trace

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// cloud is a dialer whose conns lead over TCP to what an Edge answers, or that refuses.
type cloud struct {
	t       *testing.T
	try     TryFunc
	refusal error
	last    tunnel.Request
	splices sync.WaitGroup
}

func (c *cloud) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	c.last = r
	if c.refusal != nil {
		return nil, c.refusal
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	c.splices.Go(func() {
		defer l.Close() // not before the conn is accepted
		if far, err := l.Accept(); err == nil {
			ctx := context.WithoutCancel(ctx)
			tunnel.Splice(ctx, far, newAnswer(ctx, newEdge(c.try).reportOf))
		}
	})
	return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
}

func newEdge(try TryFunc) *Edge {
	e := NewEdge(try, new(tunnel.Counters), slog.New(slog.DiscardHandler))
	e.Budget = new(budget)
	return e
}

// budget admits all dials, unless it is full. It notes what it is told.
type budget struct {
	full  *tunnel.Refusal
	told  []string
	dials int // dials under way
}

func (b *budget) Admit(_ context.Context, r tunnel.Request) *tunnel.Refusal {
	if b.full == nil {
		b.dials++
	}
	b.told = append(b.told, "admit "+r.Addr)
	return b.full
}

func (b *budget) Dialled(r tunnel.Request, err error) {
	b.told = append(b.told, "dialled "+r.Addr+" "+tunnel.ResultOf(err))
}

func (b *budget) Over() { b.dials-- }

// trace asks an edge whose dials end as try says.
func trace(t *testing.T, try TryFunc) (Traced, *cloud, error) {
	t.Helper()
	c := &cloud{t: t, try: try}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	traced, err := Target(ctx, c, "edge1", "db:5432")
	c.splices.Wait()
	return traced, c, err
}

// The report has each step up to the one that fails.
func TestTarget(t *testing.T) {
	t.Parallel()
	refused := func(code tunnel.Code) error { return tunnel.Refusef(code, "why") }
	for name, test := range map[string]struct {
		tried auth.Tried
		err   error
		want  string // step and code of each step
	}{
		"connected": {auth.Tried{Addresses: 2, Permitted: 2, Connect: time.Millisecond}, nil, "resolve- allow- connect-"},
		"no name":   {auth.Tried{Resolve: time.Millisecond}, refused(tunnel.Unreachable), "resolve-unreachable"},
		"denied":    {auth.Tried{Addresses: 2}, refused(tunnel.Denied), "resolve- allow-denied"},
		"refused": {
			auth.Tried{Addresses: 2, Permitted: 1}, refused(tunnel.Refused), "resolve- allow- connect-refused",
		},
	} {
		traced, c, err := trace(t, func(_ context.Context, addr string) (auth.Tried, error) {
			if addr != "db:5432" {
				t.Errorf("%s: the edge dials %q", name, addr)
			}
			return test.tried, test.err
		})
		var got []string
		for _, s := range traced.Report.Steps {
			got = append(got, s.Step+"-"+s.Code)
			if s.Text == "" {
				t.Errorf("%s: a step without a text: %+v", name, s)
			}
		}
		if err != nil || strings.Join(got, " ") != test.want || traced.Open <= 0 {
			t.Errorf("%s: %q, %v; want %q", name, got, err, test.want)
		}
		if c.last.Node != "edge1" || c.last.Category != newEdge(nil).Name() {
			t.Errorf("the request was %+v", c.last)
		}
	}
}

// An address has no step for its name, and a real policy gives the report that the steps say.
func TestPolicy(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	policy, err := auth.ParsePolicy([]string{"self:*"})
	if err != nil {
		t.Fatal(err)
	}
	for target, want := range map[string][]string{
		l.Addr().String(): {StepAllow, StepConnect},
		"192.0.2.1:22":    {StepAllow},
		"no-port":         {StepResolve},
	} {
		r := newEdge(policy.Try).reportOf(t.Context(), target)
		var got []string
		for _, s := range r.Steps {
			got = append(got, s.Step)
		}
		failed := r.Steps[len(r.Steps)-1].Code != ""
		if !slices.Equal(got, want) || failed == (target == l.Addr().String()) {
			t.Errorf("%s: %+v", target, r)
		}
	}
}

// The limits of the edge hold for traces as well. A refusal counts as that of an open does, a denial is a warning, and
// a name that may not be dialled tells not how many addresses it has.
func TestLimits(t *testing.T) {
	t.Parallel()
	logs := new(testkit.Log)
	tried, refusal := auth.Tried{Addresses: 3}, tunnel.Refusef(tunnel.Denied, "why")
	var limits budget
	e := NewEdge(func(context.Context, string) (auth.Tried, error) {
		if limits.dials != 1 {
			t.Errorf("%d dials are counted during the dial", limits.dials)
		}
		return tried, refusal
	}, new(tunnel.Counters), slog.New(slog.NewTextHandler(logs, nil)))
	e.Budget = &limits
	r := e.reportOf(t.Context(), "db:5432")
	if len(r.Steps) != 2 || r.Steps[0].Text != "the name db resolves" || r.Steps[1].Code != "denied" {
		t.Errorf("%+v", r)
	}
	if n := e.counters.Refusals(tunnel.Denied); n != 1 {
		t.Errorf("%d denials are counted", n)
	}
	if len(logs.Lines("level=WARN", "denied", "target=db:5432")) != 1 {
		t.Error("a denial is no warning")
	}
	if want := []string{"admit db:5432", "dialled db:5432 denied"}; !slices.Equal(limits.told, want) || limits.dials != 0 {
		t.Errorf("the limits were told %q, and have %d dials", limits.told, limits.dials)
	}

	limits = budget{full: tunnel.Refusef(tunnel.Overloaded, "limit dials: full")}
	e.try = func(context.Context, string) (auth.Tried, error) { panic("dials beyond the limit") }
	r = e.reportOf(t.Context(), "db:5432")
	if len(r.Steps) != 1 || r.Steps[0].Code != "overloaded" || len(limits.told) != 1 {
		t.Errorf("%+v; the limits were told %q", r, limits.told)
	}
}

// queued is a budget that a queue bounds.
type queued struct{ *tunnel.Queue }

func (q queued) Admit(ctx context.Context, r tunnel.Request) *tunnel.Refusal {
	return q.Enter(ctx, nil, r)
}

func (q queued) Dialled(r tunnel.Request, err error) { q.Queue.Dialled(r.Addr, err == nil) }

// The conn of a trace has the last place of its edge: the trace says so at once, and does not wait for itself.
func TestLastPlace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		limits := queued{&tunnel.Queue{Name: "node edge1", Conns: 1, Counters: new(tunnel.Counters)}}
		if err := limits.Enter(t.Context(), nil, tunnel.Request{Category: name, Addr: "trace:0"}); err != nil {
			t.Fatal(err)
		}
		limits.Queue.Dialled("trace:0", true)
		e := newEdge(func(context.Context, string) (auth.Tried, error) { return auth.Tried{Addresses: 1, Permitted: 1}, nil })
		e.Budget = limits
		began := time.Now()
		r := e.reportOf(t.Context(), "db:5432")
		if last := r.Steps[len(r.Steps)-1]; last.Code != "overloaded" || !strings.Contains(last.Text, "does not wait") {
			t.Errorf("%+v", r)
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("the trace has waited for %s", took)
		}

		limits.Conns = 2
		if r = e.reportOf(t.Context(), "db:5432"); len(r.Steps) != 3 {
			t.Errorf("with room for the dial: %+v", r)
		}
		limits.Over()
		if conns, dials := limits.InUse(); conns != 0 || dials != 0 {
			t.Errorf("%d conns and %d dials are left", conns, dials)
		}
	})
}

// A caller that leaves ends the dial, and nothing is left behind at the edge.
func TestCallerLeaves(t *testing.T) {
	t.Parallel()
	began := make(chan struct{})
	c := &cloud{t: t, try: func(ctx context.Context, _ string) (auth.Tried, error) {
		close(began)
		<-ctx.Done()
		return auth.Tried{}, ctx.Err()
	}}
	conn, err := c.Dial(t.Context(), tunnel.Request{})
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(conn, "db:54")
	io.WriteString(conn, "32\n")
	<-began
	tunnel.Reset(conn)
	c.splices.Wait()
}

// A request that is no line has no report, and ends.
func TestNoLine(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "db:5432", strings.Repeat("x", maxTarget+1)} {
		c := &cloud{t: t, try: func(context.Context, string) (auth.Tried, error) {
			t.Errorf("%.20q: the edge dials", text)
			return auth.Tried{}, nil
		}}
		conn, err := c.Dial(t.Context(), tunnel.Request{})
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(conn, text)
		conn.(*net.TCPConn).CloseWrite()
		if b, _ := io.ReadAll(conn); len(b) > 0 {
			t.Errorf("%.20q: the edge answers %q", text, b)
		}
		conn.Close()
		c.splices.Wait()
	}
}

// An edge without the module, and a konnectivity agent, are reported as such. Other refusals stay as they are.
func TestOld(t *testing.T) {
	t.Parallel()
	away := tunnel.Refusef(tunnel.NoSuchNode, "away")
	for refusal, want := range map[*tunnel.Refusal]error{
		tunnel.Refusef(tunnel.Internal, "node edge1 runs no module %q", name): ErrOld,
		tunnel.Refusef(tunnel.Denied, "an agent dials tcp only"):              ErrOld,
		away: away,
	} {
		_, err := Target(t.Context(), &cloud{t: t, refusal: refusal}, "edge1", "db:5432")
		if !errors.Is(err, want) || tunnel.CodeOf(err) != refusal.Code {
			t.Errorf("%v: %v", refusal, err)
		}
	}
}

// FuzzParse: whatever an edge answers, a report is bounded and printable.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"steps":[{"step":"allow","text":"allow permits db:5432"},{"step":"connect","code":"refused"}]}`))
	f.Add([]byte(`{"steps":[{"text":"\u001b[2J","seconds":-1}]}`))
	f.Add([]byte(`{"steps":[]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := parse(text)
		if err != nil {
			return
		}
		if len(r.Steps) == 0 || len(r.Steps) > maxSteps {
			t.Errorf("%d steps", len(r.Steps))
		}
		for _, s := range r.Steps {
			for _, field := range []string{s.Step, s.Text, s.Code} {
				if len(field) > maxText+len("…") || field != tunnel.Printable(field) {
					t.Errorf("the text %.100q", field)
				}
			}
			if s.Seconds < 0 {
				t.Errorf("%v seconds", s.Seconds)
			}
		}
		if _, err := json.Marshal(r); err != nil {
			t.Error(err)
		}
	})
}
