# Measurements with processes of their own. Included by the Makefile of the repository; paths
# are relative to its directory. Linux only; no root but where it is said.

# The benchmark compares with `ssh -R`, between a server and a client of its own.
.PHONY: openssh
openssh:
	@test -x /usr/sbin/sshd || { echo "installing openssh-server"; apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends openssh-server </dev/null >/dev/null; }

.PHONY: bench bench-ci bench-long bench-compare bench-egress bench-ls bench-services bench-udp storm scale

bench: iproute2 openssh ## what a conn costs, beside TCP, TLS, yamux, ssh -R and Konnectivity; far away; beside 50 stalled readers; a storm (ten minutes; ARGS="-part cost" for a part)
	go run ./bench $(ARGS)

bench-long: iproute2 openssh ## the same at length, with everybody over every link; into docs/benchmarks (forty minutes, on a machine that does nothing else, in a tree without changes)
	go run ./bench -long -json docs/benchmarks/bench.json -render $(ARGS)

bench-ci: ## one row of it, to see that it can be measured (half a minute)
	go run ./bench -part speed -rows '^download, 1 conn$$' -ways tunnel,tls -rounds 1

bench-compare: ## the Go micro-benchmarks of this tree beside those of BASE, by benchstat (BASE=main; two minutes; BENCH=Codec ARGS=./pkg/conn for some)
	@bench/compare/compare.sh "$(BASE)" $(ARGS)

bench-egress: ## what the egress front door costs, beside Konnectivity's server and agent with the same clients (two minutes)
	go -C test/interop test -run='^$$' -bench=Egress -benchtime=1x -timeout 10m .

bench-ls: ## that tunnel ls with 10,000 nodes takes 300 ms at most (ten seconds, on a machine that does nothing else)
	go test -count=1 -run '^$$' -bench '^BenchmarkLs$$' -benchtime 20x -timeout 5m ./test/faults

bench-services: iproute2 nftables ## what Services cost the cloud and a node, beside KPNG, which is cloned and built (root; ten minutes; KPNG=none without it)
	kpng=$$(bench/services/kpng.sh) && go run ./bench/services -kpng "$$kpng" $(ARGS)

bench-udp: ## datagrams through the tunnel, beside a plain relay and nothing: round trips, rates, losses (one minute)
	go run ./bench/udp $(ARGS)

storm: iproute2 ## 5,000 edges lose their cloud at once: when they are back, and what they cost it (EDGES=10000; two minutes)
	go run ./bench/storm -edges $(or $(EDGES),5000)

# 250 addresses are many NATs. The edges share this machine's processors with the cloud, so they come at a pace.
scale: iproute2 ## what nodes cost by tens of thousands: docs/scale.md (NODES=10000 in REPLICAS=2: two minutes; 30000: six)
	go run ./bench/storm -edges $(or $(NODES),10000) -replicas $(or $(REPLICAS),2) -sources 250 -rate 600
