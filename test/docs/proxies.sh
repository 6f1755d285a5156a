#!/bin/bash
# proxies.sh: unpacks HAProxy and nginx of Debian into bin/proxies, for TestPort443 and TestBalancers. It does not install them: Debian starts
# what it installs.
set -euo pipefail
cd "$(dirname "$0")/../.."
debs=(haproxy liblua5.3-0 libopentracing-c-wrapper0 libopentracing1 nginx libnginx-mod-stream)
[ "$(cat bin/proxies/stamp 2>/dev/null)" != "${debs[*]}" ] || exit 0
mkdir -p bin
work=$(mktemp -d bin/.proxies.XXXX)
trap 'rm -rf "$work"' EXIT
mkdir "$work/debs" "$work/root"
download() { (cd "$work/debs" && apt-get -qq -o APT::Sandbox::User=root download "${debs[@]}" >/dev/null); }
echo "unpacking HAProxy and nginx into bin/proxies"
download 2>/dev/null || { apt-get -qq update && download; } # lists that are too old name packages that are gone
for f in "$work"/debs/*.deb; do dpkg -x "$f" "$work/root"; done
echo "${debs[*]}" >"$work/root/stamp"
rm -rf bin/proxies
mv "$work/root" bin/proxies
