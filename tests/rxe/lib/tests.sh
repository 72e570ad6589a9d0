# Sourced. Which binaries run, and what came of it.

profile=()
[[ ${RXE_PROFILE:-dev} == dev ]] || profile=(--profile "$RXE_PROFILE")

# default_tests TOPOLOGY: the tests of a run without arguments. Those that need two devices are named
# fabric_verbs_pair; TCP's show that this machine's binaries run in the guest.
default_tests() {
    local file name
    [[ $1 == pair ]] || echo fabric_tcp
    # They take the device's interface down and the device away: in a guest only.
    case $1/${KVRAIL_RDMA_DEVICE:-} in
        one/)
            echo verbs_faults
            # What no fault from outside brings about.
            echo lib:verbs::fabric::service
            # Nodes that die, may not register memory, or lose one of two NICs, over RDMA, and nodes with a GPU.
            printf 'processes:%s\n' holder_dies requester_dies rdma_refused nics in_place gpu
            # The guest's kernel makes real buffers of the stand-in's GPU memory.
            echo cuda
            ;;
        # What may not land late is the more likely to where packets are under way for long.
        pair/*) echo verbs_faults:memory ;;
    esac
    for file in tests/fabric_verbs*.rs tests/fabric_verbs*/main.rs; do
        [[ -e $file ]] || continue
        name=${file#tests/} name=${name%.rs} name=${name%/main}
        case $1/$name in
            pair/fabric_verbs_pair*) echo "$name" ;;
            pair/* | one/fabric_verbs_pair*) ;;
            # It takes one of three devices down: in a guest only.
            one/fabric_verbs_nics) [[ -n ${KVRAIL_RDMA_DEVICE:-} ]] || echo "$name" ;;
            *) echo "$name" ;;
        esac
    done
}

# build_tests TEST[:FILTER]...: builds them, and leaves the list for the guest in the share. TEST is a
# file of tests/, or lib for the unit tests.
build_tests() {
    local test kind name filter path arguments=() artifacts=$work/artifacts
    declare -A executable=()
    for test in "$@"; do
        name=${test%%:*}
        if [[ $name == lib ]]; then arguments+=(--lib); else arguments+=(--test "$name"); fi
    done
    cargo test --locked "${profile[@]}" --no-run --message-format=json "${arguments[@]}" >"$artifacts" ||
        fail "the tests do not build"
    while read -r kind name path; do
        [[ $kind != lib ]] || name=lib
        executable[$kind/$name]=$path
    done < <(executables "$artifacts")
    for test in "$@"; do
        name=${test%%:*} filter=
        [[ $test != *:* ]] || filter=${test#*:}
        path=${executable[test/$name]:-${executable[lib/$name]:-}}
        [[ -n $path ]] || fail "cargo built no $name"
        printf '%s\t%s\t%s\n' "$name" "$path" "$filter" >>"$work/share/tests"
    done
    export RXE_KVRAIL=${executable[bin/kvrail]:-}
    # Unit tests alone come without the program.
    [[ -n $RXE_KVRAIL ]] || build_kvrail
}

# Builds the program, and names it in RXE_KVRAIL. Cargo builds it once more, with other features of its
# dependencies, where no test asks for it; so one does.
build_kvrail() {
    cargo test --locked "${profile[@]}" --no-run --message-format=json --test arguments >"$work/artifacts" ||
        fail "kvrail does not build"
    RXE_KVRAIL=$(executables "$work/artifacts" | sed -n 's/^bin kvrail //p')
    export RXE_KVRAIL
}

# Kind, name and path of every executable in cargo's messages.
executables() {
    sed -n 's/.*"kind":\["\([a-z]*\)"\].*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*/\1 \2 \3/p' "$1"
}

# Sums the result lines of a run. Fails where nothing ran.
print_sum() {
    local what=$1 results=$work/share/results sum
    sum=$(awk '/^test result:/ { passed += $4; failed += $6; skipped += $8 }
        END { printf "%d passed, %d failed, %d skipped", passed, failed, skipped
              exit passed + failed == 0 }' "$results" 2>/dev/null) || {
        note "$what: no test ran"
        return 1
    }
    note "$what: $sum"
}
