package https

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/singleflight"

	"tunnel.example/tunnel/pkg/tunnel"
)

// This file answers one question: which connected node has a pod?
//
// Kubernetes knows. If the cloud can ask Kubernetes (Config.Pods), only its answer counts. Otherwise
// the cloud asks all kubelets. A stolen node could claim pods of other nodes, so a node gets the
// request only if no other node claims the pod:
//
//   - If two nodes claim the pod, neither gets the request.
//   - A node that does not answer could be the owner. For a minute after its first missing answer
//     no other node gets a pod, unless that node had the pod before. After that minute a missing
//     answer counts as no; otherwise one broken kubelet would block every pod for ever.
//
// docs/security.md says which attacks this leaves possible.

const (
	// findTimeout is how long a search for a pod may take, since the user of kubectl is waiting.
	findTimeout = 5 * time.Second
	// probeTimeout is how long a kubelet may take to say whether it has a pod. It is below
	// findTimeout so that there is time to answer the caller.
	probeTimeout = 4 * time.Second
	// silentProbeTimeout replaces probeTimeout for a kubelet that has missed an answer less than maxSilence ago.
	silentProbeTimeout = time.Second
	// maxSilence is how long a kubelet that does not answer keeps pods from other nodes. Restarting
	// a kubelet, or switching its uplink, takes less time.
	maxSilence = time.Minute
	// silenceKept is how long a missing answer counts if the kubelet is not asked again: it may have been well since.
	silenceKept = 10 * time.Minute
	// hintTTL is how long the result of a search saves further searches for the same pod.
	hintTTL = 10 * time.Second
	// maxProbes bounds how many kubelets one search asks at a time.
	maxProbes = 64
	// maxHints bounds the remembered pods. Each takes about 200 bytes.
	maxHints = 4096
)

// Pods tells which node a pod is bound to.
type Pods interface {
	// NodeOf returns the spec.nodeName of a pod; "" if there is no such pod, or if it is not bound
	// to a node yet. An error means that Kubernetes cannot be asked.
	NodeOf(ctx context.Context, namespace, name string) (tunnel.NodeName, error)
}

// finder remembers results of searches. The zero value is ready to use.
type finder struct {
	flights singleflight.Group // one search at a time for each pod and caller

	mu     sync.Mutex                  // guards the following
	hints  map[podRef]hint             // last result for each pod, at most maxHints
	silent map[tunnel.NodeName]silence // connected nodes that have not answered; no entry: the node has answered
}

// silence describes a node that does not answer. since is the time of its first missing answer, and last that of its
// latest.
type silence struct{ since, last time.Time }

// hint is a search's result: only this node claimed the pod.
type hint struct {
	node tunnel.NodeName
	at   time.Time
}

// hint returns the last result for ref; the zero hint if there is none.
func (f *finder) hint(ref podRef) hint {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hints[ref]
}

// remember stores the node of a pod. If maxHints pods are stored, it forgets an arbitrary other
// one.
func (f *finder) remember(ref podRef, n tunnel.NodeName) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.hints == nil {
		f.hints = make(map[podRef]hint)
	}
	if _, known := f.hints[ref]; !known && len(f.hints) >= maxHints {
		for other := range f.hints {
			delete(f.hints, other)
			break
		}
	}
	f.hints[ref] = hint{n, time.Now()}
}

// forget removes the hint for ref.
func (f *finder) forget(ref podRef) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.hints, ref)
}

// timeoutFor returns how long node n may take to answer.
func (f *finder) timeoutFor(n tunnel.NodeName) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s, silent := f.silent[n]; silent && time.Since(s.last) < maxSilence {
		return silentProbeTimeout
	}
	return probeTimeout
}

// recordAnswer records whether node n has answered.
func (f *finder) recordAnswer(n tunnel.NodeName, answered bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if answered {
		delete(f.silent, n)
		return
	}
	now := time.Now()
	s, silent := f.silent[n]
	if !silent || now.Sub(s.last) > silenceKept {
		s.since = now
	}
	s.last = now
	if f.silent == nil {
		f.silent = make(map[tunnel.NodeName]silence)
	}
	f.silent[n] = s
}

// mayHave reports whether node n, which has not answered, may have a pod that another node claims: n has been silent
// for less than maxSilence.
func (f *finder) mayHave(n tunnel.NodeName) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, silent := f.silent[n]
	return !silent || time.Since(s.last) > silenceKept || time.Since(s.since) < maxSilence
}

// prune forgets the silence of nodes that are not connected.
func (f *finder) prune(holds func(tunnel.NodeName) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for n := range f.silent {
		if !holds(n) {
			delete(f.silent, n)
		}
	}
}

// findPod returns the connected node that has a pod, or the response to give instead. Requests that
// arrive during a search get its result. So the search does not end with the caller that started
// it.
func (p *proxy) findPod(ctx context.Context, ref podRef, caller string) (tunnel.NodeName, *answer) {
	type result struct {
		node   tunnel.NodeName
		answer *answer
	}
	find := p.search
	if p.f.cfg.Pods != nil {
		find = p.lookUp
	}
	// The caller's name comes last, because it may contain any character.
	key := fmt.Sprintf("%d/%s/%s", ref.port, ref, caller)
	v, _, _ := p.finder.flights.Do(key, func() (any, error) {
		// No link to the front door's context is needed: its end closes all conns, and so the
		// search.
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), findTimeout)
		defer cancel()
		var r result
		r.node, r.answer = find(sctx, ref, caller)
		return r, nil
	})
	r := v.(result)
	if r.answer == nil {
		return r.node, nil
	}
	if r.answer.code == tunnel.NoSuchNode {
		p.f.cfg.Counters.Refuse(tunnel.NoSuchNode)
	}
	own := *r.answer // a copy, since the caller adds to it and other requests share the result
	return r.node, &own
}

// lookUp asks Kubernetes for the node of a pod. It does not cache the result: the next pod with this
// name may be on another node. kube-apiserver also looks up the pod for each such request.
func (p *proxy) lookUp(ctx context.Context, ref podRef, _ string) (tunnel.NodeName, *answer) {
	node, err := p.f.cfg.Pods.NodeOf(ctx, ref.namespace, ref.name)
	switch {
	case err != nil:
		p.f.warn(denyPods, "Kubernetes cannot be asked which node has a pod", "err", err)
		return "", answerf(http.StatusServiceUnavailable, 0,
			"Kubernetes cannot be asked which node has pod %s: %v", ref, err)
	case node == "":
		return "", answerf(http.StatusBadGateway, tunnel.NoSuchNode,
			"Kubernetes has no pod %s that is bound to a node", ref)
	case !p.f.nodes.Holds(node):
		return "", answerf(http.StatusBadGateway, tunnel.NoSuchNode,
			"node %s, which has pod %s, is not connected", node, ref)
	}
	return node, nil
}

// search asks the kubelets of all connected nodes for a pod. (A pod that was deleted by force can
// be on two nodes for a while. Then neither gets the request.)
func (p *proxy) search(ctx context.Context, ref podRef, caller string) (tunnel.NodeName, *answer) {
	last := p.finder.hint(ref)
	if last.node != "" && time.Since(last.at) < hintTTL && p.f.nodes.Holds(last.node) {
		hctx, cancel := context.WithTimeout(ctx, silentProbeTimeout)
		err := p.probeNode(hctx, last.node, ref, caller)
		cancel()
		if err == nil {
			return last.node, nil
		}
	}
	p.finder.prune(p.f.nodes.Holds)
	nodes := p.f.nodes.Connected()
	results := p.probeAll(ctx, nodes, ref, caller)
	if len(results.claims) > 0 {
		return p.decideClaims(ref, last.node, results)
	}
	if len(nodes) == 0 {
		return "", answerf(http.StatusBadGateway, tunnel.NoSuchNode, "no node is connected")
	}
	return "", notFound(ref, len(nodes)-len(results.notAsked), results)
}

// decideClaims decides which node gets the request for a pod that at least one node claims. last is the
// node that had the pod before; "": unknown. Another node gets the pod only if no node may contradict.
func (p *proxy) decideClaims(ref podRef, last tunnel.NodeName, results probeResults) (tunnel.NodeName, *answer) {
	claim := results.claims[0]
	switch {
	case len(results.claims) > 1:
		p.finder.forget(ref)
		p.f.cfg.Counters.ContestedPods.Add(1)
		p.f.warn(denyContested, "two nodes claim one pod: the request is refused",
			"pod", ref.String(), "nodes", fmt.Sprint(results.claims))
		return "", answerf(http.StatusConflict, tunnel.Denied,
			"nodes %s and %s both claim pod %s: one of them lies, or the pod was deleted by force; "+
				"find out which, and revoke that node or wait for its kubelet",
			results.claims[0], results.claims[1], ref)
	case len(results.mayHave) > 0 && claim != last:
		p.f.warn(denySilent, "nodes that do not answer may have a pod that another node claims: the request is refused",
			"pod", ref.String(), "nodes", fmt.Sprint(firstFew(results.mayHave)))
		return "", answerf(http.StatusServiceUnavailable, tunnel.Timeout,
			"node %s claims pod %s, but node %s has not answered and may have it: "+
				"try again in %v, or end the session of %s",
			claim, ref, results.mayHave[0], maxSilence, results.mayHave[0])
	case len(results.notAsked) > 0 && claim != last:
		p.f.warn(denySilent,
			"nodes that were not asked in time may have a pod that another node claims: the request is refused",
			"pod", ref.String(), "nodes", fmt.Sprint(firstFew(results.notAsked)))
		return "", answerf(http.StatusServiceUnavailable, tunnel.Timeout,
			"node %s claims pod %s, but node %s was not asked in time and may have it: try again",
			claim, ref, results.notAsked[0])
	}
	p.finder.remember(ref, claim)
	return claim, nil
}

// notFound returns the answer for a pod that none of the asked nodes claims. asked is their number.
func notFound(ref podRef, asked int, results probeResults) *answer {
	text := fmt.Sprintf("no connected node has pod %s: its node may not be connected (%d asked", ref, asked)
	if results.unanswered > 0 {
		text += fmt.Sprintf(", %d did not answer", results.unanswered)
	}
	if n := len(results.notAsked); n > 0 {
		text += fmt.Sprintf(", %d were not asked in time", n)
	}
	if results.denied > 0 {
		text += fmt.Sprintf(", %d denied the request: see the log", results.denied)
	}
	text += ")"
	if results.timedOut {
		return answerf(http.StatusGatewayTimeout, tunnel.Timeout, "after %v: %s", probeTimeout, text)
	}
	return answerf(http.StatusBadGateway, tunnel.NoSuchNode, "%s", text)
}

// probeResults are the kubelets' answers about a pod.
type probeResults struct {
	claims     []tunnel.NodeName // they claim the pod; sorted
	mayHave    []tunnel.NodeName // they have not answered and may have the pod; sorted
	notAsked   []tunnel.NodeName // the search ended before they were asked; sorted
	unanswered int               // how many have not answered
	denied     int               // how many refuse our certificate; they would also refuse an exec
	timedOut   bool              // a kubelet exceeded its time, or some were not asked in time
}

// probeAll asks the kubelets of nodes for a pod, maxProbes at a time.
func (p *proxy) probeAll(ctx context.Context, nodes []tunnel.NodeName, ref podRef, caller string) probeResults {
	var mu sync.Mutex // guards the following
	var s probeResults
	var g errgroup.Group
	g.SetLimit(maxProbes)
	for _, n := range nodes {
		g.Go(func() error {
			var err error
			probed := ctx.Err() == nil
			if probed {
				actx, cancel := context.WithTimeout(ctx, p.finder.timeoutFor(n))
				defer cancel()
				err = tunnel.Guard(p.f.log, p.f.cfg.Counters, "the question to the kubelet ends", func() error {
					return p.probeNode(actx, n, ref, caller)
				})
			}
			mu.Lock()
			defer mu.Unlock()
			switch {
			case !probed:
				s.timedOut = true
				s.notAsked = append(s.notAsked, n)
			case err == nil:
				p.finder.recordAnswer(n, true)
				s.claims = append(s.claims, n)
			case errors.Is(err, errNoPod):
				p.finder.recordAnswer(n, true)
			case errors.Is(err, errDenied):
				p.finder.recordAnswer(n, true)
				s.denied++
			case tunnel.CodeOf(err) == tunnel.NoSuchNode: // it has disconnected meanwhile
				s.unanswered++
			default:
				s.unanswered++
				s.timedOut = s.timedOut || errors.Is(err, context.DeadlineExceeded) ||
					tunnel.CodeOf(err) == tunnel.Timeout
				if ctx.Err() == nil { // else the search has ended, and n has had less than its time
					p.finder.recordAnswer(n, false)
				}
				if p.finder.mayHave(n) {
					s.mayHave = append(s.mayHave, n)
				}
			}
			return nil
		})
	}
	g.Wait() //nolint:errcheck // the goroutines return nil
	slices.Sort(s.claims)
	slices.Sort(s.mayHave)
	slices.Sort(s.notAsked)
	return s
}

// firstFew returns the first eight nodes, for a log line.
func firstFew(nodes []tunnel.NodeName) []tunnel.NodeName { return nodes[:min(len(nodes), 8)] }

// Results of a probe.
var (
	errNoPod  = errors.New("the kubelet does not have the pod")
	errDenied = errors.New("the kubelet denies requests about pods")
)

// probe returns nil if the kubelet of node n says that it has the pod. It asks for a port-forward
// without asking for an upgrade. A kubelet first looks for the pod (404 if there is none), and then
// rejects the missing upgrade (400). Nothing has been started by then.
func (p *proxy) probe(ctx context.Context, n tunnel.NodeName, ref podRef, caller string) error {
	u := url.URL{Scheme: p.scheme(), Host: string(n), Path: "/portForward/" + ref.namespace + "/" + ref.name}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return err
	}
	t, release := p.pool.acquire(hop{node: n, port: ref.port, caller: caller})
	defer release()
	res, err := t.RoundTrip(req)
	if err != nil {
		p.f.log.Debug("kubelet not asked for a pod", "module", Name, "node", string(n), "err", err)
		return err
	}
	defer res.Body.Close()
	io.CopyN(io.Discard, res.Body, 4<<10) // makes the conn reusable
	switch s := res.StatusCode; {
	case s == http.StatusUnauthorized, s == http.StatusForbidden, s == http.StatusMethodNotAllowed:
		why := "grant the certificate of [mode.cloud.https.kubelet], or the edge's, the verb get on nodes/proxy"
		if s == http.StatusMethodNotAllowed {
			// Without that setting a kubelet answers so for every pod.
			why = "set enableDebuggingHandlers in the kubelet's configuration"
		}
		p.f.warn(denyProbe, "a kubelet refuses to say whether it has a pod",
			"node", string(n), "err", fmt.Sprintf("%s: %s", shown(res.Status), why))
		return errDenied
	case s == http.StatusNotFound, s < 400: // below 400: the listener is not a kubelet
		return errNoPod
	case s == http.StatusTooManyRequests, s >= 500:
		return fmt.Errorf("the kubelet of node %s answers %s", n, shown(res.Status))
	}
	return nil
}
