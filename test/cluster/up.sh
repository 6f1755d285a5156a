#!/bin/bash
# up.sh: starts etcd, CoreDNS, kube-apiserver, controller manager, scheduler, and every node in $NODES; waits until they are
# Ready. Whatever an earlier cluster left behind is removed first. If it fails or is interrupted, it cleans up after itself.
# Settings: lib/common.sh and the README.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
. "$HERE/lib/teardown.sh"

preflight() {
  local c f d n i seen=" "
  [ "$(id -u)" = 0 ] || die "must run as root (namespaces, cgroups, mounts)"
  for f in bin/kubeall bin/coredns bin/pki debroot/usr/bin/containerd nodebin/iptables images/pause.tar; do
    [ -e "$CLUSTER_HOME/$f" ] || die "$CLUSTER_HOME/$f is missing: run build.sh first"
  done
  for c in ip nsenter unshare setpriv flock; do command -v $c >/dev/null || die "needs $c: run build.sh first"; done
  for d in "$HERE" "$CLUSTER_HOME"; do
    case $d in
    *[[:space:]]*) die "no white space in paths, please: $d" ;;
    /run/* | /var/run/* | /sys/* | /proc/*) die "the nodes have their own /run, /sys and /proc; keep $d elsewhere" ;;
    esac
  done
  case $CNI in "" | none) ;; *) die "CNI is none or empty, not $CNI" ;; esac
  case $MODE in direct | nat) ;; *) die "MODE is direct or nat, not $MODE" ;; esac
  [ -z "$KUBERNETES" ] || [ -x "$CLUSTER_HOME/kubernetes-$KUBERNETES/bin/kubeall" ] ||
    die "$CLUSTER_HOME/kubernetes-$KUBERNETES/bin/kubeall is missing: run test/conformance/build.sh $KUBERNETES first"
  for n in $DIRECT; do [[ " $NODES " = *" $n "* ]] || die "DIRECT names $n, which NODES does not"; done
  for n in $NODES; do
    i=$(index "$n")
    case $n in *[!a-z0-9-]*) die "bad node name $n" ;; esac
    [[ $i =~ ^[1-9][0-9]?$ ]] || die "node name $n must hold one number, 1 to 99"
    case $seen in *" $i "*) die "two nodes with number $i" ;; esac
    seen="$seen$i "
  done
  cgroups
}

cgroups() {
  local c
  if cgroup2; then
    for c in cpu cpuset memory pids; do
      grep -qw $c /sys/fs/cgroup/cgroup.controllers ||
        die "cgroup v2 without its controller $c (there are: $(cat /sys/fs/cgroup/cgroup.controllers)): kubelet needs cpu, cpuset, memory and pids; in a container, run it with --privileged and a writable /sys/fs/cgroup"
    done
    if ! { mkdir -p "/sys/fs/cgroup/$PREFIX-try" && rmdir "/sys/fs/cgroup/$PREFIX-try"; } 2>/dev/null; then
      die "/sys/fs/cgroup is read-only: in a container, run it with --privileged"
    fi
    return
  fi
  for c in cpu cpuacct cpuset memory pids devices freezer; do
    [ -d /sys/fs/cgroup/$c ] ||
      die "neither cgroup v2 on /sys/fs/cgroup nor a cgroup v1 hierarchy /sys/fs/cgroup/$c: kubelet and runc need one of the two"
  done
}

failed() {
  trap - EXIT INT TERM
  echo "up.sh failed; the logs are in $LOGS" >&2
  teardown || true
  exit 1
}

preflight
lock 180
teardown
! ip -4 route show table main | grep -q "^$NET\.0/24 " || die "$NET.0/24 is in use on this machine: set NET to another /24's first three bytes"
trap failed EXIT
trap 'exit 130' INT TERM
if [ -z "$SNAPSHOTTER" ]; then # overlayfs does not stack on overlayfs
  SNAPSHOTTER=overlayfs
  [ "$(stat -f -c %T "$CLUSTER_HOME")" != overlayfs ] || SNAPSHOTTER=native
fi
mkdir -p "$RUN"/{pid,log,dns,cp,node}
declare -p NODES MODE NET CPIP APIPORT DNSBIND DNSIP KUBELET_EXTRA SNAPSHOTTER DIRECT KUBEPROXY KUBERNETES CNI ONELAN IMAGES >"$RUN/settings"

named=()
for n in $NODES; do named+=(-node "$n=$(address "$n")"); done
pki cluster -dir "$RUN/pki" -kubeconfigs "$RUN" -address "$CPIP" -port "$APIPORT" "${named[@]}"
"$HERE/lib/net.sh"
lap "certificates, network"

start etcd kubeall etcd --name e2e --data-dir "$RUN/etcd" --unsafe-no-fsync --log-level warn \
  --listen-client-urls http://127.0.0.1:23790 --advertise-client-urls http://127.0.0.1:23790 \
  --listen-peer-urls http://127.0.0.1:23800 --initial-advertise-peer-urls http://127.0.0.1:23800 \
  --initial-cluster e2e=http://127.0.0.1:23800

# The names of the nodes as kube-apiserver sees them: editing this file moves a node to a tunnel, and so does dns.sh.
for n in $NODES; do echo "$(address "$n") $n"; done >"$RUN/dns/hosts"
LOCKED=1 "$HERE/dns.sh" kit

printf 'nameserver %s\noptions timeout:1 attempts:2\n' "$DNSIP" >"$RUN/cp/resolv.conf"
echo '127.0.0.1 localhost' >"$RUN/cp/hosts"
for n in $DIRECT; do echo "$(address "$n") $n" >>"$RUN/cp/hosts"; done # as machines of a control plane know each other
LOCKED=1 "$HERE/apiserver.sh" kubelet-ca
lap "kube-apiserver ready"

kubeconfig=(--kubeconfig="$RUN/kcm.kubeconfig" --authentication-kubeconfig="$RUN/kcm.kubeconfig" --authorization-kubeconfig="$RUN/kcm.kubeconfig")
start kcm kubeall kube-controller-manager "${kubeconfig[@]}" --bind-address=127.0.0.1 --leader-elect=false \
  --use-service-account-credentials --root-ca-file="$RUN/pki/ca.crt" --service-account-private-key-file="$RUN/pki/sa.key" \
  --cluster-signing-cert-file="$RUN/pki/ca.crt" --cluster-signing-key-file="$RUN/pki/ca.key" \
  --node-monitor-grace-period=20s --kube-api-qps=200 --kube-api-burst=400 -v=1
start sched kubeall kube-scheduler "${kubeconfig[@]//kcm/sched}" --bind-address=127.0.0.1 --leader-elect=false -v=1

for n in $NODES; do start "node-$n" "$HERE/lib/node-run.sh" "$n"; done
ready() { [ "$(kubectl get node "$1" -o jsonpath='{.status.conditions[?(@.type=="Ready")].status}')" = True ]; }
[ "$CNI" != none ] || ready() { kubectl get node "$1"; } # Ready is what the test's network makes it
for n in $NODES; do WATCH=node-$n waitfor 120 "node $n to be Ready" ready "$n"; done
# As a controller manager that allocates them says it: the networks that node-init.sh gives to the CNI plugin.
for n in $NODES; do
  pods=10.88.$(index "$n").0/24 more=
  [ "$CNI" != none ] || more=',"fd00:88:'$(index "$n")'::/64"'
  kubectl patch node "$n" -p '{"spec":{"podCIDR":"'"$pods"'","podCIDRs":["'"$pods"'"'"$more"']}}' >/dev/null
done
[ -z "$KUBEPROXY" ] || LOCKED=1 "$HERE/services.sh"
WATCH=kcm waitfor 60 "the default service account" kubectl get serviceaccount default
lap "nodes ready: $NODES"
trap - EXIT INT TERM
echo "export KUBECONFIG=$KUBECONFIG PATH=$CLUSTER_HOME/bin:\$PATH"
