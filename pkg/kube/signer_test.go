package kube

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"net/http"
	"path"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// authority signs every request that it gets, as kube-controller-manager does.
type authority struct {
	t    *testing.T
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, key: newKey(t)}
	template := &x509.Certificate{Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true}
	a.cert = a.make(template, &a.key.PublicKey)
	return a
}

// make creates a certificate from a template, signed by the authority.
func (a *authority) make(template *x509.Certificate, key any) *x509.Certificate {
	a.t.Helper()
	template.SerialNumber, template.NotAfter = big.NewInt(1), time.Now().Add(time.Hour)
	parent := a.cert
	if parent == nil {
		parent = template
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return cert
}

// sign returns the certificate for a request; both are in PEM.
func (a *authority) sign(request []byte) []byte {
	a.t.Helper()
	b, _ := pem.Decode(request)
	if b == nil || b.Type != "CERTIFICATE REQUEST" {
		a.t.Errorf("not a request in PEM: %q", request)
		return nil
	}
	r, err := x509.ParseCertificateRequest(b.Bytes)
	if err != nil {
		a.t.Error(err)
		return nil
	}
	return inPEM(a.make(&x509.Certificate{Subject: r.Subject}, r.PublicKey))
}

func inPEM(certs ...*x509.Certificate) (all []byte) {
	for _, c := range certs {
		all = append(all, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
	}
	return all
}

// request returns a certificate request for edge1, in DER.
func request(t *testing.T) []byte {
	t.Helper()
	return requestFor(t, newKey(t))
}

func requestFor(t *testing.T, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: edge1}, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

var edge1 = pkix.Name{CommonName: "tunnel:node:edge1", Organization: []string{"tunnel:nodes"}}

// signing is an in-memory API server with a signer.
type signing struct {
	view
	answer func(r certificateRequest) certificateRequestStatus // of the signer to an approved request; empty: no answer
	fail   map[string][]error                                  // by verb: the errors of the next calls; guarded by mu

	mu         sync.Mutex // guards the following
	verbs      []string   // of all calls
	maxObjects int        // the largest number of certificate requests at one time
}

func newSigning(answer func(r certificateRequest) certificateRequestStatus) *signing {
	return &signing{view: newMemory().view(), answer: answer, fail: make(map[string][]error)}
}

func (s *signing) signer() *Signer {
	return (&Client{joins: s}).Signer("", 0, slog.New(slog.NewTextHandler(&s.log, nil)))
}

// next records a call. It returns the error that the call shall fail with, or nil.
func (s *signing) next(verb string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.verbs = append(s.verbs, verb)
	if left := s.fail[verb]; len(left) > 0 {
		s.fail[verb] = left[1:]
		return left[0]
	}
	return nil
}

func (s *signing) create(ctx context.Context, p string, in, out any) error {
	if err := s.next("create"); err != nil {
		return err
	}
	err := s.view.create(ctx, p, in, out)
	s.view.mu.Lock()
	defer s.view.mu.Unlock()
	s.maxObjects = max(s.maxObjects, len(s.objects))
	return err
}

func (s *signing) get(ctx context.Context, p string, out any) error {
	if err := s.next("get"); err != nil {
		return err
	}
	return s.view.get(ctx, p, out)
}

func (s *signing) patch(ctx context.Context, p string, in, _ any) error {
	if err := s.next("approve"); err != nil {
		return err
	}
	var patch, r certificateRequest
	if err := errors.Join(s.reach(ctx), convert(in, &patch)); err != nil {
		return err
	}
	p, of := path.Dir(p), path.Base(p)
	s.view.mu.Lock()
	defer s.view.mu.Unlock()
	if err := convert(s.objects[p], &r); err != nil {
		return err
	}
	if of != "approval" || patch.Metadata.ResourceVersion != r.Metadata.ResourceVersion {
		return apierrors.NewConflict(resource, path.Base(p), errors.New("changed"))
	}
	r.Status = s.answer(r)
	r.Status.Conditions = append(patch.Status.Conditions, r.Status.Conditions...)
	var o map[string]any
	if err := convert(r, &o); err != nil {
		return err
	}
	s.putLocked(p, o)
	return nil
}

func (s *signing) delete(ctx context.Context, p, version string) error {
	if err := s.next("delete"); err != nil {
		return err
	}
	return s.view.delete(ctx, p, version)
}

// left returns how many certificate requests exist.
func (s *signing) left() int {
	s.view.mu.Lock()
	defer s.view.mu.Unlock()
	return len(s.objects)
}

// Sign sends the right requests to the API server, and returns the certificate unchanged.
func TestSign(t *testing.T) {
	ca := newAuthority(t)
	s := serve(t, nil)
	var created certificateRequest
	var signed []byte
	s.setHandler(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodPost:
			s.mu.Lock()
			_, body, _ := strings.Cut(s.requests[0], "application/json ")
			s.mu.Unlock()
			if err := json.Unmarshal([]byte(body), &created); err != nil {
				t.Error(err)
			}
			text(201, `{"metadata": {"name": "x", "resourceVersion": "7"}}`)(w, r)
		case r.Method == http.MethodGet && signed == nil: // not yet
			signed = ca.sign(created.Spec.Request)
			text(200, `{"status": {"conditions": [{"type": "Approved", "status": "True"}]}}`)(w, r)
		case r.Method == http.MethodGet:
			chain := base64.StdEncoding.EncodeToString(append(signed, inPEM(ca.cert)...))
			text(200, `{"status": {"certificate": "`+chain+`"}}`)(w, r)
		default:
			text(200, `{"kind": "Status", "status": "Success"}`)(w, r)
		}
	})
	der := request(t)
	signer := s.Signer("example.com/nodes", 12*time.Hour, slog.New(slog.DiscardHandler))
	got, err := signer.Sign(t.Context(), "edge1", der)
	if want := append(signed, inPEM(ca.cert)...); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s, %v; want\n%s", got, err, want)
	}
	name := created.Metadata.Name
	if !regexp.MustCompile(`^tunnel-[a-z2-7]{26}$`).MatchString(name) {
		t.Errorf("its name is %q", name)
	}
	inside, err := json.Marshal(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
	if err != nil {
		t.Fatal(err)
	}
	const all = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
	s.wantRequests(t,
		`POST `+all+` application/json {"metadata":{"name":"`+name+`"},"spec":{"request":`+string(inside)+
			`,"signerName":"example.com/nodes","expirationSeconds":43200,"usages":["digital signature","client auth"]}}`,
		`PATCH `+all+`/`+name+`/approval application/merge-patch+json {"metadata":{"name":"`+name+`","resourceVersion":"7"},`+
			`"status":{"conditions":[{"type":"Approved","status":"True","reason":"NodeProven",`+
			`"message":"the cloud of the tunnel has seen that it comes from node edge1"}]}}`,
		`GET `+all+`/`+name, `GET `+all+`/`+name, `DELETE `+all+`/`+name)
}

// Whatever happens to a request, the error says what failed, and no request object stays behind.
func TestSignFails(t *testing.T) {
	ca := newAuthority(t)
	good := func(r certificateRequest) certificateRequestStatus {
		return certificateRequestStatus{Certificate: ca.sign(r.Spec.Request)}
	}
	refuses := func(kind, reason, message string) func(certificateRequest) certificateRequestStatus {
		return func(certificateRequest) certificateRequestStatus {
			return certificateRequestStatus{Conditions: []condition{{kind, "True", reason, message}}}
		}
	}
	gives := func(certificate []byte) func(certificateRequest) certificateRequestStatus {
		return func(certificateRequest) certificateRequestStatus {
			return certificateRequestStatus{Certificate: certificate}
		}
	}
	forbidden := apierrors.NewForbidden(resource, "x",
		errors.New(`user not permitted to approve requests with signerName "s"`))
	down := apierrors.NewServiceUnavailable("etcd is")
	der := requestFor(t, newKey(t))
	for _, c := range []struct {
		what   string
		answer func(r certificateRequest) certificateRequestStatus
		fail   map[string][]error
		says   string // "": no error
		left   int
	}{
		{"denied", refuses("Denied", "Policy", "not on Sundays"), nil, "denied: Policy: not on Sundays", 0},
		{"failed", refuses("Failed", "SignerValidationFailure", "no such usage"), nil,
			"failed: SignerValidationFailure: no such usage", 0},
		{"never signed", gives(nil), nil, "no certificate within 25s: no controller answers for this signer", 0},
		{"may not create", good, map[string][]error{"create": {forbidden}}, "deployment/cloud-rbac.yaml", 0},
		{"may not approve", good, map[string][]error{"approve": {forbidden}},
			`approve requests with signerName "s": grant it (deployment/cloud-rbac.yaml`, 0},
		{"may not get", good, map[string][]error{"get": {forbidden}}, "deployment/cloud-rbac.yaml", 0},
		{"may not delete", good, map[string][]error{"delete": {forbidden}}, "", 1},
		{"no answer to create", good, map[string][]error{"create": {errDown}}, errDown.Error(), 0},
		{"overloaded while it waits", good,
			map[string][]error{"get": {apierrors.NewTooManyRequests("later", 3), down, errDown}}, "", 0},
		{"deleted while it waits", good,
			map[string][]error{"get": {apierrors.NewNotFound(resource, "x")}}, "it was deleted before it was signed", 0},
		{"no answer for long", good, map[string][]error{"get": repeated(down, 100)}, "etcd is", 0},
		{"approved by another client", gives(nil),
			map[string][]error{"approve": {apierrors.NewConflict(resource, "x", errors.New("changed"))}},
			"no certificate within", 0},
		{"changed by another client", good,
			map[string][]error{"approve": {apierrors.NewConflict(resource, "x", errors.New("changed"))}}, "", 0},
		{"no certificate", gives([]byte("hello")), nil, "no PEM block CERTIFICATE", 0},
		{"not a certificate", gives(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("hello")})), nil,
			"x509", 0},
		{"another key", gives(inPEM(ca.make(&x509.Certificate{Subject: edge1}, newKey(t).Public()))), nil,
			"another key", 0},
		{"another name", func(r certificateRequest) certificateRequestStatus {
			parsed, _ := x509.ParseCertificateRequest(der)
			edge2 := &x509.Certificate{Subject: pkix.Name{CommonName: "tunnel:node:edge2"}}
			return certificateRequestStatus{Certificate: inPEM(ca.make(edge2, parsed.PublicKey))}
		}, nil, `it names "CN=tunnel:node:edge2"`, 0},
	} {
		t.Run(c.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSigning(c.answer)
				s.fail = c.fail
				chain, err := s.signer().Sign(t.Context(), "edge1", der)
				switch {
				case c.says == "" && (err != nil || len(chain) == 0):
					t.Errorf("%q, %v", chain, err)
				case c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)):
					t.Errorf("%v, want %q in it", err, c.says)
				}
				if got := s.left(); got != c.left || strings.Count(s.log.String(), "\n") != c.left {
					t.Errorf("%d requests are left, and the log is\n%s", got, s.log.String())
				}
				if len(s.verbs) > 20 {
					t.Errorf("%d calls: %v", len(s.verbs), s.verbs)
				}
			})
		})
	}
}

func repeated(err error, n int) (all []error) {
	for range n {
		all = append(all, err)
	}
	return all
}

// When the caller cancels, the request is deleted nevertheless.
func TestSignIsCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSigning(func(certificateRequest) (none certificateRequestStatus) { return none })
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := s.signer().Sign(ctx, "edge1", request(t)); !errors.Is(err, context.DeadlineExceeded) || s.left() != 0 {
			t.Errorf("%v, and %d requests are left", err, s.left())
		}
		if last := s.verbs[len(s.verbs)-1]; last != "delete" {
			t.Errorf("it ends with %s", last)
		}
	})
}

// However many nodes ask for certificates, at most maxSigning requests exist at a time.
func TestSignLimitsRequestsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := newAuthority(t)
		s := newSigning(func(r certificateRequest) certificateRequestStatus {
			return certificateRequestStatus{Certificate: ca.sign(r.Spec.Request)}
		})
		signer, der := s.signer(), request(t)
		var all sync.WaitGroup
		for range 5 * maxSigning {
			all.Go(func() {
				if _, err := signer.Sign(t.Context(), "edge1", der); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if s.maxObjects != maxSigning || s.left() != 0 {
			t.Errorf("%d requests at once, want %d; %d are left", s.maxObjects, maxSigning, s.left())
		}
	})
}
