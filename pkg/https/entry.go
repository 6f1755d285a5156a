package https

import (
	"cmp"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"

	"tunnel.example/tunnel/pkg/tunnel"
)

// entry is the response writer of one terminated request. It notes what the log, the counts and the audit say
// about the request. The handler's goroutine owns it, except received.
type entry struct {
	http.ResponseWriter
	f    *FrontDoor
	r    *http.Request
	conn *clientConn

	visit    tunnel.Visit
	kind     tunnel.EventKind // the event that the request is
	path     string           // the path in events: see eventOf
	status   int              // the status of the response; 0: there is none yet
	caller   string           // common name of the caller's certificate
	node     tunnel.NodeName
	sent     int64        // bytes to the caller
	received atomic.Int64 // bytes from the caller; the transport's goroutine reads the body

	refused bool        // the front door has answered, not the target
	code    tunnel.Code // the code of our refusal; 0: the request itself is wrong
	why     string      // what was wrong; "": nothing
	denied  denial      // the kind of the warning; 0: the kind that belongs to code
}

func (f *FrontDoor) newEntry(w http.ResponseWriter, r *http.Request, c *clientConn) *entry {
	e := &entry{ResponseWriter: w, f: f, r: r, conn: c, caller: callerOf(*r.TLS)}
	e.arrive()
	return e
}

// arrive begins the visit.
func (e *entry) arrive() {
	e.visit = e.f.cfg.Sink.ArrivedIn(e.f.traceOf(e.r), &e.f.cfg.Counters.Doors[tunnel.DoorHTTPS])
	e.kind, e.path = eventOf(e.r.URL.Path)
	e.visit.Quiet = e.kind == tunnel.EventRequest
}

// Unwrap is for http.ResponseController.
func (e *entry) Unwrap() http.ResponseWriter { return e.ResponseWriter }

// WriteHeader implements http.ResponseWriter.
func (e *entry) WriteHeader(status int) {
	e.head(status)
	e.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (e *entry) Write(b []byte) (int, error) {
	e.head(http.StatusOK)
	n, err := e.ResponseWriter.Write(b)
	e.sent += int64(n)
	return n, err
}

// head notes the status of the response. It ignores further calls, and informational statuses other than 101.
func (e *entry) head(status int) {
	if e.status == 0 && (status >= 200 || status == http.StatusSwitchingProtocols) {
		e.status = status
		if !e.refused {
			e.visit.Opened(e.event)
		}
	}
}

// refuse notes that we have refused the request.
func (e *entry) refuse(code tunnel.Code, why string) { e.refused, e.code, e.why = true, code, why }

// maxShown is the longest path or text in a log line, in bytes.
const maxShown = 512

// shown returns text for a log line: cut to maxShown.
func shown(text string) string {
	if len(text) > maxShown {
		return strings.ToValidUTF8(text[:maxShown], "") + "…"
	}
	return text
}

// end is called when the request is over. panicked is true if a panic of ours has ended it. end logs a refused request
// as a warning, and any other request at level debug. It never logs the query, which may hold what a caller runs or
// types.
func (e *entry) end(panicked bool) {
	switch {
	case panicked:
		e.refuse(tunnel.Internal, "a panic in the front door: the log has it")
	case e.status == 0 && !e.refused:
		e.refuse(tunnel.Gone, "the caller has gone")
	}
	e.log()
	// Both calls take first the bytes from the caller, and then the bytes to the caller.
	if e.refused {
		e.visit.Rejected(e.code, e.why, e.received.Load(), e.sent, e.event)
	} else {
		e.visit.Ended(e.received.Load(), e.sent, nil, e.event)
	}
}

// log writes the line of the request.
func (e *entry) log() {
	gone := e.code == tunnel.Gone && e.status == 0
	isWarning := e.refused && !gone
	if !isWarning && !e.f.log.Enabled(e.r.Context(), slog.LevelDebug) {
		return // nearly every request: save the time to make its line
	}
	args := []any{
		"frontend", e.conn.LocalAddr().String(), "target", e.conn.target, "node", string(e.node),
		"caller", shown(e.caller), "remote", e.r.RemoteAddr,
		"method", shown(e.r.Method), "path", shown(e.path), "status", e.status,
		"bytes", e.sent + e.received.Load(), "dur", e.visit.Since(),
	}
	switch {
	case gone:
		e.f.log.Debug("https request ended", append(args, "module", Name, "err", e.why)...)
	case !isWarning:
		e.f.log.Debug("https request served", append(args, "module", Name, "err", e.why)...)
	default:
		msg := "https request failed"
		if e.code == tunnel.Denied || e.denied != 0 {
			msg = "https request denied"
		}
		e.f.warn(cmp.Or(e.denied, failureOf(e.code)), msg, append(args, "err", shown(e.why))...)
	}
}

// event describes the request for its visit. It copies method and path: both point into the request line, which would
// stay in memory with its query.
func (e *entry) event() tunnel.Event {
	return tunnel.Event{
		Kind: e.kind, Node: e.node, Caller: e.caller, Remote: e.r.RemoteAddr,
		Door: e.conn.LocalAddr().String(), Target: e.conn.target,
		Method: strings.Clone(e.r.Method), Path: strings.Clone(e.path), Status: e.status,
	}
}

// eventOf returns the kind of event for a request with this path, and the path for the event. A kubelet that redirects
// callers to its streaming server uses paths such as /cri/exec/TOKEN. The token is a secret, so eventOf leaves it out.
func eventOf(path string) (tunnel.EventKind, string) {
	first, rest, _ := strings.Cut(strings.TrimLeft(path, "/"), "/")
	if first == "cri" {
		first, _, _ = strings.Cut(strings.TrimLeft(rest, "/"), "/")
		path = "/cri/" + first
	}
	switch first {
	case "exec", "run":
		return tunnel.EventExec, path
	case "attach":
		return tunnel.EventAttach, path
	case "portForward", "portforward":
		return tunnel.EventPortForward, path
	}
	return tunnel.EventRequest, path
}
