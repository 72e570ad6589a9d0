//! Faults of a real device, and of peers on it.
//!
//! `KVRAIL_RDMA_DEVICE` names the device. `KVRAIL_RDMA_NETDEV` names its network interface, for the
//! tests that take it down; they want to be root and alone, so they are skipped without it.
//! `KVRAIL_TEST_ROUNDS` is the number of rounds of random cuts.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "helpers of tests: they fail by panicking, sizes are small, a wait has a deadline"
)]

#[allow(dead_code, unused_imports, unused_macros, reason = "only its helpers are used here")]
#[path = "../conformance/mod.rs"]
mod conformance;
#[path = "../rdma/mod.rs"]
mod rdma;

mod connections;
#[cfg(feature = "gpu")]
#[path = "../cuda_standin/mod.rs"]
#[allow(dead_code, reason = "only a part of it is used here")]
mod cuda_standin;
#[cfg(feature = "gpu")]
mod gpu;
mod interface;
mod memory;
mod pressure;

use std::io::Write as _;
use std::process::Command;
use std::sync::Weak;

use kvrail::fabric::{CompletionStatus, ConnectionId, Region};
use kvrail::memory::Mapping;

use conformance::{End, Harness, Read, Seen};
use rdma::Verbs;

const BLOCK: u32 = 64 << 10;
const BLOCKS: u32 = 64;
const BYTES: usize = (BLOCK * BLOCKS) as usize;

/// Prints what was observed, past the test harness, which hides what a test that passes prints.
fn say(what: &str) {
    std::io::stderr().write_all(format!("observed: {what}\n").as_bytes()).ok();
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}: {status}");
}

/// One READ of each block.
fn many(remote: &Region, local: &Region) -> Vec<Read> {
    (0..BLOCKS)
        .map(|slot| Read::same(slot, remote, local, u64::from(slot * BLOCK), BLOCK))
        .collect()
}

/// One completion per READ of [`many`], none after the close.
fn all_completed<H: Harness>(end: &End<H>, id: ConnectionId) -> Vec<CompletionStatus> {
    let mut done = end.completions(id);
    done.sort_unstable_by_key(|done| done.0);
    let slots: Vec<u32> = done.iter().map(|done| done.0).collect();
    assert_eq!(slots, (0..BLOCKS).collect::<Vec<_>>());
    let last = end.seen.iter().rfind(|seen| match seen {
        Seen::Completed(of, ..) | Seen::Closed(of, _) => *of == id,
        _ => false,
    });
    assert!(matches!(last, Some(Seen::Closed(..))), "{last:?}");
    done.into_iter().map(|done| done.1).collect()
}

/// Memory whose region was deregistered with READs of [`many`] outstanding is kept until the last of
/// them has completed. Called after each poll.
fn assert_kept(end: &End<Verbs>, id: ConnectionId, memory: &Weak<Mapping>) {
    if end.completions(id).len() < BLOCKS as usize {
        assert!(memory.upgrade().is_some(), "memory was let go while READs may land in it");
    }
}

fn count(statuses: &[CompletionStatus], status: CompletionStatus) -> usize {
    statuses.iter().filter(|one| **one == status).count()
}

/// Each block whose READ succeeded is whole.
fn assert_whole(statuses: &[CompletionStatus], bytes: &[u8], filler: u8) {
    for (status, block) in statuses.iter().zip(bytes.chunks(BLOCK as usize)) {
        if *status == CompletionStatus::Success {
            assert!(block.iter().all(|byte| *byte == filler), "a READ that succeeded is not whole");
        }
    }
}
