# Sourced. Guests: start, follow, wait, kill.
#
# Every guest of a run shares the folder $work/share: NAME.job is what it runs, NAME.out what that prints,
# NAME.up appears when it is up, NAME.status when its job has ended.

declare -A guest_pid=() guest_start=() follower=()
accelerator=

qemu=(qemu-system-x86_64 -nodefaults -display none -monitor none -no-reboot)

# Sets `accelerator`. RXE_ACCEL overrides it.
choose_accelerator() {
    accelerator=${RXE_ACCEL:-tcg}
    [[ -z ${RXE_ACCEL:-} ]] || return 0
    # /dev/kvm opens on machines whose KVM cannot boot a kernel, and QEMU then does not fall back by
    # itself. So it takes the processor's flag, and a guest that starts and ends.
    if grep -qwE 'vmx|svm' /proc/cpuinfo && [[ -w /dev/kvm ]]; then
        if kvm_boots 2>/dev/null; then
            accelerator=kvm
        else
            note "KVM is there and boots no guest; going on with software emulation"
        fi
    fi
}

# A guest that switches itself off at once.
kvm_boots() {
    timeout -k 1 "${RXE_PROBE_S:-30}" "${qemu[@]}" -accel kvm -cpu host -m 512M \
        -kernel "$kernel/boot/vmlinuz-$kernel_version" -initrd "$work/initramfs" \
        -append "quiet panic=-1 rxe.probe" >/dev/null </dev/null
}

# start_guest NAME SCRIPT [QEMU ARGUMENT...]: boots, and runs SCRIPT from the project's root as root.
start_guest() {
    local name=$1 script=$2 variable cpu=max
    shift 2
    local machine=(-accel tcg,thread=multi)
    if [[ $accelerator == kvm ]]; then
        machine=(-accel kvm) cpu=host
    fi
    {
        # Nothing of the guest's own environment is of use.
        echo 'export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin'
        echo 'export HOME=/run/tmp TMPDIR=/run/tmp'
        for variable in "${!RXE_@}" "${!BENCH_@}" "${!KVRAIL_TEST_@}" "${!RUST_@}" EXPECT_TRANSPORT; do
            [[ -z ${!variable:-} ]] || printf 'export %s=%q\n' "$variable" "${!variable}"
        done
        echo 'export RXE_SHARE=/run/rxe'
        printf 'cd %q && exec bash %q\n' "$root" "$script"
    } >"$work/share/$name.job"
    : >"$work/$name.console"
    : >"$work/share/$name.out"
    guest_start[$name]=$EPOCHREALTIME
    # The kernel checks its clock against others, and under emulation on a busy host takes it for unstable:
    # then reading the time costs several times as much, and the switch rewrites code that other
    # processors run, which emulated ones have been seen to trip over (int3 in sched_clock_cpu).
    # It dies with this shell, however the shell ends.
    setpriv --pdeathsig KILL -- "${qemu[@]}" "${machine[@]}" -cpu "$cpu" \
        -m "${RXE_MEMORY:-3G}" -smp "${RXE_CPUS:-2}" \
        -kernel "$kernel/boot/vmlinuz-$kernel_version" -initrd "$work/initramfs" \
        -append "console=ttyS0 quiet oops=panic panic=-1 mitigations=off tsc=reliable rxe.guest=$name" \
        -serial "file:$work/$name.console" \
        -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
        -virtfs "local,path=$work/share,mount_tag=share,security_model=none,multidevs=remap" \
        "$@" </dev/null &
    guest_pid[$name]=$!
}

# Shows a guest's output and its console until the guest ends. A prefix tells guests apart.
follow_guest() {
    local name=$1 prefix=${2:-}
    tail -q -n +1 -s 0.2 -f --pid="${guest_pid[$name]}" "$work/share/$name.out" "$work/$name.console" |
        tr -d '\r' | sed -u -e 's/\x1b\[[0-9;?]*[a-zA-Z]//g; s/\x1bc//g' -e "s/^/$prefix/" &
    follower[$name]=$!
}

# boot_guest NAME PREFIX SCRIPT [QEMU ARGUMENT...]: starts it, shows what it prints behind PREFIX, and returns
# when its job begins. One that dies before is started again, three times at most: nothing was tested yet.
# A kernel patches its own code while it boots, and an emulated processor that runs such a place at that
# moment has been seen to die of it (int3 in sched_clock_cpu).
boot_guest() {
    local name=$1 prefix=$2 attempt
    shift 2
    for attempt in 1 2 3; do
        start_guest "$name" "$@"
        follow_guest "$name" "$prefix"
        until [[ -e $work/share/$name.up ]]; do
            guest_runs "$name" || break
            # Whoever waits for its end says so.
            ((SECONDS < deadline)) || return 0
            sleep 0.1
        done
        [[ ! -e $work/share/$name.up ]] || return 0
        drain_console "$name"
        note "guest $name died while it booted, $attempt of 3 times; its console is above"
    done
}

guest_runs() {
    kill -0 "${guest_pid[$1]}" 2>/dev/null
}

kill_guest() {
    kill -KILL "${guest_pid[$1]}" 2>/dev/null || true
    wait "${guest_pid[$1]}" 2>/dev/null || true
}

kill_guests() {
    local name
    for name in "${!guest_pid[@]}"; do
        kill_guest "$name"
    done
}

# wait_guest NAME: until it has ended by itself; its job's exit status.
wait_guest() {
    local name=$1 status
    while guest_runs "$name"; do
        if ((SECONDS >= deadline)); then
            kill_guest "$name"
            drain_console "$name"
            note "guest $name hung: it did not end within ${RXE_TIMEOUT_S:-1500} s; its console is above"
            return 1
        fi
        sleep 0.2
    done
    drain_console "$name"
    if [[ ! -s $work/share/$name.status ]]; then
        note "guest $name ended without a status: it panicked or did not boot; its console is above"
        return 1
    fi
    read -r status <"$work/share/$name.status"
    return "$status"
}

# Waits until all that an ended guest printed is on the screen.
drain_console() {
    [[ -z ${follower[$1]:-} ]] || wait "${follower[$1]}" 2>/dev/null || true
}

# Seconds from the start of the guest's process to the first line of its job.
boot_time() {
    local up
    up=$(stat -c %.3Y "$work/share/$1.up" 2>/dev/null) || up=
    if [[ -n $up ]]; then
        awk -v up="$up" -v start="${guest_start[$1]}" 'BEGIN { printf "%.1f s", up - start }'
    else
        echo "not at all"
    fi
}
