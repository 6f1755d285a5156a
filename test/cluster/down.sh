#!/bin/bash
# down.sh: ends and removes everything of the cluster, also of one that was killed or failed half way. Keeps the logs in
# $LOGS. Exit code 1 when something is left, with what it is. Harmless when there is nothing to do.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
. "$HERE/lib/teardown.sh"
[ -d "$CLUSTER_HOME" ] || exit 0
lock 180
teardown
