package https

import (
	"net/url"
	"path"
	"slices"
	"strings"

	"tunnel/pkg/auth"
)

// Caller is a caller that may send some kinds of requests only.
type Caller struct {
	Name string // common name, compared exactly
	May  []auth.Class
}

// may returns what a verified certificate of that name may ask for; nothing: it may not call.
func (f *FrontDoor) may(name string) []auth.Class {
	if slices.Contains(f.cfg.clientNames(), name) {
		return []auth.Class{auth.ClassAll}
	}
	if i := slices.IndexFunc(f.cfg.Callers, func(c Caller) bool { return c.Name == name }); i >= 0 {
		return f.cfg.Callers[i].May
	}
	return nil
}

// permits reports whether a caller that may ask for those classes may send a request of
// class c.
func permits(may []auth.Class, c auth.Class) bool {
	return slices.Contains(may, auth.ClassAll) || slices.Contains(may, c)
}

// classOf returns the class of a request. The path decides, never the method: an exec over
// WebSocket is a GET. A path that a kubelet could read differently from us is in
// auth.ClassAll, as is every path that is not listed here.
func classOf(u *url.URL) auth.Class {
	// RawPath is set where Path has lost something: an encoded slash or letter.
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

// isCanonical reports whether no two readers of p could disagree: it has no dots, empty
// segments, backslashes, percent signs (it is decoded already) or control characters that one of
// them might take away.
func isCanonical(p string) bool {
	clean := path.Clean(p)
	if strings.HasSuffix(p, "/") && clean != "/" {
		clean += "/"
	}
	return strings.HasPrefix(p, "/") && clean == p &&
		!strings.ContainsFunc(p, func(r rune) bool { return r == '\\' || r == '%' || r < ' ' || r == 0x7f })
}
