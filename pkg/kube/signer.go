package kube

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"tunnel/pkg/tunnel"
)

const (
	defaultSignerName = "kubernetes.io/kube-apiserver-client" // certificatesv1.KubeAPIServerClientSignerName
	defaultLifetime   = 30 * 24 * time.Hour

	// signWithin bounds one request from its creation on. kube-controller-manager needs
	// well under a second.
	signWithin = 25 * time.Second
	// How long to wait before the certificate is looked for again; doubled each time.
	firstLook, lastLook = 100 * time.Millisecond, 2 * time.Second
	// signAtOnce bounds the requests in flight: each is five calls and as many writes of
	// etcd. Who comes later waits.
	signAtOnce = 8
)

const certificateRequests = "/apis/certificates.k8s.io/v1/certificatesigningrequests"

// Signer has nodes' certificates signed by a signer of the cluster. It is for any
// goroutine.
type Signer struct {
	// Set once.
	objects  objects
	name     string // of the signer
	lifetime time.Duration
	log      *slog.Logger

	slots chan struct{} // holds one for each request in flight; a bound, nobody closes it
}

// Signer returns the cluster's signer of that name; "" is
// kubernetes.io/kube-apiserver-client, which kube-controller-manager answers for. lifetime
// is what is asked for, 0 is 30 days; the signer may give less.
func (c *Client) Signer(name string, lifetime time.Duration, log *slog.Logger) *Signer {
	if name == "" {
		name = defaultSignerName
	}
	if lifetime == 0 {
		lifetime = defaultLifetime
	}
	return &Signer{objects: c.joins, name: name, lifetime: lifetime, log: log, slots: make(chan struct{}, signAtOnce)}
}

// certificateRequest is the object, as far as we look (k8s.io/api/certificates/v1).
type certificateRequest struct {
	object
	Spec   certificateRequestSpec   `json:"spec,omitzero"`
	Status certificateRequestStatus `json:"status,omitzero"`
}

type certificateRequestSpec struct {
	Request    []byte   `json:"request,omitempty"` // PEM
	SignerName string   `json:"signerName,omitempty"`
	Seconds    int32    `json:"expirationSeconds,omitempty"`
	Usages     []string `json:"usages,omitempty"`
}

type certificateRequestStatus struct {
	Conditions  []condition `json:"conditions,omitempty"`
	Certificate []byte      `json:"certificate,omitempty"` // PEM, leaf first
}

type condition struct {
	Type    string `json:"type"`
	Status  string `json:"status"`
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
}

// Sign returns a certificate for node with the key and the subject of the request (PKCS
// #10, DER): the chain in PEM, leaf first. Whether node may have it, the caller has
// decided: the request is approved here. Errors say what is to be done; they are of this
// package ([ReasonFor]) where the API server has refused.
func (s *Signer) Sign(ctx context.Context, node tunnel.NodeName, request []byte) (chain []byte, err error) {
	want, err := x509.ParseCertificateRequest(request)
	if err != nil {
		return nil, fmt.Errorf("the request for a certificate: %w", err)
	}
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	signed, err := s.sign(ctx, node, request)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("by signer %s of Kubernetes: %w", s.name, Explain(err))
	}
	if chain, err = checked(signed, want); err != nil {
		return nil, fmt.Errorf("by signer %s of Kubernetes: %w", s.name, err)
	}
	return chain, nil
}

// sign takes one request through its life and returns what the signer has made of it.
func (s *Signer) sign(ctx context.Context, node tunnel.NodeName, request []byte) ([]byte, error) {
	// The name is nobody else's: what is deleted, and what is approved, is ours.
	r := certificateRequest{object: named("", "tunnel-"+strings.ToLower(rand.Text()), ""), Spec: certificateRequestSpec{
		Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: request}),
		SignerName: s.name,
		Seconds:    int32(s.lifetime / time.Second), //nolint:gosec // conf bounds it to ten years
		Usages:     []string{"digital signature", "client auth"},
	}}
	at := path.Join(certificateRequests, r.Metadata.Name)
	limited, cancel := context.WithTimeout(ctx, signWithin)
	defer cancel()

	var created object
	err := s.objects.create(limited, certificateRequests, r, &created)
	if reason := ReasonFor(err); reason == OK || reason == Failed { // without an answer it may be there all the same
		defer s.remove(context.WithoutCancel(ctx), at)
	}
	if err != nil {
		return nil, err
	}
	approval := certificateRequest{object: named("", r.Metadata.Name, created.Metadata.ResourceVersion)}
	approval.Status.Conditions = []condition{{
		Type: "Approved", Status: "True", Reason: "NodeProven",
		Message: "the cloud of the tunnel has seen that it comes from node " + string(node),
	}}
	// A conflict: somebody else has had a word already, and the object says which.
	if err := s.objects.patch(limited, path.Join(at, "approval"), approval, new(object)); err != nil && !apierrors.IsConflict(err) {
		return nil, err
	}
	return s.wait(limited, at)
}

// wait looks until the request at a path is signed or refused, or ctx is done.
func (s *Signer) wait(ctx context.Context, at string) ([]byte, error) {
	var failed error // of the last look
	for pause := firstLook; ; pause = min(2*pause, lastLook) {
		sleep(ctx, max(pause, RetryAfter(failed)))
		if ctx.Err() != nil {
			if failed != nil {
				return nil, failed
			}
			return nil, fmt.Errorf("no certificate within %v: nobody answers for this signer. For the names kubernetes.io/* it is kube-controller-manager, started with --cluster-signing-cert-file and --cluster-signing-key-file; for any other name, see that its own controller runs", signWithin)
		}
		var now certificateRequest
		err := s.objects.get(ctx, at, &now)
		switch {
		case apierrors.IsNotFound(err):
			return nil, fmt.Errorf("somebody has deleted it before it was signed: %w", err)
		case ReasonFor(err) == Forbidden:
			return nil, err
		}
		if ctx.Err() == nil {
			failed = err
		}
		for _, c := range now.Status.Conditions {
			if c.Type == "Denied" || c.Type == "Failed" {
				return nil, fmt.Errorf("%s: %s: %s", strings.ToLower(c.Type), c.Reason, c.Message)
			}
		}
		if len(now.Status.Certificate) > 0 {
			return now.Status.Certificate, nil
		}
	}
}

// remove deletes the request at a path. Kubernetes would keep a signed one for an hour.
func (s *Signer) remove(ctx context.Context, at string) {
	if err := s.objects.delete(ctx, at); err != nil && !apierrors.IsNotFound(err) {
		s.log.Warn("a certificate request that is no longer needed was not deleted; Kubernetes will, within a day", "target", at, "err", Explain(err))
	}
}

// checked returns the certificates in what a signer has made, if they are for the request.
func checked(signed []byte, want *x509.CertificateRequest) ([]byte, error) {
	var chain bytes.Buffer
	for rest := signed; ; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			break
		}
		if b.Type != "CERTIFICATE" {
			continue
		}
		if chain.Len() == 0 {
			leaf, err := x509.ParseCertificate(b.Bytes)
			if err != nil {
				return nil, err
			}
			if key, ok := leaf.PublicKey.(interface{ Equal(crypto.PublicKey) bool }); !ok || !key.Equal(want.PublicKey) {
				return nil, errors.New("it has another key than the request; see what the signer does")
			}
			if got := leaf.Subject.String(); got != want.Subject.String() {
				return nil, fmt.Errorf("it names %q, the request %q: this signer does not fit; another one is chosen with signername", got, want.Subject)
			}
		}
		if err := pem.Encode(&chain, &pem.Block{Type: b.Type, Bytes: b.Bytes}); err != nil {
			return nil, err
		}
	}
	if chain.Len() == 0 {
		return nil, errors.New("there is no PEM block CERTIFICATE in it; see what the signer does")
	}
	return chain.Bytes(), nil
}
