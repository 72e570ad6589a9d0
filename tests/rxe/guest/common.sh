# Sourced by what runs beside the device, in a guest or on the host itself where that has a device, and by bench/peers for its
# helpers. RXE_SHARE is a folder for results, shared with whoever started this; only what tests needs it.

passed=0
failed=0
broken=0
started=$EPOCHREALTIME

# check NAME COMMAND...: runs a check and prints its outcome as cargo prints a test's.
check() {
    local name=$1 outcome
    shift
    if ("$@"); then
        outcome=ok passed=$((passed + 1))
    else
        outcome=FAILED failed=$((failed + 1))
    fi
    echo "test $name ... $outcome"
}

# Ends a script: the sum of its checks, in cargo's words, and failure where a check or a test failed.
finish() {
    local outcome=ok took
    ((failed == 0)) || outcome=FAILED
    took=$(awk -v from="$started" -v to="$EPOCHREALTIME" 'BEGIN { printf "%.2f", to - from }')
    echo "test result: $outcome. $passed passed; $failed failed; 0 ignored; 0 measured; 0 filtered out; finished in ${took}s" |
        tee -a "$RXE_SHARE/results"
    ((failed + broken == 0))
}

# Runs the test binaries of the list that the host left: name, path and filter.
run_tests() {
    local name executable filter log line
    while IFS=$'\t' read -r name executable filter; do
        log=$RXE_SHARE/$name.log
        echo "     Running $name ${filter:+($filter) }on ${KVRAIL_RDMA_DEVICE:-no device}"
        # The filter may be absent, and must not become an empty argument, which every name contains.
        "$executable" ${filter:+"$filter"} </dev/null 2>&1 | tee "$log" || true
        line=$(grep '^test result:' "$log" | tail -n 1) || true
        if [[ -n ${KVRAIL_RDMA_DEVICE:-} ]] && grep -q '^SKIPPED' "$log"; then
            # There is a device, so nothing may be skipped for want of one.
            echo "test $name skips nothing ... FAILED"
            failed=$((failed + 1))
        fi
        if [[ $line =~ ^test\ result:\ (ok\.\ [1-9]|FAILED) ]]; then
            echo "$line" >>"$RXE_SHARE/results"
            [[ ${BASH_REMATCH[1]} != FAILED ]] || broken=1
        else
            # It died, or every test was filtered out: nothing was tested.
            echo "test $name ran to its end ... FAILED"
            failed=$((failed + 1))
        fi
    done <"$RXE_SHARE/tests"
}

# ipv4_gid DEVICE: the index of the RoCE v2 GID that stands for an IPv4 address.
ipv4_gid() {
    local port=/sys/class/infiniband/$1/ports/1 file index
    for file in "$port"/gids/*; do
        index=${file##*/}
        if [[ $(cat "$file") == 0000:0000:0000:0000:0000:ffff:* ]] &&
            grep -q 'RoCE v2' "$port/gid_attrs/types/$index" 2>/dev/null; then
            echo "$index"
            return
        fi
    done
    return 1
}

# until_true SECONDS COMMAND...: polls; fails where the command did not succeed in time.
until_true() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < end)) || return 1
        sleep 0.1
    done
}

# listens PORT: whether a process of this host listens on that TCP port.
listens() {
    grep -qiE ":$(printf %04x "$1") 0+:0000 0A" /proc/net/tcp /proc/net/tcp6
}

# The median of the numbers on standard input, a line each.
median() {
    sort -g | awk '{ value[NR] = $1 } END { print value[int((NR + 1) / 2)] }'
}

# add_rxe DEVICE NETDEV: an RDMA device on a network interface, ready for use.
add_rxe() {
    rdma link add "$1" type rxe netdev "$2"
    # The kernel fills the GID table on its own time.
    until_true 10 ipv4_gid "$1" >/dev/null
}

# perftest TOOL SERVER_DEVICE CLIENT_DEVICE ARGUMENT...: runs one of perftest's tools between two devices
# of this host, and prints what the client does.
perftest() {
    local tool=$1 server_device=$2 client_device=$3 log=$RXE_SHARE/perftest.$BASHPID server port=18515
    shift 3
    "$tool" -F -p "$port" -d "$server_device" -x "$(ipv4_gid "$server_device")" "$@" >"$log" 2>&1 &
    server=$!
    # The two meet over TCP, on whatever address; the GIDs say where the data goes.
    if until_true 20 listens "$port" &&
        timeout 120 "$tool" -F -p "$port" -d "$client_device" -x "$(ipv4_gid "$client_device")" "$@" 127.0.0.1 2>"$log.client" &&
        wait "$server"; then
        return 0
    fi
    echo "$tool $* failed:" >&2
    cat "$log" "$log.client" >&2
    kill "$server" 2>/dev/null || true
    return 1
}

# One device. Its packets turn round inside the kernel's rxe and reach no interface.
one_device() {
    ip link add d0 type dummy
    ip link set d0 mtu 9000 up
    ip addr add 10.77.0.1/24 dev d0
    add_rxe rxe0 d0
    export KVRAIL_RDMA_DEVICE=rxe0
}

# two_devices FIRST SECOND: two devices on the ends of a veth pair, so that packets between them cross it.
two_devices() {
    ip link add v0 type veth peer name v1
    local netdev number=0
    for netdev in v0 v1; do
        ip link set "$netdev" mtu 4500 up
        ip addr add "10.78.0.$((number + 1))/24" dev "$netdev"
        number=$((number + 1))
    done
    # Both addresses are this host's own: without these two the kernel drops what arrives from itself.
    for netdev in all v0 v1; do
        echo 1 >"/proc/sys/net/ipv4/conf/$netdev/accept_local"
        echo 0 >"/proc/sys/net/ipv4/conf/$netdev/rp_filter"
    done
    add_rxe "$1" v0
    add_rxe "$2" v1
    # For tests that set netem, or count packets.
    export KVRAIL_TEST_NETDEVS="v0 v1"
}
