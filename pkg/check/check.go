// Package check looks at everything that can keep an edge or a cloud from working, and says the next step.
//
//	list := check.Edge(check.EdgeConfig{Conf: e, …})   // or check.Cloud
//	lines := check.Run(ctx, list, func(l check.Line) { fmt.Println(l.State, l.Name, l.Text) })
//	bad := check.Failed(lines)
//
// edge.go and cloud.go have the lists. way.go follows the way from an edge to the cloud, kube.go asks Kubernetes,
// apiserver.go looks at kube-apiserver's flags, cni.go at the network of a node's pods, and services.go at Services.
//
// A check changes nothing: it opens no session, and a live session continues. A check trusts nothing that it reads. A
// text never holds a secret, and bytes from other programs are made printable.
//
// The package reads neither flags nor the environment. Its caller loads the configuration. If the configuration has
// problems, the caller reports them, and no check runs.
package check

import (
	"context"
	"fmt"

	"tunnel.example/tunnel/pkg/tunnel"
)

// State is the verdict of a check.
type State string

// The states of a check.
const (
	StateOK      State = "ok"
	StateWarn    State = "warn"    // it works, but an operator should do something
	StateFail    State = "fail"    // it does not work
	StateSkipped State = "skipped" // the check could not find out, or does not concern this machine
)

// Result is the verdict of a check, and the reason for it.
type Result struct {
	State State  `json:"state"`
	Text  string `json:"text"`
	Do    string `json:"do,omitempty"` // the next step; only of StateWarn and StateFail
}

// Check is one thing that can be wrong.
type Check struct {
	Group, Name string
	// Run makes the check. It limits its own time. The checks of a list run one after the other, so a check may use
	// what an earlier check has found.
	Run func(ctx context.Context) Result
}

// Line is the name and the result of a check that has run.
type Line struct {
	Group string `json:"group"`
	Name  string `json:"name"`
	Result
}

// Run runs the checks in order. After each check it calls tell with its line, unless tell is nil. Run returns early
// when ctx is done.
func Run(ctx context.Context, list []Check, tell func(Line)) []Line {
	lines := make([]Line, 0, len(list))
	for _, c := range list {
		if ctx.Err() != nil {
			break
		}
		l := Line{c.Group, c.Name, c.Run(ctx)}
		l.Text, l.Do = tunnel.Printable(l.Text), tunnel.Printable(l.Do)
		lines = append(lines, l)
		if tell != nil {
			tell(l)
		}
	}
	return lines
}

// Failed returns the lines with StateFail.
func Failed(lines []Line) (bad []Line) {
	for _, l := range lines {
		if l.State == StateFail {
			bad = append(bad, l)
		}
	}
	return bad
}

// Found returns a check whose result is known already.
func Found(group, name string, r Result) Check {
	return Check{group, name, func(context.Context) Result { return r }}
}

// OK returns a result with StateOK. Its text says what works.
func OK(format string, args ...any) Result {
	return Result{State: StateOK, Text: fmt.Sprintf(format, args...)}
}

// Warn returns a result with StateWarn. do says what the operator does next; the text says what was found.
func Warn(do, format string, args ...any) Result {
	return Result{StateWarn, fmt.Sprintf(format, args...), do}
}

// Fail returns a result with StateFail. do says what the operator does next; the text says what does not work.
func Fail(do, format string, args ...any) Result {
	return Result{StateFail, fmt.Sprintf(format, args...), do}
}

// Skipped returns a result with StateSkipped. Its text is "because " and the format because with args.
func Skipped(because string, args ...any) Result {
	return Result{State: StateSkipped, Text: "because " + fmt.Sprintf(because, args...)}
}
