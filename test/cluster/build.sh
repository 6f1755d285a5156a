#!/bin/bash
# build.sh: puts all that up.sh needs under $CLUSTER_HOME: bin, debroot, nodebin, images. Every step is skipped when its
# inputs did not change; FORCE=1 does them all again.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
. "$HERE/lib/build.sh"

# Unpacked under $CLUSTER_HOME, not installed.
debs=(containerd runc containernetworking-plugins iptables conntrack busybox-static
  libip4tc2 libip6tc2 libxtables12 libmnl0 libnfnetlink0 libnetfilter-conntrack3 libnftnl11
  nftables libnftables1 libjansson4 libedit2 libbsd0 libmd0 libgmp10)

case $CLUSTER_HOME in
*[[:space:]]*) die "no white space in CLUSTER_HOME, please: $CLUSTER_HOME" ;;
/*) ;;
*) die "CLUSTER_HOME must be absolute: $CLUSTER_HOME" ;;
esac
for c in go dpkg apt-get; do command -v $c >/dev/null || die "needs $c (Debian 12 and a Go toolchain)"; done
mkdir -p "$CLUSTER_HOME"/{bin,nodebin,images,tmp}
lock 3600
export TMPDIR=$CLUSTER_HOME/tmp # on the same disk as what is built; /tmp may be small
trap 'rm -rf "$CLUSTER_HOME/tmp"' EXIT

# A tool that is missing is installed: these have too many libraries to be run from a directory.
install_missing() {
  local c want=()
  for c in ip:iproute2 nsenter:util-linux unshare:util-linux setpriv:util-linux flock:util-linux; do
    command -v "${c%%:*}" >/dev/null || want+=("${c##*:}")
  done
  [ ${#want[@]} = 0 ] || {
    apt_update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${want[@]}" </dev/null >/dev/null
    lap "installed: ${want[*]}"
  }
}

unpack_debs() {
  local root=$CLUSTER_HOME/debroot stamp=${debs[*]}
  if fresh "$root" "$stamp"; then lap "debroot: nothing to do"; return; fi
  unpack "$root.new" "${debs[@]}"
  (cd "$root.new" && rm -rf usr/share etc lib/systemd usr/bin/containerd-shim usr/bin/containerd-shim-runc-v1 usr/bin/containerd-stress)
  rm -rf "$root"
  mv "$root.new" "$root"
  echo "$stamp" >"$root.stamp"
  lap "debroot: ${#debs[@]} packages, $(du -sh "$root" | cut -f1)"
}

# iptables, nft and conntrack run from debroot with its libraries, through wrappers that go on PATH.
write_wrappers() {
  local root=$CLUSTER_HOME/debroot bin=$CLUSTER_HOME/nodebin arch lib t b missing
  arch=$(cd "$root/usr/lib" && echo *-linux-gnu)
  lib=$root/usr/lib/$arch:$root/lib/$arch
  wrapper() { # NAME COMMAND
    printf '#!/bin/sh\nexport LD_LIBRARY_PATH=%s XTABLES_LIBDIR=%s\nexec %s "$@"\n' "$lib" "$root/usr/lib/$arch/xtables" "$2" >"$bin/$1"
    chmod 755 "$bin/$1"
  }
  for t in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do
    wrapper $t "$root/usr/sbin/xtables-nft-multi $t"
  done
  wrapper conntrack "$root/usr/sbin/conntrack"
  wrapper nft "$root/usr/sbin/nft"
  missing=$(for b in bin/containerd bin/containerd-shim-runc-v2 bin/ctr sbin/runc sbin/xtables-nft-multi sbin/conntrack sbin/nft; do
    LD_LIBRARY_PATH=$lib ldd "$root/usr/$b" 2>/dev/null | sed -n "s|^[[:space:]]*\(.*\) => not found|$b needs \1|p"
  done)
  [ -z "$missing" ] || die "libraries missing on this machine (is it Debian 12?): $missing"
  "$bin/iptables" --version >/dev/null
  "$bin/conntrack" --version >/dev/null
  "$bin/nft" --version >/dev/null
}

gobuild() { # NAME PACKAGE FLAGS...: builds PACKAGE of module src/NAME into bin/NAME
  local name=$1 pkg=$2 inputs out=$CLUSTER_HOME/bin/$1; shift 2
  inputs=$( (cd "$HERE/src/$name" && cat go.mod; find . -type f \( -name go.sum -o -name '*.go' \) -print0 | sort -z | xargs -0r cat; go version; echo "$pkg $*") | hash)
  if fresh "$out" "$inputs"; then lap "$name: nothing to do"; return; fi
  lap "$name: go build (with cold caches: minutes)"
  (cd "$HERE/src/$name" && nice -n 10 go build -trimpath "$@" -o "$out.new" "$pkg")
  mv "$out.new" "$out"
  echo "$inputs" >"$out.stamp"
  lap "$name: $(($(stat -c %s "$out") / 1000000)) MB"
}

build_kubeadm() { # a test has it write the manifest of kube-apiserver
  local v minor mod src
  v=$(kubernetes_version "$HERE/src/kubeall/go.mod")
  minor=${v#v} minor=${minor%.*}
  mod=$(realpath "$HERE/../conformance/kubernetes/$minor.mod")
  src=$(source_of "$HERE/src/kubeall/go.mod")
  build "$CLUSTER_HOME/bin/kubeadm" "$(cat "$mod" "${mod%.mod}.sum" | hash)" \
    go build -C "$src" -modfile="$mod" -trimpath -ldflags "-s -w $(version_flags "$v")" ./cmd/kubeadm
}

make_images() {
  local out=$CLUSTER_HOME/images bb=$CLUSTER_HOME/debroot/bin/busybox inputs
  inputs=$(cat "$HERE/lib/images.sh" "$bb" | hash)
  if fresh "$out/busybox.tar" "$inputs" && [ -e "$out/pause.tar" ]; then lap "images: nothing to do"; return; fi
  "$HERE/lib/images.sh" "$bb" "$out"
  echo "$inputs" >"$out/busybox.tar.stamp"
  lap "images: $(cd "$out" && echo *.tar)"
}

install_missing
unpack_debs
write_wrappers
gobuild pki . -ldflags "-s -w"
gobuild kubeall . -ldflags "-s -w $(version_flags "$(kubernetes_version "$HERE/src/kubeall/go.mod")")"
ln -sf kubeall "$CLUSTER_HOME/bin/kubectl"
build_kubeadm
gobuild coredns . -ldflags "-s -w"
gobuild metrics-server sigs.k8s.io/metrics-server/cmd/metrics-server -ldflags "-s -w"
make_images
lap "all in $CLUSTER_HOME ($(du -sh "$CLUSTER_HOME" | cut -f1))"
