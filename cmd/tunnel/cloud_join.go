package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"tunnel/conf"
	"tunnel/pkg/auth"
	"tunnel/pkg/kube"
	"tunnel/pkg/reload"
	"tunnel/pkg/stream"
	"tunnel/pkg/tunnel"
)

// cluster is what a cloud asks of Kubernetes. Without Kubernetes all of it is nil.
type cluster struct {
	client  *kube.Client
	names   *kube.Nodes   // that may appear in DNS
	joining *kube.Nodes   // that may join; nil: any
	reaches *kube.Reaches // what nodes reach; nil: nobody asks
	pods    *kube.Pods    // where https finds the node of a pod; nil: it asks kubelets
}

// newCluster connects to nothing yet.
func newCluster(c *conf.Cloud, log *slog.Logger) (k cluster, err error) {
	key := "mode.cloud.stream.dns.configmap"
	if c.DNS.ConfigMap == "" {
		key = "mode.cloud.join"
		switch {
		case c.Egress.AsksKubernetes():
			key = "mode.cloud.egress.kubernetes"
		case c.HTTPS.AsksKubernetes():
			key = "mode.cloud.https.kubernetes"
		case !c.Join.AsksKubernetes():
			return cluster{}, nil
		}
	}
	klog.SetSlogLogger(log) // what client-go has to say
	if k.client, err = kube.New(os.Getenv("KUBECONFIG"), "tunnel/"+software()); err != nil {
		return cluster{}, fmt.Errorf("%s: %w", key, err)
	}
	if c.DNS.ConfigMap != "" {
		if k.names, err = k.client.Nodes(c.DNS.NodeSelector, log); err != nil {
			return cluster{}, fmt.Errorf("mode.cloud.stream.dns.nodeselector: %w", err)
		}
	}
	if c.Egress.AsksKubernetes() {
		k.reaches = k.client.Reaches(log)
	}
	if c.HTTPS.MayAskKubernetes() {
		k.pods = k.client.Pods(log)
	}
	switch {
	case c.Join.AnyNode:
	// That https asks for pods does not change who may join.
	case k.names == nil && k.reaches == nil && !c.Join.AsksKubernetes():
	case k.names != nil && c.DNS.NodeSelector == "":
		k.joining = k.names
	default:
		if k.joining, err = k.client.Nodes("", log); err != nil {
			return cluster{}, fmt.Errorf("mode.cloud.join: %w", err)
		}
	}
	return k, nil
}

// add adds what follows Kubernetes.
func (k cluster) add(d *daemon) {
	if k.client == nil {
		return
	}
	d.about = append(d.about, "kubernetes", k.client.Host())
	if k.names != nil {
		d.add(nodeNames{"dns-names", k.names}, nil)
	}
	if k.joining != nil && k.joining != k.names {
		d.add(nodeNames{"join-names", k.joining}, nil)
	}
	if k.reaches != nil {
		d.add(nodeReaches{k.reaches}, k.reaches.Ready)
	}
	if k.pods != nil {
		d.add(podNodes{k.pods}, nil)
	}
}

// newTokens reads the token file.
func newTokens(c *conf.Cloud, log *slog.Logger) (*auth.Tokens, error) {
	return auth.NewTokens(auth.TokensConfig{
		Path: c.Server.TokenFile, AllowShared: c.Server.AllowShared, Log: log,
		MayBeEmpty: c.Join.CA != "" || len(c.Join.ServiceAccounts) > 0,
	})
}

// kubernetesBackdate is how long before its issue a certificate of Kubernetes' signers
// begins (kubernetes/pkg/controller/certificates/signer/signer.go).
const kubernetesBackdate = 5 * time.Minute

// backdate is how long before its issue a node's certificate begins.
func backdate(j conf.Join) time.Duration {
	switch {
	case !j.Kubernetes:
		return auth.Backdate
	case j.SignerName == "" || strings.HasPrefix(j.SignerName, "kubernetes.io/"):
		return kubernetesBackdate
	}
	// Nobody knows of others. Too much would keep certificates good that were issued before
	// a revocation; too little has a node wait that joins again at once after one.
	return 0
}

// newGate returns who decides about joining, and who makes nodes their certificates, nil if
// nobody does.
func newGate(c *conf.Cloud, files *reload.Files, k cluster, log *slog.Logger) (*auth.Gate, stream.Issuer, error) {
	tokens, err := newTokens(c, log)
	if err != nil {
		return nil, nil, err
	}
	cfg := auth.GateConfig{Tokens: tokens, Backdate: backdate(c.Join), Log: log}
	if c.Join.CA != "" {
		var pool *reload.Pool
		if pool, err = files.Pool("mode.cloud.join ca", c.Join.CA); err != nil {
			return nil, nil, err
		}
		cfg.NodeCA = pool.Pool
	}
	if len(c.Join.ServiceAccounts) > 0 {
		cfg.ServiceAccounts = c.Join.ServiceAccounts
		cfg.Reviewer = reviewer{k.client, cmp.Or(c.Join.Audience, defaultAudience)}
	}
	if k.client != nil {
		cfg.Hosts = []string{k.client.Hostname()}
	}
	if k.joining != nil {
		cfg.Nodes = k.joining
	}
	gate := auth.NewGate(cfg)
	issuer, err := newIssuer(c, gate, k, log)
	return gate, issuer, err
}

func newIssuer(c *conf.Cloud, gate *auth.Gate, k cluster, log *slog.Logger) (stream.Issuer, error) {
	switch {
	case c.Join.Kubernetes:
		return auth.NewIssuer(gate, k.client.Signer(c.Join.SignerName, c.Join.Lifetime, log)), nil
	case c.Join.CAKey != "":
		signer, err := auth.NewFileSigner(c.Join.CA, c.Join.CAKey, c.Join.Lifetime)
		if err != nil {
			return nil, fmt.Errorf("mode.cloud.join: %w", err)
		}
		return auth.NewIssuer(gate, signer), nil
	}
	return nil, nil
}

// defaultAudience is that of ServiceAccount tokens which are for us.
const defaultAudience = "tunnel"

// reviewer is Kubernetes as auth asks it.
type reviewer struct {
	client   *kube.Client
	audience string
}

// Review implements auth.Reviewer.
func (r reviewer) Review(ctx context.Context, token auth.Secret) (auth.Review, error) {
	got, err := r.client.ReviewToken(ctx, token.Reveal(), r.audience)
	if err != nil {
		return auth.Review{}, kube.Explain(err)
	}
	return auth.Review{Authenticated: got.Authenticated, User: got.User, Node: got.Node}, nil
}

// nodeNames is the module that follows which nodes there are.
type nodeNames struct {
	name string
	*kube.Nodes
}

func (n nodeNames) Name() string                    { return n.name }
func (nodeNames) Routes() map[string]tunnel.Handler { return nil }

// Note says why the names may be out of date.
func (n nodeNames) Note() string {
	if err := n.Err(); err != nil {
		return "the names of the nodes cannot be read: " + kube.Explain(err).Error()
	}
	return ""
}

// podNodes is the module that sees whether pods can be read.
type podNodes struct{ *kube.Pods }

func (podNodes) Name() string                      { return "pods" }
func (podNodes) Routes() map[string]tunnel.Handler { return nil }
