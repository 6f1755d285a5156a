#!/bin/bash
# node.sh start|kill|cut|join NODE: start a killed node again (its disk is kept) / kill -9 the whole node / take its uplink
# down / bring it back.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
usage() { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
[ $# = 2 ] || usage
settings
case $1 in
start) start "node-$2" "$HERE/lib/node-run.sh" "$2" ;;
kill) stop "node-$2" ;;
cut) ip link set "${PREFIX}v$(index "$2")" down ;;
join) ip link set "${PREFIX}v$(index "$2")" up ;;
*) usage ;;
esac
