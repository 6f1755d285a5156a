package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"tunnel.example/tunnel/pkg/tunnel"
)

// notControlPlane is a label selector that excludes the machines of the control plane. It uses
// the labels that kubeadm sets. A kubelet may not set them on its own Node (NodeRestriction).
const notControlPlane = "!" + controlPlane + ",!" + oldControlPlane

// The labels of control-plane machines: the current one, and the one of older clusters.
const controlPlane, oldControlPlane = "node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"

// isControlPlane reports whether the labels of a Node mark a machine of the control plane.
func isControlPlane(labels map[string]string) bool {
	_, is := labels[controlPlane]
	_, was := labels[oldControlPlane]
	return is || was
}

// Nodes follows the names of the cluster's nodes, without those of the control plane.
type Nodes struct {
	// Set once.
	client   *Client
	selector string // label selector; it excludes the control plane
	log      *slog.Logger

	mu    sync.RWMutex // guards the following
	names map[tunnel.NodeName]struct{}
	// known is true once names has been complete. It stays true, since an old list is better than
	// none.
	known   bool
	changed tunnel.Change // a name is added or removed
	err     error         // why names may be out of date; nil: they are up to date
	began   time.Time     // when Run began; zero: not yet
}

// Nodes returns the nodes that match a label selector (Kubernetes' syntax); "" matches all.
// The names are unknown before Run.
func (c *Client) Nodes(selector string, log *slog.Logger) (*Nodes, error) {
	if _, err := labels.Parse(selector); err != nil {
		return nil, fmt.Errorf(
			"%q is not a label selector: write one such as \"node-role.kubernetes.io/edge=\": %w", selector, err)
	}
	if selector != "" {
		selector += ","
	}
	return &Nodes{client: c, selector: selector + notControlPlane, log: log}, nil
}

// Run follows the nodes until ctx is done.
func (n *Nodes) Run(ctx context.Context) error {
	n.mu.Lock()
	n.began = time.Now()
	n.mu.Unlock()
	n.client.follow(ctx, schema.GroupVersionResource{Version: "v1", Resource: "nodes"}, "",
		metav1.ListOptions{LabelSelector: n.selector}, (*nodeStore)(n), n.noteResult)
	return nil
}

// May reports whether Kubernetes has a matching node of that name, so that clients may be told
// about it. known is false until the names have been read once.
func (n *Nodes) May(name tunnel.NodeName) (may, known bool) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	_, may = n.names[name]
	return may, n.known
}

// Names returns the names of all matching nodes, in no order. known is false until the names have been read once.
func (n *Nodes) Names() (names []tunnel.NodeName, known bool) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	names = make([]tunnel.NodeName, 0, len(n.names))
	for name := range n.names {
		names = append(names, name)
	}
	return names, n.known
}

// Changed returns a channel that is closed when the next name is added or removed.
func (n *Nodes) Changed() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.changed.Next()
}

// Err returns why the names may be out of date; nil: they are up to date.
func (n *Nodes) Err() error {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.err
}

// namesAnyway is how long Ready waits for a Kubernetes that does not answer.
const namesAnyway = 5 * time.Second

// Ready returns an error until reading the names has succeeded or failed, but not for longer than namesAnyway after the
// start of Run: the tunnel also works without Kubernetes.
func (n *Nodes) Ready() error {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if n.known || n.err != nil || !n.began.IsZero() && time.Since(n.began) >= namesAnyway {
		return nil
	}
	return errors.New("the names of the Nodes have not been read yet")
}

// noteResult stores the outcome of a request. It logs the first failure and the first success
// after a failure.
func (n *Nodes) noteResult(err error) {
	n.mu.Lock()
	before := n.err
	n.err = err
	n.mu.Unlock()
	switch {
	case err != nil && before == nil:
		n.log.Warn("the names of the nodes cannot be read; the names read before stay in use", "err", Explain(err))
	case err == nil && before != nil:
		n.log.Info("the names of the nodes can be read again")
	}
}

// nodeStore is Nodes as the store of a reflector. It keeps only the names.
type nodeStore Nodes

func (s *nodeStore) Add(o any) error    { return s.set(o, true) }
func (s *nodeStore) Update(o any) error { return s.set(o, true) }
func (s *nodeStore) Delete(o any) error { return s.set(o, false) }
func (s *nodeStore) Resync() error      { return nil }

// Replace replaces all names: the reflector calls it with each complete list.
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
	s.changed.Notify()
	return nil
}

// set adds or removes the name of one node.
func (s *nodeStore) set(o any, present bool) error {
	name, err := nodeName(o)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, was := s.names[name]; was == present {
		return nil // only the status or annotations of the Node have changed, as they often do
	}
	if present {
		s.names[name] = struct{}{}
	} else {
		delete(s.names, name)
	}
	s.changed.Notify()
	return nil
}

// nodeName returns the name of a Node.
func nodeName(o any) (tunnel.NodeName, error) {
	m, ok := o.(metav1.Object)
	if !ok {
		return "", errors.New("not an object")
	}
	return tunnel.ParseNodeName(m.GetName())
}
