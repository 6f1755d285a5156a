package kube

import (
	"context"
	"path"
)

// Right is one permission in Kubernetes, as a rule of RBAC grants it.
type Right struct {
	Verb, Group, Resource string
	Subresource           string // "": the resource itself
	Name                  string // name of the object; "": any object
	Namespace             string // "": all namespaces, or the resource has none
}

// String returns the right for people: "patch configmaps tunnel-nodes in tunnel-system".
func (r Right) String() string {
	text := r.Verb + " " + path.Join(r.Resource, r.Subresource)
	if r.Name != "" {
		text += " " + r.Name
	}
	if r.Namespace != "" {
		text += " in " + r.Namespace
	}
	return text
}

const accessReviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

// accessReview holds the fields of a SelfSubjectAccessReview (k8s.io/api/authorization/v1) that May uses. The API
// server answers the review and does not store it. Every user may create a review.
type accessReview struct {
	Spec struct {
		Attributes resourceAttributes `json:"resourceAttributes"`
	} `json:"spec"`
	Status struct {
		Allowed bool `json:"allowed,omitempty"`
	} `json:"status,omitzero"`
}

type resourceAttributes struct {
	Namespace   string `json:"namespace,omitempty"`
	Verb        string `json:"verb"`
	Group       string `json:"group,omitempty"`
	Resource    string `json:"resource"`
	Subresource string `json:"subresource,omitempty"`
	Name        string `json:"name,omitempty"`
}

// May asks whether the API server grants this client a right.
func (c *Client) May(ctx context.Context, r Right) (bool, error) {
	var ask, got accessReview
	ask.Spec.Attributes = resourceAttributes{r.Namespace, r.Verb, r.Group, r.Resource, r.Subresource, r.Name}
	err := c.objects.create(ctx, accessReviews, ask, &got)
	return got.Status.Allowed, err
}

// Version returns the version of the API server.
func (c *Client) Version(ctx context.Context) (string, error) {
	var got struct {
		GitVersion string `json:"gitVersion"`
	}
	err := c.objects.get(ctx, "/version", &got)
	return got.GitVersion, err
}
