//! Real processes, real sockets, real signals: what `kvrail` promises when something breaks.
//!
//! Every test starts the binary that ships, in a directory of its own, on ports that the kernel
//! chooses. Faults enter through `serve --fault` or as signals. Nothing sleeps: a test waits for a
//! condition until a deadline that a loaded machine meets, and asserts on what happened, never on
//! how long it took.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "tests and their helpers fail by panicking; a throughput is measured with a clock"
)]

#[path = "../registry/redis_server.rs"]
#[expect(dead_code, reason = "the tests of registries use more of it")]
mod redis_server;
mod support;
#[cfg(feature = "gpu")]
#[path = "../cuda_standin/mod.rs"]
#[expect(dead_code, reason = "the tests of the driver use more of it")]
mod cuda_standin;

mod authentication;
mod bench;
#[cfg(feature = "gpu")]
mod bench_gpu;
mod commands;
mod demo;
mod demo_gpu;
mod disaggregated;
mod drain;
#[cfg(feature = "gpu")]
mod engine_gpu;
mod engine_memory;
mod fabric_attack;
mod full_pool;
mod gpu_memory;
mod gpu_over_shm;
mod healing;
mod holder_dies;
mod hostile;
mod hung_peers;
mod in_place;
#[cfg(feature = "gpu")]
mod in_place_gpu;
mod in_place_quota;
#[cfg(feature = "gpu")]
mod in_place_gpu_or_shm;
#[cfg(feature = "gpu")]
mod in_place_staged;
mod large_read;
mod load_in_place;
#[cfg(feature = "gpu")]
mod load_in_place_gpu;
mod lost_messages;
mod nics;
mod observability;
mod redis_outage;
mod registry_outage;
mod rdma_refused;
mod requester_dies;
mod second_process;
mod service_arguments;
mod shared_memory;
mod stalls;
