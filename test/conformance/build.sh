#!/bin/bash
# build.sh VERSION...: puts what `make conformance` runs of each Kubernetes, such as 1.34 and 1.36, under
# $CLUSTER_HOME/kubernetes-VERSION: bin (e2e.test, ginkgo, kubectl, and kubeall where test/cluster builds another version),
# and images. test/cluster/build.sh comes first. Every step is skipped when its inputs did not change; FORCE=1 does them again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../cluster/lib/common.sh"
. "$HERE/lib/build.sh"
[ $# -ge 1 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
for f in bin/kubeall images/busybox.tar; do
  [ -e "$CLUSTER_HOME/$f" ] || die "$CLUSTER_HOME/$f is missing: run test/cluster/build.sh first"
done
mkdir -p "$CLUSTER_HOME/tmp"
lock 3600
export TMPDIR=$CLUSTER_HOME/tmp
trap 'rm -rf "$CLUSTER_HOME/tmp"' EXIT

# The images' names in the tests: no registry has them, so none is asked.
registries() {
  printf '%s: e2e.local\n' promoterE2eRegistry gcEtcdRegistry gcRegistry >"$1"
}

version() { # VERSION
  local v=$1 home=$CLUSTER_HOME/kubernetes-$1 mod=$here/kubernetes/$1.mod kubeall=$HERE/src/kubeall/$1.mod sums src flags own
  [ -e "$mod" ] || die "no $mod: kubernetes/update.sh makes it"
  mkdir -p "$home"/{bin,images,parts}
  own=$(kubernetes_version "$HERE/src/kubeall/go.mod")
  if [ -e "$kubeall" ]; then
    flags=$(version_flags "$(kubernetes_version "$kubeall")")
    sums=$(cat "$kubeall" "${kubeall%.mod}.sum" "$HERE"/src/kubeall/*.go | hash)
    (cd "$HERE/src/kubeall" && build "$home/bin/kubeall" "$sums" go build -modfile="$kubeall" -trimpath -ldflags "-s -w $flags" .)
    ln -f "$home/bin/kubeall" "$home/bin/kubectl" # not a symbolic link: a test copies the file itself into a pod
  else
    [[ $own = v$v.* ]] || die "test/cluster runs Kubernetes $own; for $v there must be $kubeall"
    kubeall=$HERE/src/kubeall/go.mod
    flags=$(version_flags "$own")
    ln -f "$CLUSTER_HOME/bin/kubeall" "$home/bin/kubectl"
  fi
  src=$(source_of "$kubeall")
  sums=$(cat "$mod" "${mod%.mod}.sum" | hash)
  of=(-C "$src" -modfile="$mod" -trimpath -ldflags "-s -w $flags")
  build "$home/bin/ginkgo" "$sums" go build "${of[@]}" github.com/onsi/ginkgo/v2/ginkgo
  build "$home/bin/e2e.test" "$sums" go test "${of[@]}" -vet=off -c ./test/e2e
  build "$home/parts/agnhost" "$sums" go build "${of[@]}" ./test/images/agnhost
  build "$home/parts/sample-apiserver" "$sums" go build "${of[@]}" k8s.io/sample-apiserver
  build "$home/parts/etcd" "$sums" go build "${of[@]}" go.etcd.io/etcd/server/v3
  registries "$home/registries.yaml"
  KUBE_TEST_REPO_LIST=$home/registries.yaml "$home/bin/e2e.test" --list-images | sort -u >"$home/images.txt"
  make_images "$home" "$src"
}

# tools: what the tests call in pods, in $CLUSTER_HOME/tools with all libraries: images with busybox have none.
tools() {
  local root=$CLUSTER_HOME/tools all inputs
  local names=(curl wget bind9-dnsutils netcat-openbsd iproute2 bash libc-bin) # libc-bin has getent
  inputs=$( (echo "${names[*]}"; declare -f tools unpack) | hash)
  if fresh "$root" "$inputs"; then lap "tools: nothing to do"; return; fi
  apt_update
  all=$(with_dependencies "${names[@]}") # alone, so that a failure counts
  mapfile -t all <<<"$all"
  unpack "$root.new" "${all[@]}"
  (cd "$root.new" && rm -rf usr/share var etc && ln -s /bin/nc.openbsd usr/bin/nc && ln -sf bash bin/sh) # the sh of busybox prefers its own nc
  rm -rf "$root"
  mv "$root.new" "$root"
  echo "$inputs" >"$root.stamp"
  lap "tools: ${#all[@]} packages, $(du -sh "$root" | cut -f1)"
}

make_images() { # HOME SOURCE
  local inputs
  inputs=$(cat "$here/images.sh" "$1/images.txt" "$1"/parts/* "$CLUSTER_HOME"/{images/busybox.tar,tools.stamp} | hash)
  if fresh "$1/images/agnhost.tar" "$inputs"; then lap "images: nothing to do"; return; fi
  rm -f "$1"/images/*
  "$here/images.sh" "$CLUSTER_HOME/images/busybox.tar" "$CLUSTER_HOME/tools" "$1/parts" "$2" "$1/images.txt" "$1/images"
  echo "$inputs" >"$1/images/agnhost.tar.stamp"
  lap "images: $(cd "$1/images" && echo *.tar)"
}

tools
for v in "$@"; do
  version "$v"
  lap "Kubernetes $v in $CLUSTER_HOME/kubernetes-$v ($(du -sh "$CLUSTER_HOME/kubernetes-$v" | cut -f1))"
done
