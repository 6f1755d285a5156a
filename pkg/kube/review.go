package kube

import (
	"context"
	"slices"
)

// TokenReview is what Kubernetes says of a token.
type TokenReview struct {
	Authenticated bool   // it is good, and for the audience that was asked for
	User          string // "system:serviceaccount:NAMESPACE:NAME"
	Node          string // that the pod runs on, to which the token is bound; "": none, or not one alone
}

// nodeClaim holds the node of a bound token (k8s.io/apiserver/pkg/authentication/serviceaccount).
const nodeClaim = "authentication.kubernetes.io/node-name"

const tokenReviews = "/apis/authentication.k8s.io/v1/tokenreviews"

// tokenReview is the object, as far as we look (k8s.io/api/authentication/v1). It is
// answered and not kept.
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

// ReviewToken asks whose token this is. An error means that there is no answer, and
// never holds the token; [Explain] says what is to be done. A token that is not good, or
// not for the audience, has a review that is not authenticated and says nothing else.
func (c *Client) ReviewToken(ctx context.Context, token, audience string) (TokenReview, error) {
	var got tokenReview
	ask := tokenReview{Spec: tokenReviewSpec{Token: token, Audiences: []string{audience}}}
	if err := c.joins.create(ctx, tokenReviews, ask, &got); err != nil {
		return TokenReview{}, err
	}
	// A server that knows no audiences names none, and would accept any token.
	if !got.Status.Authenticated || !slices.Contains(got.Status.Audiences, audience) {
		return TokenReview{}, nil
	}
	review := TokenReview{Authenticated: true, User: got.Status.User.Username}
	if nodes := got.Status.User.Extra[nodeClaim]; len(nodes) == 1 {
		review.Node = nodes[0]
	}
	return review, nil
}
