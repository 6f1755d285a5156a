#!/bin/bash
# images.sh BUSYBOX OUTDIR: makes docker-archive files of the two images that the pods need, from a static busybox. They
# share one layer: e2e.local/busybox:1 (cmd: sh) and e2e.local/pause:1 (the sandbox).
set -euo pipefail
bb=$1 out=$2
w=$(mktemp -d "$out/.work.XXXX")
trap 'rm -rf "$w"' EXIT
arch=$(dpkg --print-architecture) # amd64 and arm64 have the same names in Go and in Debian
mkdir -p "$w"/root/{bin,tmp,etc,www}
install -m 755 "$bb" "$w/root/bin/busybox"
for a in $("$bb" --list); do [ "$a" = busybox ] || ln -s busybox "$w/root/bin/$a"; done
echo 'root:x:0:0:root:/:/bin/sh' >"$w/root/etc/passwd"
echo 'root:x:0:' >"$w/root/etc/group"
echo hello-from-pod >"$w/root/www/index.html"
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$w/root" -cf "$w/layer.tar" .
diff=$(sha256sum "$w/layer.tar" | cut -d' ' -f1)

image() { # REFERENCE FILE CMD-as-JSON
  local d=$w/$2 c
  mkdir -p "$d/$diff"
  ln "$w/layer.tar" "$d/$diff/layer.tar"
  printf '{"architecture":"%s","os":"linux","created":"1970-01-01T00:00:00Z","config":{"Env":["PATH=/bin"],"WorkingDir":"/","Cmd":%s},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]},"history":[{"created":"1970-01-01T00:00:00Z"}]}' \
    "$arch" "$3" "$diff" >"$d/config.json"
  c=$(sha256sum "$d/config.json" | cut -d' ' -f1)
  mv "$d/config.json" "$d/$c.json"
  printf '[{"Config":"%s.json","RepoTags":["%s"],"Layers":["%s/layer.tar"]}]' "$c" "$1" "$diff" >"$d/manifest.json"
  tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$d" -cf "$out/$2.tar" .
}
image e2e.local/busybox:1 busybox '["sh"]'
image e2e.local/pause:1 pause '["sh","-c","trap \"exit 0\" TERM INT; while :; do sleep 3600 & wait $!; done"]'
