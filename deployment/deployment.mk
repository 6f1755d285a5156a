# The manifests. Included by the Makefile of the repository; paths are relative to its directory.

.PHONY: manifests

manifests: ## the kustomize overlays and the Helm chart: the same objects, valid, restricted, with accepted configurations
	go -C deployment/test test -count=1 ./...
