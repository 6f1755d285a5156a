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
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"tunnel/pkg/tunnel"
)

// Reach is what a node reaches, by what its Node says and others do not contradict.
type Reach struct {
	Hosts    []string       // its name, and its own addresses
	PodCIDRs []netip.Prefix // of its pods
	Refused  []string       // names that it claims and that do not count: they may not be dialled, unless they are another's
}

// Reaches follows what the nodes reach: what their Nodes say, and what counts of that
// (claims.go). Whole Node objects are watched for it, which costs
// an API server more than their names do: a kubelet writes its Node every five minutes.
type Reaches struct {
	// Set once.
	client *Client
	log    *slog.Logger
	denied tunnel.Limiter

	mu       sync.Mutex // guards the following
	nodes    map[tunnel.NodeName]node
	known    bool           // whether nodes has ever been complete; it stays so, since an old list is better than none
	services []netip.Prefix // the networks of Services
	asked    bool           // whether services has been read, or the cluster has none to read
	settled  *settled       // what counts of nodes; nil: not looked at yet
	changed  chan struct{}  // closed at the next change; nil while nobody waits
	err      error          // why nodes may be out of date
	errCIDRs error          // why services may be
}

// Reaches returns what all nodes reach; of those of the control plane, which may not join,
// the nodes themselves without their pods. Nothing is known before Run.
func (c *Client) Reaches(log *slog.Logger) *Reaches {
	return &Reaches{client: c, log: log, nodes: make(map[tunnel.NodeName]node)}
}

// Run follows the nodes and the networks of Services until ctx is done.
func (r *Reaches) Run(ctx context.Context) error {
	var services sync.WaitGroup
	defer services.Wait()
	services.Go(func() { r.followServices(ctx) })
	r.client.followObjects(ctx, source{
		list: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list := new(nodeList)
			return list, r.client.nodesRequest(o).Do(ctx).Into(list)
		},
		watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.Watch = true
			return r.client.nodesRequest(o).Watch(ctx)
		},
	}, metav1.ListOptions{}, &nodeObject{}, (*reachStore)(r), r.said)
	return nil
}

func (c *Client) nodesRequest(o metav1.ListOptions) *rest.Request {
	return c.nodes.Get().AbsPath("/api/v1/nodes").SpecificallyVersionedParams(&o, metav1.ParameterCodec, v1)
}

// All returns what each node reaches. The map may be kept and does not change.
func (r *Reaches) All() map[tunnel.NodeName]Reach {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.settleLocked().reach
}

// Contested returns how many addresses of Nodes do not count, or count for nobody, because
// they belong to others or two Nodes claim them.
func (r *Reaches) Contested() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.settleLocked().contested)
}

// settleLocked looks at what has changed. The caller holds mu.
func (r *Reaches) settleLocked() *settled {
	if r.settled == nil {
		r.settled = settle(r.nodes, r.services, r.client.Hostname())
		for _, c := range r.settled.contested {
			if skipped, ok := r.denied.Allow(); ok {
				r.log.Warn("an address that a Node claims does not count", "node", string(c.node), "target", c.address, "err", c.why, "skipped", skipped)
			}
		}
	}
	return r.settled
}

// Known reports whether the nodes have been read once.
func (r *Reaches) Known() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.knownLocked()
}

// knownLocked is Known. The caller holds mu.
func (r *Reaches) knownLocked() bool { return r.known && r.asked }

// Ready returns an error until the nodes have been read, or cannot be, which is Note's to
// say: all but the egress front door does without them.
func (r *Reaches) Ready() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.knownLocked() && r.err == nil && r.errCIDRs == nil {
		return errors.New("what the nodes reach has not been read yet")
	}
	return nil
}

// Changed returns a channel that is closed at the next change.
func (r *Reaches) Changed() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.changed == nil {
		r.changed = make(chan struct{})
	}
	return r.changed
}

// Note says why what is known may be out of date; "" if it is not.
func (r *Reaches) Note() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return "what the nodes reach cannot be read: " + Explain(r.err).Error()
	}
	if r.errCIDRs != nil {
		return "the networks of Services cannot be read: " + Explain(r.errCIDRs).Error()
	}
	return ""
}

// said notes the outcome of a request and logs when it has become another.
func (r *Reaches) said(err error) {
	r.mu.Lock()
	before := r.err
	r.err = err
	r.mu.Unlock()
	switch {
	case err != nil && before == nil:
		r.log.Warn("what the nodes reach cannot be read; what is known already is used", "err", Explain(err))
	case err == nil && before != nil:
		r.log.Info("what the nodes reach can be read again")
	}
}

// nodeObject is a Node, as far as somebody here looks at it.
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

type nodeAddress struct {
	Type    string `json:"type"`
	Address string `json:"address"`
}

// nodeList is a list of them.
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

var v1 = schema.GroupVersion{Version: "v1"} //nolint:gochecknoglobals // a constant

// nodesClient is a REST client that knows these types.
func nodesClient(config *rest.Config) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, v1)
	scheme.AddKnownTypeWithName(v1.WithKind("Node"), &nodeObject{})
	scheme.AddKnownTypeWithName(v1.WithKind("NodeList"), &nodeList{})
	return restClient(config, scheme)
}

// reachStore is Reaches as a reflector writes to it.
type reachStore Reaches

func (s *reachStore) Add(o any) error    { return s.set(o, true) }
func (s *reachStore) Update(o any) error { return s.set(o, true) }
func (s *reachStore) Delete(o any) error { return s.set(o, false) }
func (s *reachStore) Resync() error      { return nil }

// Replace takes the whole list.
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
	s.noteLocked()
	return nil
}

func (s *reachStore) set(o any, there bool) error {
	name, n, err := nodeOf(o)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	before, was := s.nodes[name]
	if was == there && before.equal(n) {
		return nil // a heartbeat
	}
	if there {
		s.nodes[name] = n
	} else {
		delete(s.nodes, name)
	}
	s.noteLocked()
	return nil
}

// noteLocked tells who waits. The caller holds mu.
func (s *reachStore) noteLocked() {
	s.settled = nil
	if s.changed != nil && (*Reaches)(s).knownLocked() {
		close(s.changed)
		s.changed = nil
	}
}
