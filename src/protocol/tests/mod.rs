//! Golden bytes, round trips, and a decoder under attack.
//!
//! `KVRAIL_WRITE_GOLDEN=1 cargo test --lib protocol` writes the files anew, after a deliberate
//! change of a protocol and its version.

mod attack;
mod fields;

use std::fmt::Write as _;
use std::path::PathBuf;

use bytemuck::Zeroable;

use super::*;
use crate::event::LendRefusal;
use crate::fabric::{Region, RegionId, RemoteSpan};
use crate::layout::{AllocationId, BlockId, KvSplit, Tensor};
use crate::types::{BlockHash, Generation};

/// A message that owns its lists.
#[derive(Debug, Clone)]
enum Owned {
    Plain(Message<'static>),
    Welcome(Introduction, Proof, Vec<RegionEntry>),
    Confirm(Proof, Vec<RegionEntry>),
    Lend(RequestId, NamespaceId, Vec<HashEntry>),
    Lease(RequestId, LeaseId, u32, Load, Vec<LoanEntry>),
    Complete(LeaseId, NodeEpoch, u16, Vec<u8>),
    Layout(Vec<RegionEntry>, Vec<TensorEntry>),
    Ranks(LeaseId, RanksStatus, Load, Vec<u8>),
}

impl Owned {
    fn message(&self) -> Message<'_> {
        match *self {
            Self::Plain(message) => message,
            Self::Welcome(introduction, proof, ref regions) => {
                Message::Welcome { introduction, proof, regions }
            }
            Self::Confirm(proof, ref regions) => Message::Confirm { proof, regions },
            Self::Lend(request, namespace, ref hashes) => {
                Message::Lend { request, namespace, hashes }
            }
            Self::Lease(request, lease, ttl_ms, load, ref loans) => {
                Message::Lease { request, lease, ttl_ms, load, loans }
            }
            Self::Layout(ref regions, ref tensors) => {
                Message::Layout { number: 7, blocks: 40_000, regions, tensors }
            }
            Self::Complete(lease, epoch, count, ref bitmap) => {
                Message::Complete { lease, epoch, outcomes: Outcomes::new(count, bitmap).unwrap() }
            }
            Self::Ranks(lease, status, load, ref ranks) => {
                Message::Ranks { lease, status, load, ranks }
            }
        }
    }

    fn encoded(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.message().encode(&mut out);
        out
    }
}

fn introduction(seed: u8, requester: &str) -> Introduction {
    Introduction {
        node: NodeId([seed; 16]),
        epoch: NodeEpoch(0x0102_0304_0506_0708 + u64::from(seed)),
        requester: requester.parse().unwrap(),
        nonce: [seed ^ 0xff; 16],
    }
}

fn region(rkey: u32, address: u64, len: u64) -> RegionEntry {
    RegionEntry::from(&Region { id: RegionId(0), rkey, address, len })
}

fn ready(rank: u32, address: u64, len: u32) -> Loan {
    Loan::Ready {
        rank: EvictionRank::clamped(rank),
        generation: Generation(0x0a0b_0c0d),
        place: Place::Span(RemoteSpan { rkey: 0x1122_3344, address, len }),
        checksum: 0xfeed_face_cafe_beef,
    }
}

fn hash(bytes: &[u8]) -> HashEntry {
    BlockHash::new(bytes).unwrap().into()
}

const LOAD: Load = Load { outstanding_bytes: 3 << 30, pause_ms: 250 };

/// One fixed message of a kind: what its golden file holds.
fn example(kind: Kind) -> Owned {
    let lease = LeaseId(0x0000_0001_0000_002a);
    let proof = Proof([0x5a; 32]);
    let regions = vec![region(0x1122_3344, 0x7f00_0000_0000, 1 << 30), region(2, 0x1000, 4096)];
    let place = Place::Block { layout: 7, block: BlockId(39_999), len: 2 << 20 };
    let in_layout = match ready(2, 0, 1) {
        Loan::Ready { rank, generation, checksum, .. } => {
            Loan::Ready { rank, generation, place, checksum }
        }
        other => other,
    };
    match kind {
        Kind::Hello => Owned::Plain(Message::Hello(introduction(1, "10.0.0.1:7700"))),
        Kind::Beside => Owned::Plain(Message::Beside(introduction(1, "10.0.0.1:7700"))),
        Kind::Widen => Owned::Plain(Message::Widen),
        Kind::Welcome => Owned::Welcome(introduction(2, "10.0.0.2:7700"), proof, regions),
        Kind::Confirm => Owned::Confirm(proof, regions),
        Kind::Reject => Owned::Plain(Message::Reject { reason: RejectReason::Authentication }),
        Kind::Lend => Owned::Lend(
            RequestId(7),
            NamespaceId(0x6b76_7261_696c_0001),
            vec![hash(&[0xab; 32]), hash(&[1, 2, 3])],
        ),
        Kind::Lease => Owned::Lease(
            RequestId(7),
            lease,
            30_000,
            LOAD,
            vec![
                ready(2, 0x7f00_0000_1000, 2 << 20).into(),
                Loan::NotFound.into(),
                Loan::Busy(LendRefusal::Draining).into(),
                Loan::Failed.into(),
                in_layout.into(),
            ],
        ),
        Kind::Renew => Owned::Plain(Message::Renew { lease }),
        Kind::Renewed => Owned::Plain(Message::Renewed { lease, ttl_ms: 30_000, load: LOAD }),
        Kind::Complete => Owned::Complete(lease, NodeEpoch(99), 10, vec![0b0000_0101, 0b10]),
        Kind::Ranks => Owned::Ranks(lease, RanksStatus::Recorded, LOAD, vec![1, 0, 31]),
        Kind::Abort => Owned::Plain(Message::Abort { lease, reason: AbortReason::NoMemory }),
        Kind::Ping => Owned::Plain(Message::Ping { token: 0xdead_beef }),
        Kind::Pong => Owned::Plain(Message::Pong { token: 0xdead_beef, load: LOAD }),
        Kind::Goodbye => Owned::Plain(Message::Goodbye { reason: GoodbyeReason::Shutdown }),
        Kind::Layout => {
            let tensor = Tensor {
                allocation: AllocationId(1),
                offset: 0x1000,
                layers: 80,
                layer_stride: 0x0102_0304_0500,
                kv: KvSplit::Split { stride: 0x0001_0000_0000 },
                block_stride: 0x8000,
                segment_bytes: 0x4000,
            };
            let fused = Tensor { allocation: AllocationId(0), kv: KvSplit::Fused, ..tensor };
            Owned::Layout(regions, [tensor, fused].iter().map(TensorEntry::from).collect())
        }
    }
}

fn golden_path(kind: Kind) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/peer")
        .join(format!("{}.hex", kind.name()))
}

fn hex_lines(bytes: &[u8]) -> String {
    bytes.chunks(16).fold(String::new(), |mut text, chunk| {
        for byte in chunk {
            write!(text, "{byte:02x}").unwrap();
        }
        text.push('\n');
        text
    })
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
        .collect()
}

#[test]
fn every_kind_has_its_golden_encoding() {
    for kind in Kind::ALL {
        let path = golden_path(*kind);
        rewrite_golden(&path, &hex_lines(&example(*kind).encoded()));
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let example = example(*kind);
        assert_eq!(example.message().kind(), *kind);
        assert_eq!(hex_lines(&example.encoded()), text, "{}", kind.name());
        assert_eq!(decode(&from_hex(&text)), Ok(example.message()));
    }
}

#[test]
fn codes_and_names_are_distinct_and_survive() {
    for kind in Kind::ALL {
        assert_eq!(Kind::from_code(kind.code()), Some(*kind));
        assert_eq!(kind_of(&example(*kind).encoded()), Some(*kind));
    }
    let names: std::collections::HashSet<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
    assert_eq!(names.len(), Kind::ALL.len());
    assert_eq!(kind_of(&[]), None);
    assert_eq!(kind_of(&[0]), None);
}

#[test]
fn a_message_cut_short_or_drawn_out_is_refused() {
    for kind in Kind::ALL {
        let whole = example(*kind).encoded();
        for len in 0..whole.len() {
            assert!(decode(&whole[..len]).is_err(), "{} at {len}", kind.name());
        }
        let mut long = whole.clone();
        long.push(0);
        let refused = Err(DecodeError::Length { kind: *kind });
        assert_eq!(decode(&long), refused);
        // The header admits to the extra byte: the body's own lengths do not.
        let body = u32::try_from(long.len() - 8).unwrap();
        long[4..8].copy_from_slice(&body.to_le_bytes());
        assert_eq!(decode(&long), refused);
    }
}

#[test]
fn the_largest_messages_fit_and_nothing_larger_is_looked_at() {
    let loans = vec![LoanEntry::from(ready(31, u64::MAX - (1 << 30), 1 << 30)); 512];
    let largest = Owned::Lease(RequestId(1), LeaseId(1), 1, LOAD, loans).encoded();
    assert!(largest.len() <= limits::MESSAGE_BYTES_MAX);
    assert!(decode(&largest).is_ok());
    let regions = vec![region(1, 0, 1); limits::REGIONS_MAX];
    let tensors = vec![TensorEntry::zeroed(); limits::LAYOUT_TENSORS_MAX];
    let layout = Owned::Layout(regions.clone(), tensors).encoded();
    assert!(layout.len() <= limits::MESSAGE_BYTES_MAX);
    assert!(decode(&layout).is_ok());
    assert!(decode(&Owned::Confirm(Proof([0; 32]), regions).encoded()).is_ok());
    let got = limits::MESSAGE_BYTES_MAX + 1;
    assert_eq!(decode(&vec![1; got]), Err(DecodeError::Size { got }));
}

#[test]
fn a_message_is_appended_and_allocates_nothing_in_a_warm_buffer() {
    let mut out = Vec::with_capacity(4096);
    let (start, capacity) = (out.as_ptr(), out.capacity());
    example(Kind::Lend).message().encode(&mut out);
    let first = out.len();
    example(Kind::Ping).message().encode(&mut out);
    assert_eq!(decode(&out[..first]), Ok(example(Kind::Lend).message()));
    assert_eq!(decode(&out[first..]), Ok(example(Kind::Ping).message()));
    assert_eq!((out.as_ptr(), out.capacity()), (start, capacity));
}

#[test]
fn a_proof_binds_both_introductions_the_role_and_the_secret() {
    let key = SecretKey::derive(b"secret");
    let (hello, welcome) = (introduction(1, "a"), introduction(2, "b"));
    let proof = key.proof(Role::Initiator, &hello, &welcome);
    assert_eq!(SecretKey::derive(b"secret").proof(Role::Initiator, &hello, &welcome), proof);
    let changed = |change: fn(&mut Introduction)| {
        let (mut other_hello, mut other_welcome) = (hello, welcome);
        change(&mut other_hello);
        change(&mut other_welcome);
        [
            key.proof(Role::Initiator, &other_hello, &welcome),
            key.proof(Role::Initiator, &hello, &other_welcome),
        ]
    };
    let mut others = vec![
        key.proof(Role::Acceptor, &hello, &welcome),
        key.proof(Role::Initiator, &welcome, &hello),
        SecretKey::derive(b"").proof(Role::Initiator, &hello, &welcome),
    ];
    others.extend(changed(|it| it.node.0[15] ^= 1));
    others.extend(changed(|it| it.epoch.0 += 1));
    others.extend(changed(|it| it.nonce[0] ^= 1));
    others.extend(changed(|it| it.requester = "c".parse().unwrap()));
    assert!(others.iter().all(|other| *other != proof));
    assert_eq!(format!("{key:?}"), "SecretKey(..)");
}

#[test]
fn outcomes_are_of_one_form() {
    assert!(Outcomes::new(0, &[]).is_none());
    assert!(Outcomes::new(8, &[1]).is_some());
    assert!(Outcomes::new(8, &[1, 0]).is_none());
    assert!(Outcomes::new(9, &[1]).is_none());
    assert!(Outcomes::new(7, &[0x80]).is_none());
    assert!(Outcomes::new(513, &[0; 65]).is_none());
    let mut bitmap = vec![9];
    let count = Outcomes::pack(&mut bitmap, (0..11).map(|at| at % 3 == 0));
    let outcomes = Outcomes::new(count, &bitmap).unwrap();
    let good: Vec<_> = outcomes.iter().collect();
    assert_eq!(good, (0..11).map(|at| at % 3 == 0).collect::<Vec<_>>());
}

#[test]
fn a_region_contains_what_lies_in_it_under_any_key() {
    let region = region(5, 1000, 100);
    let contains = |rkey, address, len| region.contains(&RemoteSpan { rkey, address, len });
    assert!(contains(5, 1000, 100));
    assert!(contains(5, 1099, 1));
    assert!(contains(4, 1000, 1), "leases may have keys of their own");
    assert!(!contains(5, 999, 1));
    assert!(!contains(5, 1099, 2));
    assert!(!contains(5, u64::MAX, u32::MAX));
}
