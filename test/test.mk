# Tests and measurements with processes of their own. Included by the Makefile of the
# repository; paths are relative to its directory. Linux only; no root but where it is said.

.PHONY: faults replicas vanish hostile soak links bench bench-ci bench-long bench-compare bench-egress storm scale interop

faults: ## kill, stop and starve cloud and edge, each a process (45 seconds)
	go test -count=1 -timeout 5m -v ./test/faults

replicas: ## kill, replace and cut off replicas of the cloud, each a process (20 seconds)
	go test -count=1 -timeout 5m -v ./test/replicas

vanish: iproute2 ## callers' and targets' machines that vanish in every state, by every way: no cut-off stream ends cleanly (root; three minutes)
	TUNNEL_VANISH=1 go test -count=1 -timeout 20m -v ./test/vanish

interop: ## Konnectivity's own programs, from the Go module proxy, against ours; its faults, on both (three minutes)
	go -C test/interop test -count=1 -timeout 10m ./...

hostile: ## edges, callers and strangers that mean harm: what the others notice (sixteen minutes)
	TUNNEL_HOSTILE=1 go test -count=1 -timeout 30m -v ./test/hostile

soak: ## the same with ten pairs, also away for 40 s: 40 kills; and replicas as promised (fourteen minutes)
	TUNNEL_SOAK=1 go test -count=1 -timeout 25m -v -p 1 ./test/faults ./test/replicas

links: iproute2 ## bulk transfers over 10, 1 and 0.1 Mbit/s, 4 to 110 at once, up and down; links that are cut for 2 to 10 s (a quarter of an hour)
	TUNNEL_LINKS=1 go test -count=1 -timeout 40m -parallel 6 -v -run 'TestBulkOverThinLink|TestShortCut' ./test/links

bench: iproute2 ## what a conn costs, beside TCP, TLS, yamux, ssh -R and Konnectivity; far away; beside 50 stalled readers; a storm (eight minutes; ARGS="-part cost" for a part)
	go run ./test/bench $(ARGS)

bench-long: iproute2 ## the same at length, with everybody over every link; into docs/benchmarks (half an hour, on a machine that does nothing else, in a tree without changes)
	go run ./test/bench -long -json docs/benchmarks/bench.json -render $(ARGS)

bench-ci: ## one row of it, to see that it can be measured (half a minute)
	go run ./test/bench -part speed -rows '^download, 1 conn$$' -ways tunnel,tls -rounds 1

bench-compare: ## the Go micro-benchmarks of this tree beside those of BASE, by benchstat (BASE=main; two minutes; BENCH=Codec ARGS=./pkg/conn for some)
	@test/compare/compare.sh "$(BASE)" $(ARGS)

bench-egress: ## what the egress front door costs, beside Konnectivity's server and agent with the same clients (two minutes)
	go -C test/interop test -run='^$$' -bench=Egress -benchtime=1x -timeout 10m .

storm: iproute2 ## 5,000 edges lose their cloud at once: when they are back, and what they cost it (EDGES=10000; two minutes)
	go run ./test/storm -edges $(or $(EDGES),5000)

# 250 addresses are many NATs. The edges share this machine's processors with the cloud, so they come at a pace.
scale: iproute2 ## what nodes cost by tens of thousands: docs/scale.md (NODES=10000 in REPLICAS=2: two minutes; 30000: six)
	go run ./test/storm -edges $(or $(NODES),10000) -replicas $(or $(REPLICAS),2) -sources 250 -rate 600
