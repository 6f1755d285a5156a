package tunnel

import (
	"errors"
	"fmt"
	"log/slog"
)

// Code is the reason why a conn was not opened. Codes go over the wire as numbers.
// Programs branch on the code; the text beside it is for people.
type Code uint8

// The numbers are those of the protobuf enum Code (docs/protocol.md).
const (
	Denied       Code = 1  // a policy does not allow the dial
	Refused      Code = 2  // the target answered with a reset: nothing listens there
	Unreachable  Code = 3  // no route to the target, or its name does not resolve
	Timeout      Code = 4  // the target, or the edge, did not answer in time
	NoSuchNode   Code = 5  // the node has no live session
	Overloaded   Code = 6  // a limit on conns is reached
	Draining     Code = 7  // the other side is about to stop
	Gone         Code = 8  // the request was cancelled, or its session ended
	WrongSession Code = 9  // a stream that needs a session arrived on a connection without one
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

// Codes returns all codes, sorted by number.
func Codes() []Code {
	codes := make([]Code, 0, len(codeNames)-1)
	for c := Denied; int(c) < len(codeNames); c++ {
		codes = append(codes, c)
	}
	return codes
}

// String returns the name of the code in documents, logs and metrics.
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
	// Detail is only for the log of the refusing side. It holds what the other side must not
	// learn, for example the addresses behind a name. It never goes over the wire.
	Detail string
}

// Refusef returns a refusal with a formatted text.
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

// Answered reports whether the dial that ended with r got an answer: there is a conn (r is nil),
// or the other side knows why there is none. There was no answer if the target or the edge
// stayed silent, or if the dial was abandoned.
func (r *Refusal) Answered() bool { return r == nil || r.Code != Timeout && r.Code != Gone }

// CodeOf returns the code of the refusal in err's chain, or Internal if there is
// none. err must not be nil.
func CodeOf(err error) Code {
	if r, ok := errors.AsType[*Refusal](err); ok {
		return r.Code
	}
	return Internal
}
