// Package test renders the kustomize overlays and the Helm chart of the folder deployment, and
// compares them with each other, with the configuration that tunnel accepts, and with what
// Kubernetes permits. It needs no cluster. It is a module of its own, so that tunnel does not
// depend on Helm and kustomize.
package test
