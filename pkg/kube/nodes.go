package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"tunnel/pkg/tunnel"
)

// notControlPlane leaves out the machines of the control plane, by the labels that
// kubeadm gives them. The kubelet of a node may not set them (NodeRestriction).
const notControlPlane = "!" + controlPlane + ",!" + oldControlPlane

const controlPlane, oldControlPlane = "node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"

func isControlPlane(labels map[string]string) bool {
	_, is := labels[controlPlane]
	_, was := labels[oldControlPlane]
	return is || was
}

// Nodes are the names of the cluster's nodes, those of the control plane apart.
type Nodes struct {
	// Set once.
	client   *Client
	selector string
	log      *slog.Logger

	mu      sync.RWMutex // guards the following
	names   map[tunnel.NodeName]struct{}
	known   bool          // whether names have ever been complete; it stays so, since an old list is better than none
	changed chan struct{} // closed at the next change; nil while nobody waits
	err     error         // why names may be out of date
}

// Nodes returns the nodes that match a label selector (Kubernetes' syntax); "" are all.
// Nothing is known of them before Run.
func (c *Client) Nodes(selector string, log *slog.Logger) (*Nodes, error) {
	if _, err := labels.Parse(selector); err != nil {
		return nil, fmt.Errorf("%q is not a label selector: write one such as \"node-role.kubernetes.io/edge=\": %w", selector, err)
	}
	if selector != "" {
		selector += ","
	}
	return &Nodes{client: c, selector: selector + notControlPlane, log: log}, nil
}

// Run follows the nodes until ctx is done.
func (n *Nodes) Run(ctx context.Context) error {
	n.client.follow(ctx, schema.GroupVersionResource{Version: "v1", Resource: "nodes"}, "",
		metav1.ListOptions{LabelSelector: n.selector}, (*nodeStore)(n), n.said)
	return nil
}

// May reports whether a node of that name may be told of. known is false until the
// names have been read once.
func (n *Nodes) May(name tunnel.NodeName) (may, known bool) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	_, may = n.names[name]
	return may, n.known
}

// Changed returns a channel that is closed at the next change of any name.
func (n *Nodes) Changed() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.changed == nil {
		n.changed = make(chan struct{})
	}
	return n.changed
}

// Err returns why the names may be out of date, or nil.
func (n *Nodes) Err() error {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.err
}

// said notes the outcome of a request and logs when it has become another.
func (n *Nodes) said(err error) {
	n.mu.Lock()
	before := n.err
	n.err = err
	n.mu.Unlock()
	switch {
	case err != nil && before == nil:
		n.log.Warn("the names of the nodes cannot be read; those known already are used", "err", Explain(err))
	case err == nil && before != nil:
		n.log.Info("the names of the nodes can be read again")
	}
}

// nodeStore is Nodes as a reflector writes to it. Only names are kept.
type nodeStore Nodes

func (s *nodeStore) Add(o any) error    { return s.set(o, true) }
func (s *nodeStore) Update(o any) error { return s.set(o, true) }
func (s *nodeStore) Delete(o any) error { return s.set(o, false) }
func (s *nodeStore) Resync() error      { return nil }

// Replace takes the whole list.
func (s *nodeStore) Replace(all []any, _ string) error {
	names := make(map[tunnel.NodeName]struct{}, len(all))
	for _, o := range all {
		name, err := nodeName(o)
		if err != nil {
			return err
		}
		names[name] = struct{}{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.names, s.known = names, true
	s.noteLocked()
	return nil
}

func (s *nodeStore) set(o any, there bool) error {
	name, err := nodeName(o)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, was := s.names[name]; was == there {
		return nil // its status or its annotations, which change all the time
	}
	if there {
		s.names[name] = struct{}{}
	} else {
		delete(s.names, name)
	}
	s.noteLocked()
	return nil
}

// noteLocked tells who waits. The caller holds mu.
func (s *nodeStore) noteLocked() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

func nodeName(o any) (tunnel.NodeName, error) {
	m, ok := o.(metav1.Object)
	if !ok {
		return "", errors.New("not an object")
	}
	return tunnel.ParseNodeName(m.GetName())
}
