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

# source_of MODFILE: the folder of the module k8s.io/kubernetes, downloaded. kubeadm, the e2e tests and the test images are
# packages of it. Its own go.mod names folders that a published module does not have, so build gets another by -modfile:
# test/conformance/kubernetes/update.sh makes these.
source_of() {
  local dir
  dir=$(cd "$HERE/src/kubeall" && go mod download -modfile="$1" -json k8s.io/kubernetes | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
  [ -d "$dir" ] || die "the module k8s.io/kubernetes of $1 has no folder"
  echo "$dir"
}

updated=
apt_update() { [ -n "$updated" ] || apt-get -qq update; updated=1; }

# unpack ROOT PACKAGE...: puts the files of Debian packages into the folder ROOT, and installs nothing.
unpack() {
  local root=$1 d f; shift
  for d; do
    case $(apt-cache policy "$d" 2>/dev/null) in *"Candidate: "[0-9]*) ;; *) apt_update ;; esac
  done
  download() {
    rm -rf "$CLUSTER_HOME/debs"
    mkdir "$CLUSTER_HOME/debs"
    (cd "$CLUSTER_HOME/debs" && apt-get -qq -o APT::Sandbox::User=root download "$@")
  }
  download "$@" || { updated=; apt_update; download "$@"; } # lists that are too old name packages that are gone
  rm -rf "$root"
  mkdir "$root"
  for f in "$CLUSTER_HOME"/debs/*.deb; do dpkg -x "$f" "$root"; done
  rm -rf "$CLUSTER_HOME/debs"
}

# with_dependencies PACKAGE...: the names of these packages and of all that they need, on a machine that has none.
with_dependencies() {
  apt-get -qq -s -o Dir::State::status=/dev/null install --no-install-recommends "$@" | sed -n 's/^Inst \([^ ]*\).*/\1/p'
}

# build OUT INPUTS COMMAND... PACKAGE: runs `COMMAND -o OUT PACKAGE` unless OUT was made of the same inputs.
build() {
  local out=$1 inputs=$2; shift 2
  inputs=$(echo "$inputs $* $(go version)" | hash)
  if fresh "$out" "$inputs"; then lap "$(basename "$out"): nothing to do"; return; fi
  lap "$(basename "$out"): go build (with cold caches: minutes)"
  nice -n 10 "${@:1:$#-1}" -o "$out.new" "${@: -1}"
  mv "$out.new" "$out"
  echo "$inputs" >"$out.stamp"
  lap "$(basename "$out"): $(($(stat -c %s "$out") / 1000000)) MB"
}
