package kube

import (
	"context"
	"log/slog"
	"path"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"tunnel.example/tunnel/pkg/tunnel"
)

// podsRetryInterval is how long after a failure Run tries again to read pods.
const podsRetryInterval = 30 * time.Second

// Pods finds the node of a pod, and notes whether this client has the right to read pods.
type Pods struct {
	// Set once.
	client *Client
	log    *slog.Logger

	mu     sync.Mutex    // guards the following
	err    error         // why the last request failed; nil: it did not
	failed chan struct{} // closed when err is set, never sent to; nil: Run does not wait
}

// Pods returns the pods of the cluster. It sends no request before Run or NodeOf.
func (c *Client) Pods(log *slog.Logger) *Pods { return &Pods{client: c, log: log} }

// pod has the fields of a Kubernetes Pod that the cloud reads (k8s.io/api/core/v1).
type pod struct {
	Spec struct {
		NodeName string `json:"nodeName"`
	} `json:"spec"`
}

// NodeOf returns the node that a pod is bound to; "" if there is no such pod, or if the pod is not bound
// yet. A node cannot claim the pod of another node, because spec.nodeName of a pod does not change once it
// is set. The API server itself sends an exec to the kubelet that this field names. A kubelet may create
// mirror pods, but these are bound to its own node.
func (p *Pods) NodeOf(ctx context.Context, namespace, name string) (tunnel.NodeName, error) {
	var got pod
	err := p.client.pods.get(ctx, path.Join("/api/v1/namespaces", namespace, "pods", name), &got)
	if apierrors.IsNotFound(err) {
		err = nil
	}
	if ctx.Err() == nil { // otherwise the outcome says nothing about the API server
		p.noteResult(err)
	}
	if err != nil {
		return "", Explain(err)
	}
	return tunnel.NodeName(got.Spec.NodeName), nil
}

// Run reads a pod once. After any failure it tries again until pods can be read. So missing rights
// show in Note and in the log before a caller needs them. The pod does not have to exist.
func (p *Pods) Run(ctx context.Context) error {
	for {
		p.NodeOf(ctx, "default", "tunnel") //nolint:errcheck // noteResult stores the error
		if !p.awaitFailure(ctx) {
			return nil
		}
		select {
		case <-time.After(podsRetryInterval):
		case <-ctx.Done():
			return nil
		}
	}
}

// awaitFailure waits until the last request has failed. It returns false if ctx is done first.
func (p *Pods) awaitFailure(ctx context.Context) bool {
	p.mu.Lock()
	if p.err != nil {
		p.mu.Unlock()
		return true
	}
	if p.failed == nil {
		p.failed = make(chan struct{})
	}
	failed := p.failed
	p.mu.Unlock()
	select {
	case <-failed:
		return true
	case <-ctx.Done():
		return false
	}
}

// noteResult stores the outcome of a request. It logs the first failure and the first success
// after a failure.
func (p *Pods) noteResult(err error) {
	p.mu.Lock()
	before := p.err
	p.err = err
	if err != nil && p.failed != nil {
		close(p.failed)
		p.failed = nil
	}
	p.mu.Unlock()
	switch {
	case err != nil && before == nil:
		p.log.Warn("pods cannot be read: an exec, attach or port-forward that does not name its node fails",
			"err", Explain(err))
	case err == nil && before != nil:
		p.log.Info("pods can be read again")
	}
}

// Note returns why pods cannot be read; "" if they can.
func (p *Pods) Note() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		return ""
	}
	return "pods cannot be read: " + Explain(p.err).Error()
}
