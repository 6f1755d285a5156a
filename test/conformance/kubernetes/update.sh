#!/bin/bash
# update.sh VERSION: writes the module files of one Kubernetes, such as 1.36.3, that build.sh uses: here, for its tests and test
# images; and in test/cluster/src/kubeall, for its programs (but where go.mod there is of that minor version). The module
# k8s.io/kubernetes names its siblings (k8s.io/api and so on) by folders that a published module does not have: each line
# `=> ./staging/src/X` becomes the published version of X. Sums come from Kubernetes' own go.sum, those of the siblings from
# the checksum database. Minutes; downloads 0.3 GB.
set -euo pipefail
[[ ${1:-} =~ ^1\.[0-9]+\.[0-9]+$ ]] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
version=$1 minor=${1%.*} siblings=v0.${1#1.}
here=$(cd "$(dirname "$0")" && pwd)
kubeall=$here/../../cluster/src/kubeall
export GOWORK=off GOTOOLCHAIN=local GOFLAGS=-buildvcs=false
src=$(cd / && GOFLAGS=-mod=mod go mod download -json "k8s.io/kubernetes@v$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
published() { sed "s|=> ./staging/src/\(k8s.io/.*\)|=> \1 $siblings|" "$src/go.mod"; }

published >"$here/$minor.mod"
cat "$src/go.sum" >"$here/$minor.sum"
go list -C "$src" -mod=mod -modfile="$here/$minor.mod" -deps -test ./test/e2e ./test/images/agnhost ./cmd/kubeadm \
  k8s.io/sample-apiserver github.com/onsi/ginkgo/v2/ginkgo go.etcd.io/etcd/server/v3 >/dev/null

[[ $(sed -n 's|^.*k8s.io/kubernetes v||p' "$kubeall/go.mod") != "$minor".* ]] || exit 0
{
  echo 'module tunnel.example/tunnel/test/cluster/kubeall'
  published | sed -n '/^go /,$p' | sed "0,/^require (/s|^require (|require (\n\tk8s.io/kubernetes v$version|"
} >"$kubeall/$minor.mod"
cp "$here/$minor.sum" "$kubeall/$minor.sum"
cd "$kubeall"
go list -mod=mod -modfile="$minor.mod" -deps . >/dev/null
