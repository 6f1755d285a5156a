#!/bin/bash
# dns.sh kit | file PATH | forward ADDRESS:PORT: (re)starts CoreDNS, from which kube-apiserver has the nodes' addresses. It
# reads them in run/dns/hosts, the kit's own file (kit), or in another, such as a ConfigMap that a kubelet has mounted (file);
# or it asks another name server (forward).
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
usage() { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
case $#,${1:-} in
1,kit) from="hosts $RUN/dns/hosts" ;;
2,file) from="hosts $2" ;;
2,forward) from="forward . $2" ;;
*) usage ;;
esac
settings
[ -d "$RUN/pki" ] || die "no cluster is up: run up.sh first"
[ -n "${LOCKED:-}" ] || lock 180 # up.sh holds it

# In production ttl 5 and reload 1s do; a test does not want to wait for either.
[ "$1" = forward ] || from="$from {
    ttl 1
    reload 500ms
    no_reverse
  }"
stop coredns
cat >"$RUN/dns/Corefile" <<C
.:53 {
  bind $DNSBIND $CPIP
  $from
  log
  errors
}
C
start coredns coredns -conf "$RUN/dns/Corefile"
WATCH=coredns waitfor 60 CoreDNS bash -c ": </dev/tcp/$DNSBIND/53"
