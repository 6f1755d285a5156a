# Tests with processes of their own. Included by the Makefile of the repository; paths are
# relative to its directory. Linux only; no root but where it is said.

.PHONY: faults replicas vanish hostile busy soak links interop udp udp-programs networks balancers boxes nftables cni cni-bench chromium page page-pictures services fuzz-choose

faults: ## kill, stop and starve cloud and edge, each a process (45 seconds)
	go test -count=1 -timeout 5m -v ./test/faults

replicas: ## kill, replace and cut off replicas of the cloud, each a process (20 seconds)
	go test -count=1 -timeout 5m -v ./test/replicas

vanish: iproute2 ## callers' and targets' machines that vanish in every state, by every way: no cut-off stream ends cleanly (root; three minutes)
	TUNNEL_VANISH=1 go test -count=1 -timeout 20m -v ./test/vanish

# What stands between edge and cloud in test/networks. policy-rc.d(8) keeps the packages from starting their
# services, which would listen on ports of this machine.
boxes:
	@for box in squid danted nginx haproxy; do test -x /usr/sbin/$$box || missing=1; done; \
	if [ -n "$${missing-}" ]; then \
		echo "installing squid, dante, nginx and HAProxy"; policy=/usr/sbin/policy-rc.d; \
		if [ ! -e $$policy ]; then trap "rm $$policy" EXIT; printf '#!/bin/sh\nexit 101\n' >$$policy; chmod +x $$policy; fi; \
		apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
			squid dante-server nginx-light haproxy </dev/null >/dev/null; \
	fi

networks: boxes ## out through squid, dante, nginx, HAProxy and a proxy that inspects TLS: join, session, a gigabyte each way (ten minutes)
	TUNNEL_NETWORKS=1 go test -count=1 -timeout 30m -v ./test/networks

balancers: proxies ## HAProxy and nginx of Debian in front of the cloud, as docs/network.md configures them (a minute)
	go test -count=1 -timeout 5m -v ./test/balancers

interop: ## Konnectivity's own programs, from the Go module proxy, against ours; its faults, on both (three minutes)
	go -C test/interop test -count=1 -timeout 20m ./...

udp-programs:
	@command -v dig >/dev/null && command -v snmpwalk >/dev/null && test -x /usr/sbin/snmpd && test -x /usr/sbin/dnsmasq && \
		test -x /usr/sbin/rsyslogd && ls /usr/bin/coap-client* >/dev/null 2>&1 || { echo "installing clients and servers of UDP"; \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
		bind9-dnsutils dnsmasq-base snmp snmpd rsyslog libcoap3-bin </dev/null >/dev/null; }

udp: udp-programs ## real clients and servers through UDP ports: DNS, SNMP, syslog, CoAP of Debian, QUIC and WireGuard in Go (root, to install; one minute)
	go -C test/udp test -count=1 -timeout 10m -v ./...
	TUNNEL_UDP_FLOWS=$(or $(FLOWS),200000) go test -count=1 -timeout 30m -run '^TestFlowsLeaveNothing$$' -v ./pkg/udp

nftables: # portmap, which the tests of hostPort execute, needs it
	@command -v nft >/dev/null || { echo "installing nftables"; apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends nftables </dev/null >/dev/null; }

cni: nftables strace ## the CNI plugin, driven by libcni, by containerd's go-cni and by cnitool; killed after every step of ADD and DEL (root; two minutes)
	@# Root may skip no test of pkg/cni and pkg/podnet; test/skips.txt lists them for other users.
	@go run ./tools/report -- go test -count=1 -timeout 10m -json ./pkg/cni ./pkg/podnet
	@go run ./tools/report -allow test/skips.txt -- go -C test/cni test -count=1 -timeout 10m -json ./...

cni-bench: ## the CNI plugin beside bridge with host-local, and beside the plugin that RIVAL=FILE names: faults and times (root; two minutes)
	unshare --net go -C test/cni test -run '^$$' -bench AddDel -benchtime 60x -count 5 .
	TMPDIR=/var/tmp TUNNEL_CNI_RIVAL='$(abspath $(RIVAL))' go -C test/cni test -count=1 -run '^TestSideBySide$$' -v .

# CI leaves it out. It compiles 670 packages of Kubernetes and others: 400 s of one processor, 130 s after make interop.
# CI tests pkg/services by the same table, and kube-proxy changes only with the version in go.mod.
services: ## pkg/services chooses endpoints as kube-proxy does: a table, and Services at random (four minutes to compile it, then seconds)
	go -C test/services test -count=1 -timeout 10m ./...

# The two packages that are compared guide the fuzzer. `go test -fuzz` would compile all others for it, too.
fuzz-choose: ## the same, with Services that a fuzzer makes, for FUZZTIME (60s)
	@go -C test/services test -c -o $(CURDIR)/bin/services.test -gcflags=tunnel.example/tunnel/pkg/services=-d=libfuzzer \
		-gcflags=k8s.io/kubernetes/pkg/proxy=-d=libfuzzer .
	@cd test/services && ../../bin/services.test -test.run '^$$' -test.fuzz '^FuzzChoose$$' -test.fuzztime $(FUZZTIME) \
		-test.fuzzcachedir "$$(go env GOCACHE)/fuzz/tunnel.example/tunnel/test/services"

hostile: ## edges, callers and strangers that mean harm: what the others notice (twenty-five minutes)
	TUNNEL_HOSTILE=1 go test -count=1 -timeout 90m -v ./test/hostile

busy: iproute2 strace proxies ## all tests of the main module, twenty times beside four busy processes: a test that needs a fast machine fails (two and a half hours; RUNS=5)
	@test/busy.sh $(RUNS)

soak: ## the same with ten pairs, also away for 40 s: 40 kills; and replicas as promised (fourteen minutes)
	TUNNEL_SOAK=1 go test -count=1 -timeout 25m -v -p 1 ./test/faults ./test/replicas

chromium:
	@command -v chromium >/dev/null || { echo "installing chromium"; apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core </dev/null >/dev/null; }

page: chromium ## the status page in a real browser, of made-up nodes and of a cloud with edges (root, to install; a minute)
	go -C test/page test -count=1 -timeout 10m -v ./...

page-pictures: chromium ## the pictures of docs/page.md, of a cloud with edges (three minutes)
	TUNNEL_PAGE_PICTURES=$(CURDIR)/docs go -C test/page test -count=1 -timeout 10m -run '^TestProcesses$$' -v .

links: iproute2 ## bulk transfers over 10, 1 and 0.1 Mbit/s, 4 to 110 at once, up and down; links that are cut for 2 to 10 s, that lose packets, and two uplinks (half an hour)
	TUNNEL_LINKS=1 go test -count=1 -timeout 40m -parallel 6 -v -run 'TestBulkOverThinLink|TestShortCut' ./test/links
	@# These judge rates and times, so few run at once. TestCleanLink sends little for ten minutes.
	TUNNEL_LINKS=1 go test -count=1 -timeout 40m -parallel 2 -v \
		-run 'TestLossyLink|TestMultipathOnLoopback|TestCleanLink|TestTwoUplinks|TestAddressIsReplaced' ./test/links
