package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/reload"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
)

// cluster is what a cloud reads from Kubernetes. Without Kubernetes every field is nil.
type cluster struct {
	client  *kube.Client
	names   *kube.Nodes   // nodes that may appear in DNS
	joining *kube.Nodes   // nodes that may join; nil: any node
	edges   *kube.Nodes   // nodes that should have an edge, perhaps names or joining; nil: the cloud reads no nodes
	reaches *kube.Reaches // the addresses that each node reaches; nil: no module reads them
	pods    *kube.Pods    // the node of each pod, for https; nil: https asks the kubelets
}

// newCluster makes the clients of Kubernetes that the configuration needs. None connects yet.
func newCluster(c *conf.Cloud, log *slog.Logger) (k cluster, err error) {
	key := "mode.cloud.stream.dns.configmap"
	if c.DNS.ConfigMap == "" {
		key = "mode.cloud.join"
		switch {
		case c.Egress.AsksKubernetes():
			key = "mode.cloud.egress.kubernetes"
		case c.HTTPS.AsksKubernetes():
			key = "mode.cloud.https.kubernetes"
		case c.InventoryMap() != "":
			key = "mode.cloud.admin.inventory"
		case c.Services.On:
			key = "mode.cloud.services"
		case !c.Join.AsksKubernetes():
			return cluster{}, nil
		}
	}
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
	if c.AsksKubernetes() && c.HTTPS.MayAskKubernetes() { // false if only the inventory uses Kubernetes
		k.pods = k.client.Pods(log)
	}
	switch {
	case c.Join.AnyNode:
	// If the cloud uses Kubernetes only for pods, Services or the inventory, any node may join.
	case k.names == nil && k.reaches == nil && !c.Join.AsksKubernetes():
	case k.names != nil && c.DNS.NodeSelector == "":
		k.joining = k.names
	default:
		if k.joining, err = k.client.Nodes("", log); err != nil {
			return cluster{}, fmt.Errorf("mode.cloud.join: %w", err)
		}
	}
	k.edges = cmp.Or(k.names, k.joining)
	if c.Expected != "" && (k.names == nil || c.Expected != c.DNS.NodeSelector) {
		if k.edges, err = k.client.Nodes(c.Expected, log); err != nil {
			return cluster{}, fmt.Errorf("mode.cloud.admin.nodeselector: %w", err)
		}
	}
	return k, nil
}

// add adds the modules that watch Kubernetes.
func (k cluster) add(d *daemon) {
	if k.client == nil {
		return
	}
	d.about = append(d.about, "kubernetes", k.client.Host())
	if k.names != nil {
		d.add(nodeNames{"dns-names", k.names}, k.names.Ready) // a responder does not know which nodes exist before
	}
	if k.joining != nil && k.joining != k.names {
		d.add(nodeNames{"join-names", k.joining}, nil)
	}
	if k.edges != cmp.Or(k.names, k.joining) {
		d.add(nodeNames{"edge-names", k.edges}, nil)
	}
	if k.reaches != nil {
		d.add(nodeReaches{k.reaches}, k.reaches.Ready)
	}
	if k.pods != nil {
		d.add(podNodes{k.pods}, nil)
	}
}

// newTokens reads the token file, which may be empty if nodes can prove themselves otherwise.
func newTokens(c *conf.Cloud, log *slog.Logger, trail tunnel.Trail) (*auth.Tokens, error) {
	return auth.NewTokens(auth.TokensConfig{
		Path: c.Server.TokenFile, AllowShared: c.Server.AllowShared, Log: log, Audit: trail,
		MayBeEmpty: c.Join.CA != "" || len(c.Join.ServiceAccounts) > 0,
	})
}

// kubernetesBackdate is how far Kubernetes' own signers backdate a certificate
// (kubernetes/pkg/controller/certificates/signer/signer.go).
const kubernetesBackdate = 5 * time.Minute

// backdate returns how long before its issue the NotBefore of a node's certificate lies.
func backdate(j conf.Join) time.Duration {
	switch {
	case !j.Kubernetes:
		return auth.Backdate
	case j.SignerName == "" || strings.HasPrefix(j.SignerName, "kubernetes.io/"):
		return kubernetesBackdate
	}
	// The backdating of any other signer is unknown. A value too large would keep certificates
	// good that were issued before a revocation. With a value too small, a node that joins again
	// right after a revocation has to wait.
	return 0
}

// newGate sets gate and issuer.
func (w *cloudWiring) newGate() error {
	c, k := w.conf, w.cluster
	tokens, err := newTokens(c, w.log, w.trail)
	if err != nil {
		return err
	}
	cfg := auth.GateConfig{Tokens: tokens, Backdate: backdate(c.Join), Log: w.log}
	if c.Join.CA != "" {
		var pool *reload.Pool
		if pool, err = w.files.Pool("mode.cloud.join ca", c.Join.CA); err != nil {
			return err
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
	if c.Inventory != "" {
		cfg.Known = w.knows
	}
	w.gate = auth.NewGate(cfg)
	w.issuer, err = w.newIssuer()
	return err
}

// knows reports whether a node has a session, or had a session that the cloud remembers. While the inventory has not
// been read, knows returns true for every node, because the inventory may hold any node.
func (w *cloudWiring) knows(node tunnel.NodeName) bool {
	return w.reach.Holds(node) || w.inventory != nil && (!w.inventory.Known() || w.inventory.Has(node))
}

// newIssuer returns the Issuer that makes certificates for nodes; nil: this cloud makes none.
func (w *cloudWiring) newIssuer() (stream.Issuer, error) {
	c := w.conf.Join
	switch {
	case c.Kubernetes:
		return auth.NewIssuer(w.gate, w.cluster.client.Signer(c.SignerName, c.Lifetime, w.log)), nil
	case c.CAKey != "":
		signer, err := auth.NewFileSigner(c.CA, c.CAKey, c.Lifetime)
		if err != nil {
			return nil, fmt.Errorf("mode.cloud.join: %w", err)
		}
		return auth.NewIssuer(w.gate, signer), nil
	}
	return nil, nil
}

// defaultAudience is the audience of the ServiceAccount tokens that a cloud accepts.
const defaultAudience = "tunnel"

// reviewer asks Kubernetes to review ServiceAccount tokens.
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

// nodeNames is a module that watches the names of the cluster's nodes.
type nodeNames struct {
	name string
	*kube.Nodes
}

func (n nodeNames) Name() string { return n.name }

// Note says why the names may be stale, for /readyz.
func (n nodeNames) Note() string {
	if err := n.Err(); err != nil {
		return "the names of the nodes cannot be read: " + kube.Explain(err).Error()
	}
	return ""
}

// podNodes is the module that checks, for /readyz, whether Kubernetes lets the cloud read pods.
type podNodes struct{ *kube.Pods }

func (podNodes) Name() string { return "pods" }
