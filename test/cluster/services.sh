#!/bin/bash
# services.sh [stop]: starts or stops the name server of pods behind the address 10.96.0.10, as clusters of kubeadm have it: a
# second CoreDNS, beside the control plane, that knows the Services. up.sh does it with KUBEPROXY: nobody could ask it without kube-proxy, or an edge
# in its place (KUBEPROXY=none).
# It refuses all other names. In particular it does not ask the CoreDNS of kube-apiserver: dns.sh may have that one ask a pod,
# and a pod's name server that does not know a name asks this one.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
settings
[ -d "$RUN/pki" ] || die "no cluster is up: run up.sh first"
[ -n "${LOCKED:-}" ] || lock 180 # up.sh holds it
dns=$NET.2
stop poddns
[ "${1-}" != stop ] || exit 0
ip addr replace "$dns/24" dev "$BRIDGE" # it goes with the bridge
cat >"$RUN/dns/Corefile.pods" <<C
.:53 {
  bind $dns
  kubernetes cluster.local in-addr.arpa ip6.arpa {
    kubeconfig $RUN/admin.kubeconfig
    ttl 1
  }
  errors
}
C
start poddns coredns -conf "$RUN/dns/Corefile.pods"
sed "s|@DNS@|$dns|" "$HERE/conf/kube-dns.yaml" | kubectl apply -f - >/dev/null
WATCH=poddns waitfor 20 "the pods' CoreDNS" bash -c ": </dev/tcp/$dns/53"
