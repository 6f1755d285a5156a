package kube

import (
	"context"
	"log/slog"
	"path"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"tunnel/pkg/tunnel"
)

// podsAgain is how long after a failure the API server is asked again whether pods can be read.
const podsAgain = 30 * time.Second

// Pods tells which node a pod is bound to, and whether the API server lets us ask.
type Pods struct {
	// Set once.
	client *Client
	log    *slog.Logger

	mu     sync.Mutex    // guards the following
	err    error         // why the last request failed, or nil
	failed chan struct{} // closed when err is set; nil while nobody waits
}

// Pods returns the pods of the cluster. Nothing is asked before Run or NodeOf.
func (c *Client) Pods(log *slog.Logger) *Pods { return &Pods{client: c, log: log} }

// pod is a Pod, as far as we look (k8s.io/api/core/v1).
type pod struct {
	Spec struct {
		NodeName string `json:"nodeName"`
	} `json:"spec"`
}

// NodeOf returns the node that a pod is bound to; "" if there is no such pod, or it is not
// bound yet. A node cannot take the pod of another: spec.nodeName of a pod does not change once it
// is set, and the API server sends an exec to the kubelet that the same field names. (A kubelet
// may create mirror pods, which are bound to its own node.)
func (p *Pods) NodeOf(ctx context.Context, namespace, name string) (tunnel.NodeName, error) {
	var got pod
	err := p.client.pods.get(ctx, path.Join("/api/v1/namespaces", namespace, "pods", name), &got)
	if apierrors.IsNotFound(err) {
		err = nil
	}
	if ctx.Err() == nil { // else it says nothing about the API server
		p.said(err)
	}
	if err != nil {
		return "", Explain(err)
	}
	return tunnel.NodeName(got.Spec.NodeName), nil
}

// Run asks once whether pods can be read, and after a failure again until they can, so that
// missing rights show before somebody needs them. The pod that it asks for need not exist.
func (p *Pods) Run(ctx context.Context) error {
	for {
		p.NodeOf(ctx, "default", "tunnel") //nolint:errcheck // said notes it
		if !p.await(ctx) {
			return nil
		}
		select {
		case <-time.After(podsAgain):
		case <-ctx.Done():
			return nil
		}
	}
}

// await waits until pods cannot be read. It reports false when ctx is done first.
func (p *Pods) await(ctx context.Context) bool {
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

// said notes the outcome of a request and logs when it has become another.
func (p *Pods) said(err error) {
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
		p.log.Warn("pods cannot be read: an exec, attach or port-forward that does not name its node fails", "err", Explain(err))
	case err == nil && before != nil:
		p.log.Info("pods can be read again")
	}
}

// Note says why pods cannot be read; "" if they can.
func (p *Pods) Note() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		return ""
	}
	return "pods cannot be read: " + Explain(p.err).Error()
}
