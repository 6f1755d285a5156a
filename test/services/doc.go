// Package services asks kube-proxy which endpoints a node uses, and compares the answer with that of
// pkg/services.Choose: first for a table of cases, then for cases that a fuzzer makes.
//
// `make services` runs the table and fuzzes for a while. The folder is a Go module of its own, so that the tunnel does
// not depend on k8s.io/kubernetes.
package services
