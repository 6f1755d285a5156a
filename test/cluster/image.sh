#!/bin/bash
# image.sh FILE.tar NAME:TAG PROGRAM: makes an image, as `docker save` writes it, with a static program and nothing else. The
# program is the entrypoint; it is in the root folder and runs as user 65532. Then: load.sh FILE.tar
set -euo pipefail
[ $# = 3 ] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
out=$(realpath "$1") reference=$2 program=$3
w=$(mktemp -d "$(dirname "$out")/.image.XXXX")
trap 'rm -rf "$w"' EXIT
repeatable=(--sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner)
mkdir -p "$w/root" "$w/image"
install -m 755 "$program" "$w/root/"
tar "${repeatable[@]}" -C "$w/root" -cf "$w/layer.tar" .
sum=$(sha256sum "$w/layer.tar" | cut -d' ' -f1)
mkdir "$w/image/$sum"
mv "$w/layer.tar" "$w/image/$sum/"
printf '{"architecture":"%s","os":"linux","created":"1970-01-01T00:00:00Z","config":{"User":"65532:65532","WorkingDir":"/","Entrypoint":["/%s"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]},"history":[{"created":"1970-01-01T00:00:00Z"}]}' \
  "$(dpkg --print-architecture)" "$(basename "$program")" "$sum" >"$w/config.json"
config=$(sha256sum "$w/config.json" | cut -d' ' -f1).json
mv "$w/config.json" "$w/image/$config"
printf '[{"Config":"%s","RepoTags":["%s"],"Layers":["%s/layer.tar"]}]' "$config" "$reference" "$sum" >"$w/image/manifest.json"
tar "${repeatable[@]}" -C "$w/image" -cf "$out" .
