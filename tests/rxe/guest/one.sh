#!/usr/bin/env bash
# The test binaries and the demo on one device: the guest's own, or KVRAIL_RDMA_DEVICE on the host. In a
# guest there are two more, for what needs several.
set -euo pipefail
. tests/rxe/guest/common.sh

if [[ -z ${KVRAIL_RDMA_DEVICE:-} ]]; then
    one_device
    # The interface below the device, which the fault tests take down.
    export KVRAIL_RDMA_NETDEV=d0
    two_devices rxe1 rxe2
    export KVRAIL_RDMA_NICS="rxe0 rxe1 rxe2"
fi
# Tests that take the device away, or count what it holds, want it for themselves.
export RUST_TEST_THREADS=1
export KVRAIL_TEST_ROUNDS=${KVRAIL_TEST_ROUNDS:-1000}

device_is_active() {
    ibv_devinfo -d "$KVRAIL_RDMA_DEVICE" | grep -q PORT_ACTIVE
}

# Whether the demo moved its blocks, verified them, and took the transport that it should.
demo() {
    local out=$RXE_SHARE/demo.json
    "$RXE_KVRAIL" demo --json >"$out" || return 1
    if ! grep -q '"verified":true' "$out"; then
        echo "the demo verified nothing:"
    elif [[ -n ${EXPECT_TRANSPORT:-} ]] && ! grep -q "\"transport\":\"$EXPECT_TRANSPORT\"" "$out"; then
        echo "the demo should run over $EXPECT_TRANSPORT:"
    else
        return 0
    fi
    head -c 400 "$out"
    echo
    return 1
}

check device_is_active device_is_active
check demo_verifies_its_blocks demo
run_tests
finish
