# Sourced by hosts on the wire.

# host ADDRESS: the wire's interface, and an RDMA device on it.
host() {
    # Large enough for the device's largest MTU, 4096 bytes and headers.
    ip link set eth0 mtu 4500 up
    ip addr add "$1/24" dev eth0
    add_rxe rxe0 eth0
    export KVRAIL_RDMA_DEVICE=rxe0
}

# serve NAME ADDRESS: a node that is ready when this returns.
serve() {
    export KVRAIL_SOCKET=/run/kvrail.sock
    "$RXE_KVRAIL" serve --listen "$2:7070" --registry http://10.79.0.1:7071 --pool 512MiB \
        --transfer-timeout "${transfer_timeout_s}s" --ready-file "$RXE_SHARE/$1.ready" &
    until_true 60 test -s "$RXE_SHARE/$1.ready"
}

# How long a reader may wait for a block of a peer that is gone.
transfer_timeout_s=5
