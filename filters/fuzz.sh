#!/bin/sh
# Runs every fuzz target for an equal share of SECONDS, one at a time: filters/fuzz.sh SECONDS
# They begin with filters/fuzz/seeds/, and what they find on the way is kept in filters/fuzz/corpus/ for the next run.
# What makes one fail is kept in filters/fuzz/artifacts/, and ends the run: see filters/fuzz/README.md.
set -eu
cd "$(dirname "$0")"
seconds="${1:?usage: $0 SECONDS}"

cargo +nightly --version >/dev/null 2>&1 || {
    echo "There is no nightly Rust, which fuzzing needs; install it with: rustup toolchain install nightly" >&2
    exit 1
}
cargo fuzz --version >/dev/null 2>&1 || {
    echo "Installing cargo-fuzz"
    cargo install --quiet --locked cargo-fuzz
}

targets="$(cargo +nightly fuzz list)"
# shellcheck disable=SC2086 # a list of words
set -- $targets
each=$((seconds / $#))
[ "$each" -gt 0 ] || {
    echo "$seconds s are too few for $# targets" >&2
    exit 1
}
for target in "$@"; do
    echo "Fuzzing $target for $each s"
    mkdir -p "fuzz/corpus/$target"
    # Without a sanitizer, since the crate has no unsafe code: ten times as fast.
    cargo +nightly fuzz run --sanitizer none "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
        -max_total_time="$each" -max_len=4096 -timeout=20 -print_final_stats=1
done
