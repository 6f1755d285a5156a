// Package trace finds out which step of a dial through a node fails, and how long each step takes.
//
//	edge:  e := trace.NewEdge(policy.Try, counters, log)                 // a module of the edge
//	       e.Budget = client                                             // the limits of the edge
//	cloud: report, err := trace.Target(ctx, dialer, "edge1", "db:5432")  // asks that module
//
// A trace is an ordinary conn to the edge's module "trace". The cloud sends one line, the target. The edge resolves
// the name, checks its list of permitted targets, connects and disconnects; it answers with a [Report] in JSON. It
// sends nothing to the target, and does not tell the addresses behind a name. A caller learns no more than a conn to
// the target would tell. The limits, counts and warnings of an edge for dials apply to a trace as well. An edge older
// than this package refuses the conn: [ErrOld].
package trace

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	name   = "trace"        // the edge's module, and the category of its opens
	caller = "tunnel trace" // the caller in the opens of the cloud, and in the dials of an edge
	// dialTimeout is how long the dial of an edge may take. Operators wait a little longer.
	dialTimeout = 10 * time.Second
)

const (
	maxTarget = 512      // bytes of a target
	maxReport = 16 << 10 // bytes of a report
	maxSteps  = 16       // steps of a report
	maxText   = 1 << 10  // bytes of a text
)

// The steps of a dial at an edge.
const (
	StepResolve = "resolve" // find the addresses of a name
	StepAllow   = "allow"   // check the list of permitted targets
	StepConnect = "connect" // connect to the target
)

// Report is the answer of an edge: the steps of the dial in order, up to the last step or the first that failed.
type Report struct {
	Steps []Step `json:"steps"`
}

// Step is one step of a dial.
type Step struct {
	Step    string  `json:"step"`
	Text    string  `json:"text"`
	Seconds float64 `json:"seconds,omitempty"`
	Code    string  `json:"code,omitempty"` // the code of the refusal; "": the step has succeeded
}

// TryFunc dials a target and disconnects, as auth.Policy.Try does.
type TryFunc func(ctx context.Context, addr string) (auth.Tried, error)

// Edge is the edge's module. Its fields are set once.
type Edge struct {
	// Budget limits the dials. Set before the first session.
	Budget tunnel.Budget

	try      TryFunc
	counters *tunnel.Counters
	log      *slog.Logger
	// Limits of log lines: failed for traces that have failed, denied for traces that the policy denied.
	failed, denied tunnel.Limiter
}

var _ tunnel.Routed = (*Edge)(nil)

// NewEdge returns the module. It dials by calling try. It writes to log what the cloud must not learn, such as the
// address behind a name that the policy denies.
func NewEdge(try TryFunc, counters *tunnel.Counters, log *slog.Logger) *Edge {
	return &Edge{try: try, counters: counters, log: log}
}

// Name implements tunnel.Module.
func (*Edge) Name() string { return name }

// Routes implements tunnel.Routed.
func (e *Edge) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error {
			return in.Serve(func(ctx context.Context, _ tunnel.Request) (net.Conn, error) {
				return newAnswer(context.WithoutCancel(ctx), e.reportOf), nil // ctx may end when the conn is open
			})
		},
	}
}

// Run implements tunnel.Module. The sessions own the conns and wait for them.
func (*Edge) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// answer is a conn that reads the name of a target, and answers with a report. Its two directions have a goroutine
// each, in tunnel.Splice: that of Write also dials.
type answer struct {
	*io.PipeReader
	w      *io.PipeWriter
	report func(target string) Report
	cancel context.CancelFunc // ends the dial

	asked bytes.Buffer // the line so far; owned by the writer
	done  bool         // owned by the writer
}

func newAnswer(ctx context.Context, report func(ctx context.Context, target string) Report) *answer {
	ctx, cancel := context.WithCancel(ctx)
	r, w := io.Pipe()
	return &answer{
		PipeReader: r, w: w, cancel: cancel,
		report: func(target string) Report { return report(ctx, target) },
	}
}

// Write implements net.Conn. When the line is whole, it dials, and waits until the report is read.
func (a *answer) Write(p []byte) (int, error) {
	if a.done {
		return len(p), nil
	}
	line, _, whole := bytes.Cut(p, []byte{'\n'})
	a.asked.Write(line)
	switch {
	case a.asked.Len() > maxTarget:
		a.done = true
		return len(p), a.w.Close() // no report
	case !whole:
		return len(p), nil
	}
	a.done = true
	text, err := json.Marshal(a.report(a.asked.String()))
	if err == nil {
		_, err = a.w.Write(text)
	}
	a.w.CloseWithError(err) // with a nil err, the reader gets the whole report and then EOF
	return len(p), nil
}

// CloseWrite is called when the cloud has finished writing. If the line is not complete then, there is no report.
func (a *answer) CloseWrite() error {
	if a.done {
		return nil
	}
	return a.w.Close()
}

// Reset implements tunnel.Resetter.
func (a *answer) Reset() error {
	a.cancel()
	return errors.Join(a.w.CloseWithError(tunnel.ErrReset), a.CloseWithError(tunnel.ErrReset))
}

// Close implements net.Conn.
func (a *answer) Close() error {
	a.cancel()
	return errors.Join(a.w.Close(), a.PipeReader.Close())
}

// LocalAddr implements net.Conn.
func (*answer) LocalAddr() net.Addr { return addr{} }

// RemoteAddr implements net.Conn.
func (*answer) RemoteAddr() net.Addr { return addr{} }

// SetDeadline implements net.Conn. Splice sets a deadline only to end a direction.
func (a *answer) SetDeadline(t time.Time) error { return a.SetReadDeadline(t) }

// SetReadDeadline implements net.Conn.
func (a *answer) SetReadDeadline(t time.Time) error {
	if !t.IsZero() && !t.After(time.Now()) {
		a.cancel()
		a.w.CloseWithError(tunnel.ErrReset)
	}
	return nil
}

// SetWriteDeadline implements net.Conn.
func (*answer) SetWriteDeadline(time.Time) error { return nil }

// addr is the address of an answer.
type addr struct{}

// Network implements net.Addr.
func (addr) Network() string { return name }

// String implements net.Addr.
func (addr) String() string { return name }

// dial dials the target and disconnects. It fails if the limits of the edge have no room at once. It must not wait for
// room, since conns of traces themselves may have taken the places for which it would wait.
func (e *Edge) dial(ctx context.Context, target string) (tried auth.Tried, err error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	r := tunnel.Request{Category: name, Network: "tcp", Addr: target, Caller: caller, NoWait: true}
	if refusal := e.Budget.Admit(ctx, r); refusal != nil {
		return tried, tunnel.Refusef(refusal.Code,
			"%s; a trace needs room for its own conn and for its dial, and does not wait", refusal.Text)
	}
	defer func() { // runs also if try panics
		e.Budget.Dialled(r, errors.Join(err, ctx.Err()))
		e.Budget.Over()
	}()
	return e.try(ctx, target)
}

// note counts and logs a failed trace, in the same way as a session counts and logs a failed open.
func (e *Edge) note(target string, err error) {
	code := tunnel.CodeOf(err)
	e.counters.Refuse(code)
	level, lines, text := slog.LevelInfo, &e.failed, "a trace has failed"
	if code == tunnel.Denied {
		level, lines, text = slog.LevelWarn, &e.denied, "a trace that the cloud asked for is denied"
	}
	if skipped, ok := lines.Allow(); ok {
		e.log.Log(context.Background(), level, text, "target", tunnel.Printable(target), "err", err, "skipped", skipped)
	}
}

// reportOf dials the target, and says how far the dial has come.
func (e *Edge) reportOf(ctx context.Context, target string) (r Report) {
	tried, err := e.dial(ctx, target)
	if err != nil {
		e.note(target, err)
	}
	failed := func(step string, took time.Duration) Report {
		r.Steps = append(r.Steps, Step{step, err.Error(), took.Seconds(), tunnel.CodeOf(err).String()})
		return r
	}
	if tried.Addresses == 0 && err != nil {
		return failed(StepResolve, tried.Resolve)
	}
	host, _, _ := net.SplitHostPort(target)
	if _, bad := netip.ParseAddr(host); bad != nil { // a name
		r.Steps = append(r.Steps, Step{
			Step: StepResolve, Text: "the name " + host + " resolves" + counted(tried), Seconds: tried.Resolve.Seconds(),
		})
	}
	if tried.Permitted == 0 && err != nil {
		return failed(StepAllow, 0)
	}
	text := "allow permits " + target
	if tried.Permitted < tried.Addresses {
		text = fmt.Sprintf("allow permits %d of the %d addresses", tried.Permitted, tried.Addresses)
	}
	r.Steps = append(r.Steps, Step{Step: StepAllow, Text: text})
	if err != nil {
		return failed(StepConnect, tried.Connect)
	}
	r.Steps = append(r.Steps, Step{Step: StepConnect, Text: "connected to " + target, Seconds: tried.Connect.Seconds()})
	return r
}

// counted returns a text with the number of addresses of a name. For a name that the policy denies, it tells no number.
func counted(tried auth.Tried) string {
	switch {
	case tried.Permitted == 0:
		return ""
	case tried.Addresses == 1:
		return " to 1 address"
	}
	return fmt.Sprintf(" to %d addresses", tried.Addresses)
}

// ErrOld is the error of an edge that has no module for traces.
var ErrOld = errors.New(
	"the node answers no traces: its edge is older than tunnel trace, or it is a konnectivity agent")

// Traced is the result of a trace.
type Traced struct {
	Open   time.Duration // the time to open the conn to the edge: a round trip through the tunnel
	Report Report
}

// Target asks the edge of a node for the steps of a dial to target, host:port. The report says whether the dial has
// failed. An error means that Target has got no report from the edge.
func Target(ctx context.Context, dialer tunnel.Dialer, node tunnel.NodeName, target string) (Traced, error) {
	began := time.Now()
	c, err := dialer.Dial(ctx, tunnel.Request{
		Node: node, Category: name, Network: name, Addr: net.JoinHostPort(name, "0"), Caller: caller,
	})
	if err != nil {
		switch tunnel.CodeOf(err) {
		case tunnel.Internal, tunnel.Denied: // the code for a module that an edge lacks; the code of agents
			err = fmt.Errorf("%w (%w)", ErrOld, err)
		}
		return Traced{}, err
	}
	defer c.Close()
	traced := Traced{Open: time.Since(began)}
	if until, ok := ctx.Deadline(); ok {
		c.SetDeadline(until)
	}
	var text []byte
	if _, err = io.WriteString(c, target+"\n"); err == nil {
		text, err = io.ReadAll(io.LimitReader(c, maxReport+1))
	}
	if err == nil {
		traced.Report, err = parse(text)
	}
	if err != nil {
		return traced, fmt.Errorf("the report of node %s: %w", node, err)
	}
	return traced, nil
}

// parse parses the report of an edge. Since an edge may send anything, parse makes the texts printable and cuts them.
func parse(text []byte) (Report, error) {
	var r Report
	if len(text) > maxReport {
		return r, fmt.Errorf("longer than %d bytes", maxReport)
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return Report{}, err
	}
	if len(r.Steps) == 0 || len(r.Steps) > maxSteps {
		return Report{}, fmt.Errorf("%d steps", len(r.Steps))
	}
	for i := range r.Steps {
		s := &r.Steps[i]
		for _, field := range []*string{&s.Step, &s.Text, &s.Code} {
			if len(*field) > maxText {
				*field = strings.ToValidUTF8((*field)[:maxText], "") + "…"
			}
			*field = tunnel.Printable(*field)
		}
		s.Seconds = max(0, s.Seconds)
	}
	return r, nil
}
