# Tests with processes of their own. Included by the Makefile of the repository; paths are
# relative to its directory. Linux only; no root but where it is said.

.PHONY: faults replicas vanish hostile soak links interop

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
