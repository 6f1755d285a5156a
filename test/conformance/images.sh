#!/bin/bash
# images.sh BUSYBOX.tar TOOLS PARTS SOURCE LIST OUTDIR: makes docker-archive files of the images that the tests of our list use,
# under the names that `e2e.test --list-images` printed into LIST. Everything in them is built here (PARTS: agnhost,
# sample-apiserver, etcd), is a file of the module k8s.io/kubernetes (SOURCE), or is Debian's: busybox, the first layer, and TOOLS.
# httpd and nginx are busybox's web server: the tests ask for a page that says "It works!", and for nothing of Apache or nginx.
set -euo pipefail
busybox=$1 tools=$2 parts=$3 source=$4 list=$5 out=$6
w=$(mktemp -d "$out/.work.XXXX")
trap 'rm -rf "$w"' EXIT
arch=$(dpkg --print-architecture) # amd64 and arm64 have the same names in Go and in Debian
mkdir -p "$w/layers"
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# layer NAME: turns the folder $w/NAME into a layer, and remembers its hash under that name.
declare -A layers
layer() {
  local tar=$w/$1.tar sum
  tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$w/$1" -cf "$tar" .
  sum=$(sha256sum "$tar" | cut -d' ' -f1)
  mkdir -p "$w/layers/$sum"
  mv "$tar" "$w/layers/$sum/layer.tar"
  layers[$1]=$sum
}

# json WORD...: a list of strings, as JSON has it.
json() { printf '[%s]' "$(printf '"%s"\n' "$@" | paste -sd, -)"; }

# image NAME CONFIG LAYER...: an image of these layers, under every name NAME:VERSION of the list. A list without NAME: none.
image() {
  local name=$1 config=$2 d=$w/image tags sums=() diffs=() history=() c l; shift 2
  mapfile -t tags < <(grep -E "^e2e.local/$name:[^/]+\$" "$list" || true)
  [ ${#tags[@]} -gt 0 ] || { echo "$name: in no test of this version"; return; }
  rm -rf "$d"
  mkdir "$d"
  for l in "$@"; do
    cp -rl "$w/layers/${layers[$l]}" "$d/"
    sums+=("${layers[$l]}/layer.tar")
    diffs+=("sha256:${layers[$l]}")
    history+=('{"created":"1970-01-01T00:00:00Z"}')
  done
  printf '{"architecture":"%s","os":"linux","created":"1970-01-01T00:00:00Z","config":{"Env":["PATH=%s"],"WorkingDir":"/",%s},"rootfs":{"type":"layers","diff_ids":%s},"history":[%s]}' \
    "$arch" "$path" "$config" "$(json "${diffs[@]}")" "$(IFS=,; echo "${history[*]}")" >"$d/config.json"
  c=$(sha256sum "$d/config.json" | cut -d' ' -f1)
  mv "$d/config.json" "$d/$c.json"
  printf '[{"Config":"%s.json","RepoTags":%s,"Layers":%s}]' "$c" "$(json "${tags[@]}")" "$(json "${sums[@]}")" >"$d/manifest.json"
  tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$d" -cf "$out/$name.tar" .
}

# The first layer, as test/cluster/lib/images.sh has made it.
mkdir "$w/busybox"
tar -xOf "$busybox" --wildcards '*/layer.tar' >"$w/busybox.tar"
tar -xf "$w/busybox.tar" -C "$w/busybox"
chmod 1777 "$w/busybox/tmp" # tests run as users of their own
mkdir -p "$w/busybox/root"
printf '#!/bin/sh\neval "echo \\$$1"\n' >"$w/busybox/bin/printenv" # Debian's busybox has none, and a test of kubectl in a pod runs it
chmod 755 "$w/busybox/bin/printenv"
layer busybox

cp -al "$tools" "$w/tools"
layer tools

# As test/images/agnhost/Dockerfile has it, but for iperf and CoreDNS, which no test of our lists runs.
mkdir -p "$w"/agnhost/{uploads,etc}
install -m 755 "$parts/agnhost" "$w/agnhost/agnhost"
ln -s agnhost "$w/agnhost/agnhost-2"
install -m 644 "$source"/test/images/agnhost/porter/localhost.{crt,key} "$w/agnhost/"
printf '%s\n' root:x:0:0:root:/:/bin/sh user-defined-in-image:x:1000:1000::/:/bin/sh >"$w/agnhost/etc/passwd"
printf '%s\n' root:x:0: user-defined-in-image:x:1000: group-defined-in-image:x:50000:user-defined-in-image >"$w/agnhost/etc/group"
layer agnhost

mkdir "$w/nautilus"
install -m 644 "$source"/test/images/nautilus/html/{nautilus.jpg,data.json} "$w/nautilus/"
layer nautilus

mkdir -p "$w/web/htdocs"
echo '<html><body><h1>It works!</h1></body></html>' >"$w/web/htdocs/index.html"
layer web

mkdir "$w/sample-apiserver"
install -m 755 "$parts/sample-apiserver" "$w/sample-apiserver/"
layer sample-apiserver

mkdir -p "$w/etcd/usr/local/bin"
install -m 755 "$parts/etcd" "$w/etcd/usr/local/bin/etcd"
layer etcd

image busybox '"Cmd":["sh"]' busybox
image agnhost '"Entrypoint":["/agnhost"],"Cmd":["pause"]' busybox tools agnhost
image jessie-dnsutils '"Cmd":["sh"]' busybox tools
image glibc-dns-testing '"Cmd":["sh"]' busybox tools
image nautilus '"Entrypoint":["/agnhost"],"Cmd":["test-webserver"]' busybox tools agnhost nautilus
image httpd '"Cmd":["httpd","-f","-p","80","-h","/htdocs"]' busybox web
image nginx '"Cmd":["httpd","-f","-p","80","-h","/htdocs"]' busybox web
image pause '"Cmd":["sh","-c","trap \"exit 0\" TERM INT; while :; do sleep 3600 & wait $!; done"]' busybox
image sample-apiserver '"Entrypoint":["/sample-apiserver"]' busybox sample-apiserver
image etcd '"Cmd":["/usr/local/bin/etcd"]' busybox etcd
