# The end-to-end tests. Included by the Makefile of the repository; paths are relative to its directory.
# The cluster has its own README: test/cluster/README.md.

.PHONY: cluster-demo e2e e2e-bench e2e-build e2e-kills e2e-up e2e-down e2e-pictures conformance conformance-build

e2e: e2e-build ## prove the main job on a real Kubernetes (root, Debian 12; 28 minutes, the first time 47; FROM=COMMIT: upgrade from it)
	@status=0; TUNNEL_E2E_FROM='$(FROM)' go test -tags e2e -count=1 -v -timeout 60m ./test/e2e || status=$$?; \
	test/cluster/down.sh && exit $$status

e2e-bench: ## what 10,000 nodes that join within a minute cost a real API server (root; two minutes)
	@go test -tags e2e -run '^$$' -bench . -benchtime 1x -timeout 10m ./test/e2e

e2e-kills: e2e-build ## edges with Services, cloud and API server are killed for ten minutes: nodes keep their rules, and drop those of deleted Services (root; KILLS=30m)
	@status=0; TUNNEL_E2E_KILLS=$(or $(KILLS),10m) go test -tags e2e -count=1 -v -timeout 3h -run '^TestServicesKills$$' ./test/e2e || status=$$?; \
	test/cluster/down.sh && exit $$status

# RECORD keeps the record; the pictures go to docs/.
e2e-pictures: RECORD = $(or $(TMPDIR),/tmp)/tunnel-record
e2e-pictures: e2e-build chromium ## docs/page-cluster*.png: the status page while kubectl uses the e2e cluster (root; ten minutes)
	@rm -rf $(RECORD); status=0; \
	TUNNEL_E2E_RECORD=$(RECORD) go test -tags e2e -count=1 -v -timeout 20m -run '^TestRecord$$' ./test/e2e || status=$$?; \
	test/cluster/down.sh; [ $$status = 0 ]
	TUNNEL_PAGE_RECORD=$(RECORD) TUNNEL_PAGE_PICTURES=$(CURDIR)/docs \
		go -C test/page test -count=1 -timeout 10m -run '^TestRecord$$' -v .

e2e-build: ## build that Kubernetes into the cache, once (minutes; nothing to do the next time)
	@nice test/cluster/build.sh

e2e-up: e2e-build ## start it without the tests, and say how to use it
	@test/cluster/up.sh

conformance: conformance-build ## Kubernetes' own tests through each front door and of Services, beside the same without the tunnel (root; an hour for a version; CONFORMANCE=1.34: that one)
	@status=0; go test -tags 'e2e conformance' -count=1 -v -timeout 6h -run TestConformance ./test/e2e || status=$$?; \
	test/cluster/down.sh && exit $$status

conformance-build: e2e-build ## build those tests and their images into the cache, once (the first time half an hour or more)
	@nice test/conformance/build.sh $(or $(CONFORMANCE),1.34 1.36)

cluster-demo: e2e-build ## from a clone to kubectl logs on a node behind NAT, installed by the manifests (root; half a minute, the first time 20; ARGS=--once: remove it at the end)
	@test/cluster/demo.sh $(ARGS)

e2e-down: ## remove it, also what a killed run left behind; logs are kept
	@test/cluster/down.sh
