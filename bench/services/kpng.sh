#!/bin/bash
# kpng.sh: builds KPNG's program from its public source, once, and prints the program's path. KPNG=SOURCE names another
# place to clone it from, such as a clone on this machine. With KPNG=none it does and prints nothing.
set -euo pipefail
[ "${KPNG:-}" != none ] || exit 0
source=${KPNG:-https://github.com/kubernetes-retired/kpng}
commit=edb81cd6a3c8443ee734e614b48ea30f6569fd9d # of 2024-07-09, the last one
dir=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-bench
program=$dir/kpng-${commit:0:7}
if [ ! -x "$program" ]; then
  mkdir -p "$dir"
  tmp=$(mktemp -d "$dir/kpng.XXXXXX")
  trap 'rm -rf "$tmp"' EXIT
  git clone -q "$source" "$tmp/kpng" >&2 || {
    echo "kpng.sh: KPNG=none measures tunnel alone, and KPNG=DIR takes the source from a clone" >&2
    exit 1
  }
  cd "$tmp/kpng/cmd"
  git checkout -q "$commit"
  # Other backends than nft need C libraries.
  sed -i -E '/kpng\/backends\/(ebpf|iptables|ipvs|userspacelin)"/d' kpng/storecmds/storecmds_linux.go
  CGO_ENABLED=0 go build -trimpath -o "$tmp/program" ./kpng >&2
  mv "$tmp/program" "$program"
fi
echo "$program"
