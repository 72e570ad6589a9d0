# Sourced. The first file system of the guest: busybox, the modules, and the script that goes on from there.

# Modules that are loaded in this order, each after what it needs.
rxe_modules=(
    virtio_pci 9pnet_virtio 9p overlay virtio_net
    crc32c_generic crc32_generic
    ib_uverbs rdma_ucm rdma_rxe
    dummy veth sch_netem
)

# make_initramfs OUT
make_initramfs() {
    local out=$1 tree module file base
    tree=$(mktemp -d "$work/initramfs.XXXXXX")
    mkdir -p "$tree"/{bin,modules,proc,sys,dev,newroot,ro,rw}
    cp "$(command -v busybox)" "$tree/bin/busybox"
    cp "$here/guest/init" "$tree/init"
    chmod 755 "$tree/init"
    for module in "${rxe_modules[@]}"; do
        # A module that is built in is listed as such and needs no file.
        modprobe -d "$kernel" -S "$kernel_version" --show-depends "$module" >"$tree/depends" ||
            fail "kernel $kernel_version has no module $module"
        while read -r file; do
            base=$(basename "${file%.xz}")
            [[ ! -e $tree/modules/$base ]] || continue
            case $file in
                *.xz) xz -dc "$file" >"$tree/modules/$base" ;;
                *) cp "$file" "$tree/modules/$base" ;;
            esac
            echo "$base" >>"$tree/modlist"
        done < <(awk '$1 == "insmod" { print $2 }' "$tree/depends")
    done
    rm "$tree/depends"
    (cd "$tree" && find . | cpio -o -H newc --quiet | gzip -1) >"$out"
    rm -rf "$tree"
}
