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

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	DefaultSigner   = "kubernetes.io/kube-apiserver-client" // certificatesv1.KubeAPIServerClientSignerName
	defaultLifetime = 30 * 24 * time.Hour

	// signTimeout bounds the time from the creation of a request to its certificate.
	// kube-controller-manager needs well under a second.
	signTimeout = 25 * time.Second
	// The pauses between two polls for the certificate: firstPoll at first, doubled each time up to maxPoll.
	firstPoll, maxPoll = 100 * time.Millisecond, 2 * time.Second
	// maxSigning bounds the requests in flight: each takes five API calls and as many writes of
	// etcd. Further requests wait.
	maxSigning = 8
)

const certificateRequests = "/apis/certificates.k8s.io/v1/certificatesigningrequests"

// Signer requests certificates for nodes from a signer of the cluster. Any goroutine may use it.
type Signer struct {
	// Set once.
	objects  objects
	name     string        // the signer's name in Kubernetes
	lifetime time.Duration // the lifetime that a request asks for
	log      *slog.Logger

	// slots bounds the requests in flight: Sign sends one element at the start and receives one at
	// the end. Its capacity is maxSigning. It is never closed.
	slots chan struct{}
}

// Signer returns the cluster's signer of that name. "" means
// kubernetes.io/kube-apiserver-client, whose requests kube-controller-manager signs. lifetime
// is the lifetime that a request asks for; 0 means 30 days. The signer may grant less.
func (c *Client) Signer(name string, lifetime time.Duration, log *slog.Logger) *Signer {
	if name == "" {
		name = DefaultSigner
	}
	if lifetime == 0 {
		lifetime = defaultLifetime
	}
	return &Signer{objects: c.joins, name: name, lifetime: lifetime, log: log, slots: make(chan struct{}, maxSigning)}
}

// certificateRequest holds the fields that are used of a CertificateSigningRequest
// (k8s.io/api/certificates/v1).
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
// #10, DER): the chain in PEM, leaf first. Sign itself approves the request, so the caller
// must have checked that node may have the certificate. Errors say what to do. If the API
// server has refused, [ReasonFor] gives the reason.
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
	if chain, err = checkChain(signed, want); err != nil {
		return nil, fmt.Errorf("by signer %s of Kubernetes: %w", s.name, err)
	}
	return chain, nil
}

// sign creates a request, approves it, waits for the certificate, and deletes the request. It
// returns the certificate as the signer has issued it.
func (s *Signer) sign(ctx context.Context, node tunnel.NodeName, request []byte) ([]byte, error) {
	// The name is random and unique, so sign approves and deletes only its own request.
	r := certificateRequest{object: named("", "tunnel-"+strings.ToLower(rand.Text()), ""), Spec: certificateRequestSpec{
		Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: request}),
		SignerName: s.name,
		Seconds:    int32(s.lifetime / time.Second), // conf limits it to ten years
		Usages:     []string{"digital signature", "client auth"},
	}}
	objectPath := path.Join(certificateRequests, r.Metadata.Name)
	limited, cancel := context.WithTimeout(ctx, signTimeout)
	defer cancel()

	var created object
	err := s.objects.create(limited, certificateRequests, r, &created)
	if reason := ReasonFor(err); reason == OK || reason == Failed { // without an answer, the request may exist
		defer s.remove(context.WithoutCancel(ctx), objectPath)
	}
	if err != nil {
		return nil, err
	}
	approval := certificateRequest{object: named("", r.Metadata.Name, created.Metadata.ResourceVersion)}
	approval.Status.Conditions = []condition{{
		Type: "Approved", Status: "True", Reason: "NodeProven",
		Message: "the cloud of the tunnel has seen that it comes from node " + string(node),
	}}
	if err := s.approve(limited, objectPath, approval); err != nil {
		return nil, err
	}
	return s.wait(limited, objectPath)
}

// approveTries is how often approve tries while other programs change the request.
const approveTries = 5

// approve approves a request, unless another approver has already approved or denied it: wait reads the decision.
func (s *Signer) approve(ctx context.Context, objectPath string, approval certificateRequest) error {
	for try := 1; ; try++ {
		err := s.objects.patch(ctx, path.Join(objectPath, "approval"), approval, new(object))
		if err == nil || !apierrors.IsConflict(err) || try == approveTries {
			return err
		}
		var now certificateRequest
		if err := s.objects.get(ctx, objectPath, &now); err != nil {
			return err
		}
		if len(now.Status.Conditions) > 0 {
			return nil
		}
		approval.Metadata.ResourceVersion = now.Metadata.ResourceVersion // another program has added a label, for example
	}
}

// wait polls the request at objectPath until it is signed or refused, or ctx is done.
func (s *Signer) wait(ctx context.Context, objectPath string) ([]byte, error) {
	var failed error // why the last poll failed; nil: it did not
	for pause := firstPoll; ; pause = min(2*pause, maxPoll) {
		sleep(ctx, max(pause, RetryAfter(failed)))
		if ctx.Err() != nil {
			if failed != nil {
				return nil, failed
			}
			return nil, fmt.Errorf("no certificate within %v: no controller answers for this signer. "+
				"For the names kubernetes.io/* it is kube-controller-manager, "+
				"started with --cluster-signing-cert-file and --cluster-signing-key-file; "+
				"for any other name, see that its own controller runs", signTimeout)
		}
		var now certificateRequest
		err := s.objects.get(ctx, objectPath, &now)
		switch {
		case apierrors.IsNotFound(err):
			return nil, fmt.Errorf("it was deleted before it was signed: %w", err)
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

// remove deletes the request at objectPath. Kubernetes would keep a signed request for an hour.
func (s *Signer) remove(ctx context.Context, objectPath string) {
	if err := s.objects.delete(ctx, objectPath, ""); err != nil && !apierrors.IsNotFound(err) {
		s.log.Warn("a certificate request that is no longer needed was not deleted; Kubernetes will, within a day",
			"target", objectPath, "err", Explain(err))
	}
}

// checkChain returns the certificates in signed, in PEM. It returns an error if they are not for
// the request want.
func checkChain(signed []byte, want *x509.CertificateRequest) ([]byte, error) {
	var chain bytes.Buffer
	blocks, err := tunnel.PEMBlocks(signed)
	if err != nil {
		return nil, fmt.Errorf("%w; see what the signer does", err)
	}
	for _, b := range blocks {
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
				return nil, fmt.Errorf("it names %q, the request %q: this signer does not suit; "+
					"choose another one with signername", got, want.Subject)
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
