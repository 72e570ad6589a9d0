#!/usr/bin/env bash
# Two devices on a veth pair, so that packets cross an interface and netem can delay and lose them.
# The test binaries run with RXE_NETEM on both ends, KVRAIL_RDMA_DEVICE and KVRAIL_RDMA_PEER_DEVICE set.
set -euo pipefail
. tests/rxe/guest/common.sh

# netem WORDS...: on both ends; nothing takes it away.
netem() {
    local netdev
    for netdev in v0 v1; do
        tc qdisc del dev "$netdev" root 2>/dev/null || true
        (($# == 0)) || tc qdisc add dev "$netdev" root netem "$@"
    done
}

# read_latency COUNT: typical microseconds of a 4 KiB READ from rxe1 by rxe0.
read_latency() {
    perftest ib_read_lat rxe1 rxe0 -s 4096 -n "$1" | awk '$1 == 4096 { print $5 }'
}

received() {
    cat /sys/class/net/v1/statistics/rx_packets
}

# Retries and repeats that both devices counted.
repeats() {
    cat /sys/class/infiniband/rxe?/ports/1/hw_counters/{rcvd_seq_err,duplicate_request,completer_retry_err,out_of_seq_request} \
        2>/dev/null | awk '{ sum += $1 } END { print sum + 0 }'
}

packets_cross_the_pair() {
    local before typical
    before=$(received)
    typical=$(read_latency 100) || return 1
    echo "clean: a 4 KiB READ takes typically $typical us"
    (($(received) - before >= 100))
}

# A READ is a request and its response, each delayed by its sender's end.
delay_reaches_reads() {
    local typical
    netem delay 10ms
    typical=$(read_latency 20) || return 1
    netem
    echo "10 ms each way: a 4 KiB READ takes typically $typical us"
    awk -v typical="$typical" 'BEGIN { exit !(typical >= 20000) }'
}

loss_is_repaired() {
    local before typical
    before=$(repeats)
    netem loss 5%
    typical=$(read_latency 200) || return 1
    netem
    echo "5 % loss: $(($(repeats) - before)) repeats; a 4 KiB READ takes typically $typical us"
    (($(repeats) > before))
}

# Tests set netem and take interfaces down: they want both for themselves.
export RUST_TEST_THREADS=1 RXE_NETEM=${RXE_NETEM-delay 10ms loss 5%}
# A round takes several times the wire's delay.
export KVRAIL_TEST_ROUNDS=${KVRAIL_TEST_ROUNDS:-200}
two_devices rxe0 rxe1
export KVRAIL_RDMA_DEVICE=rxe0 KVRAIL_RDMA_PEER_DEVICE=rxe1
check packets_cross_the_pair packets_cross_the_pair
check delay_reaches_reads delay_reaches_reads
check loss_is_repaired loss_is_repaired
read -ra spec <<<"$RXE_NETEM"
netem "${spec[@]}"
run_tests
finish
