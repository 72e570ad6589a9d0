//! What both ends tell each other over TCP before their queue pairs can talk: one fixed message each
//! way, little-endian.

use bytemuck::{Pod, Zeroable};

use crate::limits::STREAMS_MAX;
use crate::sys::ibverbs::constants::{IBV_MTU_256, IBV_MTU_4096};
use crate::verbs::QueuePairAddress;

#[cfg(target_endian = "big")]
compile_error!("the verbs fabric sends its hello as it lies in memory: little-endian hosts only");

/// First bytes of a hello: another fabric's peer is told apart by them.
const MAGIC: [u8; 8] = *b"kvrailRC";

/// Version of the hello and of the frames on the message queue pair. Both ends have the same one.
const VERSION: u32 = 2;

/// The message queue pair, and the data queue pairs after it.
const PAIRS_MAX: usize = 1 + STREAMS_MAX;

/// Packet sequence numbers and queue pair numbers have 24 bits.
const BITS_24: u32 = 0x00ff_ffff;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Pair {
    number: u32,
    psn: u32,
}

/// One end's numbers. Of every limit the smaller one of both ends holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Hello {
    magic: [u8; 8],
    version: u32,
    /// Data queue pairs: wanted by the connector, granted by the acceptor.
    pub(super) lanes: u32,
    /// The port's MTU, as `IBV_MTU_*`.
    pub(super) mtu: u32,
    /// READs that it has on the wire at once per queue pair.
    pub(super) reads_issued: u32,
    /// READs that it answers at once per queue pair.
    pub(super) reads_served: u32,
    /// Longest READ that its port carries, bytes.
    pub(super) message_bytes: u32,
    /// Receives that wait on its message queue pair.
    pub(super) receives: u32,
    /// Its port's local identifier.
    pub(super) lid: u32,
    /// Where its pattern lies.
    pub(super) probe_address: u64,
    /// The pattern's key.
    pub(super) probe_rkey: u32,
    reserved: u32,
    /// Its GID.
    pub(super) gid: [u8; 16],
    pairs: [Pair; PAIRS_MAX],
}

/// Length of a hello, bytes.
pub(super) const HELLO_BYTES: usize = size_of::<Hello>();

const _: () = assert!(HELLO_BYTES == 208);

impl Hello {
    /// A hello without numbers.
    pub(super) fn new() -> Self {
        Self { magic: MAGIC, version: VERSION, ..Self::zeroed() }
    }

    /// Decodes and checks a peer's hello: after this every field is in its range, and there are as
    /// many queue pairs as `lanes` says.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let hello: Self = bytemuck::try_pod_read_unaligned(bytes).ok()?;
        let lanes = usize::try_from(hello.lanes).ok()?;
        let mtus = IBV_MTU_256.cast_unsigned()..=IBV_MTU_4096.cast_unsigned();
        let pairs = hello.pairs.get(..lanes.checked_add(1)?)?;
        let good = hello.magic == MAGIC
            && hello.version == VERSION
            && lanes >= 1
            && mtus.contains(&hello.mtu)
            && (1..=255).contains(&hello.reads_issued)
            && (1..=255).contains(&hello.reads_served)
            && (2..=1024).contains(&hello.receives)
            && hello.message_bytes >= 1
            && hello.lid <= u32::from(u16::MAX)
            && pairs.iter().all(|pair| pair.number <= BITS_24 && pair.psn <= BITS_24);
        good.then_some(hello)
    }

    /// The address of a queue pair: 0 is that of messages, data follows.
    pub(super) fn pair(&self, index: usize) -> QueuePairAddress {
        let pair = self.pairs.get(index).copied().unwrap_or_else(Pair::zeroed);
        QueuePairAddress { number: pair.number, psn: pair.psn }
    }

    pub(super) fn set_pair(&mut self, index: usize, address: QueuePairAddress) {
        if let Some(pair) = self.pairs.get_mut(index) {
            *pair = Pair { number: address.number, psn: address.psn };
        }
    }
}

/// A packet sequence number to begin with: random, so that packets of an earlier connection between
/// the same queue pair numbers are not taken for this one's.
pub(super) fn random_psn() -> Result<u32, getrandom::Error> {
    Ok(getrandom::u32()? & BITS_24)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Hello {
        let mut hello = Hello::new();
        hello.lanes = 2;
        hello.mtu = 5;
        hello.reads_issued = 16;
        hello.reads_served = 16;
        hello.message_bytes = 1 << 20;
        hello.receives = 8;
        for index in 0..3 {
            hello.set_pair(index, QueuePairAddress { number: 17, psn: 0xff_ffff });
        }
        hello
    }

    #[test]
    fn a_hello_survives_the_wire() {
        let hello = good();
        let decoded = Hello::decode(bytemuck::bytes_of(&hello)).unwrap();
        assert_eq!(decoded, hello);
        assert_eq!(decoded.pair(2), QueuePairAddress { number: 17, psn: 0xff_ffff });
    }

    #[test]
    fn fields_out_of_range_are_refused() {
        let spoil: [fn(&mut Hello); 11] = [
            |hello| hello.magic[7] = b'D',
            |hello| hello.version = 1,
            |hello| hello.lanes = 0,
            |hello| hello.lanes = 17,
            |hello| hello.lanes = u32::MAX,
            |hello| hello.mtu = 0,
            |hello| hello.mtu = 6,
            |hello| hello.reads_issued = 0,
            |hello| hello.reads_served = 256,
            |hello| hello.receives = 1,
            |hello| hello.pairs[2].psn = 1 << 24,
        ];
        for (case, spoil) in spoil.into_iter().enumerate() {
            let mut hello = good();
            spoil(&mut hello);
            assert_eq!(Hello::decode(bytemuck::bytes_of(&hello)), None, "case {case}");
        }
        assert_eq!(Hello::decode(&bytemuck::bytes_of(&good())[1..]), None);
        let unused = {
            let mut hello = good();
            hello.pairs[3].number = u32::MAX;
            hello
        };
        assert!(Hello::decode(bytemuck::bytes_of(&unused)).is_some(), "not one of its pairs");
    }
}
