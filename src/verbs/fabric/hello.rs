//! What both ends tell each other over TCP before their queue pairs can talk: one fixed message each
//! way, little-endian.
//!
//! The connector tells of its NICs and offers queue pairs on those that are up. The acceptor pairs each
//! with a queue pair on a NIC of its own, and says which and why ([`super::pairing`]).

use bytemuck::{Pod, Zeroable};

use super::device::{Device, PART_BYTES_MIN};
use super::pairing::{Candidate, Reason};
use crate::fabric::FabricError;
use crate::limits::{NICS_MAX, STREAMS_MAX};
use crate::sys::ibverbs::constants::{IBV_MTU_256, IBV_MTU_4096};
use crate::sys::random;
use crate::verbs::QueuePairAddress;

#[cfg(target_endian = "big")]
compile_error!("the verbs fabric sends its hello as it lies in memory: little-endian hosts only");

/// First bytes of a hello: another fabric's peer is told apart by them.
const MAGIC: [u8; 8] = *b"kvrailRC";

/// Version of the hello and of the frames on the message queue pair. Both ends have the same one.
const VERSION: u32 = 4;

/// The message queue pair, and the data queue pairs after it.
pub(super) const PAIRS_MAX: usize = 1 + STREAMS_MAX;

/// Packet sequence numbers and queue pair numbers have 24 bits.
const BITS_24: u32 = 0x00ff_ffff;

/// Longest name of a device, with the zero behind it.
const NAME_BYTES: usize = 64;

/// [`Card::numa`] of a NIC that is on no node.
const NO_NODE: u32 = u32::MAX;

/// A NIC. Of every limit the smaller one of both ends holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Card {
    name: [u8; NAME_BYTES],
    /// The device of the other end that it shall talk to; zeros for any.
    wish: [u8; NAME_BYTES],
    /// Its GID.
    pub(super) gid: [u8; 16],
    /// Where its pattern lies.
    pub(super) probe_address: u64,
    /// The pattern's key.
    pub(super) probe_rkey: u32,
    /// Its NUMA node.
    numa: u32,
    /// Its port's MTU, as `IBV_MTU_*`.
    pub(super) mtu: u32,
    /// READs that it has on the wire at once per queue pair.
    pub(super) reads_issued: u32,
    /// READs that it answers at once per queue pair.
    pub(super) reads_served: u32,
    /// Longest READ that its port carries, bytes.
    pub(super) message_bytes: u32,
    /// Its port's local identifier.
    pub(super) lid: u32,
    reserved: u32,
}

impl From<&Device> for Card {
    fn from(device: &Device) -> Self {
        Self {
            name: padded(device.name()),
            wish: padded(&device.wish),
            gid: device.choice.gid.raw,
            probe_address: device.probe.address(),
            probe_rkey: device.probe.rkey(),
            numa: device.numa.unwrap_or(NO_NODE),
            mtu: device.port.active_mtu.cast_unsigned(),
            reads_issued: device.limits.reads_issued.into(),
            reads_served: device.limits.reads_served.into(),
            message_bytes: device.port.message_bytes,
            lid: device.port.lid.into(),
            reserved: 0,
        }
    }
}

impl Card {
    pub(super) fn name(&self) -> &str {
        text(&self.name)
    }

    /// As pairing sees it. What the connector offers a queue pair on is up.
    pub(super) fn candidate(&self) -> Candidate<'_> {
        let numa = (self.numa != NO_NODE).then_some(self.numa);
        Candidate { name: self.name(), wish: text(&self.wish), numa, up: true }
    }

    fn is_valid(&self) -> bool {
        let mtus = IBV_MTU_256.cast_unsigned()..=IBV_MTU_4096.cast_unsigned();
        mtus.contains(&self.mtu)
            && (1..=255).contains(&self.reads_issued)
            && (1..=255).contains(&self.reads_served)
            && self.message_bytes >= PART_BYTES_MIN
            && self.lid <= u32::from(u16::MAX)
    }
}

fn padded(name: &str) -> [u8; NAME_BYTES] {
    let mut bytes = [0; NAME_BYTES];
    let room = bytes.iter_mut().take(NAME_BYTES - 1);
    room.zip(name.as_bytes()).for_each(|(to, from)| *to = *from);
    bytes
}

/// The text of a name; none where it is not one that goes into a log.
fn text(bytes: &[u8; NAME_BYTES]) -> &str {
    let name = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    let plain = name.iter().all(|byte| byte.is_ascii_graphic());
    std::str::from_utf8(name).ok().filter(|_| plain).unwrap_or_default()
}

/// A queue pair, the NIC that it is on, and the NIC that it talks to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Pair {
    number: u32,
    psn: u32,
    nic: u8,
    /// The acceptor's word; zero in an offer.
    peer: u8,
    /// Why, as [`Reason`]; zero in an offer.
    reason: u8,
    reserved: u8,
}

/// Where one queue pair of a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seat {
    /// The sender's NIC.
    pub(super) nic: u8,
    /// The receiver's.
    pub(super) peer: u8,
    /// Why they talk to each other; `None` in an offer.
    pub(super) reason: Option<Reason>,
}

/// One end's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Hello {
    magic: [u8; 8],
    version: u32,
    nics: u32,
    /// Data queue pairs: wanted by the connector, granted by the acceptor.
    pub(super) lanes: u32,
    /// Receives that wait on its message queue pair.
    pub(super) receives: u32,
    cards: [Card; NICS_MAX],
    pairs: [Pair; PAIRS_MAX],
    /// 1 where it serves by windows, whose keys name their lane; else 0.
    pub(super) windows: u32,
}

/// Length of a hello, bytes.
pub(super) const HELLO_BYTES: usize = size_of::<Hello>();

const _: () = assert!(HELLO_BYTES == 24 + NICS_MAX * 184 + PAIRS_MAX * 12 + 4);

impl Hello {
    /// A hello that tells of these NICs.
    pub(super) fn new(devices: &[Device]) -> Self {
        let mut hello = Self { magic: MAGIC, version: VERSION, ..Self::zeroed() };
        hello.nics = u32::try_from(devices.len()).unwrap_or(u32::MAX);
        let cards = hello.cards.iter_mut().zip(devices);
        cards.for_each(|(card, device)| *card = device.into());
        hello
    }

    /// Whether the first bytes that came may begin a hello of this version.
    pub(super) fn may_begin(bytes: &[u8]) -> bool {
        let start = MAGIC.into_iter().chain(VERSION.to_le_bytes());
        start.zip(bytes).all(|(expected, byte)| expected == *byte)
    }

    /// Decodes and checks a peer's hello: after this every field is in its range, there are as many
    /// queue pairs as `lanes` says, and each is on a NIC that the hello tells of.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let hello: Self = bytemuck::try_pod_read_unaligned(bytes).ok()?;
        let lanes = usize::try_from(hello.lanes).ok()?;
        let pairs = hello.pairs.get(..lanes.checked_add(1)?)?;
        let nics = usize::try_from(hello.nics).ok()?;
        let cards = hello.cards.get(..nics)?;
        let pair_good = |pair: &Pair| {
            pair.number <= BITS_24 && pair.psn <= BITS_24 && usize::from(pair.nic) < nics
        };
        let good = hello.magic == MAGIC
            && hello.version == VERSION
            && lanes >= 1
            && nics >= 1
            && (2..=1024).contains(&hello.receives)
            && hello.windows <= 1
            && cards.iter().all(Card::is_valid)
            && pairs.iter().all(pair_good);
        good.then_some(hello)
    }

    /// The NICs.
    pub(super) fn cards(&self) -> &[Card] {
        let count = usize::try_from(self.nics).unwrap_or(usize::MAX);
        self.cards.get(..count).unwrap_or(&self.cards)
    }

    /// A port's MTU, where it has changed.
    pub(super) fn set_mtu(&mut self, nic: u8, mtu: i32) {
        if let Some(card) = self.cards.get_mut(usize::from(nic)) {
            card.mtu = mtu.cast_unsigned();
        }
    }

    /// As if all NICs were at another address.
    #[cfg(test)]
    pub(super) fn move_to(&mut self, gid: [u8; 16]) {
        self.cards.iter_mut().for_each(|card| card.gid = gid);
    }

    /// The address of a queue pair: 0 is that of messages, data follows.
    pub(super) fn pair(&self, index: usize) -> QueuePairAddress {
        let pair = self.pairs.get(index).copied().unwrap_or_else(Pair::zeroed);
        QueuePairAddress { number: pair.number, psn: pair.psn }
    }

    /// Where a queue pair is.
    pub(super) fn seat(&self, index: usize) -> Seat {
        let pair = self.pairs.get(index).copied().unwrap_or_else(Pair::zeroed);
        Seat { nic: pair.nic, peer: pair.peer, reason: Reason::decode(pair.reason) }
    }

    pub(super) fn set_pair(&mut self, index: usize, address: QueuePairAddress, seat: Seat) {
        if let Some(pair) = self.pairs.get_mut(index) {
            *pair = Pair {
                number: address.number,
                psn: address.psn,
                nic: seat.nic,
                peer: seat.peer,
                reason: seat.reason.map_or(0, |reason| reason as u8),
                reserved: 0,
            };
        }
    }
}

/// A packet sequence number to begin with: random, so that packets of an earlier connection between
/// the same queue pair numbers are not taken for this one's.
pub(super) fn random_psn() -> Result<u32, FabricError> {
    Ok(random::number()? & BITS_24)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEAT: Seat = Seat { nic: 1, peer: 0, reason: Some(Reason::Near) };

    fn good() -> Hello {
        let mut hello = Hello::new(&[]);
        hello.nics = 2;
        for card in &mut hello.cards[..2] {
            *card = Card {
                name: padded("mlx5_0"),
                wish: padded(""),
                gid: [1; 16],
                probe_address: 1 << 40,
                probe_rkey: 3,
                numa: NO_NODE,
                mtu: 5,
                reads_issued: 16,
                reads_served: 16,
                message_bytes: 1 << 20,
                lid: 0,
                reserved: 0,
            };
        }
        hello.lanes = 2;
        hello.receives = 8;
        for index in 0..3 {
            hello.set_pair(index, QueuePairAddress { number: 17, psn: 0xff_ffff }, SEAT);
        }
        hello
    }

    #[test]
    fn a_hello_survives_the_wire() {
        let hello = good();
        let decoded = Hello::decode(bytemuck::bytes_of(&hello)).unwrap();
        assert_eq!(decoded, hello);
        assert_eq!(decoded.pair(2), QueuePairAddress { number: 17, psn: 0xff_ffff });
        assert_eq!(decoded.seat(2), SEAT);
        assert_eq!(decoded.cards().len(), 2);
        let candidate = decoded.cards()[1].candidate();
        assert_eq!((candidate.name, candidate.wish, candidate.numa), ("mlx5_0", "", None));
    }

    #[test]
    fn fields_out_of_range_are_refused() {
        let spoil: [fn(&mut Hello); 16] = [
            |hello| hello.magic[7] = b'D',
            |hello| hello.version = 3,
            |hello| hello.lanes = 0,
            |hello| hello.lanes = 17,
            |hello| hello.lanes = u32::MAX,
            |hello| hello.nics = 0,
            |hello| hello.nics = 9,
            |hello| hello.cards[1].mtu = 0,
            |hello| hello.cards[1].mtu = 6,
            |hello| hello.cards[1].reads_issued = 0,
            |hello| hello.cards[1].reads_served = 256,
            |hello| hello.cards[1].message_bytes = PART_BYTES_MIN - 1,
            |hello| hello.cards[1].lid = 1 << 16,
            |hello| hello.receives = 1,
            |hello| hello.pairs[2].psn = 1 << 24,
            |hello| hello.pairs[2].nic = 2,
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
            hello.cards[2].mtu = 0;
            hello
        };
        assert!(Hello::decode(bytemuck::bytes_of(&unused)).is_some(), "not one of its pairs");
    }

    #[test]
    fn what_begins_no_hello_is_known_early() {
        let hello = good();
        let bytes = bytemuck::bytes_of(&hello);
        for len in [0, 1, 8, 11, 12, 13, bytes.len()] {
            assert!(Hello::may_begin(&bytes[..len]), "{len}");
        }
        assert!(!Hello::may_begin(b"G"));
        assert!(!Hello::may_begin(b"kvrailRC\x01\0\0\0"));
    }

    #[test]
    fn names_of_any_length_and_kind_harm_nobody() {
        let long = "x".repeat(100);
        assert_eq!(text(&padded(&long)), &long[..63]);
        assert_eq!(text(&[b'a'; NAME_BYTES]).len(), 64, "without a zero");
        assert_eq!(text(&padded("a\nb")), "", "no line of a log is forged");
        assert_eq!(text(&[0xff; NAME_BYTES]), "");
    }
}
