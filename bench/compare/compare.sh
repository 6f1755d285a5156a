#!/bin/bash
# The Go micro-benchmarks of this working tree beside those of another revision:
#
#   bench/compare/compare.sh BASE [package...]
#
# Both are built first, then run in turn (base, tree, base, tree, ...), so that what else
# the machine does hits both. benchstat says what differs; "~" is nothing that can be told
# from noise. BENCH (a regular expression), COUNT (rounds) and BENCHTIME choose how much.
set -eu -o pipefail

: "${BENCH:=Codec|Conn|Dial|Peers|Router|Directory|Decide}" "${COUNT:=8}" "${BENCHTIME:=100ms}"
benchstat=golang.org/x/perf/cmd/benchstat@v0.0.0-20260908200009-22c9c6c9d4da

die() { echo "bench-compare: $*" >&2; exit 1; }

base=${1:-}
[ -n "$base" ] || die "compare with what? BASE=main, a tag, a commit"
shift
[ $# -gt 0 ] || set -- ./pkg/conn ./pkg/stream ./pkg/peers ./pkg/tunnel ./pkg/dns
tree=$(git rev-parse --show-toplevel)
rev=$(git rev-parse --verify --quiet --end-of-options "$base^{commit}") || die "$base is no revision of this repository"

dir=$(mktemp -d)
mkdir "$dir/tmp"
export TMPDIR=$dir/tmp # of the go command, which leaves it behind when it is killed
child=
clean() {
	trap - EXIT INT TERM HUP
	[ -z "$child" ] || kill -- "-$child" 2>/dev/null || true
	wait
	git -C "$tree" worktree remove --force "$dir/base" 2>/dev/null || true
	rm -rf "$dir"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# In the background, so that a signal is heard at once and not when the child has ended;
# and in a group of its own, so that what the child has started ends with it.
set -m
run() {
	"$@" &
	child=$!
	wait "$child" || return
	child=
}

# build SIDE FOLDER: a test binary of each package that has tests there.
build() {
	for pkg in "${packages[@]}"; do
		if compgen -G "$2/$pkg/*_test.go" >/dev/null; then
			run go -C "$2" test -c -o "$dir/$1/$pkg/test" "$pkg" || die "$pkg of $1 does not build"
		fi
	done
}

# bench SIDE FOLDER PACKAGE: one round.
bench() {
	[ -x "$dir/$1/$3/test" ] || return 0
	cd "$2/$3"
	run "$dir/$1/$3/test" -test.run='^$' -test.bench="$BENCH" -test.benchtime="$BENCHTIME" >>"$dir/$1.txt" || die "$3 of $1 fails: $(tail -n 5 "$dir/$1.txt")"
}

packages=("$@")
git -C "$tree" worktree add --quiet --detach "$dir/base" "$rev"
touch "$dir/base.txt" "$dir/tree.txt"
build base "$dir/base"
build tree "$tree"
for ((i = 1; i <= COUNT; i++)); do
	for pkg in "${packages[@]}"; do
		bench base "$dir/base" "$pkg"
		bench tree "$tree" "$pkg"
	done
	echo "round $i of $COUNT" >&2
done

names() { awk '/^pkg: / { pkg = $2 } /^Benchmark/ { print pkg "." $1 }' "$1" | sort -u; }
[ -n "$(comm -12 <(names "$dir/base.txt") <(names "$dir/tree.txt"))" ] ||
	die "nothing to compare: no benchmark that matches '$BENCH' is both in $base and here"
cd "$dir"
run go run "$benchstat" "base=base.txt" "tree=tree.txt"
