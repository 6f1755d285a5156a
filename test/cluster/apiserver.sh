#!/bin/bash
# apiserver.sh kubelet-ca|no-kubelet-ca [FLAG...]: (re)starts kube-apiserver of the cluster that is up, and waits until it is
# ready. kubelet-ca: it verifies kubelets (--kubelet-certificate-authority) and sends the node's name as SNI everywhere.
# no-kubelet-ca: it takes any certificate, and its exec, attach and port-forward upgrades carry no SNI. FLAGs are added;
# --kubelet-preferred-address-types takes the place of Hostname,InternalIP.
# apiserver.sh stop: kills it.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
mode=${1:-}
case $mode in
kubelet-ca) verify=(--kubelet-certificate-authority="$RUN/pki/ca.crt") ;;
no-kubelet-ca | stop) verify=() ;;
*) sed -n '2,6s/^# //p' "$0" >&2; exit 2 ;;
esac
shift
settings
[ -d "$RUN/pki" ] || die "no cluster is up: run up.sh first"
[ -n "${LOCKED:-}" ] || lock 180 # up.sh holds it

case " $*" in # the flag is a list: given twice, it is the longer one
*" --kubelet-preferred-address-types="*) ;;
*) set -- --kubelet-preferred-address-types=Hostname,InternalIP "$@" ;;
esac

stop apiserver
[ "$mode" != stop ] || exit 0
pki=$RUN/pki
# In a mount namespace of its own, so that it has its own resolv.conf and hosts.
cat >"$RUN/cp/apiserver" <<'S'
#!/bin/bash
set -e
mount --bind "$RUN/cp/resolv.conf" /etc/resolv.conf
mount --bind "$RUN/cp/hosts" /etc/hosts
exec kubeall kube-apiserver "$@"
S
start apiserver env RUN="$RUN" unshare --mount --propagation private bash "$RUN/cp/apiserver" \
  --etcd-servers=http://127.0.0.1:23790 --bind-address=0.0.0.0 --secure-port="$APIPORT" --advertise-address="$CPIP" \
  --service-cluster-ip-range=10.96.0.0/16 --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
  --client-ca-file="$pki/ca.crt" --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" \
  --kubelet-client-certificate="$pki/apiserver-kubelet.crt" --kubelet-client-key="$pki/apiserver-kubelet.key" \
  "${verify[@]}" \
  --service-account-issuer=https://kubernetes.default.svc.cluster.local \
  --service-account-key-file="$pki/sa.pub" --service-account-signing-key-file="$pki/sa.key" \
  --requestheader-client-ca-file="$pki/front.crt" --requestheader-allowed-names=front-proxy-client \
  --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group \
  --requestheader-extra-headers-prefix=X-Remote-Extra- \
  --proxy-client-cert-file="$pki/front-client.crt" --proxy-client-key-file="$pki/front-client.key" \
  --enable-aggregator-routing=true --allow-privileged=true -v=2 "$@"
WATCH=apiserver waitfor 120 kube-apiserver kubectl get --raw /readyz
