package main

import (
	"cmp"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/auth"
)

const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {token: t}}]
current-context: c
`

// An unknown signer counts as one that does not backdate. Otherwise a certificate that it issued
// just before a revocation would stay good.
func TestBackdate(t *testing.T) {
	for name, tt := range map[string]struct {
		join conf.Join
		want time.Duration
	}{
		"our own":     {conf.Join{CAKey: "key"}, auth.Backdate},
		"Kubernetes'": {conf.Join{Kubernetes: true}, kubernetesBackdate},
		"by its name": {conf.Join{Kubernetes: true, SignerName: "kubernetes.io/kube-apiserver-client"}, kubernetesBackdate},
		"another one": {conf.Join{Kubernetes: true, SignerName: "example.com/nodes"}, 0},
	} {
		if got := backdate(tt.join); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

// A cloud asks Kubernetes for what is configured, and for nothing twice.
func TestCluster(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", file)
	dns := conf.DNS{ConfigMap: "nodes"}
	selecting := conf.DNS{ConfigMap: "nodes", NodeSelector: "edge="}
	byAccount := conf.Join{ServiceAccounts: []string{"a/b"}}
	yes, no := true, false
	https := func(asks *bool) conf.HTTPS {
		return conf.HTTPS{Ports: map[string]string{"10250": "a:1"}, ClientCA: "ca", Kubernetes: asks}
	}
	egress := conf.Egress{GRPC: []string{"unix:///s"}, Kubernetes: true}
	type cloud = conf.Cloud
	type join = conf.Join
	anyAccount := join{ServiceAccounts: byAccount.ServiceAccounts, AnyNode: true}
	remembers := cloud{Inventory: "configmap:i", HTTPS: https(nil)}
	closed := conf.HTTPS{ClientCA: "ca", Kubernetes: &yes}
	for name, tt := range map[string]struct {
		cloud                              conf.Cloud
		client, names, joining, same, pods bool
		edges                              bool // nodes of their own are read for the nodes that should have an edge
	}{
		"no Kubernetes":                {cloud{Join: join{CA: "ca", CAKey: "key"}}, false, false, false, false, false, false},
		"DNS":                          {cloud{DNS: dns}, true, true, true, true, false, false},
		"DNS with a selector":          {cloud{DNS: selecting}, true, true, true, false, false, false},
		"DNS, and any node may join":   {cloud{DNS: dns, Join: join{AnyNode: true}}, true, true, false, false, false, false},
		"ServiceAccounts":              {cloud{Join: byAccount}, true, false, true, false, false, false},
		"ServiceAccounts of any nodes": {cloud{Join: anyAccount}, true, false, false, false, false, false},
		"Kubernetes signs":             {cloud{Join: join{Kubernetes: true}}, true, false, true, false, false, false},
		"https":                        {cloud{HTTPS: https(&yes)}, true, false, false, false, true, false},
		"https by itself":              {cloud{HTTPS: https(nil)}, false, false, false, false, false, false},
		"https without a port":         {cloud{HTTPS: closed}, false, false, false, false, false, false},
		"https beside egress":          {cloud{HTTPS: https(nil), Egress: egress}, true, false, true, false, true, false},
		"https without, and egress":    {cloud{HTTPS: https(&no), Egress: egress}, true, false, true, false, false, false},
		"inventory":                    {remembers, true, false, false, false, false, false},
		"https beside DNS":             {cloud{HTTPS: https(&yes), DNS: dns}, true, true, true, true, true, false},
		"some nodes have edges":        {cloud{DNS: dns, Expected: "edge="}, true, true, true, true, false, true},
		"these nodes have names":       {cloud{DNS: selecting, Expected: "edge="}, true, true, true, false, false, false},
	} {
		k, err := newCluster(&tt.cloud, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if (k.client != nil) != tt.client || (k.names != nil) != tt.names || (k.joining != nil) != tt.joining ||
			k.names != nil && (k.names == k.joining) != tt.same || (k.pods != nil) != tt.pods ||
			(k.edges != cmp.Or(k.names, k.joining)) != tt.edges || (k.expected() != nil) != (tt.names || tt.joining) {
			t.Errorf("%s: %+v", name, k)
		}
		d := new(daemon)
		k.add(d)
		ofPods := func(c admin.Check) bool { return c.Name == "pods" && c.Note != nil }
		if shows := slices.ContainsFunc(d.checks, ofPods); shows != tt.pods {
			t.Errorf("%s: /readyz tells of pods: %t, want %t", name, shows, tt.pods)
		}
	}
}
