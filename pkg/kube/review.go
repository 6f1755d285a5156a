package kube

import (
	"context"
	"slices"
)

// TokenReview is Kubernetes' answer about a token.
type TokenReview struct {
	Authenticated bool   // the token is valid, and is meant for the audience of the request
	User          string // "system:serviceaccount:NAMESPACE:NAME"
	Node          string // the node of the pod to which the token is bound; "": no node, or more than one
}

// nodeClaim is the key of the extra user info that holds the node of a bound token
// (k8s.io/apiserver/pkg/authentication/serviceaccount).
const nodeClaim = "authentication.kubernetes.io/node-name"

const tokenReviews = "/apis/authentication.k8s.io/v1/tokenreviews"

// tokenReview holds the fields of a TokenReview (k8s.io/api/authentication/v1) that this package uses.
// The API server answers it and does not store it.
type tokenReview struct {
	Spec   tokenReviewSpec   `json:"spec"`
	Status tokenReviewStatus `json:"status,omitzero"`
}

type tokenReviewSpec struct {
	Token     string   `json:"token"`
	Audiences []string `json:"audiences"`
}

type tokenReviewStatus struct {
	Authenticated bool     `json:"authenticated,omitempty"`
	Audiences     []string `json:"audiences,omitempty"`
	User          struct {
		Username string              `json:"username,omitempty"`
		Extra    map[string][]string `json:"extra,omitempty"`
	} `json:"user,omitzero"`
}

// ReviewToken asks Kubernetes whose token this is. An error means that there is no answer. The
// error never contains the token; [Explain] adds what to do about it. For an invalid token, or a
// token for another audience, ReviewToken returns a zero TokenReview and no error.
func (c *Client) ReviewToken(ctx context.Context, token, audience string) (TokenReview, error) {
	var got tokenReview
	ask := tokenReview{Spec: tokenReviewSpec{Token: token, Audiences: []string{audience}}}
	if err := c.joins.create(ctx, tokenReviews, ask, &got); err != nil {
		return TokenReview{}, err
	}
	// A server that does not support audiences returns none, and accepts tokens for any audience.
	if !got.Status.Authenticated || !slices.Contains(got.Status.Audiences, audience) {
		return TokenReview{}, nil
	}
	review := TokenReview{Authenticated: true, User: got.Status.User.Username}
	if nodes := got.Status.User.Extra[nodeClaim]; len(nodes) == 1 {
		review.Node = nodes[0]
	}
	return review, nil
}
