# Shortcuts; none is needed: README names the commands behind them.

# The main job on this machine.
demo:
    cargo run --release -- demo

# All tests.
test:
    bash tests/run

# The tests without the fuzz targets and the model checker.
quick:
    FUZZ_SECONDS=0 SCHEDULES=0 bash tests/run

# The tests on a SoftRoCE device: one, pair, hosts or all.
rxe *arguments:
    bash tests/rxe/run {{arguments}}

# READs beside perftest's, on that device.
perftest:
    bash bench/peers/perftest

# What a change must pass.
ci:
    bash .ci/run

# Format and lint.
check:
    cargo fmt --check
    cargo clippy --all-targets -- -D warnings
