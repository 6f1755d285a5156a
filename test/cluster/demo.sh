#!/bin/bash
# demo.sh [--once]: from nothing to `kubectl logs` on a node behind NAT: starts the cluster with a machine beside the control
# plane (control3) and two nodes behind NAT, installs the cloud and the edges by the manifests of deployment/kustomize, and
# prints each kubectl command as it runs. build.sh comes first. The cluster stays up; with --once it is removed at the end.
set -euo pipefail
began=$SECONDS
export KUBEPROXY=1 DIRECT=control3 NODES="edge1 edge2 control3" MODE=nat
. "$(dirname "$0")/lib/common.sh"
once=
case $#,${1:-} in
0,) ;;
1,--once) once=1 ;;
*) sed -n '2,4s/^# //p' "$0" >&2; exit 2 ;;
esac
repo=$(cd "$HERE/../.." && pwd)
overlays=$repo/deployment/kustomize/overlays
version=$(sed -n 's|^ *image: tunnel:||p' "$repo/deployment/kustomize/base/cloud/deployment.yaml")
join=$NET.13:30900 # control3, and the nodePort of the Service tunnel-cloud
system=tunnel-system edges=tunnel-edge

"$HERE/up.sh"
[ -z "$once" ] || trap '"$HERE/down.sh"' EXIT
work=$RUN/demo
mkdir -p "$work"/{cloud,edges}

run() { printf '\n$ %s\n' "$*"; "$@"; }
quiet() { printf '\n$ %s\n' "$*"; "$@" >/dev/null; }
relative() { realpath --relative-to="$1" "$2"; } # kustomize takes no absolute paths

(cd "$repo" && CGO_ENABLED=0 go build -trimpath -tags grpcnotrace -ldflags "-s -w -X main.version=$version" -o "$work/tunnel" ./cmd/tunnel)
"$HERE/image.sh" "$work/tunnel.tar" "docker.io/library/tunnel:$version" "$work/tunnel"
"$HERE/load.sh" "$work/tunnel.tar" >/dev/null
lap "the image tunnel:$version is in the containerd of each node"

quiet kubectl label node edge1 edge2 node-role.kubernetes.io/edge=
for n in edge1 edge2; do sed "s/NODE/$n/g" "$repo/test/e2e/testdata/pods.yaml" | kubectl apply -f - >/dev/null; done
quiet kubectl wait --for=condition=Ready --timeout=60s pod --all
printf '\n$ kubectl logs web-edge1 -c web    # without the tunnel\n'
! kubectl logs web-edge1 -c web 2>&1 || die "the node can be reached without the tunnel"

cat >"$work/cloud/kustomization.yaml" <<Y
resources: ["$(relative "$work/cloud" "$overlays/single")"]
patches:
- target: {kind: Job, name: tunnel-init}
  patch: |-
    - {op: replace, path: /spec/template/spec/containers/0/args/1, value: "--address=$join"}
Y
sed "s|tunnel.example.com:9000|$join|" "$overlays/edge-host-network/edge.toml" >"$work/edges/edge.toml"
cat >"$work/edges/kustomization.yaml" <<Y
resources: ["$(relative "$work/edges" "$overlays/edge-host-network")"]
configMapGenerator:
- {name: tunnel-edge, namespace: $edges, behavior: replace, files: [edge.toml]}
generatorOptions: {disableNameSuffixHash: true}
Y

quiet kubectl apply -k "$work/cloud"
quiet kubectl rollout status deployment/tunnel-cloud -n $system --timeout=120s
quiet kubectl apply -k "$work/edges"
printf '\n$ kubectl get configmap tunnel-ca -n %s ... | kubectl create configmap tunnel-ca -n %s ...\n' $system $edges
kubectl get configmap tunnel-ca -n $system -o 'jsonpath={.data.ca\.crt}' |
  kubectl create configmap tunnel-ca -n $edges --from-file=ca.crt=/dev/stdin >/dev/null
quiet kubectl rollout status daemonset/tunnel-edge -n $edges --timeout=120s

# kube-apiserver asks the cloud for the addresses of the nodes.
cloud=$(kubectl get pods -n $system -l app.kubernetes.io/component=cloud -o 'jsonpath={.items[0].status.podIP}')
"$HERE/dns.sh" forward "$cloud:5353"
waitfor 30 "the names of the nodes to lead to the cloud" kubectl logs web-edge1 -c web --tail=1
run kubectl get pods -A -o wide
run kubectl logs web-edge1 -c web --tail=3
run kubectl exec web-edge2 -c web -- hostname
echo
echo "kubectl reaches nodes behind NAT, $((SECONDS - began)) s after the start of the cluster."
[ -n "$once" ] || echo "Go on with:  export KUBECONFIG=$KUBECONFIG PATH=$CLUSTER_HOME/bin:\$PATH     Remove it with:  make e2e-down"
