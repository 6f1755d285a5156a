#!/bin/bash
# busy.sh [RUNS [PACKAGE...]]: runs the tests of the packages, those of the main module if none is named, RUNS times,
# 20 without an argument, while four processes keep the machine busy. A test that depends on the speed of the machine
# fails here. Programs and logs are in a folder, which is removed if all runs pass, and else kept.
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:-20}
packages=("${@:2}")
dir=$(mktemp -d "${TMPDIR:-/tmp}/tunnel-busy.XXXXXX")
busy=()
trap '[ ${#busy[@]} = 0 ] || kill "${busy[@]}"' EXIT

echo "building the tests into $dir"
go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{.Dir}}{{end}}' "${packages[@]:-./...}" >"$dir/packages"
while read -r package folder; do
  name=${package//\//_}
  go test -c -o "$dir/$name" "$package"
  echo "$name $folder"
done <"$dir/packages" >"$dir/tests"

for _ in 1 2 3 4; do
  sh -c 'while :; do :; done' &
  busy+=($!)
done

# A package begins its next run while others are still in theirs, so that a slow one does not hold up all.
one() { # DIR PACKAGES NAME FOLDER RUN: runs the tests of one package
  local log=$1/$3.$5.log
  cd "$4"
  exec 9>"$1/$3.lock"
  flock 9 # tests of one package may use the same names
  if "$1/$3" -test.timeout 20m >"$log" 2>&1 9>&-; then
    rm "$log"
  else
    echo "run $5: $log"
    grep -m 5 -- '^--- FAIL' "$log" || tail -n 5 "$log"
    touch "$1/failed"
  fi
  echo "$3" >>"$1/ended.$5"
  [ "$(wc -l <"$1/ended.$5")" -lt "$2" ] || echo "run $5 has ended, $(($(date +%s) - $(stat -c %Y "$1/tests"))) s after the start"
}
export -f one
for ((run = 1; run <= runs; run++)); do
  sed "s/\$/ $run/" "$dir/tests"
done | xargs -P 4 -L 1 bash -c 'one "$@"' one "$dir" "$(wc -l <"$dir/tests")"
[ ! -e "$dir/failed" ] || exit 1
rm -r "$dir"
