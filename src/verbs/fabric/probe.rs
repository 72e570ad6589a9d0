//! The proof that paths carry data: before a connection is used, each end reads a known pattern out of
//! the other one's memory, through the GIDs and at the MTU that were chosen.
//!
//! The pattern lies in a protection domain of its own, beside the frames of messages, and the queue
//! pair of messages belongs to that domain alone. So it may serve READs from the start: what a peer
//! that nobody has admitted can read is the pattern.
//!
//! Lanes belong to the domain of served memory, and serve no READ until the peer is admitted. Over the
//! first lane of each further pair of NICs each end therefore sends the pattern instead, in packets as
//! long as a READ's: both directions are tried, and a SEND completes when the other end has it.

use std::fmt;
use std::fs::File;
use std::sync::Arc;

use super::device::Device;
use super::hello::Card;
use crate::fabric::FabricError;
use crate::limits::MESSAGE_BYTES_MAX;
use crate::memory::Mapping;
use crate::sys::gid::Gid;
use crate::sys::ibverbs::constants::{IBV_MTU_256, IBV_MTU_4096};
use crate::verbs::{MemoryRegion, ProtectionDomain, Served, VerbsError};

/// Length of the pattern, bytes: two packets of the largest MTU, so that every path is asked for a
/// packet as long as its queue pairs will send. Where a switch or the other end's interface takes
/// less, the answer is lost, and it is lost here.
pub(super) const PROBE_BYTES: usize = 2 * 4096;

const _: () = assert!(PROBE_BYTES <= MESSAGE_BYTES_MAX, "it lands where messages are sent from");

/// The pattern: its period fits no packet, so that a packet at the wrong place shows.
fn pattern() -> impl Iterator<Item = u8> {
    (0..251).cycle().take(PROBE_BYTES)
}

/// Whether these bytes are the pattern.
pub(super) fn is_pattern(bytes: &[u8]) -> bool {
    pattern().eq(bytes.iter().copied())
}

/// Memory of a fabric's own, filled with zeros.
pub(super) fn own_memory(name: &str, len: usize) -> Result<Arc<Mapping>, FabricError> {
    let attempt = || -> std::io::Result<Mapping> {
        let file = File::from(rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?);
        file.set_len(len as u64)?;
        Mapping::new(&file, len as u64)
    };
    let memory = attempt().map_err(|source| FabricError::Os {
        call: format!("making {len} bytes for {name}"),
        source,
        remedy: "raise the limit of open files or free memory",
    })?;
    Ok(Arc::new(memory))
}

/// The pattern, registered for peers to read.
pub(super) fn register(domain: &Arc<ProtectionDomain>) -> Result<MemoryRegion, VerbsError> {
    let memory = own_memory("kvrail-probe", PROBE_BYTES)?;
    fill(&memory)?;
    MemoryRegion::new(domain, memory, Served::Whole)
}

/// The pattern, and behind it as much room for a peer's, registered for lanes: what peers send over
/// those is looked at by nobody, so that all share one place.
pub(super) fn register_for_lanes(
    domain: &Arc<ProtectionDomain>,
) -> Result<MemoryRegion, VerbsError> {
    let memory = own_memory("kvrail-lane-probe", 2 * PROBE_BYTES)?;
    fill(&memory)?;
    MemoryRegion::new(domain, memory, Served::No)
}

/// Writes the pattern to the front.
fn fill(memory: &Mapping) -> Result<(), FabricError> {
    let bytes: Vec<u8> = pattern().collect();
    memory.write(0, &bytes).map_err(|error| FabricError::Os {
        call: "writing the probe".to_owned(),
        source: std::io::Error::other(error),
        remedy: "report this as a defect",
    })
}

/// Both ends of a path, for the log.
#[derive(Debug, Clone)]
pub(super) struct PathEnds {
    device: String,
    peer_device: String,
    ours: [u8; 16],
    theirs: [u8; 16],
    /// As `IBV_MTU_*`.
    mtu: i32,
}

impl PathEnds {
    pub(super) fn new(device: &Device, peer: &Card, mtu: i32) -> Self {
        let (name, peer_device) = (device.name().to_owned(), peer.name().to_owned());
        Self { device: name, peer_device, ours: device.choice.gid.raw, theirs: peer.gid, mtu }
    }

    /// The name of the peer's device.
    pub(super) fn peer_device(&self) -> &str {
        &self.peer_device
    }

    /// Says that READs do not cross it, and what to try.
    pub(super) fn warn(&self, what: &str) {
        self.say(format_args!(
            "a peer that answers over TCP does not answer over RDMA: {what}. Where the GIDs are of \
             different networks, set --gid-index here or there; where they reach each other, the way \
             between them may not carry packets of this MTU: compare `ip link` on both hosts and the \
             switches' MTU (RoCE adds up to 90 bytes to its own), and give all of them the same one"
        ));
    }

    /// Says that a connection goes on without it.
    pub(super) fn left_out(&self, what: &str) {
        self.say(format_args!(
            "a pair of NICs carries no data and is left out of a connection: {what}. The connection goes on \
             over its other pairs. Compare `ip link`, `ip route` and the switches' MTU on that rail, or say \
             with --nic-pairs which NICs reach each other"
        ));
    }

    fn say(&self, sentence: fmt::Arguments<'_>) {
        tracing::warn!(
            device = self.device,
            peer_device = self.peer_device,
            gid = %Gid::new(self.ours),
            peer_gid = %Gid::new(self.theirs),
            mtu = bytes_of_mtu(self.mtu),
            "{sentence}"
        );
    }
}

/// An `IBV_MTU_*` in bytes; 0 for what is none.
const fn bytes_of_mtu(mtu: i32) -> u32 {
    match mtu {
        IBV_MTU_256..=IBV_MTU_4096 => 128 << mtu,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::ibverbs::constants::IBV_MTU_1024;

    #[test]
    fn only_the_whole_pattern_in_its_place_is_the_pattern() {
        let whole: Vec<u8> = pattern().collect();
        assert!(is_pattern(&whole));
        assert!(!is_pattern(&[0; PROBE_BYTES]));
        assert!(!is_pattern(&whole[1..]));
        for mtu in [256, 512, 1024, 2048, 4096] {
            let mut swapped = whole.clone();
            swapped.rotate_left(mtu);
            assert!(!is_pattern(&swapped), "{mtu}");
        }
    }

    #[test]
    fn mtus_have_bytes() {
        let mtus = [IBV_MTU_256, IBV_MTU_1024, IBV_MTU_4096, 0, 6].map(bytes_of_mtu);
        assert_eq!(mtus, [256, 1024, 4096, 0, 0]);
    }
}
