#!/usr/bin/env bash
# The host that hangs and then crashes: the registry, and a node that holds blocks and reads those of
# host b.
set -euo pipefail
. tests/rxe/guest/common.sh
. tests/rxe/guest/host.sh

host 10.79.0.1
"$RXE_KVRAIL" registry --listen 10.79.0.1:7071 --ready-file "$RXE_SHARE/registry.ready" &
until_true 30 test -s "$RXE_SHARE/registry.ready"
serve a 10.79.0.1
save small 8M
save more 8M
save large 256M

# Host b looks at this node over the share; the last state is that before the crash.
while sleep 0.3; do
    stat >"$RXE_SHARE/a.stat.part" && mv "$RXE_SHARE/a.stat.part" "$RXE_SHARE/a.stat"
done &

until_true 180 test -e "$RXE_SHARE/read-back"
get large-of-b || echo "the read of host b ended"
wait
