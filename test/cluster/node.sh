#!/bin/bash
# node.sh start|kill|forget|cut|join NODE: start a killed node again (its disk is kept) / kill -9 the whole node / give a killed
# node behind NAT a new network namespace, as a boot does / take the uplink of its LAN down / bring it back.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
usage() { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
[ $# = 2 ] || usage
settings
uplink() { if direct "$1"; then index "$1"; else router "$1"; fi; }
case $1 in
start) start "node-$2" "$HERE/lib/node-run.sh" "$2" ;;
kill) stop "node-$2" ;;
forget) "$HERE/lib/net.sh" "$2" ;;
cut) ip link set "${PREFIX}v$(uplink "$2")" down ;;
join) ip link set "${PREFIX}v$(uplink "$2")" up ;;
*) usage ;;
esac
