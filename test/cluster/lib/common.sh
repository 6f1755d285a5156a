# shellcheck shell=bash
# Settings and helpers that the scripts share. Source it; the environment overrides every setting.
# shellcheck disable=SC2034 # the settings are used by the scripts that source this file

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)   # test/cluster
CLUSTER_HOME=${CLUSTER_HOME:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/tunnel-e2e}
RUN=$CLUSTER_HOME/run             # state of the cluster that is up; gone after down.sh
LOGS=$CLUSTER_HOME/logs           # logs of the last cluster that was taken down
NODES=${NODES:-edge1 edge2}       # names that hold one number N, 1 to 99, each
MODE=${MODE:-nat}                 # nat: a node sits behind its own masquerading router; direct: it is on the bridge
NET=${NET:-10.77.0}               # first three bytes of the bridge's /24
CPIP=${CPIP:-$NET.1}              # the control plane's address on the bridge
APIPORT=${APIPORT:-6443}
DNSBIND=${DNSBIND:-127.0.77.53}   # CoreDNS listens here and on CPIP, port 53
DNSIP=${DNSIP:-$DNSBIND}          # the only name server of kube-apiserver and metrics-server
KUBELET_EXTRA=${KUBELET_EXTRA:-}  # more flags for every kubelet
SNAPSHOTTER=${SNAPSHOTTER:-}      # containerd's; empty: overlayfs, or native where overlayfs cannot be stacked
DIRECT=${DIRECT:-}                # MODE=nat: nodes that are on the bridge all the same, as machines beside the control plane are
KUBEPROXY=${KUBEPROXY:-}          # iptables (or 1) or nftables: kube-proxy of this mode in every node, and a DNS for pods: Services work from pods by address and name; with DIRECT also from kube-apiserver. none: the DNS alone
KUBERNETES=${KUBERNETES:-}        # such as 1.36: the programs in kubernetes-1.36/bin in place of build.sh's own kubeall
CNI=${CNI:-}                      # none: no network for pods but what a test installs; nodes have IPv6 networks for pods, too. Empty: the stock plugin bridge
ONELAN=${ONELAN:-}                # 1: the nodes behind NAT are in one LAN, of IPv4 and IPv6, behind one router
IMAGES=${IMAGES:-}                # more directories of image archives that every node imports

# Everything in the kernel that has a name carries this prefix, so that down.sh finds it without any state file.
PREFIX=te2e
BRIDGE=${PREFIX}0
ROUTEPROTO=177                    # routing protocol number of our routes, for the same reason

export CLUSTER_HOME NODES MODE NET CPIP APIPORT DNSBIND DNSIP KUBELET_EXTRA SNAPSHOTTER DIRECT KUBEPROXY KUBERNETES CNI ONELAN IMAGES
PATH=$CLUSTER_HOME/bin:$CLUSTER_HOME/nodebin:$CLUSTER_HOME/debroot/usr/bin:$CLUSTER_HOME/debroot/usr/sbin:/usr/local/sbin:/usr/sbin:/sbin:$PATH
programs() { [ -z "$KUBERNETES" ] || PATH=$CLUSTER_HOME/kubernetes-$KUBERNETES/bin:$PATH; }
programs
export PATH
export KUBECONFIG=$RUN/admin.kubeconfig KUBECACHEDIR=$RUN/kubecache

die() { echo "$(basename "$0"): $*" >&2; exit 1; }

# settings: what up.sh was given, for the scripts that work on the cluster that is up.
settings() {
  # shellcheck disable=SC1091
  [ ! -f "$RUN/settings" ] || . "$RUN/settings"
  programs
}

index() { echo "${1//[!0-9]/}"; }                        # edge7 -> 7
direct() { [ "$MODE" = direct ] || [[ " $DIRECT " = *" $1 "* ]]; }
router() {                                               # MODE=nat: the number of the node's router
  local n
  [ -n "$ONELAN" ] || { index "$1"; return; }
  for n in $NODES; do direct "$n" || { index "$n"; return; }; done
}
lan() { echo "192.168.$((6 + $(router "$1")))"; }        # MODE=nat: the subnet behind the node's router
address() {
  if direct "$1"; then echo "$NET.$((10 + $(index "$1")))"
  elif [ -n "$ONELAN" ]; then echo "$(lan "$1").$((1 + $(index "$1")))"
  else echo "$(lan "$1").2"; fi
}
ROUTER6=fd00:77::1                                       # ONELAN: the router of the LAN
OUTSIDE6=fd00:66::1                                      # ONELAN: all that is outside of the LAN for IPv6. It has no route to pods
address6() { [ -z "$ONELAN" ] || direct "$1" || echo "fd00:77::$((1 + $(index "$1")))"; } # empty: the node has no IPv6
cgroup2() { [ -f /sys/fs/cgroup/cgroup.controllers ]; }  # pure cgroup v2, not the hybrid of v1 and v2

# lock SECONDS: one script that changes the cluster at a time. Whatever they start must close descriptor 9.
lock() {
  mkdir -p "$CLUSTER_HOME"
  exec 9>"$CLUSTER_HOME/lock"
  flock -w "$1" 9 || die "another build.sh, up.sh or down.sh is still at work in $CLUSTER_HOME"
}

# start NAME CMD...: detached, output to $RUN/log/NAME.log, process id in $RUN/pid/NAME. The variable TUNNEL_E2E marks
# every process of this cluster: a recorded id may be stale, an environment is not.
start() {
  local n=$1 i; shift
  TUNNEL_E2E=$RUN setsid nice -n 5 "$@" </dev/null >>"$RUN/log/$n.log" 2>&1 9>&- &
  echo $! >"$RUN/pid/$n"
  for ((i = 0; i < 200; i++)); do ! alive "$n" || return 0; sleep 0.01; done # the mark is there once it has become CMD
}

marked() { # process ids of everything that carries our mark; a zombie has no environment and is left out
  grep -lzsxF "TUNNEL_E2E=$RUN" /proc/[0-9]*/environ | sed 's|/proc/\([0-9]*\)/environ|\1|' || true
}

alive() { # NAME: whether the process that start recorded lives and is ours
  local p i; p=$(cat "$RUN/pid/$1" 2>/dev/null) || return 1
  for i in 1 2 3 4 5; do
    ! grep -qzsxF "TUNNEL_E2E=$RUN" "/proc/$p/environ" || return 0
    [ -d "/proc/$p" ] || return 1
    sleep 0.02 # setsid, nice and CMD follow each other in one process, which has no environment while it becomes the next
  done
  return 1
}

# ended PID: whether a process that was killed has given back what it held. It loses its environment first and its sockets
# later, and the machine's pid 1 may take its time to reap it.
ended() {
  [ ! -d "/proc/$1" ] || { grep -qs '^State:[[:space:]]*Z' "/proc/$1/status" && [ "$(find "/proc/$1/task" -mindepth 1 -maxdepth 1 2>/dev/null | wc -l)" -le 1 ]; }
}

stop() { # NAME: kill -9 (all state is thrown away afterwards) and wait until it is gone
  local p i
  if alive "$1"; then
    p=$(cat "$RUN/pid/$1")
    kill -KILL "$p" 2>/dev/null || true
    for ((i = 0; i < 200; i++)); do ! ended "$p" || break; sleep 0.05; done
    ended "$p" || die "$1 does not end"
  fi
  rm -f "$RUN/pid/$1"
}

waitfor() { # SECONDS WHAT CMD...: polls; gives up early when the process named $WATCH has ended
  local t=$1 what=$2 end=$((SECONDS + $1)); shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || { echo "timeout after ${t}s waiting for $what" >&2; return 1; }
    [ -z "${WATCH:-}" ] || alive "$WATCH" || { echo "$WATCH ended:" >&2; tail -n 20 "$RUN/log/$WATCH.log" >&2; return 1; }
    sleep 0.2
  done
}

LAP=$(date +%s%N)
lap() { printf '%6d ms  %s\n' $((($(date +%s%N) - LAP) / 1000000)) "$*"; }
