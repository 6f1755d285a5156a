package kube

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Reach holds the addresses that a node reaches: the claims of its Node object that were accepted.
type Reach struct {
	Hosts    []string       // its name, and its own addresses
	PodCIDRs []netip.Prefix // the networks of its pods
	// Refused are names that the Node claims and that were not accepted. A dial to such a name must fail,
	// unless the name is another Node's own.
	Refused []string
}

// Reaches follows the addresses that the nodes reach. claims.go decides which claims of the Node
// objects are accepted. Reaches watches whole Node objects. That costs an API server more than
// watching their names, since a kubelet writes its Node every five minutes.
type Reaches struct {
	// Set once.
	client *Client
	log    *slog.Logger
	denied tunnel.Limiter // limits log lines about claims that are not accepted

	mu    sync.Mutex               // guards the following
	nodes map[tunnel.NodeName]node // the Node objects
	// known is true once nodes has been complete. It stays true, since an old list is better than
	// none.
	known    bool
	services []netip.Prefix // the networks of Services
	// servicesKnown: services has been read, or there is nothing to wait for: the cluster has no
	// ServiceCIDRs, or the right to read them is missing.
	servicesKnown bool
	claims        *claims       // computed from nodes and services; nil: claimsLocked computes them again
	changed       tunnel.Change // the claims have changed; notified only when everything is known
	err           error         // why nodes may be out of date; nil: up to date
	errServices   error         // why services may be out of date; nil: up to date
}

// Reaches returns the addresses that all nodes reach. For nodes of the control plane, which may
// not join, it has the nodes' own addresses without those of their pods. Nothing is known before
// Run.
func (c *Client) Reaches(log *slog.Logger) *Reaches {
	return &Reaches{client: c, log: log, nodes: make(map[tunnel.NodeName]node)}
}

// Run follows the nodes and the networks of Services until ctx is done.
func (r *Reaches) Run(ctx context.Context) error {
	var services sync.WaitGroup
	defer services.Wait()
	services.Go(func() { r.followServices(ctx) })
	r.client.followObjects(ctx, r.client.wholeObjects(nodesPath, func() runtime.Object { return new(nodeList) }),
		metav1.ListOptions{}, &nodeObject{}, (*reachStore)(r), r.noteResult)
	return nil
}

// All returns the addresses that each node reaches. The caller may keep the map; it does not
// change.
func (r *Reaches) All() map[tunnel.NodeName]Reach {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.claimsLocked().reach
}

// Contested returns how many claims of Nodes are not accepted, or are useless because two Nodes
// claim the same address.
func (r *Reaches) Contested() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.claimsLocked().contested)
}

// claimsLocked returns the resolved claims, and resolves them again after a change. The caller
// holds mu.
func (r *Reaches) claimsLocked() *claims {
	if r.claims == nil {
		r.claims = resolveClaims(r.nodes, r.services, r.client.Hostname())
		for _, c := range r.claims.contested {
			if skipped, ok := r.denied.Allow(); ok {
				r.log.Warn("an address that a Node claims is not accepted",
					"node", string(c.node), "target", c.address, "err", c.reason, "skipped", skipped)
			}
		}
	}
	return r.claims
}

// Known reports whether the nodes have been read once, and also the networks of Services, if these can be read.
func (r *Reaches) Known() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.knownLocked()
}

// knownLocked is Known. The caller holds mu.
func (r *Reaches) knownLocked() bool { return r.known && r.servicesKnown }

// Ready returns an error until reading the nodes has succeeded or failed. It returns nil after a
// failure, since only the egress front door needs the nodes. Note reports the failure.
func (r *Reaches) Ready() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.knownLocked() && r.err == nil && r.errServices == nil {
		return errors.New("the addresses of the Nodes have not been read yet")
	}
	return nil
}

// Changed returns a channel that is closed at the next change.
func (r *Reaches) Changed() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changed.Next()
}

// Note returns why the addresses may be out of date; "" if they are up to date.
func (r *Reaches) Note() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return "the addresses of the Nodes cannot be read: " + Explain(r.err).Error()
	}
	if r.errServices != nil {
		return "the networks of Services cannot be read: " + Explain(r.errServices).Error()
	}
	return ""
}

// noteResult stores the outcome of a request for nodes. It logs the first failure and the first
// success after a failure.
func (r *Reaches) noteResult(err error) {
	r.mu.Lock()
	before := r.err
	r.err = err
	r.mu.Unlock()
	switch {
	case err != nil && before == nil:
		r.log.Warn("the addresses of the Nodes cannot be read; the addresses read before stay in use", "err", Explain(err))
	case err == nil && before != nil:
		r.log.Info("the addresses of the Nodes can be read again")
	}
}

// nodeObject holds the fields of a Node (k8s.io/api/core/v1) that this package uses.
type nodeObject struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		PodCIDRs []string `json:"podCIDRs"`
	} `json:"spec"`
	Status struct {
		Addresses []nodeAddress `json:"addresses"`
	} `json:"status"`
}

// nodeAddress is an entry of status.addresses of a Node.
type nodeAddress struct {
	Type    string `json:"type"`
	Address string `json:"address"`
}

// nodeList is a list of Nodes.
type nodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []nodeObject `json:"items"`
}

// DeepCopyObject implements runtime.Object.
func (n *nodeObject) DeepCopyObject() runtime.Object {
	c := *n
	n.ObjectMeta.DeepCopyInto(&c.ObjectMeta)
	c.Spec.PodCIDRs = slices.Clone(n.Spec.PodCIDRs)
	c.Status.Addresses = slices.Clone(n.Status.Addresses)
	return &c
}

// DeepCopyObject implements runtime.Object.
func (l *nodeList) DeepCopyObject() runtime.Object {
	c := &nodeList{TypeMeta: l.TypeMeta, ListMeta: *l.ListMeta.DeepCopy()}
	for i := range l.Items {
		c.Items = append(c.Items, *l.Items[i].DeepCopyObject().(*nodeObject))
	}
	return c
}

// reachStore is Reaches as the store of a reflector.
type reachStore Reaches

func (s *reachStore) Add(o any) error    { return s.set(o, true) }
func (s *reachStore) Update(o any) error { return s.set(o, true) }
func (s *reachStore) Delete(o any) error { return s.set(o, false) }
func (s *reachStore) Resync() error      { return nil }

// Replace replaces all nodes: the reflector calls it with each complete list.
func (s *reachStore) Replace(objects []any, _ string) error {
	all := make(map[tunnel.NodeName]node, len(objects))
	for _, o := range objects {
		name, n, err := nodeOf(o)
		if err != nil {
			return err
		}
		all[name] = n
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nodes, s.known = all, true
	s.notifyLocked()
	return nil
}

// set adds, changes or removes one node.
func (s *reachStore) set(o any, present bool) error {
	name, n, err := nodeOf(o)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	before, was := s.nodes[name]
	if was == present && before.equal(n) {
		return nil // a heartbeat of the kubelet
	}
	if present {
		s.nodes[name] = n
	} else {
		delete(s.nodes, name)
	}
	s.notifyLocked()
	return nil
}

// notifyLocked discards the resolved claims, and wakes the callers that wait for a change once
// everything is known. The caller holds mu.
func (s *reachStore) notifyLocked() {
	s.claims = nil
	if (*Reaches)(s).knownLocked() {
		s.changed.Notify()
	}
}
