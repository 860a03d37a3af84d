#!/bin/bash
# Compares two addresses with sysbench, in alternating runs (A, B, B, A), and prints medians and ratios. The four runs
# of a round follow each other, so a slow change of the machines affects both addresses alike.
# docs/operate/measure.md describes the measurement.
#
#   compare.sh NAME=HOST[,HOST...]:PORT NAME=HOST[,HOST...]:PORT SYSBENCH_ARGUMENTS...
#
# In the environment: ROUNDS (default 5), and RUN_SECONDS, the duration of a run (default 60).
set -euo pipefail

ROUNDS=${ROUNDS:-5}
RUN_SECONDS=${RUN_SECONDS:-60}
target='^[^= ]+=[^=: ]+:[0-9]+$'
if [[ $# -lt 3 || ! $1 =~ $target || ! $2 =~ $target || ${1%%=*} == "${2%%=*}" ]]; then
    echo "usage: $0 NAME=HOST[,HOST...]:PORT NAME=HOST[,HOST...]:PORT SYSBENCH_ARGUMENTS..." >&2
    exit 2
fi
first=$1
second=$2
shift 2
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
TIMEFORMAT='%U %S %R'

# run ROUND TARGET SYSBENCH_ARGUMENTS...: runs sysbench once, and prints its figures.
run() {
    local round=$1 name=${2%%=*} address=${2#*=}
    shift 2
    if ! { time sysbench "$@" --mysql-host="${address%:*}" --mysql-port="${address##*:}" --time="$RUN_SECONDS" \
        --percentile=95 run > "$directory/output" 2>&1; } 2> "$directory/time"; then
        cat "$directory/output" >&2
        echo "$0: sysbench has failed at $name ($address)" >&2
        exit 1
    fi
    awk -v round="$round" -v name="$name" -v times="$(< "$directory/time")" '
        /^ *queries: / { queries = substr($3, 2) }
        /^ *ignored errors: / { errors = $3 }
        /^ *total number of events: / { events = $NF }
        /^ *sum: / { milliseconds = $NF }
        /^ *95th percentile: / { p95 = $NF }
        END {
            split(times, seconds, " ")
            printf "%-8s %-12s %10.0f %10.3f %10.2f %8d %6.1f\n", round, name, queries, milliseconds / events, p95,
                errors, (seconds[1] + seconds[2]) / seconds[3]
        }' "$directory/output" | tee -a "$directory/results"
}

printf '%-8s %-12s %10s %10s %10s %8s %6s\n' round target queries/s mean_ms p95_ms errors cores
run warm-up "$first" "$@"
run warm-up "$second" "$@"
for ((round = 1; round <= ROUNDS; round++)); do
    for target in "$first" "$second" "$second" "$first"; do
        run "$round" "$target" "$@"
    done
done

awk -v first="${first%%=*}" -v second="${second%%=*}" '
    # Sorts the values, and returns their median.
    function median(values, count,    i, j, value) {
        for (i = 2; i <= count; i++) {
            value = values[i]
            for (j = i; j > 1 && values[j - 1] > value; j--) values[j] = values[j - 1]
            values[j] = value
        }
        return count % 2 ? values[(count + 1) / 2] : (values[count / 2] + values[count / 2 + 1]) / 2
    }
    $1 == "warm-up" { next }
    {
        rounds = $1
        runs[$2]++
        for (figure = 3; figure <= 5; figure++) {
            value[$2, figure, runs[$2]] = $figure
            sum[$1, $2, figure] += $figure
        }
    }
    END {
        split("- - queries/s mean_ms p95_ms", title, " ")
        printf "\n%-12s %12s %12s   %s/%s: median, lowest and highest of %d rounds\n", "median", first, second, second,
            first, rounds
        for (figure = 3; figure <= 5; figure++) {
            for (i = 1; i <= 2 * rounds; i++) {
                a[i] = value[first, figure, i]
                b[i] = value[second, figure, i]
            }
            for (i = 1; i <= rounds; i++) ratio[i] = sum[i, second, figure] / sum[i, first, figure]
            middle = median(ratio, rounds)
            printf "%-12s %12.3f %12.3f   %.3f  %.3f  %.3f\n", title[figure], median(a, 2 * rounds),
                median(b, 2 * rounds), middle, ratio[1], ratio[rounds]
        }
    }' "$directory/results"
