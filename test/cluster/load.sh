#!/bin/bash
# load.sh FILE [NODE...]: gives every node, or the named ones, the images of an archive (OCI layout or docker save, as tar).
# A pod then finds them there with imagePullPolicy IfNotPresent or Never. Prints the names of all images of the last node.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
[ $# -ge 1 ] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
settings
file=$(realpath "$1")
shift
[ $# -gt 0 ] || read -ra nodes <<<"$NODES"
[ $# = 0 ] || nodes=("$@")
for n in "${nodes[@]}"; do
  "$HERE/innode.sh" "$n" ctr -a /run/containerd/containerd.sock -n k8s.io images import --snapshotter "$SNAPSHOTTER" "$file"
done
"$HERE/innode.sh" "${nodes[-1]}" ctr -a /run/containerd/containerd.sock -n k8s.io images ls -q
