#!/bin/bash
# node-run.sh NODE: becomes the node. Joins a cgroup of the node's own, then takes new mount, pid, uts, ipc and cgroup
# namespaces and the node's network namespace, and runs node-init.sh there as pid 1. Killing this process kills the whole
# node: kubelet, containerd, shims, containers; the mounts go with the namespace.
#
# `ip netns exec` would not do: its mount namespace hides cgroups, and kubelet's mounts would never reach containerd.
set -euo pipefail
. "$(dirname "$0")/common.sh"
n=$1
cg=$PREFIX-node-$n

# A node that was killed leaves the empty cgroups of its pods behind (a reboot would not); kubelet would look for each dead
# container for 3 s before it starts any pod.
empty() { ! find "$@" -mindepth 1 -type d -print -quit 2>/dev/null | grep -q .; }
for ((i = 0; i < 20; i++)); do
  find /sys/fs/cgroup/{,*/}"$cg" -mindepth 1 -depth -type d -exec rmdir {} \; 2>/dev/null || true
  ! empty /sys/fs/cgroup/{,*/}"$cg" || break
  sleep 0.1
done

inside=(unshare --mount --propagation private --uts --ipc --pid --fork --kill-child=SIGKILL bash "$HERE/lib/node-init.sh" "$n")
enter=(nsenter --net="/run/netns/$PREFIX-$n" unshare --cgroup)

# delegate DIR: hands DIR's controllers to its children. Inside a container DIR is not the real root, and the processes in
# it must first move to a leaf ("no internal processes"); undelegate moves them back.
delegate() {
  local c p have
  if [ -f "$1/cgroup.type" ]; then
    mkdir -p "$1/$PREFIX-init"
    while grep -q . "$1/cgroup.procs"; do # again, as long as one forks before it has moved
      while read -r p; do echo "$p" >"$1/$PREFIX-init/cgroup.procs" 2>/dev/null || true; done <"$1/cgroup.procs"
    done
  fi
  read -ra have <"$1/cgroup.controllers" || true
  for c in "${have[@]}"; do echo "+$c" >"$1/cgroup.subtree_control" 2>/dev/null || true; done
  for c in cpu cpuset memory pids; do
    grep -qw "$c" "$1/cgroup.subtree_control" || die "cgroup v2: controller $c cannot be handed to a child of $1"
  done
}

if cgroup2; then
  delegate /sys/fs/cgroup
  d=/sys/fs/cgroup/$cg
  mkdir -p "$d/node"
  echo $$ >"$d/cgroup.procs"
  # The cgroup namespace's root is $d; the process then moves on to a leaf, so that the node can delegate controllers.
  # shellcheck disable=SC2016 # expanded by the inner shell
  exec "${enter[@]}" bash -c 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"' _ "$d/node" "${inside[@]}"
fi

for c in /sys/fs/cgroup/*/; do
  d=$c$cg
  mkdir -p "$d"
  if [ -f "$d/cpuset.cpus" ]; then # an empty cpuset takes no process
    cat "${c}cpuset.cpus" >"$d/cpuset.cpus"
    cat "${c}cpuset.mems" >"$d/cpuset.mems"
    echo 1 >"$d/cgroup.clone_children"
  fi
  echo $$ >"$d/cgroup.procs"
done
exec "${enter[@]}" "${inside[@]}"
