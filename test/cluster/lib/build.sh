# shellcheck shell=bash
# What build.sh here and that of test/conformance share. Source common.sh first.

export CGO_ENABLED=0 GOWORK=off GOTOOLCHAIN=local GOFLAGS="-buildvcs=false -mod=readonly"

fresh() { [ -z "${FORCE:-}" ] && [ -e "$1" ] && [ "$(cat "$1.stamp" 2>/dev/null)" = "$2" ]; } # FILE INPUTS
hash() { sha256sum | cut -d' ' -f1; }

# kubernetes_version FILE: which Kubernetes a go.mod requires, such as v1.34.4.
kubernetes_version() { sed -n 's|^.*k8s.io/kubernetes v|v|p' "$1" | head -n 1; }

# version_flags VERSION: linker flags for what `kubectl version` and the node's status say.
version_flags() {
  local v=$1 minor pkg=k8s.io/component-base/version
  minor=${v#v1.}
  minor=${minor%%.*}
  echo "-X $pkg.gitVersion=$v -X $pkg.gitMajor=1 -X $pkg.gitMinor=$minor -X $pkg.gitTreeState=clean -X $pkg.gitCommit=0000000" \
    "-X $pkg.buildDate=2026-01-01T00:00:00Z -X k8s.io/client-go/pkg/version.gitVersion=$v"
}
