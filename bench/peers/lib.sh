# Sourced by the scripts beside it. Each runs a peer and kvrail on the same work in turn, and prints one
# table: the median of each side, and the ratio.

# A guest has no locale, and column(1) would then escape what is no ASCII.
export LC_ALL=C.UTF-8
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$root/tests/rxe/guest/common.sh"
kvrail=${KVRAIL_BINARY:-$root/target/release/kvrail}
# Where peers are installed, outside the project: BENCH_SCRATCH, also in the guest.
scratch=${BENCH_SCRATCH:-$HOME/.cache/kvrail/peers}
rounds=${BENCH_ROUNDS:-5}
seconds=${BENCH_SECONDS:-1}

work=$(mktemp -d "${TMPDIR:-/tmp}/peers.XXXXXX")
children=()
end() {
    local child
    for child in "${children[@]}"; do
        kill "$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

note() {
    echo "peers: $*" >&2
}

# A peer that does not run is listed with the reason: that is no failure of ours.
cannot() {
    echo "$1: not measured: $2"
    exit 0
}

[[ -x $kvrail ]] || {
    note "no $kvrail: cargo build --release makes it, or KVRAIL_BINARY names another one"
    exit 1
}

# background LOG COMMAND...: starts what ends with this script; its process id is the last of children.
background() {
    local log=$1
    shift
    "$@" >"$log" 2>&1 </dev/null &
    children+=($!)
}

# Ends the process that was started last.
stop_last() {
    local child=${children[-1]}
    unset 'children[-1]'
    kill "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
}

# ours SIZE ARGUMENT...: MB/s of bare READs.
ours() {
    local size=$1
    shift
    "$kvrail" bench read --what bare --lines --size "$size" --time "${seconds}s" "$@" |
        awk -v size="$size" '$1 == "bandwidth" && $2 == size { printf "%.1f\n", $3 * 1.048576 }'
}

# compare WORK PEER_FUNCTION OURS_ARGUMENT...: measures both in turn, adds a line to the table.
compare() {
    local what=$1 peer=$2 round theirs mine
    shift 2
    for ((round = 1; round <= rounds; round++)); do
        theirs=$("$peer" "$what") || return 1
        mine=$(ours "${what%% *}" "$@")
        [[ -n $theirs && -n $mine ]] || {
            note "no value for $what: peer ${theirs:-none}, kvrail ${mine:-none}"
            return 1
        }
        note "round $round, $what: peer $theirs, kvrail $mine"
        echo "$theirs" >>"$work/theirs.$what"
        echo "$mine" >>"$work/mine.$what"
    done
    printf '%s\t%s\t%s\n' "$what" "$(median <"$work/theirs.$what")" "$(median <"$work/mine.$what")" >>"$work/rows"
}

# print_table PEER WORK_HEADER: what was compared.
print_table() {
    machine
    echo "$1 beside kvrail, MB/s, medians of $rounds rounds of $seconds s in turn"
    {
        printf '%s\t%s\tkvrail\tkvrail/%s\n' "$2" "$1" "$1"
        awk -F'\t' '{ printf "%s\t%s\t%s\t%.2f\n", $1, $2, $3, $3 / $2 }' "$work/rows"
    } | column -t -s $'\t'
}

# Where it ran, without a name of it.
machine() {
    local cpu memory
    cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | sed -n 1p)
    memory=$(awk '/^MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo)
    echo "$(date -u +%F), $(nproc) × ${cpu:-unknown}, $memory, Linux $(uname -r), $("$kvrail" --version)"
}

# in_guest SCRIPT: the same script on a SoftRoCE device, in a guest unless KVRAIL_RDMA_DEVICE names one.
in_guest() {
    export BENCH_SCRATCH=$scratch BENCH_ON_DEVICE=1
    rm -rf "$work"
    exec bash "$root/tests/rxe/run" script "$1"
}

# The device, its packets' MTU and all that tests/rxe knows of it.
on_device() {
    export RXE_SHARE=${RXE_SHARE:-$work}
    [[ -n ${KVRAIL_RDMA_DEVICE:-} ]] || one_device
    device=$KVRAIL_RDMA_DEVICE
}
