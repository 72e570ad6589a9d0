# Sourced. What the guest needs of the machine that starts it.

# Some tools lie in folders that only root's path has.
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

# Each command or file that must be there, and the Debian package that brings it.
rxe_needs=(
    qemu-system-x86_64:qemu-system-x86
    busybox:busybox-static
    modprobe:kmod
    cpio:cpio
    xz:xz-utils
    rdma:iproute2
    ibv_devinfo:ibverbs-utils
    ib_read_lat:perftest
    /etc/libibverbs.d/rxe.driver:ibverbs-providers
    rdma-ndd:rdma-core
)

# Ends the run with one line that names the packages to install.
require_packages() {
    local pair want missing=()
    for pair in "${rxe_needs[@]}"; do
        want=${pair%%:*}
        command -v "$want" >/dev/null || [[ -e $want ]] || missing+=("${pair##*:}")
    done
    # The initramfs holds no libraries. A static binary is what ldd refuses.
    if command -v busybox >/dev/null && ldd "$(command -v busybox)" >/dev/null 2>&1; then
        missing+=(busybox-static)
    fi
    if ((${#missing[@]})); then
        fail "missing on this machine: apt-get install --no-install-recommends ${missing[*]}"
    fi
    # The guest runs this machine's own programs.
    [[ $(uname -m) == x86_64 ]] || fail "the guest runs this machine's binaries, so it needs x86_64"
}
