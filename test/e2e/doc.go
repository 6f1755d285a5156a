// Package e2e proves the main job on a real Kubernetes: two nodes behind NAT that nothing can dial, our two binaries
// between kube-apiserver and their kubelets, and kubectl in front, as a user has it.
//
//	make e2e                                         # builds what is missing, runs everything, leaves nothing
//	go test -tags e2e -count=1 -v -timeout 60m ./test/e2e   # the same, when test/cluster/build.sh has run
//
// It needs root and what test/cluster/README.md lists. TUNNEL_BIN names a binary to test instead of
// building ./cmd/tunnel.
//
// The cluster's scripts do the cluster (test/cluster); this package starts the tunnel and asserts
// what kubectl prints and how it exits. No name is written by hand: kube-apiserver asks CoreDNS,
// and CoreDNS has the nodes' addresses from the tunnel, once through the ConfigMap that a kubelet
// has mounted, once by asking the tunnel. The tunnel may do in Kubernetes what
// deployment/cloud-rbac.yaml says. TestTunnel/identities has one node join with `tunnel join` and
// the other one with the ServiceAccount token of a pod, and has strangers try to be one of them.
// TestTunnel/dns has more clouds than one and looks at the names alone, and "TestTunnel/replicas
// apart" at what becomes of them while replicas are cut off from each other. TestEgress has a
// cluster of its own, in which kube-apiserver reaches nodes, pods, a webhook and an aggregated API
// by its egress selector:
//
//	go test -tags e2e -count=1 -v -run TestTunnel/identities ./test/e2e      # 1 minute
//	go test -tags e2e -count=1 -v -run TestTunnel/dns ./test/e2e             # 3 minutes
//	go test -tags e2e -count=1 -v -run TestTunnel/replicas_apart ./test/e2e  # 2 minutes
//	go test -tags e2e -count=1 -v -run TestEgress ./test/e2e                 # 3 minutes
//
// TestInstall installs tunnel by the manifests of deployment/, once with kustomize and once with Helm,
// in a cluster with a third node beside the control plane, upgrades it under load, and removes it.
// TestOverlays has the API server judge every overlay.
//
//	go test -tags e2e -count=1 -v -run 'TestInstall|TestOverlays' ./test/e2e
//
// TestCNI gives the pods of two nodes behind one NAT their network by the overlay edge-cni: addresses of both
// families, routes between the nodes, hostPort, an upgrade, a reboot without cloud and uplink, and the removal.
//
//	go test -tags e2e -count=1 -v -run TestCNI ./test/e2e
//
// TestServices has pods of two nodes behind NAT use each other's Services, beside kube-proxy, through the tunnel, or
// over a LAN between the nodes. A pod beside the control plane uses them by a mirror. TestServicesFull has the edges
// serve all Services of nodes without kube-proxy:
//
//	go test -tags e2e -count=1 -v -run TestServices ./test/e2e
//
// TestServicesKills (make e2e-kills) kills edges with Services, the cloud and kube-apiserver for ten minutes, while
// Services come and go. make e2e leaves it out.
//
// TestPages types the commands of the pages that need a cluster, in one cluster: docs/kubernetes.md,
// deployment/README.md by kustomize and by Helm, backup, upgrade, and what kubeadm makes of
// docs/kubeadm.md. The marks before the blocks name the scenarios (package test/docs).
//
//	go test -tags e2e -count=1 -v -run TestPages ./test/e2e
//	go test -tags e2e -count=1 -v -run TestPages/deployment-helm ./test/e2e  # one scenario
//
// TestConformance (make conformance) runs Kubernetes' own tests; test/conformance/README.md says
// which. It takes hours, so it has a build tag of its own besides e2e: conformance.
//
// The tests know nothing of the tunnel's code: only the configuration files, the health port, the
// command line, DNS, what stands in the ConfigMap, and the wire, to say what an edge would not.
// What they do not do: measure (see make bench), except that TestServices compares ways of a connection,
// or break single connections on the way (see the tests of pkg/stream).
package e2e
