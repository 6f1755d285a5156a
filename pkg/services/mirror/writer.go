package mirror

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// writeInterval is the least time between two reconciliations. A new EndpointSlice gets its endpoints in the
	// reconciliation after its creation, so that the replicas have time to open its ports.
	writeInterval = time.Second
	// resyncInterval is how often the leader reconciles when nothing has changed: a port may have become free meanwhile.
	resyncInterval = freedFor
	// minRetry is the pause after the first failure. The pause doubles with each further failure, up to maxRetry.
	minRetry, maxRetry = time.Second, 15 * time.Second
)

// Election elects the replica that writes. *kube.Lease implements it.
type Election interface {
	// Run calls lead while this replica is the leader. It returns when ctx is done and lead has returned.
	Run(ctx context.Context, lead func(ctx context.Context))
	// Err returns why the leader is unknown; nil: it is known.
	Err() error
}

// Writer is the module that writes twins and their EndpointSlices while this replica is the leader.
type Writer struct {
	// Set once.
	m        *Mirror
	election Election
	interval time.Duration

	warnings tunnel.Limiter // limits log lines about problems

	mu       sync.Mutex        // guards the following
	problems map[string]string // why an original has no twin, by NAMESPACE/NAME; empty unless this replica leads
	err      error             // why the last reconciliation failed; nil: it did not, or another replica is the leader
}

// NewWriter returns a Writer for m. The Run of m must run as well.
func NewWriter(m *Mirror, election Election) *Writer {
	return &Writer{
		m: m, election: election, interval: writeInterval, warnings: tunnel.Limiter{Every: time.Second, Burst: 100},
	}
}

// Name implements tunnel.Module.
func (w *Writer) Name() string { return "mirror-twins" }

// Note returns why twins are missing or out of date; "": none is. It leaves out what is wrong with one Service, which
// only the log names: a user's mistake must not make the cloud look degraded.
func (w *Writer) Note() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch err := w.election.Err(); {
	case err != nil:
		return fmt.Sprintf("the Lease %s cannot be used: %v", kube.MirrorLease, kube.Explain(err))
	case w.err != nil:
		return "the twins cannot be written: " + w.err.Error()
	}
	return ""
}

// Run implements tunnel.Module.
func (w *Writer) Run(ctx context.Context) error {
	w.election.Run(ctx, w.lead)
	return nil
}

// lead writes twins and EndpointSlices until ctx is done: until this replica is no longer the leader.
func (w *Writer) lead(ctx context.Context) {
	defer w.note(nil, nil)
	t := term{m: w.m, given: make(map[string]uint16)}
	failures := 0
	for ctx.Err() == nil {
		changed := w.m.cfg.Objects.Changed() // before View, so that no change is missed
		var problems map[string]string
		err := tunnel.Guard(w.m.log, w.m.cfg.Counters, "the twins stay as they are", func() (err error) {
			problems, err = t.reconcile(ctx)
			return err
		})
		if ctx.Err() != nil {
			return
		}
		w.note(problems, err)
		again := resyncInterval
		if err == nil {
			failures = 0
		} else {
			failures++
			again = max(min(minRetry<<min(failures-1, 10), maxRetry), kube.RetryAfter(err))
		}
		wait(ctx, w.interval, nil)
		wait(ctx, again, changed)
	}
}

// wait waits for d, or until changed is closed or ctx is done.
func wait(ctx context.Context, d time.Duration, changed <-chan struct{}) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-changed:
	case <-ctx.Done():
	}
}

// note stores the outcome of a reconciliation, and logs problems that the last outcome did not have.
func (w *Writer) note(problems map[string]string, err error) {
	w.mu.Lock()
	before, beforeErr := w.problems, w.err
	w.problems, w.err = problems, err
	w.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(problems)) {
		if problems[key] == before[key] {
			continue
		}
		if skipped, ok := w.warnings.Allow(); ok { // users decide how many there are
			w.m.log.Warn("a Service has no complete twin", "target", key, "err", problems[key], "skipped", skipped)
		}
	}
	if err != nil && beforeErr == nil {
		w.m.log.Warn("the twins cannot be written", "err", err)
	}
}

// term is one term of a leader. One goroutine owns it.
type term struct {
	m *Mirror
	// given are the ports that this term has assigned, by the host:port of the original. The watch may show them only
	// later.
	given map[string]uint16
	began time.Time    // when begin has read the EndpointSlices; zero: it has not
	first []kube.Slice // the EndpointSlices that begin has read; nil after freedFor
}

// reconcile writes the twins and EndpointSlices that originals want, and deletes other twins. When one write fails, it
// continues with the others.
func (t *term) reconcile(ctx context.Context) (problems map[string]string, err error) {
	cfg := t.m.cfg
	if err = t.begin(ctx); err != nil {
		return nil, err
	}
	v := cfg.Objects.View()
	if !v.Known {
		return nil, nil
	}
	t.m.track(v.Slices)
	if len(v.Replicas) == 0 {
		err = errors.New("the Service that service in [mode.cloud.services.mirror] names has no EndpointSlice")
	}
	originals, problems := cfg.originals(v)
	ports, full := t.assign(v, originals, problems)
	err = errors.Join(err, full)
	services := make(map[string]kube.Service)
	for _, s := range v.Services {
		services[s.Key()] = s
	}
	for _, key := range slices.Sorted(maps.Keys(originals)) {
		o := originals[key]
		if len(ports[key]) == 0 {
			continue // no port is free
		}
		twin, exists := services[key]
		failed := kube.ErrTaken
		switch {
		case !exists:
			twin = kube.Service{Ports: ports[key], Object: kube.Object{
				Namespace: o.Namespace, Name: o.twin, Labels: map[string]string{labelOf: o.Name},
			}}
			failed = cfg.Objects.CreateService(ctx, twin, o.Service)
		case twin.Labels[Label] == cfg.Owner && twin.Labels[labelOf] == o.Name:
			failed = t.update(ctx, v, o, twin, ports[key])
		}
		if errors.Is(failed, kube.ErrTaken) {
			taken := "the Service " + o.twin
			if slice, ok := errors.AsType[takenSlice](failed); ok {
				taken = slice.String()
			}
			problems[o.Key()] = fmt.Sprintf("%s exists, and this cloud has not made it: remove it, or write "+
				"another name as value of the annotation %s", taken, Annotation)
			continue
		}
		err = errors.Join(err, unlessConflict(failed))
	}
	return problems, errors.Join(err, t.clean(ctx, v, originals))
}

// update changes an existing twin and its EndpointSlices to what the original o wants.
func (t *term) update(
	ctx context.Context, v kube.MirrorView, o original, twin kube.Service, ports []kube.ServicePort,
) error {
	if twin.Owner != o.UID { // the original was deleted and made again: Kubernetes is about to delete its twin, too
		return t.m.cfg.Objects.DeleteService(ctx, twin)
	}
	var failed error
	if !slices.Equal(twin.Ports, ports) {
		twin.Ports = ports
		failed = t.m.cfg.Objects.PatchService(ctx, twin)
	}
	return errors.Join(unlessConflict(failed), t.writeSlices(ctx, v, twin, ports))
}

// takenSlice is the error for an EndpointSlice that exists although this cloud has not made it. Its value is the name.
type takenSlice string

func (s takenSlice) String() string { return "the EndpointSlice " + string(s) }

// Error implements error.
func (s takenSlice) Error() string { return s.String() + ": " + kube.ErrTaken.Error() }

// Unwrap returns kube.ErrTaken.
func (takenSlice) Unwrap() error { return kube.ErrTaken }

// unlessConflict returns err, or nil if another writer has changed the object first. The watch then shows the change,
// and the leader reconciles again.
func unlessConflict(err error) error {
	if kube.ReasonFor(err) == kube.Conflict {
		return nil
	}
	return err
}

// begin reads the EndpointSlices once in a term, without the watch. The leader before may have assigned ports that the
// watch does not show yet. A twin keeps such a port, and no other twin gets the port for freedFor.
func (t *term) begin(ctx context.Context) error {
	if !t.began.IsZero() {
		return nil
	}
	all, err := t.m.cfg.Objects.ListSlices(ctx)
	if err != nil {
		return kube.Explain(err)
	}
	t.began, t.first = time.Now(), all
	t.m.mu.Lock()
	defer t.m.mu.Unlock()
	for _, s := range all {
		for _, p := range s.Ports {
			t.m.freed[p.Port] = t.began
		}
	}
	return nil
}

// assign returns the ports of each twin: the ports of its original, each with a port of the cloud as Target. A port
// that an EndpointSlice records stays. A namespace gets at most half of all ports, so that its users leave room for
// others; if it wants more, assign adds that to problems. The error says that no port was free for some twins.
func (t *term) assign(
	v kube.MirrorView, originals map[string]original, problems map[string]string,
) (ports map[string][]kube.ServicePort, err error) {
	cfg := t.m.cfg
	half := (int(cfg.Last-cfg.First) + 2) / 2
	has := make(map[string]int) // ports of each namespace
	if time.Since(t.began) >= freedFor {
		t.first = nil
	}
	routes := cfg.routes(v.Slices, originals)
	recorded, before := portOf(routes), portOf(cfg.routes(t.first, originals))
	used := make(map[uint16]bool)
	for _, s := range v.Slices {
		for _, p := range s.Ports {
			used[p.Port] = true
		}
	}
	wanted := make(map[string]bool)
	for _, o := range originals {
		for _, p := range o.tcp() {
			wanted[o.addr(p)] = true
			if recorded[o.addr(p)] != 0 || t.given[o.addr(p)] != 0 || before[o.addr(p)] != 0 {
				has[o.Namespace]++
			}
		}
	}
	maps.DeleteFunc(t.given, func(addr string, port uint16) bool { return !wanted[addr] || routes[port] != "" })
	for _, port := range t.given {
		used[port] = true
	}
	ports = make(map[string][]kube.ServicePort)
	for _, key := range slices.Sorted(maps.Keys(originals)) {
		o := originals[key]
		for _, p := range o.tcp() {
			at := recorded[o.addr(p)]
			if at == 0 {
				at = t.given[o.addr(p)]
			}
			if at == 0 && before[o.addr(p)] == 0 && has[o.Namespace] >= half {
				problems[o.Key()] = fmt.Sprintf("the twins of the namespace have %d ports, half of those in "+
					"[mode.cloud.services.mirror]: remove the annotation %s elsewhere, or make ports larger", half, Annotation)
				continue
			}
			if at == 0 {
				if at = before[o.addr(p)]; at == 0 || used[at] {
					at = t.free(used)
				}
				if at == 0 {
					err = fmt.Errorf("no port is free for %s: make ports in [mode.cloud.services.mirror] larger", o.addr(p))
					continue
				}
				t.given[o.addr(p)], used[at] = at, true
				if before[o.addr(p)] == 0 {
					has[o.Namespace]++
				}
			}
			ports[key] = append(ports[key], kube.ServicePort{Name: p.Name, Protocol: p.Protocol, Port: p.Port, Target: at})
		}
	}
	return ports, err
}

// portOf returns the port of each host:port of routes; of several, the highest.
func portOf(routes map[uint16]string) map[string]uint16 {
	ports := make(map[string]uint16)
	for port, addr := range routes {
		ports[addr] = max(port, ports[addr])
	}
	return ports
}

// free returns a random port that no twin has, and that none has had for freedFor; 0: there is none.
func (t *term) free(used map[uint16]bool) uint16 {
	cfg := t.m.cfg
	t.m.mu.Lock()
	defer t.m.mu.Unlock()
	n := int(cfg.Last-cfg.First) + 1
	start := rand.IntN(n)
	for i := range n {
		port := cfg.First + uint16((start+i)%n)
		if at, was := t.m.freed[port]; !used[port] && (!was || time.Since(at) >= freedFor) {
			return port
		}
	}
	return 0
}

// writeSlices writes the EndpointSlices of a twin: one for each family of addresses that the replicas have.
func (t *term) writeSlices(
	ctx context.Context, v kube.MirrorView, twin kube.Service, ports []kube.ServicePort,
) (err error) {
	objects := t.m.cfg.Objects
	targets := slices.Clone(ports)
	for i := range targets {
		targets[i].Port, targets[i].Target = targets[i].Target, 0
	}
	replicas := make(map[string][]kube.SliceEndpoint) // by family
	for _, s := range v.Replicas {
		both := append(replicas[s.Family], s.Endpoints...)
		slices.SortFunc(both, func(a, b kube.SliceEndpoint) int { return strings.Compare(a.Address, b.Address) })
		replicas[s.Family] = slices.Compact(both)
	}
	for _, s := range v.Slices {
		if _, known := replicas[s.Family]; !known && s.Namespace == twin.Namespace && s.Of() == twin.Name {
			replicas[s.Family] = nil // no replica has this family any more: the slice gets no endpoints
		}
	}
	for _, family := range slices.Sorted(maps.Keys(replicas)) {
		name := twin.Name + "-" + strings.ToLower(family)
		i := slices.IndexFunc(v.Slices, func(s kube.Slice) bool {
			return s.Namespace == twin.Namespace && s.Name == name
		})
		var failed error
		switch {
		case i < 0:
			failed = objects.CreateSlice(ctx, kube.Slice{Family: family, Ports: targets, Object: kube.Object{
				Namespace: twin.Namespace, Name: name, Labels: map[string]string{labelOf: twin.Labels[labelOf]},
			}}, twin)
			if errors.Is(failed, kube.ErrTaken) {
				failed = takenSlice(name)
			}
		case v.Slices[i].Owner != twin.UID, v.Slices[i].Of() != twin.Name, // the latter two: its labels were edited
			v.Slices[i].Labels[labelOf] != twin.Labels[labelOf]:
			failed = objects.DeleteSlice(ctx, v.Slices[i])
		case !slices.Equal(v.Slices[i].Ports, targets) || !slices.Equal(v.Slices[i].Endpoints, replicas[family]):
			s := v.Slices[i]
			s.Ports, s.Endpoints = targets, replicas[family]
			failed = objects.PatchSlice(ctx, s)
		}
		err = errors.Join(err, unlessConflict(failed))
	}
	return err
}

// clean deletes twins that no original wants. Kubernetes then deletes their EndpointSlices. clean leaves EndpointSlices
// to Kubernetes: the watch of EndpointSlices may be ahead of the watch of originals.
func (t *term) clean(ctx context.Context, v kube.MirrorView, originals map[string]original) (err error) {
	for _, s := range v.Services {
		of, wanted := originals[s.Key()]
		if s.Labels[Label] == t.m.cfg.Owner && (!wanted || of.Name != s.Labels[labelOf]) {
			err = errors.Join(err, unlessConflict(t.m.cfg.Objects.DeleteService(ctx, s)))
		}
	}
	return err
}
