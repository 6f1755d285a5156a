package tunnel

import (
	"errors"
	"fmt"
	"log/slog"
)

// Code says why a conn was not opened. Codes go over the wire as numbers and are
// what a program branches on; the text beside them is for people.
type Code uint8

// The numbers are those of the protobuf enum Code (docs/protocol.md).
const (
	Denied       Code = 1  // policy says no
	Refused      Code = 2  // the target answered with a reset: nothing listens there
	Unreachable  Code = 3  // no route to the target, or its name does not resolve
	Timeout      Code = 4  // the target, or the edge, did not answer in time
	NoSuchNode   Code = 5  // no session of that node lives
	Overloaded   Code = 6  // a limit on conns is reached
	Draining     Code = 7  // the other side is about to stop
	Gone         Code = 8  // the request was cancelled, or its session ended
	WrongSession Code = 9  // a conn arrived on another connection than its session's
	Internal     Code = 10 // anything else
)

//nolint:gochecknoglobals // a constant table
var codeNames = [...]string{
	Denied:       "denied",
	Refused:      "refused",
	Unreachable:  "unreachable",
	Timeout:      "timeout",
	NoSuchNode:   "no-such-node",
	Overloaded:   "overloaded",
	Draining:     "draining",
	Gone:         "gone",
	WrongSession: "wrong-session",
	Internal:     "internal",
}

// Codes lists every code, in the order of their numbers.
func Codes() []Code {
	codes := make([]Code, 0, len(codeNames)-1)
	for c := Denied; int(c) < len(codeNames); c++ {
		codes = append(codes, c)
	}
	return codes
}

// String returns the code as documents and logs write it.
func (c Code) String() string {
	if int(c) < len(codeNames) && codeNames[c] != "" {
		return codeNames[c]
	}
	return fmt.Sprintf("code-%d", uint8(c))
}

// Refusal is the error of a conn that was not opened.
type Refusal struct {
	Code Code
	Text string
	// Detail is for the log of the side that refuses, which must not tell the other side:
	// addresses behind a name, for example. It never crosses the wire.
	Detail string
}

// Refusef makes a refusal.
func Refusef(c Code, format string, args ...any) *Refusal {
	return &Refusal{Code: c, Text: fmt.Sprintf(format, args...)}
}

// Error returns the code and the text.
func (r *Refusal) Error() string {
	if r.Text == "" {
		return r.Code.String()
	}
	return r.Code.String() + ": " + r.Text
}

// LogValue implements slog.LogValuer: the error and the detail.
func (r *Refusal) LogValue() slog.Value {
	if r.Detail == "" {
		return slog.StringValue(r.Error())
	}
	return slog.StringValue(r.Error() + " (" + r.Detail + ")")
}

// Answered reports whether a dial that ended so was answered: there is a conn (nil), or the
// other side knows why not. No answer came where the target or the edge was silent, or
// where the dial was given up.
func (r *Refusal) Answered() bool { return r == nil || r.Code != Timeout && r.Code != Gone }

// CodeOf returns the code of the refusal in err's chain, or Internal when there is
// none. It must not be asked about a nil error.
func CodeOf(err error) Code {
	if r, ok := errors.AsType[*Refusal](err); ok {
		return r.Code
	}
	return Internal
}
