# Sourced. A Debian kernel, unpacked outside the tree and kept there.

# Sets `kernel` (the folder with boot/ and lib/modules/) and `kernel_version`.
# RXE_KERNEL names a folder to take instead.
find_kernel() {
    local cache
    if [[ -n ${RXE_KERNEL:-} ]]; then
        kernel=$RXE_KERNEL
    else
        cache=${XDG_CACHE_HOME:-}
        # The tilde finds the user's folder also where HOME is not set.
        [[ -n $cache ]] || cache=~/.cache
        cache=$cache/kvrail/kernels
        mkdir -p "$cache"
        # Runs in parallel wait here for one download instead of doing their own.
        exec {lock}>"$cache/lock"
        flock "$lock"
        kernel=$(newest_in "$cache" 6.12)
        if [[ -z $kernel ]]; then
            fetch_kernel "$cache"
        fi
        flock -u "$lock"
        exec {lock}>&-
    fi
    kernel_version=$(ls "$kernel/lib/modules") || fail "$kernel holds no unpacked kernel package"
    # modprobe answers what a module needs from this index, which the package does not bring.
    [[ -e $kernel/lib/modules/$kernel_version/modules.dep ]] || depmod -b "$kernel" "$kernel_version"
}

# The newest kernel of that line in the cache; nothing where there is none.
newest_in() {
    find "$1" -mindepth 1 -maxdepth 1 -type d -name "linux-image-$2.*" | sort -V | tail -n 1
}

# The newest package of that line that the configured sources can give; nothing where there is none.
# Names differ between releases and their backports (6.12.9+bpo, 6.12.48+deb13), so the list is asked
# instead of a meta-package.
package_of() {
    local name
    while read -r name; do
        # apt knows the names of packages that it cannot give.
        if [[ -n $(apt-cache madison "$name") ]]; then
            echo "$name"
            return
        fi
    done < <(apt-cache pkgnames "linux-image-$1." |
        grep -E '^linux-image-[0-9.]+([-+][a-z0-9.~]+)?-amd64$' | sort -rV)
}

# Downloads the kernel into the cache and sets `kernel`.
fetch_kernel() {
    local cache=$1 name line
    command -v apt-get >/dev/null || fail "no apt-get here: unpack a Debian kernel package with dpkg -x and name its folder in RXE_KERNEL"
    # 6.12 runs rxe on a work queue, so faults hit transfers in flight; 6.1 completes a same-device
    # READ inside post_send, which hides them.
    for line in 6.12 6.1; do
        name=$(package_of "$line")
        if [[ -z $name && $EUID == 0 ]]; then
            # Fresh machines may come without lists.
            apt-get update -qq || true
            name=$(package_of "$line")
        fi
        if [[ -z $name ]]; then
            continue
        fi
        if [[ $line == 6.1 ]]; then
            note "NOTE: no 6.12 kernel in the package sources; 6.1 hides faults during a transfer"
            kernel=$(newest_in "$cache" 6.1)
            [[ -z $kernel ]] || return 0
        fi
        note "getting $name into $cache"
        unpack_kernel "$cache" "$name"
        return
    done
    fail "no linux-image-6.12 or 6.1 package in the package sources: run apt-get update, or name an unpacked one in RXE_KERNEL"
}

unpack_kernel() {
    local cache=$1 name=$2 part packages
    part=$(mktemp -d "$cache/part.XXXXXX")
    # apt drops its privileges while it downloads.
    chmod 755 "$part"
    # Lists that are older than the last security update name a file that is gone.
    (cd "$part" && apt-get download -q "$name") >&2 ||
        { apt-get update -qq && (cd "$part" && apt-get download -q "$name") >&2; } ||
        { rm -rf "$part"; fail "$name did not download: run apt-get update"; }
    packages=("$part"/*.deb)
    dpkg -x "${packages[0]}" "$part/tree"
    depmod -b "$part/tree" "$(ls "$part/tree/lib/modules")"
    # Renamed when whole, so that a run that is cut short leaves no half kernel under this name.
    mv -T "$part/tree" "$cache/$name"
    rm -rf "$part"
    kernel=$cache/$name
}
