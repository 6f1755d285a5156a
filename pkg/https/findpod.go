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

	"tunnel/pkg/tunnel"
)

// This file answers one question: which connected node has a pod?
//
// Kubernetes knows, and where it can be asked (Config.Pods) nobody else is. Without it the
// kubelets are asked, and any of them may belong to a thief. So all are asked, and a
// node gets the request only if it alone claims the pod:
//
//   - Two nodes claim the pod: neither gets it.
//   - A node that does not answer could be the owner. For a minute after its first silence
//     no other node gets a pod, unless that node had the pod before. Then its silence
//     counts as no, or one broken kubelet would block every pod for ever.
//
// docs/security.md says what this leaves open.

const (
	// findTimeout bounds a search for a pod. kubectl's user is waiting.
	findTimeout = 5 * time.Second
	// answerTimeout is how long a kubelet may take to say whether it has a pod. It leaves
	// time to answer the caller.
	answerTimeout = 4 * time.Second
	// silentTimeout is answerTimeout for a kubelet that did not answer the last time.
	silentTimeout = time.Second
	// silentFor is how long a kubelet that does not answer keeps pods from other nodes. A
	// restart of a kubelet or a hand-over of its uplink is over by then.
	silentFor = time.Minute
	// hintFor is how long after a search its result saves the next search for that pod.
	hintFor = 10 * time.Second
	// maxProbes bounds the kubelets that one search asks at a time.
	maxProbes = 64
	// maxHints bounds the remembered pods. One is some 200 bytes.
	maxHints = 4096
)

// Pods tells which node a pod is bound to.
type Pods interface {
	// NodeOf returns spec.nodeName of a pod; "" if there is no such pod, or it is not bound
	// to a node yet. An error says that Kubernetes cannot be asked.
	NodeOf(ctx context.Context, namespace, name string) (tunnel.NodeName, error)
}

// finder remembers what searches have found. The zero value is ready.
type finder struct {
	flights singleflight.Group // one search at a time per pod and caller

	mu     sync.Mutex // guards the following
	hints  map[podRef]hint
	silent map[tunnel.NodeName]time.Time // connected nodes that did not answer the last time, and since when
}

// hint is the node that alone claimed a pod in a search.
type hint struct {
	node tunnel.NodeName
	at   time.Time
}

// hint returns where ref was last. The zero hint says that nobody knows.
func (f *finder) hint(ref podRef) hint {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hints[ref]
}

// remember notes the node of a pod. When the memory is full, it forgets some other pod.
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

func (f *finder) forget(ref podRef) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.hints, ref)
}

// patience returns how long node n may take to answer.
func (f *finder) patience(n tunnel.NodeName) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, silent := f.silent[n]; silent {
		return silentTimeout
	}
	return answerTimeout
}

// heard notes whether node n has answered. It reports whether n may still have a pod that
// others claim.
func (f *finder) heard(n tunnel.NodeName, answered bool) (may bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if answered {
		delete(f.silent, n)
		return false
	}
	since, silent := f.silent[n]
	if !silent {
		if f.silent == nil {
			f.silent = make(map[tunnel.NodeName]time.Time)
		}
		since = time.Now()
		f.silent[n] = since
	}
	return time.Since(since) < silentFor
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

// findPod returns the connected node that has a pod. Those who ask while a search is on its
// way get its result; so it outlives the caller who started it.
func (p *proxy) findPod(ctx context.Context, ref podRef, caller string) (tunnel.NodeName, *answer) {
	type result struct {
		node   tunnel.NodeName
		answer *answer
	}
	find := p.search
	if p.f.cfg.Pods != nil {
		find = p.lookUp
	}
	// The caller's name comes last: it may hold any character.
	key := fmt.Sprintf("%d/%s/%s", ref.port, ref, caller)
	v, _, _ := p.finder.flights.Do(key, func() (any, error) {
		// The end of the front door ends every conn, and with it this.
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), findTimeout)
		defer cancel()
		var r result
		r.node, r.answer = find(sctx, ref, caller)
		return r, nil
	})
	r := v.(result)
	if r.answer != nil && r.answer.code == tunnel.NoSuchNode {
		p.f.cfg.Counters.Refuse(tunnel.NoSuchNode)
	}
	return r.node, r.answer
}

// lookUp asks Kubernetes. Its answer is not kept: kube-apiserver looks the pod up for each
// such request, too, and the next pod of that name may be on another node.
func (p *proxy) lookUp(ctx context.Context, ref podRef, _ string) (tunnel.NodeName, *answer) {
	node, err := p.f.cfg.Pods.NodeOf(ctx, ref.namespace, ref.name)
	switch {
	case err != nil:
		p.f.warn(denyPods, "Kubernetes cannot be asked which node has a pod", "err", err)
		return "", answerf(http.StatusServiceUnavailable, 0, "Kubernetes cannot be asked which node has pod %s: %v", ref, err)
	case node == "":
		return "", answerf(http.StatusBadGateway, tunnel.NoSuchNode, "Kubernetes has no pod %s that is bound to a node", ref)
	case !p.f.nodes.Holds(node):
		return "", answerf(http.StatusBadGateway, tunnel.NoSuchNode, "node %s, which has pod %s, is not connected", node, ref)
	}
	return node, nil
}

// search asks the kubelets of all connected nodes for a pod. (A pod that was deleted by
// force can be on two nodes for a while. Then neither gets it.)
func (p *proxy) search(ctx context.Context, ref podRef, caller string) (tunnel.NodeName, *answer) {
	last := p.finder.hint(ref)
	if last.node != "" && time.Since(last.at) < hintFor && p.f.nodes.Holds(last.node) {
		hctx, cancel := context.WithTimeout(ctx, silentTimeout)
		err := p.ask(hctx, last.node, ref, caller)
		cancel()
		if err == nil {
			return last.node, nil
		}
	}
	p.finder.prune(p.f.nodes.Holds)
	nodes := p.f.nodes.Connected()
	said := p.askAll(ctx, nodes, ref, caller)
	switch {
	case len(said.have) > 1:
		p.finder.forget(ref)
		p.f.cfg.Counters.ContestedPods.Add(1)
		p.f.warn(denyContested, "two nodes claim one pod: nobody gets it", "pod", ref.String(), "nodes", fmt.Sprint(said.have))
		return "", answerf(http.StatusConflict, tunnel.Denied, "nodes %s and %s both claim pod %s: one of them lies, or the pod was deleted by force; find out which, and revoke that node or wait for its kubelet",
			said.have[0], said.have[1], ref)
	case len(said.have) == 1 && len(said.mayHave) > 0 && said.have[0] != last.node:
		p.f.warn(denySilent, "nodes that do not answer may have a pod that another node claims: nobody gets it", "pod", ref.String(), "nodes", fmt.Sprint(first(said.mayHave)))
		return "", answerf(http.StatusServiceUnavailable, tunnel.Timeout, "node %s claims pod %s, but node %s has not answered and may have it: try again in %v, or end the session of %s",
			said.have[0], ref, said.mayHave[0], silentFor, said.mayHave[0])
	case len(said.have) == 1 && len(said.unasked) > 0 && said.have[0] != last.node:
		p.f.warn(denySilent, "nodes that were not asked in time may have a pod that another node claims: nobody gets it", "pod", ref.String(), "nodes", fmt.Sprint(first(said.unasked)))
		return "", answerf(http.StatusServiceUnavailable, tunnel.Timeout, "node %s claims pod %s, but node %s was not asked in time and may have it: try again",
			said.have[0], ref, said.unasked[0])
	case len(said.have) == 1:
		p.finder.remember(ref, said.have[0])
		return said.have[0], nil
	case len(nodes) == 0:
		return "", answerf(http.StatusBadGateway, tunnel.NoSuchNode, "no node is connected")
	}
	text := fmt.Sprintf("no connected node has pod %s: its node may not be connected (%d asked", ref, len(nodes)-len(said.unasked))
	if said.silent > 0 {
		text += fmt.Sprintf(", %d did not answer", said.silent)
	}
	if n := len(said.unasked); n > 0 {
		text += fmt.Sprintf(", %d were not asked in time", n)
	}
	if said.denied > 0 {
		text += fmt.Sprintf(", %d did not let us ask: see the log", said.denied)
	}
	text += ")"
	if said.late {
		return "", answerf(http.StatusGatewayTimeout, tunnel.Timeout, "after %v: %s", answerTimeout, text)
	}
	return "", answerf(http.StatusBadGateway, tunnel.NoSuchNode, "%s", text)
}

// said is what kubelets have said about a pod.
type said struct {
	have    []tunnel.NodeName // claim it, sorted
	mayHave []tunnel.NodeName // have not answered, and may have it, sorted
	unasked []tunnel.NodeName // the search ended before their turn, sorted
	silent  int               // have not answered
	denied  int               // do not let us ask, and so would not let us exec
	late    bool              // time was over for one of the silent, or before all were asked
}

// askAll asks the kubelets of nodes for a pod.
func (p *proxy) askAll(ctx context.Context, nodes []tunnel.NodeName, ref podRef, caller string) said {
	var mu sync.Mutex // guards the following
	var s said
	var g errgroup.Group
	g.SetLimit(maxProbes)
	for _, n := range nodes {
		g.Go(func() error {
			var err error
			asked := ctx.Err() == nil
			if asked {
				actx, cancel := context.WithTimeout(ctx, p.finder.patience(n))
				defer cancel()
				err = p.ask(actx, n, ref, caller)
			}
			mu.Lock()
			defer mu.Unlock()
			switch {
			case !asked:
				s.late = true
				s.unasked = append(s.unasked, n)
			case err == nil:
				p.finder.heard(n, true)
				s.have = append(s.have, n)
			case errors.Is(err, errNoPod):
				p.finder.heard(n, true)
			case errors.Is(err, errDenied):
				p.finder.heard(n, true)
				s.denied++
			case tunnel.CodeOf(err) == tunnel.NoSuchNode: // it has left meanwhile
				s.silent++
			default:
				s.silent++
				s.late = s.late || errors.Is(err, context.DeadlineExceeded) || tunnel.CodeOf(err) == tunnel.Timeout
				if p.finder.heard(n, false) {
					s.mayHave = append(s.mayHave, n)
				}
			}
			return nil
		})
	}
	g.Wait() //nolint:errcheck // it returns none
	slices.Sort(s.have)
	slices.Sort(s.mayHave)
	slices.Sort(s.unasked)
	return s
}

// first returns the first few of nodes, for a log line.
func first(nodes []tunnel.NodeName) []tunnel.NodeName { return nodes[:min(len(nodes), 8)] }

// What a probe may find.
var (
	errNoPod  = errors.New("the kubelet does not have the pod")
	errDenied = errors.New("the kubelet does not let us ask for pods")
)

// probe returns nil if the kubelet of node n says that it has the pod. It asks for a
// port-forward without asking for an upgrade: a kubelet looks for the pod first (404), and
// then misses the upgrade (400); nothing has been started.
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
	io.CopyN(io.Discard, res.Body, 4<<10) //nolint:errcheck // so that the conn can be used again
	switch s := res.StatusCode; {
	case s == http.StatusUnauthorized, s == http.StatusForbidden, s == http.StatusMethodNotAllowed:
		why := "grant the certificate of [mode.cloud.https.kubelet], or the edge's, the verb get on nodes/proxy"
		if s == http.StatusMethodNotAllowed {
			why = "set enableDebuggingHandlers in the kubelet's configuration" // without, it says so of every pod
		}
		p.f.warn(denyProbe, "a kubelet does not tell whether it has a pod", "node", string(n), "err", fmt.Sprintf("%s: %s", res.Status, why))
		return errDenied
	case s == http.StatusNotFound, s < 400: // below 400 whatever listens there is not a kubelet
		return errNoPod
	case s == http.StatusTooManyRequests, s >= 500:
		return fmt.Errorf("the kubelet of node %s answers %s", n, res.Status)
	}
	return nil
}
