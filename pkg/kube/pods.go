package kube

import (
	"context"
	"path"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"tunnel/pkg/tunnel"
)

// pod is a Pod, as far as we look (k8s.io/api/core/v1).
type pod struct {
	Spec struct {
		NodeName string `json:"nodeName"`
	} `json:"spec"`
}

// NodeOf returns the node that a pod is bound to; "" if there is no such pod, or it is not
// bound yet. Nobody but the scheduler binds pods: a node cannot claim one.
func (c *Client) NodeOf(ctx context.Context, namespace, name string) (tunnel.NodeName, error) {
	var p pod
	err := c.pods.get(ctx, path.Join("/api/v1/namespaces", namespace, "pods", name), &p)
	switch {
	case apierrors.IsNotFound(err):
		return "", nil
	case err != nil:
		return "", Explain(err)
	}
	return tunnel.NodeName(p.Spec.NodeName), nil
}
