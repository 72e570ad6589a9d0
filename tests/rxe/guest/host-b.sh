#!/usr/bin/env bash
# The host that outlives host a: it reads from it and is read by it, and must answer its engine, and take
# back what it lent, when host a hangs and when it crashes.
set -euo pipefail
. tests/rxe/guest/common.sh
. tests/rxe/guest/host.sh

# ask WORD: has the other side do that to host a, and waits until it is done.
ask() {
    echo "$1" >"$RXE_SHARE/request.part"
    mv "$RXE_SHARE/request.part" "$RXE_SHARE/request"
    until_true 20 test -e "$RXE_SHARE/$1.done"
}

# Whether the file read last is what was saved.
whole() {
    sha256sum <"$TMPDIR/$1" | cmp - "$RXE_SHARE/$1.sum"
}

# says STATE WORD: whether a state has it; shows it where it has not.
says() {
    grep -qF "$2" <<<"$1" || {
        echo "no $2 in $1"
        return 1
    }
}

# What this host's node says of its residents.
residents() {
    stat | sed 's/.*"residents"//'
}

# What host a's node said about itself last.
state_of_a() {
    cat "$RXE_SHARE/a.stat"
}

# The reader's blocks begin with rank 1, those of the holder go on to 2. Nothing is pinned any more.
a_file_crosses_by_rdma() {
    until_true 120 test -e "$RXE_SHARE/a.stat" && get small && whole small || return 1
    says "$(stat)" '"transport":"verbs"' && says "$(state_of_a)" '"transport":"verbs"' || return 1
    says "$(residents)" '"blocks":8,"bytes":8388608,' && says "$(residents)" '"pinned":0,"ranks":[8,0,' || return 1
    until_true 10 eval '[[ $(state_of_a) == *"\"pinned\":0,\"ranks\":[264,8,"* ]]' ||
        says "$(state_of_a)" '"pinned":0,"ranks":[264,8,'
}

arrived() {
    cat /sys/class/net/eth0/statistics/rx_bytes
}

sent() {
    cat /sys/class/net/eth0/statistics/tx_bytes
}

# grown COUNTER BYTES: whether the counter has grown by 16 MiB.
grown() {
    (($("$1") - $2 > 16 << 20))
}

# The engine's call ends, with an error, once the transfer has timed out and neither the registry, which
# is gone with host a, nor another owner could be asked. That, and the slowness of emulation, is what the
# allowance is for.
allowance_s=10

# answered_in_time READER SINCE FILE: the reader ends with an error, and leaves no file.
answered_in_time() {
    local took
    until_true $((transfer_timeout_s + allowance_s + 20)) eval "! kill -0 $1 2>/dev/null" || return 1
    took=$(awk -v from="$2" -v to="$EPOCHREALTIME" 'BEGIN { printf "%.1f", to - from }')
    if wait "$1"; then
        echo "the read succeeded"
        return 1
    fi
    echo "observed: answered after $took s: $(tail -n 1 "$TMPDIR/$3.error")"
    [[ ! -e $TMPDIR/$3 ]] || return 1
    awk -v took="$took" -v most="$((transfer_timeout_s + allowance_s))" 'BEGIN { exit !(took <= most) }'
}

# Nothing pinned, nothing lent, no memory taken but that of residents, no peer.
at_rest() {
    local state
    state=$(stat) || return 1
    [[ $(number pinned <<<"$state") == 0 && $state != *'"leases":'[1-9]* ]] &&
        (($(number free_bytes <<<"$state") + $(sed 's/.*"residents"//' <<<"$state" | number bytes) ==
            $(sed 's/.*"pools"//' <<<"$state" | number bytes)))
}

a_hang_in_mid_transfer_is_answered_in_time() {
    local before reader since
    before=$(arrived)
    get large 2>"$TMPDIR/large.error" &
    reader=$!
    until_true 60 grown arrived "$before" || return 1
    ask freeze || return 1
    since=$EPOCHREALTIME
    answered_in_time "$reader" "$since" large || return 1
    until_true 20 at_rest || { stat; return 1; }
    # Host a goes on where it stopped, and serves as before.
    ask thaw && until_true 60 get more && whole more
}

# Both read from each other when host a crashes.
a_crash_in_mid_transfer_is_answered_in_time() {
    local before out reader since
    save large-of-b 256M
    before=$(arrived)
    get large 2>"$TMPDIR/large.error" &
    reader=$!
    until_true 60 grown arrived "$before" || return 1
    out=$(sent)
    : >"$RXE_SHARE/read-back"
    until_true 60 grown sent "$out" || return 1
    until_true 5 eval '[[ $(stat) == *"\"leases\":"[1-9]* ]]' || { echo "nothing is lent"; stat; return 1; }
    kill -0 "$reader" || { echo "the transfer ended before the crash"; return 1; }
    ask crash || return 1
    since=$EPOCHREALTIME
    answered_in_time "$reader" "$since" large
}

# What host a had under a lease is free when that has expired, and its rank has not moved.
what_was_lent_comes_back() {
    until_true $((lease_s + allowance_s)) at_rest || { stat; return 1; }
    echo "observed: at rest; leases expired: $(metric 'kvrail_leases_ended_total{end="expired"}')," \
        "completed: $(metric 'kvrail_leases_ended_total{end="completed"}')"
    says "$(stat)" '"transport":"verbs"' || return 1
    # A crash is no completion.
    (($(metric 'kvrail_leases_ended_total{end="expired"}') > 0)) || return 1
    until_true 20 eval '[[ $(stat) == *"\"peers\":[]"* ]]' || { echo "host a still counts"; stat; return 1; }
}

what_was_there_is_still_served() {
    rm "$TMPDIR/small"
    get small --local && whole small && get large-of-b --local && whole large-of-b
}

host 10.79.0.2
until_true 60 test -s "$RXE_SHARE/a.ready"
serve b 10.79.0.2
for name in a_file_crosses_by_rdma a_hang_in_mid_transfer_is_answered_in_time \
    a_crash_in_mid_transfer_is_answered_in_time what_was_lent_comes_back what_was_there_is_still_served; do
    check "$name" "$name"
done
finish
