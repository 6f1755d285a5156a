#!/bin/bash
# innode.sh NODE CMD...: runs CMD inside the node (its network, mount, pid, uts and ipc namespaces), as an edge agent would
# run. CMD dies with the node, and it is killed when this process ends, however that ends. The working directory is /.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
[ $# -ge 2 ] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
alive "node-$1" || die "node $1 is not up"
p=$(cat "$RUN/pid/node-$1")
init=$(cat "/proc/$p/task/$p/children")
shift
export TUNNEL_E2E=$RUN # down.sh finds it by this
exec nsenter -t "${init%% *}" -m -n -p -u -i -- setpriv --pdeathsig KILL "$@"
