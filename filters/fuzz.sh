#!/bin/sh
# Runs every fuzz target for an equal share of SECONDS: filters/fuzz.sh SECONDS
# What makes one fail is kept in filters/fuzz/artifacts/, and ends the run.
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
for target in "$@"; do
    echo "Fuzzing $target for $each s"
    cargo +nightly fuzz run "$target" -- -max_total_time="$each" -print_final_stats=1
done
