package kube

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

const testToken = "ey.secret.token"

// review answers a TokenReview with a status.
func review(status string) http.HandlerFunc {
	return text(201, `{"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "metadata": {},
		"status": {`+status+`}}`)
}

func TestReviewToken(t *testing.T) {
	s := serve(t, nil)
	const user = `"authenticated": true, "user": {"username": "system:serviceaccount:ns:edge", "extra": {%s}}`
	const forUs = `, "audiences": ["tunnel"]`
	node := fmt.Sprintf(user,
		`"authentication.kubernetes.io/node-name": ["edge1"], "authentication.kubernetes.io/pod-name": ["p"]`)
	account := TokenReview{Authenticated: true, User: "system:serviceaccount:ns:edge"}
	bound := account
	bound.Node = "edge1"
	for _, c := range []struct {
		what, status string
		want         TokenReview
	}{
		{"valid", node + forUs, bound},
		{"valid for other audiences, too", node + `, "audiences": ["a", "tunnel"]`, bound},
		{"for another audience", node + `, "audiences": ["https://kubernetes.default.svc"]`, TokenReview{}},
		{"for an API server that knows no audiences", node, TokenReview{}},
		{"bound to no node", fmt.Sprintf(user, "") + forUs, account},
		{
			"bound to two nodes",
			fmt.Sprintf(user, `"authentication.kubernetes.io/node-name": ["edge1", "edge2"]`) + forUs, account,
		},
		{"bound to nothing", fmt.Sprintf(user, `"authentication.kubernetes.io/node-name": []`) + forUs, account},
		{"not valid", `"error": "invalid bearer token"`, TokenReview{}},
		{"not valid, with other fields set", strings.Replace(node, "true", "false", 1) + forUs, TokenReview{}},
		{"no status", "", TokenReview{}},
	} {
		s.setHandler(review(c.status))
		if got, err := s.ReviewToken(t.Context(), testToken, "tunnel"); err != nil || got != c.want {
			t.Errorf("%s: %+v, %v; want %+v", c.what, got, err, c.want)
		}
		s.wantRequests(t, `POST /apis/authentication.k8s.io/v1/tokenreviews application/json `+
			`{"spec":{"token":"`+testToken+`","audiences":["tunnel"]}}`)
	}
}

// Without an answer from the API server, ReviewToken returns an error and an empty review.
func TestReviewTokenFails(t *testing.T) {
	for _, c := range []struct {
		what    string
		handler http.HandlerFunc
		want    Reason
		says    string
	}{
		{
			"credential not accepted", refusal(401, "Unauthorized", ""), Forbidden,
			"is the service account or the kubeconfig up to date?",
		},
		{"no rights", refusal(403, "Forbidden", ""), Forbidden, "deployment/cloud-rbac.yaml"},
		{"too many requests", refusal(429, "TooManyRequests", `"retryAfterSeconds": 1`), Throttled, "overloaded"},
		{"broken", refusal(500, "InternalError", ""), Failed, "no"},
		{"no JSON", text(201, "hello"), Failed, "invalid character"},
		{"no answer", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, Failed, "EOF"},
	} {
		s := serve(t, c.handler)
		got, err := s.ReviewToken(t.Context(), testToken, "tunnel")
		if got != (TokenReview{}) || ReasonFor(err) != c.want || !strings.Contains(Explain(err).Error(), c.says) {
			t.Errorf("%s: %+v, %q: %v; want %q with %q in it", c.what, got, ReasonFor(err), Explain(err), c.want, c.says)
		}
		if strings.Contains(err.Error(), testToken) {
			t.Errorf("%s: the token is in %q", c.what, err)
		}
	}
}

// Reviews do not wait for the rate limit of other requests, and other requests do not wait for
// reviews.
func TestReviewsHaveTheirOwnRateLimit(t *testing.T) {
	s := serve(t, refusal(404, "NotFound", ""))
	limit := func(o objects) (qps float32) { return o.(restObjects).client.GetRateLimiter().QPS() }
	if got := limit(s.joins); got != joinsPerSecond {
		t.Errorf("%v reviews a second", got)
	}
	if got := limit(s.objects); got != requestsPerSecond {
		t.Errorf("%v other requests a second", got)
	}
}
