package https

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/singleflight"

	"tunnel/pkg/tunnel"
)

// This file answers one question: which node is a terminated request for?
//
// kube-apiserver does not always say. Without --kubelet-certificate-authority it sends
// no SNI on upgrades, and for port-forward, and for exec and attach by SPDY, the Host
// is the one that kubectl used for kube-apiserver itself: newThrottledUpgradeAwareProxyHandler
// (kubernetes/pkg/registry/core/pod/rest/subresources.go) leaves UseLocationHost unset.
// Then the path alone says what is wanted, and the kubelets know who has that pod.

const (
	// findTimeout bounds a search for a pod. kubectl's user is waiting.
	findTimeout = 5 * time.Second
	// hintTimeout is what of it may be spent on the node that had the pod last.
	hintTimeout = 2 * time.Second
	// maxProbes bounds the kubelets that one search asks at a time.
	maxProbes = 16
	// maxHints bounds the remembered pods. One is some 200 bytes.
	maxHints = 4096
)

// podRef names a pod on the targets of one port.
type podRef struct {
	port            int // index of FrontDoor.ports
	namespace, name string
}

func (r podRef) String() string { return r.namespace + "/" + r.name }

// podOf returns the pod that the path of a kubelet's streaming API names
// (kubernetes/pkg/kubelet/server/server.go, InstallDebuggingHandlers).
func podOf(path string) (ref podRef, ok bool) {
	s := strings.Split(path, "/")
	if len(s) < 4 || s[0] != "" {
		return podRef{}, false
	}
	switch s[1] {
	case "portForward", "exec", "attach", "run":
	default:
		return podRef{}, false
	}
	// Names of namespaces and pods follow the rules for those of nodes, or stricter ones.
	for _, name := range s[2:4] {
		if _, err := tunnel.ParseNodeName(name); err != nil {
			return podRef{}, false
		}
	}
	return podRef{namespace: s[2], name: s[3]}, true
}

// answer is one of our own, instead of the target's.
type answer struct {
	status int
	code   tunnel.Code // 0: none
	text   string
}

func answerf(status int, code tunnel.Code, format string, args ...any) *answer {
	return &answer{status, code, fmt.Sprintf(format, args...)}
}

// whichNode returns the node that r, which came over c from a caller that has been
// verified, is for, or the answer to give instead:
//
//  1. the node that Host names, if it is connected. Only a connected one counts: any
//     name of kube-apiserver's own could be a node's;
//  2. the node that the connection's SNI names: the caller opened it for that one;
//  3. the connected node whose kubelet has the pod that the path names.
func (p *proxy) whichNode(r *http.Request, c *clientConn, caller string) (tunnel.NodeName, *answer) {
	host, hostErr := nodeOf(r.Host)
	sni, err := tunnel.ParseNodeName(c.sni)
	named := err == nil
	switch {
	case hostErr == nil && p.f.nodes.Holds(host):
		if named && sni != host && p.f.nodes.Holds(sni) {
			return "", answerf(http.StatusMisdirectedRequest, 0, "this connection was opened for node %s and the request is for %s: open another", sni, host)
		}
		return host, nil
	case named && p.f.nodes.Holds(sni):
		return sni, nil
	case named && (hostErr != nil || host != sni):
		return "", p.noSuchNode("node %s is not connected (the connection's SNI names it; the request's Host %q is not a connected node)", sni, r.Host)
	case named:
		return "", p.noSuchNode("node %s is not connected", sni)
	}
	if ref, ok := podOf(r.URL.Path); ok {
		ref.port = c.port
		node, a := p.findPod(r.Context(), ref, caller)
		if a != nil && a.code == tunnel.NoSuchNode && hostErr == nil && !isIP(host) {
			a = answerf(a.status, a.code, "node %s is not connected, and %s", host, a.text)
		}
		return node, a
	}
	if hostErr != nil {
		return "", answerf(http.StatusBadRequest, 0, "the host of the request must name a node: %v", hostErr)
	}
	return "", p.noSuchNode("node %s is not connected", host)
}

// noSuchNode counts a call of a node that is not connected: nobody dials, so nobody
// else does.
func (p *proxy) noSuchNode(format string, args ...any) *answer {
	p.f.cfg.Counters.Refuse(tunnel.NoSuchNode)
	return answerf(http.StatusBadGateway, tunnel.NoSuchNode, format, args...)
}

// nodeOf returns the node that a Host header names, with or without a port.
func nodeOf(host string) (tunnel.NodeName, error) {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return tunnel.ParseNodeName(strings.ToLower(strings.TrimSuffix(host, ".")))
}

func isIP(n tunnel.NodeName) bool {
	_, err := netip.ParseAddr(string(n))
	return err == nil
}

// finder remembers where pods were. The zero value is ready.
type finder struct {
	flights singleflight.Group // one search at a time per pod and caller

	mu    sync.Mutex // guards the following
	hints map[podRef]tunnel.NodeName
}

// hint returns where ref was last. Pods of one name move, so it is asked before it is
// believed.
func (f *finder) hint(ref podRef) (n tunnel.NodeName, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, ok = f.hints[ref]
	return n, ok
}

// remember notes where ref is. When there are too many, it takes the place of any.
func (f *finder) remember(ref podRef, n tunnel.NodeName) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.hints == nil {
		f.hints = make(map[podRef]tunnel.NodeName)
	}
	if _, known := f.hints[ref]; !known && len(f.hints) >= maxHints {
		for other := range f.hints {
			delete(f.hints, other)
			break
		}
	}
	f.hints[ref] = n
}

func (f *finder) forget(ref podRef) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.hints, ref)
}

// findPod returns the connected node whose kubelet has a pod. Those who ask while a
// search is on its way get its result; so it outlives the caller who started it.
func (p *proxy) findPod(ctx context.Context, ref podRef, caller string) (tunnel.NodeName, *answer) {
	type result struct {
		node   tunnel.NodeName
		answer *answer
	}
	// The caller's name comes last: it may hold any character.
	key := fmt.Sprintf("%d/%s/%s", ref.port, ref, caller)
	v, _, _ := p.finder.flights.Do(key, func() (any, error) {
		// The end of the front door ends every conn, and with it this.
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), findTimeout)
		defer cancel()
		var r result
		r.node, r.answer = p.search(sctx, ref, caller)
		return r, nil
	})
	r := v.(result)
	if r.answer != nil && r.answer.code == tunnel.NoSuchNode {
		p.f.cfg.Counters.Refuse(tunnel.NoSuchNode)
	}
	return r.node, r.answer
}

// search asks kubelets for a pod: first the one that had it last, then all others. The
// first that has it ends the search. (A pod that was deleted by force can be on two
// nodes for a while. kube-apiserver's own request does not tell them apart, either.)
func (p *proxy) search(ctx context.Context, ref podRef, caller string) (tunnel.NodeName, *answer) {
	nodes := p.f.nodes.Connected()
	hint, hinted := p.finder.hint(ref)
	if hinted && p.f.nodes.Holds(hint) {
		hctx, cancel := context.WithTimeout(ctx, hintTimeout)
		err := p.probe(hctx, hint, ref, caller)
		cancel()
		if err == nil {
			return hint, nil
		}
		p.finder.forget(ref)
	}

	var found atomic.Pointer[tunnel.NodeName]
	var silent, denied atomic.Int64
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(maxProbes)
	for _, n := range nodes {
		if gctx.Err() != nil {
			break
		}
		g.Go(func() error {
			err := p.probe(gctx, n, ref, caller)
			switch {
			case err == nil:
				found.CompareAndSwap(nil, &n)
				return errFound // ends the others
			case errors.Is(err, errNoPod):
			case errors.Is(err, errDenied):
				denied.Add(1)
			default:
				silent.Add(1)
			}
			return nil
		})
	}
	g.Wait() //nolint:errcheck // found says it
	if n := found.Load(); n != nil {
		p.finder.remember(ref, *n)
		return *n, nil
	}
	if len(nodes) == 0 {
		return "", answerf(http.StatusBadGateway, tunnel.NoSuchNode, "no node is connected")
	}
	text := fmt.Sprintf("no connected node has pod %s: its node may not be connected (%d asked", ref, len(nodes))
	if n := silent.Load(); n > 0 {
		text += fmt.Sprintf(", %d did not answer", n)
	}
	if n := denied.Load(); n > 0 {
		text += fmt.Sprintf(", %d did not let us ask: see the log", n)
	}
	text += ")"
	if ctx.Err() != nil {
		return "", answerf(http.StatusGatewayTimeout, tunnel.Timeout, "after %v: %s", findTimeout, text)
	}
	return "", answerf(http.StatusBadGateway, tunnel.NoSuchNode, "%s", text)
}

// What a probe may find.
var (
	errFound  = errors.New("the pod was found")
	errNoPod  = errors.New("the kubelet does not have the pod")
	errDenied = errors.New("the kubelet does not let us ask for pods")
)

// probe returns nil if the kubelet of node n has the pod. It asks for a port-forward
// without asking for an upgrade: a kubelet looks for the pod first (404), and then
// misses the upgrade (400); nothing has been started.
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
	switch res.StatusCode {
	case http.StatusNotFound:
		return errNoPod
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusMethodNotAllowed:
		why := "grant the certificate of [mode.cloud.https.kubelet], or the edge's, the verb get on nodes/proxy"
		if res.StatusCode == http.StatusMethodNotAllowed {
			why = "set enableDebuggingHandlers in the kubelet's configuration" // without, it says so of every pod
		}
		p.f.warn(denyProbe, "a kubelet does not tell whether it has a pod", "node", string(n), "err", fmt.Sprintf("%s: %s", res.Status, why))
		return errDenied
	default:
		if res.StatusCode < 400 {
			return errNoPod // whatever listens there, it is not a kubelet
		}
		return nil
	}
}
