# shellcheck shell=bash
# teardown: ends and removes everything of a cluster, whatever state it is in: up, half up, or left behind by a run that
# was killed. It goes by marks (an environment variable, a name's prefix, a route's protocol number), not by what was
# recorded. Keeps the logs in $LOGS. Returns 1 and says what, when something is left. Source common.sh first.

teardown() {
  local left=0 p d i killed=""
  # Processes. Killing a node's first process ends its pid namespace: containerd, shims, containers and mounts go too.
  for ((i = 0; i < 100; i++)); do
    p=$(marked); [ -n "$p" ] || break
    # shellcheck disable=SC2086 # one argument per process id
    kill -KILL $p 2>/dev/null || true
    killed="$killed $p"
    sleep 0.05
  done
  for p in $killed; do # their ports and mounts go when they have ended
    for ((i = 0; i < 100; i++)); do ! ended "$p" || break; sleep 0.05; done
  done
  [ -z "$(marked)" ] || { echo "left: processes $(marked | tr '\n' ' ')" >&2; left=1; }

  # Network: namespaces, bridge and its ports, routes.
  for d in /run/netns/"$PREFIX"-*; do
    [ ! -e "$d" ] || ip netns del "${d##*/}" || left=1
  done
  for d in /sys/class/net/"$PREFIX"*; do
    [ ! -e "$d" ] || ip link del "${d##*/}" 2>/dev/null || [ ! -e "$d" ] || left=1
  done
  if command -v ip >/dev/null; then ip route flush proto "$ROUTEPROTO"; fi
  # ip-netns makes /run/netns a mount point of its own; take that away too when nobody uses it.
  if [ -d /run/netns ] && [ -z "$(ls -A /run/netns)" ]; then umount /run/netns 2>/dev/null || true; rmdir /run/netns 2>/dev/null || true; fi

  # cgroups, deepest first. A dying process may hold its own for a moment.
  for d in /sys/fs/cgroup/"$PREFIX"-node-* /sys/fs/cgroup/*/"$PREFIX"-node-*; do
    for ((i = 0; i < 50; i++)); do
      [ -d "$d" ] || break
      find "$d" -depth -type d -exec rmdir {} \; 2>/dev/null || true
      [ ! -d "$d" ] || sleep 0.1
    done
    [ ! -d "$d" ] || { echo "left: $d" >&2; left=1; }
  done
  undelegate || left=1

  # Files, except the logs.
  if [ -d "$RUN/log" ]; then rm -rf "$LOGS"; mv "$RUN/log" "$LOGS"; fi
  rm -rf --one-file-system "$RUN" || left=1
  return $left
}

# undelegate: the reverse of delegate in node-run.sh (cgroup v2 inside a container).
undelegate() {
  local root=/sys/fs/cgroup d=/sys/fs/cgroup/$PREFIX-init c p i have
  [ -d "$d" ] || return 0
  read -ra have <$root/cgroup.subtree_control || true
  for c in "${have[@]}"; do echo "-$c" >$root/cgroup.subtree_control || true; done
  for ((i = 0; i < 50; i++)); do
    while read -r p; do echo "$p" >$root/cgroup.procs 2>/dev/null || true; done <"$d/cgroup.procs"
    ! rmdir "$d" 2>/dev/null || return 0
    sleep 0.1
  done
  echo "left: $d" >&2
  return 1
}
