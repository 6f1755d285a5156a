#!/bin/bash
# metrics-server.sh: starts metrics-server beside the control plane and registers its API, for `kubectl top`. It asks the
# kubelets by node name, with kube-apiserver's name server, so it goes through a tunnel when kube-apiserver does.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
settings
[ -d "$RUN/pki" ] || die "no cluster is up: run up.sh first"
cat >"$RUN/cp/metrics-server" <<'S'
#!/bin/bash
set -e
mount --bind "$RUN/cp/resolv.conf" /etc/resolv.conf
mount --bind "$RUN/cp/hosts" /etc/hosts
exec metrics-server "$@"
S
stop metrics-server
# --kubelet-request-timeout must stay below --metric-resolution, and 10 s is the finest resolution that it takes.
start metrics-server env RUN="$RUN" unshare --mount --propagation private bash "$RUN/cp/metrics-server" \
  --kubeconfig="$RUN/admin.kubeconfig" --authentication-kubeconfig="$RUN/admin.kubeconfig" \
  --authorization-kubeconfig="$RUN/admin.kubeconfig" --secure-port=14443 --cert-dir="$RUN/cp/metrics-server-certs" \
  --kubelet-preferred-address-types=Hostname --kubelet-certificate-authority="$RUN/pki/ca.crt" \
  --metric-resolution=10s --kubelet-request-timeout=5s
sed "s|@CPIP@|$CPIP|" "$HERE/conf/metrics-server.yaml" | kubectl apply -f - >/dev/null
available() { [ "$(kubectl get apiservice v1beta1.metrics.k8s.io -o jsonpath='{.status.conditions[?(@.type=="Available")].status}')" = True ]; }
WATCH=metrics-server waitfor 60 "metrics.k8s.io to be available" available
