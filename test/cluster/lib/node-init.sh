#!/bin/bash
# node-init.sh NODE: pid 1 of a node (see node-run.sh). Gives the node its own view of /sys, /run and the state directories,
# then runs containerd and kubelet.
set -euo pipefail
. "$(dirname "$0")/common.sh"
n=$1 d=$RUN/node/$1 log=$RUN/log i=$(index "$1")
hostname "$n"
mount -t proc proc /proc
# Each start of a node is a boot, as the kernel of a machine of its own says it.
mkdir -p "$d"
cat /proc/sys/kernel/random/uuid >"$d/boot_id"
mount --bind "$d/boot_id" /proc/sys/kernel/random/boot_id

# sysfs of this network namespace, cgroups of this cgroup namespace: the node sees its own cgroup as "/".
v2=; ! cgroup2 || v2=1
hierarchies=$(ls /sys/fs/cgroup)
umount -R -l /sys
mount -t sysfs sysfs /sys
if [ -n "$v2" ]; then
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
  read -ra controllers </sys/fs/cgroup/cgroup.controllers || true
  for c in "${controllers[@]}"; do echo "+$c" >/sys/fs/cgroup/cgroup.subtree_control; done
else
  mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
  for c in $hierarchies; do
    h=/sys/fs/cgroup/$c
    mkdir -p "$h"
    case $c in
      unified) mount -t cgroup2 cgroup2 "$h" ;;
      systemd) mount -t cgroup -o none,name=systemd cgroup "$h" ;;
      *) mount -t cgroup -o "$c" cgroup "$h" ;;
    esac
    mkdir -p "$h/node"
    if [ -f "$h/node/cpuset.cpus" ]; then
      cat "$h/cpuset.cpus" >"$h/node/cpuset.cpus"
      cat "$h/cpuset.mems" >"$h/node/cpuset.mems"
    fi
    echo $$ >"$h/node/cgroup.procs"
  done
fi

# A /run of its own (containerd 1.6 puts shim sockets in /run/containerd/s whatever its settings) and its own state.
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/netns /run/lock "$d/cni.d" "$d/static"
own() { mkdir -p "$d/$2" "$1"; mount --bind "$d/$2" "$1"; }
own /var/lib/kubelet kubelet
own /var/lib/containerd containerd
own /var/lib/cni cni
confdir=$d/cni.d bindir=$CLUSTER_HOME/debroot/usr/lib/cni
if [ "$CNI" = none ]; then # where a test installs a plugin as on a machine; the packages of Kubernetes bring the stock plugins
  confdir=/etc/cni/net.d bindir=/opt/cni/bin
  own $confdir cni.d
  own $bindir cni-bin
  cp "$CLUSTER_HOME"/debroot/usr/lib/cni/{loopback,portmap} $bindir
fi
own /var/log/pods logs/pods
own /var/log/containers logs/containers
nameserver=$CPIP
[ -z "$KUBEPROXY" ] || nameserver=$NET.2 # services.sh
printf 'nameserver %s\n' "$nameserver" >"$d/resolv.conf"
printf '127.0.0.1 localhost\n%s %s\n' "$(address "$n")" "$n" >"$d/hosts"
mount --bind "$d/resolv.conf" /etc/resolv.conf
mount --bind "$d/hosts" /etc/hosts
mount --make-rshared / # kubelet's volume mounts must reach containerd, and the other way round

[ "$CNI" = none ] || cat >"$d/cni.d/10-bridge.conflist" <<JSON
{"cniVersion": "1.0.0", "name": "$PREFIX", "plugins": [
 {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.$i.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
 {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON
cat >"$d/containerd.toml" <<TOML
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "e2e.local/pause:1"
  disable_apparmor = true
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "$SNAPSHOTTER"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
        BinaryName = "$CLUSTER_HOME/debroot/usr/sbin/runc"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$bindir"
    conf_dir = "$confdir"
TOML
# A mounted ConfigMap follows its object each syncFrequency to 1.5 times that (kubelet looks at a pod's volumes when it syncs
# the pod; configMapAndSecretChangeDetectionStrategy is Watch, so it knows of the change at once). The default, 1m, would
# have the tests wait.
# Kubernetes 1.35 turns cgroup v1 off by default, hence failCgroupV1. containerd 1.6 cannot tell kubelet its cgroup driver.
cat >"$d/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: "$([ -n "$ONELAN" ] && echo :: || echo 0.0.0.0)"
port: 10250
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true, cacheTTL: 10s}
  x509: {clientCAFile: $RUN/pki/ca.crt}
authorization: {mode: Webhook}
tlsCertFile: $RUN/pki/kubelet-$n-serving.crt
tlsPrivateKeyFile: $RUN/pki/kubelet-$n-serving.key
clusterDomain: cluster.local
staticPodPath: $d/static
clusterDNS: [$([ -n "$KUBEPROXY" ] && echo 10.96.0.10 || echo "$CPIP")]
resolvConf: $d/resolv.conf
registerNode: true
nodeStatusUpdateFrequency: 4s
syncFrequency: 2s
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: {memory.available: "100Mi", nodefs.available: "1%", imagefs.available: "1%"}
YAML

end() { kill -KILL -1 2>/dev/null || true; exit 0; }
trap end TERM INT
ctr=(ctr -a /run/containerd/containerd.sock)
containerd -c "$d/containerd.toml" >>"$log/$n-containerd.log" 2>&1 &
waitfor 60 containerd "${ctr[@]}" version
for f in "$CLUSTER_HOME"/images/*.tar $(for d in $IMAGES; do echo "$d"/*.tar; done); do
  "${ctr[@]}" -n k8s.io images import --snapshotter "$SNAPSHOTTER" "$f" >>"$log/$n-images.log" 2>&1
done
address6=$(address6 "$n")
# shellcheck disable=SC2086 # KUBELET_EXTRA is a list of flags
kubeall kubelet --config="$d/kubelet.yaml" --kubeconfig="$RUN/kubelet-$n.kubeconfig" --hostname-override="$n" \
  --node-ip="$(address "$n")${address6:+,$address6}" --root-dir=/var/lib/kubelet $KUBELET_EXTRA -v=2 >>"$log/$n-kubelet.log" 2>&1 &
if [ -n "${KUBEPROXY#none}" ]; then # without the three it sets limits of the whole machine
  kubeall kube-proxy --kubeconfig="$RUN/admin.kubeconfig" --hostname-override="$n" --proxy-mode="${KUBEPROXY/#1/iptables}" \
    --cluster-cidr=10.88.0.0/16 --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0s \
    --conntrack-tcp-timeout-close-wait=0s -v=2 >>"$log/$n-kube-proxy.log" 2>&1 &
fi
echo "$(date -u +%T) node $n is up"
while :; do wait || true; sleep 1 & done # reap what shims leave to pid 1
