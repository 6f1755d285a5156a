#!/bin/bash
# busy.sh [RUNS]: runs the tests of all packages of the main module RUNS times, 20 without an argument, while four processes
# keep the machine busy. A test that depends on the speed of the machine fails here. Programs and logs are in a folder,
# which is removed if all runs pass, and else kept.
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:-20}
dir=$(mktemp -d "${TMPDIR:-/tmp}/tunnel-busy.XXXXXX")
busy=()
trap '[ ${#busy[@]} = 0 ] || kill "${busy[@]}"' EXIT

echo "building the tests into $dir"
go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{.Dir}}{{end}}' ./... >"$dir/packages"
while read -r package folder; do
  name=${package//\//_}
  go test -c -o "$dir/$name" "$package"
  echo "$name $folder"
done <"$dir/packages" >"$dir/tests"

for _ in 1 2 3 4; do
  sh -c 'while :; do :; done' &
  busy+=($!)
done

one() { # DIR RUN NAME FOLDER: runs the tests of one package
  local log=$1/$3.$2.log
  cd "$4"
  if "$1/$3" -test.timeout 20m >"$log" 2>&1; then
    rm "$log"
  else
    echo "run $2: $log"
    grep -m 5 -- '^--- FAIL' "$log" || tail -n 5 "$log"
    touch "$1/failed"
  fi
}
export -f one
for ((run = 1; run <= runs; run++)); do
  xargs -P 4 -L 1 bash -c 'one "$@"' one "$dir" "$run" <"$dir/tests"
  echo "run $run of $runs has ended, $SECONDS s after the start"
done
[ ! -e "$dir/failed" ] || exit 1
rm -r "$dir"
