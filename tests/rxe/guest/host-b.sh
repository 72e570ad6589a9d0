#!/usr/bin/env bash
# The host that reads from host a, and must answer its engine when that host crashes.
set -euo pipefail
. tests/rxe/guest/common.sh
. tests/rxe/guest/host.sh

# ask WORD: has the other side do that to host a, and waits until it is done.
ask() {
    echo "$1" >"$RXE_SHARE/request.part"
    mv "$RXE_SHARE/request.part" "$RXE_SHARE/request"
    until_true 20 test -e "$RXE_SHARE/$1.done"
}

# get FILE [OPTION...]: reads it into TMPDIR.
get() {
    local file=$1
    shift
    "$RXE_KVRAIL" get --namespace rxe --hashes "$RXE_SHARE/$file.hashes" -o "$TMPDIR/$file" "$@"
}

# Whether the file read last is what host a saved.
whole() {
    sha256sum <"$TMPDIR/$1" | cmp - "$RXE_SHARE/$1.sum"
}

a_file_crosses() {
    until_true 60 test -e "$RXE_SHARE/small.hashes" && get small && whole small
}

arrived() {
    cat /sys/class/net/eth0/statistics/rx_bytes
}

# arrived_since BYTES: whether 16 MiB more have come than there were.
arrived_since() {
    (($(arrived) - $1 > 16 << 20))
}

# The engine's call ends, with an error, once the transfer has timed out and neither the registry, which
# died with host a, nor another owner could be asked. That, and the slowness of emulation, is what the
# allowance is for.
allowance_s=10
a_crash_in_mid_transfer_is_answered_in_time() {
    local before reader crashed took
    until_true 180 test -e "$RXE_SHARE/large.hashes" || return 1
    before=$(arrived)
    get large 2>"$TMPDIR/large.error" &
    reader=$!
    until_true 60 arrived_since "$before" || return 1
    kill -0 "$reader" || { echo "the transfer ended before the crash"; return 1; }
    ask crash || return 1
    crashed=$EPOCHREALTIME
    until_true $((transfer_timeout_s + allowance_s + 20)) eval "! kill -0 $reader 2>/dev/null" || return 1
    took=$(awk -v from="$crashed" -v to="$EPOCHREALTIME" 'BEGIN { printf "%.1f", to - from }')
    if wait "$reader"; then
        echo "the read of a crashed host succeeded"
        return 1
    fi
    echo "answered $took s after the crash: $(tail -n 1 "$TMPDIR/large.error")"
    [[ ! -e $TMPDIR/large ]] || return 1
    awk -v took="$took" -v most="$((transfer_timeout_s + allowance_s))" 'BEGIN { exit !(took <= most) }'
}

what_had_arrived_is_still_served() {
    rm "$TMPDIR/small"
    get small --local && whole small && "$RXE_KVRAIL" stat >/dev/null
}

host 10.79.0.2
until_true 60 test -s "$RXE_SHARE/a.ready"
serve b 10.79.0.2
check a_file_crosses a_file_crosses
check a_crash_in_mid_transfer_is_answered_in_time a_crash_in_mid_transfer_is_answered_in_time
check what_had_arrived_is_still_served what_had_arrived_is_still_served
finish
