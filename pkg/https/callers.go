package https

import (
	"cmp"
	"net/url"
	"path"
	"slices"
	"strings"

	"tunnel.example/tunnel/pkg/auth"
)

// Caller is a caller that may send only some classes of requests.
type Caller struct {
	Name string       // common name, compared exactly
	May  []auth.Class // classes of requests that it may send
}

// Lists say who may call, and how often. A Lists never changes: SetLists replaces it. Each field has the meaning of
// the field of [Config] or [Limits] with the same name.
type Lists struct {
	ClientNames     []string
	Callers         []Caller
	AllowFrom       auth.Sources
	ConnsPerAddress int
}

// SetLists replaces the lists. Open connections stay open, even if their source may no longer connect. The front
// door checks each request of a terminated connection by the lists that are valid when the request comes.
func (f *FrontDoor) SetLists(l Lists) {
	l.ConnsPerAddress = cmp.Or(l.ConnsPerAddress, DefaultLimits().ConnsPerAddress)
	f.lists.Store(&l)
}

func (l *Lists) clientNames() []string {
	if len(l.ClientNames) == 0 {
		return []string{DefaultClientName}
	}
	return l.ClientNames
}

// classesOf returns the classes of requests that a caller may send whose verified certificate has this
// common name. If there are none, the caller may not call.
func (f *FrontDoor) classesOf(name string) []auth.Class {
	l := f.lists.Load()
	if slices.Contains(l.clientNames(), name) {
		return []auth.Class{auth.ClassAll}
	}
	if i := slices.IndexFunc(l.Callers, func(c Caller) bool { return c.Name == name }); i >= 0 {
		return l.Callers[i].May
	}
	return nil
}

// permits reports whether a caller with these classes may send a request of class c.
func permits(classes []auth.Class, c auth.Class) bool {
	return slices.Contains(classes, auth.ClassAll) || slices.Contains(classes, c)
}

// classOf returns the class of a request. The path decides, never the method: an exec over
// WebSocket is a GET. auth.ClassAll is the class of paths that are not listed here, and of paths
// that a kubelet could interpret differently.
func classOf(u *url.URL) auth.Class {
	// RawPath is set if decoding the path to Path loses information: an encoded slash or letter.
	if u.RawPath != "" || !isCanonical(u.Path) {
		return auth.ClassAll
	}
	first, _, _ := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	switch first {
	case "metrics", "stats":
		return auth.ClassMetrics
	case "healthz":
		return auth.ClassHealth
	case "pods", "runningpods":
		return auth.ClassPods
	case "containerLogs", "logs":
		return auth.ClassLogs
	case "exec", "attach", "run", "portForward":
		return auth.ClassExec
	}
	return auth.ClassAll
}

// isCanonical reports whether all readers agree on the meaning of p. So p must not have dot or
// empty segments, backslashes, percent signs (p is decoded already) or control characters, which
// some reader could remove or resolve.
func isCanonical(p string) bool {
	clean := path.Clean(p)
	if strings.HasSuffix(p, "/") && clean != "/" {
		clean += "/"
	}
	return strings.HasPrefix(p, "/") && clean == p &&
		!strings.ContainsFunc(p, func(r rune) bool { return r == '\\' || r == '%' || r < ' ' || r == 0x7f })
}
