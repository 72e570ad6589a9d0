#!/usr/bin/env bash
# The host that will crash: the registry, and a node that holds two files' blocks.
set -euo pipefail
. tests/rxe/guest/common.sh
. tests/rxe/guest/host.sh

host 10.79.0.1
# So slow that the large file is under way for ten seconds on any machine.
tc qdisc add dev eth0 root netem rate 200mbit limit 10000
"$RXE_KVRAIL" registry --listen 10.79.0.1:7071 --ready-file "$RXE_SHARE/registry.ready" &
until_true 30 test -s "$RXE_SHARE/registry.ready"
serve a 10.79.0.1

# save NAME SIZE: random bytes in the node, and what host b needs to read and verify them in the share.
save() {
    head -c "$2" /dev/urandom >"$TMPDIR/$1"
    sha256sum <"$TMPDIR/$1" >"$RXE_SHARE/$1.sum"
    "$RXE_KVRAIL" put "$TMPDIR/$1" --namespace rxe --block-size 1MiB >"$RXE_SHARE/$1.part"
    mv "$RXE_SHARE/$1.part" "$RXE_SHARE/$1.hashes"
    rm "$TMPDIR/$1"
}

save small 8M
save large 256M
wait
