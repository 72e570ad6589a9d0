# Sourced by hosts on the wire.

# host ADDRESS: the wire's interface, and an RDMA device on it.
host() {
    # Large enough for the device's largest MTU, 4096 bytes and headers.
    ip link set eth0 mtu 4500 up
    ip addr add "$1/24" dev eth0
    # So slow that a large file is under way for ten seconds on any machine.
    tc qdisc add dev eth0 root netem rate 200mbit limit 10000
    add_rxe rxe0 eth0
    export KVRAIL_RDMA_DEVICE=rxe0
}

# serve NAME ADDRESS: a node that is ready when this returns.
serve() {
    export KVRAIL_SOCKET=/run/kvrail.sock
    "$RXE_KVRAIL" serve --listen "$2:7070" --registry http://10.79.0.1:7071 --pool 768MiB \
        --transport verbs --lease-ttl "${lease_s}s" --transfer-timeout "${transfer_timeout_s}s" \
        --metrics-listen 127.0.0.1:7072 --ready-file "$RXE_SHARE/$1.ready" &
    until_true 60 test -s "$RXE_SHARE/$1.ready"
}

# How long a reader may wait for a block of a peer that is gone, and how long a lease lasts.
transfer_timeout_s=5
lease_s=6

# save NAME SIZE: random bytes in the node, and what the other host needs to read and verify them in the
# share.
save() {
    head -c "$2" /dev/urandom >"$TMPDIR/$1"
    sha256sum <"$TMPDIR/$1" >"$RXE_SHARE/$1.sum"
    "$RXE_KVRAIL" put "$TMPDIR/$1" --namespace rxe --block-size 1MiB >"$RXE_SHARE/$1.part"
    mv "$RXE_SHARE/$1.part" "$RXE_SHARE/$1.hashes"
    rm "$TMPDIR/$1"
}

# get FILE [OPTION...]: reads it into TMPDIR.
get() {
    local file=$1
    shift
    "$RXE_KVRAIL" get --namespace rxe --hashes "$RXE_SHARE/$file.hashes" -o "$TMPDIR/$file" "$@"
}

# The node's state, one JSON object on a line.
stat() {
    "$RXE_KVRAIL" stat --json
}

# number KEY: of a state on standard input, the first number of that name.
number() {
    grep -oE "\"$1\":[0-9]+" | sed -n '1s/.*://p'
}

# metric SERIES: its value now, 0 where there is none.
metric() {
    local line
    exec 3<>/dev/tcp/127.0.0.1/7072
    printf 'GET /metrics HTTP/1.0\r\nhost: node\r\nconnection: close\r\n\r\n' >&3
    line=$(grep -F "$1 " <&3) || line="x 0"
    exec 3>&-
    echo "${line##* }"
}
