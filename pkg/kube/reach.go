package kube

import (
	"context"
	"errors"
	"log/slog"
	"maps"
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

// Reach is what Kubernetes says a node reaches.
type Reach struct {
	Hosts    []string       // status.addresses: addresses and names of the node itself
	PodCIDRs []netip.Prefix // spec.podCIDRs: its pods
}

// Reaches follows what the nodes reach. Whole Node objects are watched for it, which costs
// an API server more than their names do: a kubelet writes its Node every five minutes.
type Reaches struct {
	// Set once.
	client *Client
	log    *slog.Logger

	mu      sync.Mutex // guards the following
	all     map[tunnel.NodeName]Reach
	known   bool          // whether all has ever been complete; it stays so, since an old list is better than none
	changed chan struct{} // closed at the next change; nil while nobody waits
	err     error         // why all may be out of date
}

// Reaches returns what all nodes reach; of those of the control plane, which may not join,
// the nodes themselves without their pods. Nothing is known before Run.
func (c *Client) Reaches(log *slog.Logger) *Reaches {
	return &Reaches{client: c, log: log, all: make(map[tunnel.NodeName]Reach)}
}

// Run follows the nodes until ctx is done.
func (r *Reaches) Run(ctx context.Context) error {
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
	return maps.Clone(r.all)
}

// Known reports whether the nodes have been read once.
func (r *Reaches) Known() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.known
}

// Ready returns an error until the nodes have been read, or cannot be, which is Note's to
// say: all but the egress front door does without them.
func (r *Reaches) Ready() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.known && r.err == nil {
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
		Addresses []struct {
			Address string `json:"address"`
		} `json:"addresses"`
	} `json:"status"`
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
	all := make(map[tunnel.NodeName]Reach, len(objects))
	for _, o := range objects {
		name, reach, err := reachOf(o)
		if err != nil {
			return err
		}
		all[name] = reach
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all, s.known = all, true
	s.noteLocked()
	return nil
}

func (s *reachStore) set(o any, there bool) error {
	name, reach, err := reachOf(o)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	before, was := s.all[name]
	if was == there && before.equal(reach) {
		return nil // a heartbeat
	}
	if there {
		s.all[name] = reach
	} else {
		delete(s.all, name)
	}
	s.noteLocked()
	return nil
}

// noteLocked tells who waits. The caller holds mu.
func (s *reachStore) noteLocked() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

func (r Reach) equal(other Reach) bool {
	return slices.Equal(r.Hosts, other.Hosts) && slices.Equal(r.PodCIDRs, other.PodCIDRs)
}

// reachOf reads a Node. What is no network in it is left out: it is not ours to complain.
func reachOf(o any) (tunnel.NodeName, Reach, error) {
	n, ok := o.(*nodeObject)
	if !ok {
		return "", Reach{}, errors.New("not a node")
	}
	name, err := tunnel.ParseNodeName(n.Name)
	if err != nil {
		return "", Reach{}, err
	}
	r := Reach{Hosts: []string{n.Name}}
	for _, a := range n.Status.Addresses {
		if !slices.Contains(r.Hosts, a.Address) {
			r.Hosts = append(r.Hosts, a.Address)
		}
	}
	if isControlPlane(n.Labels) {
		return name, r, nil // its pods may be reached in another way: nobody may be asked for them here
	}
	for _, text := range n.Spec.PodCIDRs {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			continue
		}
		if a := p.Addr(); a.Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
		}
		r.PodCIDRs = append(r.PodCIDRs, p.Masked())
	}
	return name, r, nil
}
