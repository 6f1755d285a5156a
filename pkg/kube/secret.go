package kube

import (
	"context"
	"path"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// secret holds the fields of a Secret (k8s.io/api/core/v1) that this package uses. encoding/json writes and
// reads the values in base64, as Kubernetes does.
type secret struct {
	object
	Type string            `json:"type,omitempty"`
	Data map[string][]byte `json:"data,omitempty"`
}

// Secret returns the data of a Secret. found is false if there is no such Secret.
func (c *Client) Secret(ctx context.Context, namespace, name string) (data map[string][]byte, found bool, err error) {
	var s secret
	err = c.objects.get(ctx, path.Join(secrets(namespace), name), &s)
	if apierrors.IsNotFound(err) {
		return nil, false, nil
	}
	return s.Data, err == nil, err
}

// CreateSecret creates an opaque Secret. It never changes an existing Secret. Its error has the reason [Conflict]
// if the Secret exists, or if there is no such namespace.
func (c *Client) CreateSecret(ctx context.Context, namespace, name string, data map[string][]byte) error {
	s := secret{object: named(namespace, name, ""), Type: "Opaque", Data: data}
	var created object // has no field for the data, so no second copy of the data is made
	return c.objects.create(ctx, secrets(namespace), s, &created)
}

func secrets(namespace string) string { return path.Join("/api/v1/namespaces", namespace, "secrets") }
