# Bare `make` prints what there is to make. Everything is installed by the targets
# that need it, from the Go module proxy and Debian; nothing has to be there but Go,
# make and, for -race, gcc.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
LDFLAGS := -s -w -X main.version=$(VERSION)
# grpcnotrace leaves out golang.org/x/net/trace, which nothing here serves. It uses html/template, and a
# program with that keeps every exported method. test/rig builds with the same tag.
TAGS    := grpcnotrace
PKGS    := ./...
# Modules beside the main one, with code of ours. Three have none of these checks. test/cluster/src/kubeall and
# test/services would make lint compile Kubernetes, and go mod tidy would break the go.mod of kubeall (its README).
# metrics-server has no code of ours.
MODULES := deployment/test test/cluster/src/coredns test/cluster/src/pki test/cni test/interop test/page test/udp tools/protobuf tools/release

GOLANGCI    := go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
# v3.22.0 is the newest release whose requirements are all published versions.
VALE        := go run github.com/vale-cli/vale/v3/cmd/vale@v3.22.0
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.6.0
FUZZTIME    ?= 60s

.PHONY: help
help: ## print this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# tools/release builds with these recipes too, for each platform: with BIN or CNI_BIN, VERSION, and an environment of its own.
BIN     := bin/tunnel
CNI_BIN := bin/tunnel-cni

.PHONY: build
build: ## build bin/tunnel
	@CGO_ENABLED=0 go build -trimpath -tags '$(TAGS)' -ldflags '$(LDFLAGS)' -o '$(BIN)' ./cmd/tunnel

.PHONY: build-cni
build-cni: ## build bin/tunnel-cni, the CNI plugin (Linux)
	@CGO_ENABLED=0 GOOS=linux go build -trimpath -ldflags '$(LDFLAGS)' -o '$(CNI_BIN)' ./cmd/tunnel-cni

.PHONY: demo
demo: build ## see it work on this machine (ARGS=--once: run the checks and exit)
	@bin/tunnel demo $(ARGS)

.PHONY: dev-certs
dev-certs: ## make the certificates and tokens that conf/cloud.toml and conf/edge.toml name
	@if [ -e conf/dev/ca.crt ]; then \
		echo "conf/dev is there already and stays as it is; for new ones: go run ./conf/devcerts -force"; \
	else go run ./conf/devcerts; fi

.PHONY: test
test: FUZZTIME = 10s
test: race fuzz ## the tests: with the race detector, leak checks, and 10 s of fuzzing per target

.PHONY: race
race: iproute2 strace proxies ## the tests with the race detector; a skip that test/skips.txt does not list fails
	@# Everything is compiled first: tests that wait for others should not share the processors with a compiler.
	@go list -race -test -export $(PKGS) >/dev/null
	@go run ./tools/report -allow test/skips.txt -- go test -race -count=1 -timeout 20m -json $(PKGS)

# Tests that make networks of their own do it with ip(8).
.PHONY: iproute2
iproute2:
	@command -v ip >/dev/null || { echo "installing iproute2"; apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends iproute2 </dev/null >/dev/null; }

# A test has it report errors of accept(2).
.PHONY: strace
strace:
	@command -v strace >/dev/null || { echo "installing strace"; apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends strace </dev/null >/dev/null; }

# A test shares port 443 between them and tunnel.
.PHONY: proxies
proxies:
	@test/docs/proxies.sh

.PHONY: fuzz
fuzz: ## fuzz every target for FUZZTIME (60s each: 25 minutes); commit an input that fails, named after its fault
	@go run ./tools/fuzzall -time $(FUZZTIME) $(PKGS)

.PHONY: lint
lint: ## golangci-lint, formatting, that each go.mod is in order, and the sentences of the pages (tools/prose)
	@for module in . $(MODULES); do (cd $$module; $(GOLANGCI) run $(PKGS); go mod verify >/dev/null; go mod tidy -diff); done
	@$(GOLANGCI) fmt --diff
	@$(VALE) --config tools/prose/vale.ini --output=line README.md CHANGELOG.md docs

# The daemons are for Linux. The commands that a newcomer types build everywhere. Tests use
# Linux, so on other systems only the code itself is vetted.
.PHONY: cross
cross: ## that everything builds for darwin and windows, for linux/arm64, and with 32 bits (linux/arm)
	@export CGO_ENABLED=0; for platform in linux/arm linux/arm64 darwin/arm64 windows/amd64; do \
		echo $$platform; export GOOS=$${platform%/*} GOARCH=$${platform#*/}; \
		go build ./cmd/... ./internal/... ./pkg/... ./conf/...; \
		if [ $$GOOS = linux ]; then go vet $(PKGS); continue; fi; \
		go list -f '{{range .GoFiles}}{{$$.Dir}}/{{.}} {{end}}' ./cmd/... ./internal/... ./pkg/... ./conf/... | while read -r files; do go vet $$files; done; \
		go vet ./cmd/tunnel; \
	done

.PHONY: vuln
vuln: ## known vulnerabilities in what we depend on (asks vuln.go.dev; where that cannot be reached, a snapshot of it)
	@GOBIN=$(CURDIR)/bin go install $(GOVULNCHECK)
	@go run ./tools/vuln -- bin/govulncheck $(PKGS)

# It needs no network if the module cache holds what the two go.mod files name.
.PHONY: release
release: ## dist/: archives, packages, image, SBOM, checksums of the tag at HEAD (VERSION=v0.1.0, KEY=FILE, ARGS=-snapshot)
	@rm -rf dist
	@go -C tools/release run . -out $(CURDIR)/dist $(if $(findstring command line,$(origin VERSION)),-version $(VERSION)) \
		$(if $(KEY),-key $(abspath $(KEY))) $(ARGS)

# Root installs the deb in a Debian that debootstrap makes. Without root, these tests are skipped.
.PHONY: debootstrap
debootstrap:
	@[ "$$(id -u)" != 0 ] || command -v debootstrap >/dev/null || { echo "installing debootstrap"; apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends debootstrap </dev/null >/dev/null; }

.PHONY: release-test
release-test: debootstrap ## a release holds what it must, and two builds agree; the deb lives in a clean Debian (root; four minutes)
	@go -C tools/release vet ./...
	@go -C tools/release test -count=1 -timeout 40m ./...

.PHONY: cover
cover: ## test coverage, by package
	@go test -count=1 -cover $(PKGS)

.PHONY: gen
gen: ## generate the protobuf code again, without protoc
	@go -C tools/protobuf run . ../../pkg/stream/tunnelv1 ../../pkg/services/servicesv1

.PHONY: docs
docs: ## write the pages of docs/ that are made from the code: configuration, metrics, commands
	@TUNNEL_UPDATE_DOCS=1 go test -count=1 -run '^(TestReference|TestMetricsPage|TestCommandsPage)$$' ./conf ./cmd/tunnel

.PHONY: hugo
hugo:
	@command -v hugo >/dev/null || { echo "installing hugo"; apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends hugo </dev/null >/dev/null; }

.PHONY: site
site: hugo ## bin/site: the pages as a site (HTML); every link of the site is checked
	@hugo --source tools/site --noBuildLock --quiet --cleanDestinationDir
	@go run ./tools/site bin/site

.PHONY: tidy
tidy: ## format, and put each go.mod in order
	@$(GOLANGCI) fmt
	@for module in . $(MODULES); do go -C $$module mod tidy; done

.PHONY: clean
clean: ## remove what make has made here
	@rm -rf bin dist conf/dev

include test/test.mk test/e2e/e2e.mk bench/bench.mk deployment/deployment.mk
