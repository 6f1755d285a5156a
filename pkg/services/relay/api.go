package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/services"
)

// List is the answer to GET /v1/services.
type List struct {
	Node  string     `json:"node"`
	Stale *time.Time `json:"stale_since,omitempty"` // nil: the state is that of the cloud; zero: it never was
	Why   string     `json:"stale_because,omitempty"`
	Ports []Port     `json:"ports"`
}

// Served says which program serves connections from this node to a port of a Service.
type Served string

// The values of Served.
const (
	ServedKubeProxy Served = "kube-proxy" // the edge leaves the port to kube-proxy
	ServedRules     Served = "rules"      // rules of the edge in the kernel, which lead to direct endpoints
	ServedRelay     Served = "relay"      // the edge, through the tunnel
	ServedNobody    Served = "nobody"     // no endpoint may be used: the kernel refuses or drops connections
)

// Port is a port of a Service at one of its addresses. In mode full, these include external IPs, and 0.0.0.0 or :: for
// a node port.
type Port struct {
	Service   string    `json:"service"` // NAMESPACE/NAME
	Name      string    `json:"name,omitempty"`
	Address   string    `json:"address"`
	Protocol  string    `json:"protocol"`
	Port      uint16    `json:"port"`
	Served    Served    `json:"served"`
	Usable    int       `json:"usable"`              // endpoints that a connection may get
	Known     int       `json:"known"`               // endpoints of the Service that this node was told
	Endpoints []Verdict `json:"endpoints,omitempty"` // only in the answer about one Service
}

// Verdict says of an endpoint why a connection may get it or not.
type Verdict struct {
	Address string `json:"address"`
	Port    uint16 `json:"port,omitempty"`
	Node    string `json:"node,omitempty"`
	Zone    string `json:"zone,omitempty"`
	Usable  bool   `json:"usable"`
	Why     string `json:"why"`
}

// Line is a line of the answer to GET /v1/services/watch: an item that was set or deleted.
type Line struct {
	Time    time.Time       `json:"time"`
	Path    string          `json:"path,omitempty"`
	Deleted bool            `json:"deleted,omitempty"`
	Value   json.RawMessage `json:"value,omitempty"` // the new value of the item
	Lost    int             `json:"lost,omitempty"`  // lines that found no room since the last such number
}

// Handlers returns the handlers of paths of the admin socket, by their patterns.
func (r *Relay) Handlers() map[string]http.Handler {
	return map[string]http.Handler{
		"GET /v1/services": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			answer(w, r.list(""))
		}),
		"GET /v1/services/{namespace}/{name}": http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			name := q.PathValue("namespace") + "/" + q.PathValue("name")
			list := r.list(name)
			if list == nil {
				refuse(w, http.StatusNotFound, "no-such-service",
					fmt.Errorf("node %s knows no Service %s", r.cfg.Node, name))
				return
			}
			answer(w, list)
		}),
		"GET /v1/services/watch": http.HandlerFunc(r.watchItems),
	}
}

// answer writes v as JSON, in the form that package api reads.
func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	json.NewEncoder(w).Encode(v) //nolint:errcheck // the caller has gone
}

// refuse writes an error as JSON, in the form that package api reads.
func refuse(w http.ResponseWriter, status int, code string, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	//nolint:errcheck // the caller has gone
	json.NewEncoder(w).Encode(map[string]string{"error": err.Error(), "code": code})
}

// list returns the ports of all Services. With only, it returns the ports of that Service and its endpoints, or nil if
// there is no such Service.
func (r *Relay) list(only string) *List {
	r.mu.RLock()
	defer r.mu.RUnlock()
	list := &List{Node: string(r.cfg.Node), Ports: []Port{}}
	if !r.current {
		since := r.since
		list.Stale = &since
		if r.watch != nil {
			list.Why = r.watch.Error()
		}
	}
	found := only == ""
	for path, service := range r.state.Services() {
		name := nameOf(path)
		if only != "" && name != only {
			continue
		}
		found = true
		endpoints := r.state.Endpoints(path)
		for f := range r.planner.frontends(path, service) {
			list.Ports = append(list.Ports, r.describeLocked(f, name, endpoints, only != ""))
		}
	}
	if !found {
		return nil
	}
	return list
}

// describeLocked describes a frontend, with whole also its endpoints. The caller holds mu.
func (r *Relay) describeLocked(f frontend, name string, endpoints []services.Named, whole bool) Port {
	node := string(r.cfg.Node)
	w := r.planner.ways(r.state, f, chosen(f, endpoints, r.planner.self(r.state)))
	p := Port{
		Service: name, Name: f.port.GetName(), Address: f.at.Addr().String(), Protocol: f.at.protocol, Port: f.at.Port(),
		Known: len(endpoints),
	}
	rule, ours := r.planner.rule(r.state, f, endpoints)
	ends := max(len(rule.ends), len(rule.local))
	tries := !ours // kube-proxy tries endpoints that nobody reaches; the edge's rules do so only if there are no others
	switch {
	case ours && rule.relayed():
		p.Served, p.Usable = ServedRelay, len(w.direct)+len(w.far)
	case ours && ends > 0:
		p.Served, p.Usable = ServedRules, ends
		tries = len(w.direct) == 0
	case !ours && len(w.direct)+len(w.none) > 0:
		p.Served, p.Usable = ServedKubeProxy, len(w.direct)+len(w.none)
	default:
		p.Served = ServedNobody
	}
	if !whole {
		return p
	}
	why := make(map[services.Path]Verdict)
	for _, one := range w.direct {
		text := "it is in a network that this node reaches by itself (direct, or routes in [mode.edge.cni])"
		if services.Home(one.Endpoint) == node {
			text = "it is on this node"
		}
		why[one.Path] = Verdict{Usable: true, Why: text}
	}
	for _, one := range w.far {
		v := Verdict{Usable: true, Why: "it is reachable through the tunnel"}
		if len(w.direct) > 0 && !rule.relayed() {
			v = Verdict{Why: "it is reachable through the tunnel, but this node reaches others by itself"}
		}
		why[one.Path] = v
	}
	for _, one := range w.none {
		text := "the tunnel does not lead to it: it is on no edge node, and [mode.cloud.services] allow has no \"cluster\""
		if _, ok := addressOf(r.state, one.Endpoint); !ok {
			text = "it is no address of a pod"
		}
		usable := tries && p.Served != ServedNobody
		switch {
		case usable && p.Served == ServedKubeProxy:
			text = "kube-proxy tries it; " + text
		case usable:
			text = "the rules try it; " + text
		}
		why[one.Path] = Verdict{Usable: usable, Why: text}
	}
	for _, e := range endpoints {
		v, chosen := why[e.Path]
		if !chosen {
			v.Why = whyNot(f, e.Endpoint)
		}
		v.Address, v.Node, v.Zone = e.GetAddress(), services.Home(e.Endpoint), e.GetZone()
		v.Port = services.TargetPort(e.Endpoint, f.port)
		p.Endpoints = append(p.Endpoints, v)
	}
	return p
}

// whyNot says why Kubernetes does not permit an endpoint for a frontend.
func whyNot(f frontend, e *services.Endpoint) string {
	switch {
	case strings.Contains(e.GetAddress(), ":") != f.at.Addr().Is6():
		return "it is of the other family"
	case services.TargetPort(e, f.port) == 0:
		return fmt.Sprintf("it has no port %q", f.port.GetName())
	case e.GetTerminating() && e.GetServing():
		return "it terminates, and others are ready"
	case e.GetTerminating():
		return "it terminates"
	case !e.GetReady():
		return "it is not ready"
	case f.service.GetInternalLocal() && !f.external:
		return "internalTrafficPolicy is Local, and it is not on this node"
	}
	return "its hints are for other nodes or zones, or its address is listed twice"
}

// maxWatchers is how many operators may watch at a time.
const maxWatchers = 4

// maxStall is how long a watcher may take to read what was sent.
const maxStall = time.Minute

// watchItems answers with a line for each item that changes, until the client leaves.
func (r *Relay) watchItems(w http.ResponseWriter, q *http.Request) {
	watcher := r.watchers.add()
	if watcher == nil {
		refuse(w, http.StatusTooManyRequests, "overloaded",
			errors.New("too many operators watch this edge already: end one tunnel services watch, and try again"))
		return
	}
	defer r.watchers.remove(watcher)
	control := http.NewResponseController(w)
	control.SetReadDeadline(time.Time{}) // it fails only for a conn that has ended
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	lines := json.NewEncoder(w)
	for {
		control.SetWriteDeadline(time.Now().Add(maxStall))
		if control.Flush() != nil {
			return
		}
		line, ok := watcher.next(q.Context())
		if !ok || lines.Encode(line) != nil {
			return
		}
	}
}

// watchers are the operators that watch changes.
type watchers struct {
	mu  sync.Mutex // guards the following
	all []*watcher
}

// watcher is a bounded queue of lines.
type watcher struct {
	lines chan Line    // tell sends, next receives; never closed
	lost  atomic.Int64 // lines that found no room since next has told
}

func (w *watchers) add() *watcher {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.all) >= maxWatchers {
		return nil
	}
	one := &watcher{lines: make(chan Line, 1024)}
	w.all = append(w.all, one)
	return one
}

func (w *watchers) remove(one *watcher) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = slices.DeleteFunc(w.all, func(other *watcher) bool { return other == one })
}

// tell queues a line for each changed item at all watchers. It never waits.
func (w *watchers) tell(d *services.Difference) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.all) == 0 {
		return
	}
	now := time.Now()
	for _, p := range d.Deleted {
		w.putLocked(Line{Time: now, Path: p, Deleted: true})
	}
	for _, item := range d.Set {
		w.putLocked(Line{Time: now, Path: item.GetPath(), Value: valueOf(item.GetPath(), item.GetValue())})
	}
}

func (w *watchers) putLocked(line Line) {
	for _, one := range w.all {
		one.put(line)
	}
}

func (w *watcher) put(line Line) {
	select {
	case w.lines <- line:
	default:
		w.lost.Add(1)
	}
}

// next returns the next line. ok is false when ctx is done.
func (w *watcher) next(ctx context.Context) (line Line, ok bool) {
	if lost := w.lost.Swap(0); lost > 0 {
		return Line{Time: time.Now(), Lost: int(lost)}, true
	}
	select {
	case line = <-w.lines:
		return line, true
	case <-ctx.Done():
		return line, false
	}
}

// valueOf returns an item as JSON; nil if it cannot be read.
func valueOf(p services.Path, value []byte) json.RawMessage {
	var v proto.Message
	switch {
	case strings.HasPrefix(p, "service/"):
		v = new(services.Service)
	case strings.HasPrefix(p, "endpoint/"):
		v = new(services.Endpoint)
	case strings.HasPrefix(p, "node/"):
		v = new(services.Node)
	default:
		return nil
	}
	if proto.Unmarshal(value, v) != nil {
		return nil
	}
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(v)
	if err != nil {
		return nil
	}
	return text
}
