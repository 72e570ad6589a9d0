#!/usr/bin/env bash
# What bench/rxe/compare runs beside the device.
set -euo pipefail
. tests/rxe/guest/common.sh

export BENCH_QPS=${BENCH_QPS:-1} BENCH_DEPTH=${BENCH_DEPTH:-64} BENCH_SECONDS=${BENCH_SECONDS:-3}
rounds=${BENCH_ROUNDS:-5}
command=()
[[ -z ${BENCH_COMMAND:-} ]] || eval "command=($BENCH_COMMAND)"

if [[ -z ${KVRAIL_RDMA_DEVICE:-} ]]; then
    one_device
fi
device=$KVRAIL_RDMA_DEVICE

# Measure, block size, and the ratio to perftest that is wanted: at least for bandwidth, at most else; - for
# none.
measures=("bandwidth 4096 0.9" "bandwidth 65536 0.9" "bandwidth 1048576 0.9" "latency 4096 1.15" "leased 4096 2.5"
    "whole 4096 -")

# peer MEASURE SIZE: perftest's value. A leased read is held against a bare one.
peer() {
    case $1 in
        bandwidth)
            perftest ib_read_bw "$device" "$device" -s "$2" -q "$BENCH_QPS" -t "$BENCH_DEPTH" -D "$BENCH_SECONDS" |
                awk -v size="$2" '$1 == size { print $4 }'
            ;;
        *)
            perftest ib_read_lat "$device" "$device" -s "$2" -n 1000 | awk -v size="$2" '$1 == size { print $5 }'
            ;;
    esac
}

# ours MEASURE SIZE
ours() {
    "${command[@]}" "$1" "$2" | awk -v measure="$1" -v size="$2" '$1 == measure && $2 == size { print $3 }'
}

values=$(mktemp)
for ((round = 1; round <= rounds; round++)); do
    for measure in "${measures[@]}"; do
        read -r what size _ <<<"$measure"
        # Without ours there is nothing to hold against a bare READ a second time.
        [[ $what != leased && $what != whole ]] || ((${#command[@]})) || continue
        theirs=$(peer "$what" "$size")
        mine=-
        ((${#command[@]} == 0)) || mine=$(ours "$what" "$size")
        if [[ -z $theirs || -z $mine ]]; then
            echo "no value for $what $size"
            exit 1
        fi
        echo "$what $size $theirs $mine" >>"$values"
    done
done

echo "READ on $device, $BENCH_QPS queue pairs, depth $BENCH_DEPTH, ib_read_bw for $BENCH_SECONDS s, ib_read_lat typical of 1000; $rounds rounds"
printf '%-9s %8s %-5s %10s %10s %10s %10s %7s %9s %8s\n' \
    measure size unit perftest "(median)" kvrail "(median)" ratio "(medians)" wanted
status=0
for measure in "${measures[@]}"; do
    read -r what size bound <<<"$measure"
    rows=$(grep "^$what $size " "$values") || continue
    unit=us sign="<=" order=-g
    if [[ $what == bandwidth ]]; then unit=MiB/s sign=">=" order=-gr; fi
    # Other load on the host only ever makes a value worse, by jumps of a scheduler's tick: each side's best
    # round stands beside the median, by which it is judged.
    theirs=$(awk '{ print $3 }' <<<"$rows" | sort "$order" | sed -n 1p)
    mine=$(awk '{ print $4 }' <<<"$rows" | sort "$order" | sed -n 1p)
    their_median=$(awk '{ print $3 }' <<<"$rows" | median)
    my_median=$(awk '{ print $4 }' <<<"$rows" | median)
    ratio=- medians=- verdict=
    if [[ $mine != - ]]; then
        ratio=$(awk -v mine="$mine" -v theirs="$theirs" 'BEGIN { printf "%.3f", mine / theirs }')
        medians=$(awk -v mine="$my_median" -v theirs="$their_median" 'BEGIN { printf "%.3f", mine / theirs }')
        if [[ $bound == - ]]; then
            sign= bound=
        elif awk -v ratio="$medians" -v bound="$bound" "BEGIN { exit !(ratio $sign bound) }"; then
            verdict=ok
        else
            verdict=MISSED status=1
        fi
    fi
    printf '%-9s %8s %-5s %10s %10s %10s %10s %7s %9s %8s %s\n' "$what" "$size" "$unit" \
        "$theirs" "$their_median" "$mine" "$my_median" "$ratio" "$medians" "$sign $bound" "$verdict"
done
exit "$status"
