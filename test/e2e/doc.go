// Package e2e proves the main job on a real Kubernetes: two nodes behind NAT that nothing can dial, our two binaries
// between kube-apiserver and their kubelets, and kubectl in front, as a user has it.
//
//	make e2e                                         # builds what is missing, runs everything, leaves nothing
//	go test -tags e2e -count=1 -v -timeout 30m ./test/e2e   # the same, when test/cluster/build.sh has run
//
// It needs root and what test/cluster/README.md lists. TUNNEL_BIN names a binary to test instead of building ./cmd/tunnel.
//
// The cluster's scripts do the cluster (test/cluster); this package starts the tunnel, moves the nodes' names to it and
// asserts what kubectl prints and how it exits. It knows nothing of the tunnel's code: only the configuration files, the
// health port and the command line. What it does not do: measure (see make bench), or break single connections on the way
// (see the tests of pkg/stream).
package e2e
