//! Golden bytes, round trips, and a decoder under attack.
//!
//! `cargo test --lib protocol -- --ignored write_golden_files` writes the files anew.

use std::fmt::Write as _;
use std::path::PathBuf;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::fabric::{Region, RegionId, RemoteSpan};
use crate::types::{BlockHash, Generation};

/// A message that owns its lists.
#[derive(Debug, Clone)]
enum Owned {
    Plain(Message<'static>),
    Welcome(Introduction, Proof, Vec<RegionEntry>),
    Confirm(Proof, Vec<RegionEntry>),
    Lend(RequestId, NamespaceId, Vec<HashEntry>),
    Lease(RequestId, LeaseId, u32, u32, Vec<LoanEntry>),
    Complete(LeaseId, NodeEpoch, u16, Vec<u8>),
    Ranks(LeaseId, RanksStatus, u32, Vec<u8>),
}

impl Owned {
    fn message(&self) -> Message<'_> {
        match *self {
            Self::Plain(message) => message,
            Self::Welcome(introduction, proof, ref regions) => Message::Welcome {
                introduction,
                proof,
                regions,
            },
            Self::Confirm(proof, ref regions) => Message::Confirm { proof, regions },
            Self::Lend(request, namespace, ref hashes) => Message::Lend {
                request,
                namespace,
                hashes,
            },
            Self::Lease(request, lease, ttl_ms, pause_ms, ref loans) => Message::Lease {
                request,
                lease,
                ttl_ms,
                pause_ms,
                loans,
            },
            Self::Complete(lease, epoch, count, ref bitmap) => Message::Complete {
                lease,
                epoch,
                outcomes: Outcomes::new(count, bitmap).unwrap(),
            },
            Self::Ranks(lease, status, pause_ms, ref ranks) => Message::Ranks {
                lease,
                status,
                pause_ms,
                ranks,
            },
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
    RegionEntry::from(&Region {
        id: RegionId(0),
        rkey,
        address,
        len,
    })
}

fn ready(rank: u32, address: u64, len: u32) -> Loan {
    Loan::Ready {
        rank: EvictionRank::clamped(rank),
        generation: Generation(0x0a0b_0c0d),
        span: RemoteSpan {
            rkey: 0x1122_3344,
            address,
            len,
        },
        checksum: 0xfeed_face_cafe_beef,
    }
}

fn hash(bytes: &[u8]) -> HashEntry {
    BlockHash::new(bytes).unwrap().into()
}

/// One fixed message of a kind: what its golden file holds.
fn example(kind: Kind) -> Owned {
    let lease = LeaseId(0x0000_0001_0000_002a);
    let proof = Proof([0x5a; 32]);
    let regions = vec![
        region(0x1122_3344, 0x7f00_0000_0000, 1 << 30),
        region(2, 0x1000, 4096),
    ];
    match kind {
        Kind::Hello => Owned::Plain(Message::Hello(introduction(1, "10.0.0.1:7700"))),
        Kind::Welcome => Owned::Welcome(introduction(2, "10.0.0.2:7700"), proof, regions),
        Kind::Confirm => Owned::Confirm(proof, regions),
        Kind::Reject => Owned::Plain(Message::Reject {
            reason: RejectReason::Authentication,
        }),
        Kind::Lend => Owned::Lend(
            RequestId(7),
            NamespaceId(0x6b76_7261_696c_0001),
            vec![hash(&[0xab; 32]), hash(&[1, 2, 3])],
        ),
        Kind::Lease => Owned::Lease(
            RequestId(7),
            lease,
            30_000,
            250,
            vec![
                ready(2, 0x7f00_0000_1000, 2 << 20).into(),
                Loan::NotFound.into(),
                Loan::Busy.into(),
                Loan::Failed.into(),
            ],
        ),
        Kind::Renew => Owned::Plain(Message::Renew { lease }),
        Kind::Renewed => Owned::Plain(Message::Renewed {
            lease,
            ttl_ms: 30_000,
        }),
        Kind::Complete => Owned::Complete(lease, NodeEpoch(99), 10, vec![0b0000_0101, 0b10]),
        Kind::Ranks => Owned::Ranks(lease, RanksStatus::Recorded, 0, vec![1, 0, 31]),
        Kind::Abort => Owned::Plain(Message::Abort {
            lease,
            reason: AbortReason::NoMemory,
        }),
        Kind::Ping => Owned::Plain(Message::Ping { token: 0xdead_beef }),
        Kind::Pong => Owned::Plain(Message::Pong {
            token: 0xdead_beef,
            pause_ms: 100,
            outstanding_bytes: 3 << 30,
        }),
        Kind::Goodbye => Owned::Plain(Message::Goodbye {
            reason: GoodbyeReason::Shutdown,
        }),
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
#[ignore = "writes the golden files; run it after a deliberate change of the protocol's version"]
fn write_golden_files() {
    for kind in Kind::ALL {
        std::fs::write(golden_path(*kind), hex_lines(&example(*kind).encoded())).unwrap();
    }
}

#[test]
fn every_kind_has_its_golden_encoding() {
    for kind in Kind::ALL {
        let path = golden_path(*kind);
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

/// The example of `kind`, with `bytes` written at `at`.
fn patched(kind: Kind, at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut message = example(kind).encoded();
    message[at..at + bytes.len()].copy_from_slice(bytes);
    message
}

#[test]
fn each_field_is_judged() {
    let value = |kind, field| Err(DecodeError::Value { kind, field });
    let cases = [
        (
            patched(Kind::Ping, 0, &[0]),
            Err(DecodeError::Kind { got: 0 }),
        ),
        (
            patched(Kind::Ping, 0, &[200]),
            Err(DecodeError::Kind { got: 200 }),
        ),
        (
            patched(Kind::Ping, 1, &[2]),
            Err(DecodeError::Version { got: 2 }),
        ),
        (
            patched(Kind::Ping, 3, &[1]),
            value(Kind::Ping, "reserved part"),
        ),
        (patched(Kind::Hello, 8, b"K"), value(Kind::Hello, "magic")),
        // A requester of no byte, of more bytes than there are, not UTF-8, with a space, and with
        // something behind its end.
        (
            patched(Kind::Hello, 56, &[0]),
            value(Kind::Hello, "reserved part"),
        ),
        (
            patched(Kind::Hello, 56, &[65]),
            value(Kind::Hello, "requester"),
        ),
        (
            patched(Kind::Hello, 64, &[0xff]),
            value(Kind::Hello, "requester"),
        ),
        (
            patched(Kind::Hello, 64, b" "),
            value(Kind::Hello, "requester"),
        ),
        (
            patched(Kind::Hello, 127, b"x"),
            value(Kind::Hello, "reserved part"),
        ),
        (
            patched(Kind::Reject, 8, &[99]),
            value(Kind::Reject, "reason"),
        ),
        (
            patched(Kind::Reject, 9, &[1]),
            value(Kind::Reject, "reserved part"),
        ),
        // A hash of no byte, of 33, and one with something behind its end.
        (patched(Kind::Lend, 32, &[0]), value(Kind::Lend, "hash")),
        (patched(Kind::Lend, 32, &[33]), value(Kind::Lend, "hash")),
        (patched(Kind::Lend, 65 + 4, &[1]), value(Kind::Lend, "hash")),
        (
            patched(Kind::Lend, 24, &[0, 0]),
            Err(DecodeError::Count {
                kind: Kind::Lend,
                got: 0,
            }),
        ),
        (
            patched(Kind::Lend, 24, &[0xff, 0xff]),
            Err(DecodeError::Count {
                kind: Kind::Lend,
                got: 65_535,
            }),
        ),
        // A loan of an unknown status, of rank 0 and 32, of no length, that wraps the address
        // space, and an absent one that carries a key.
        (patched(Kind::Lease, 40, &[9]), value(Kind::Lease, "loan")),
        (patched(Kind::Lease, 41, &[0]), value(Kind::Lease, "loan")),
        (patched(Kind::Lease, 41, &[32]), value(Kind::Lease, "loan")),
        (
            patched(Kind::Lease, 52, &[0; 4]),
            value(Kind::Lease, "loan"),
        ),
        (
            patched(Kind::Lease, 56, &[0xff; 8]),
            value(Kind::Lease, "loan"),
        ),
        (
            patched(Kind::Lease, 72 + 8, &[1]),
            value(Kind::Lease, "loan"),
        ),
        (
            patched(Kind::Lease, 16, &[0; 8]),
            value(Kind::Lease, "lease"),
        ),
        (
            patched(Kind::Renew, 8, &[0; 8]),
            value(Kind::Renew, "lease"),
        ),
        (
            patched(Kind::Complete, 33, &[4]),
            value(Kind::Complete, "bitmap"),
        ),
        (patched(Kind::Ranks, 22, &[4]), value(Kind::Ranks, "status")),
        (patched(Kind::Ranks, 24, &[32]), value(Kind::Ranks, "rank")),
        (
            patched(Kind::Ranks, 22, &[RanksStatus::Unknown.code()]),
            Err(DecodeError::Count {
                kind: Kind::Ranks,
                got: 3,
            }),
        ),
        (patched(Kind::Abort, 16, &[0]), value(Kind::Abort, "reason")),
        (
            patched(Kind::Confirm, 48 + 12, &[0; 8]),
            value(Kind::Confirm, "region"),
        ),
        (
            patched(Kind::Confirm, 40, &[65, 0]),
            Err(DecodeError::Count {
                kind: Kind::Confirm,
                got: 65,
            }),
        ),
    ];
    for (bytes, refusal) in cases {
        assert_eq!(decode(&bytes), refusal, "{}", hex_lines(&bytes));
    }
}

#[test]
fn the_largest_messages_fit_and_nothing_larger_is_looked_at() {
    let loans = vec![LoanEntry::from(ready(31, u64::MAX - (1 << 30), 1 << 30)); 512];
    let largest = Owned::Lease(RequestId(1), LeaseId(1), 1, 0, loans).encoded();
    assert!(largest.len() <= limits::MESSAGE_BYTES_MAX);
    assert!(decode(&largest).is_ok());
    let regions = vec![region(1, 0, 1); limits::REGIONS_MAX];
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
    assert_eq!(
        SecretKey::derive(b"secret").proof(Role::Initiator, &hello, &welcome),
        proof
    );
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
fn a_region_contains_spans_of_its_own_key_only() {
    let region = region(5, 1000, 100);
    let contains = |rkey, address, len| region.contains(&RemoteSpan { rkey, address, len });
    assert!(contains(5, 1000, 100));
    assert!(contains(5, 1099, 1));
    assert!(!contains(4, 1000, 1));
    assert!(!contains(5, 999, 1));
    assert!(!contains(5, 1099, 2));
    assert!(!contains(5, u64::MAX, u32::MAX));
}

fn introductions() -> impl Strategy<Value = Introduction> {
    let name = "[a-z0-9:.é-]{1,32}";
    (any::<[u8; 16]>(), any::<u64>(), name, any::<[u8; 16]>()).prop_map(
        |(node, epoch, requester, nonce)| Introduction {
            node: NodeId(node),
            epoch: NodeEpoch(epoch),
            requester: requester.parse().unwrap(),
            nonce,
        },
    )
}

fn region_lists() -> impl Strategy<Value = Vec<RegionEntry>> {
    let one = (any::<u32>(), 0..1_u64 << 63, 1..1_u64 << 62);
    vec(one.prop_map(|(r, a, l)| region(r, a, l)), 0..8)
}

fn loans() -> impl Strategy<Value = LoanEntry> {
    prop_oneof![
        Just(Loan::NotFound),
        Just(Loan::Busy),
        Just(Loan::Failed),
        (1..=31_u32, 0..1_u64 << 62, 1..=1_u32 << 30).prop_map(|(r, a, l)| ready(r, a, l)),
    ]
    .prop_map(LoanEntry::from)
}

fn messages() -> impl Strategy<Value = Owned> {
    let proofs = || any::<[u8; 32]>().prop_map(Proof);
    let leases = || (1..u64::MAX).prop_map(LeaseId);
    let hashes = vec(
        vec(any::<u8>(), 1..=32).prop_map(|bytes| hash(&bytes)),
        1..40,
    );
    prop_oneof![
        proptest::sample::select(Kind::ALL).prop_map(example),
        introductions().prop_map(|it| Owned::Plain(Message::Hello(it))),
        (introductions(), proofs(), region_lists()).prop_map(|(i, p, r)| Owned::Welcome(i, p, r)),
        (proofs(), region_lists()).prop_map(|(p, r)| Owned::Confirm(p, r)),
        (any::<u64>(), any::<u64>(), hashes).prop_map(|(r, n, h)| Owned::Lend(
            RequestId(r),
            NamespaceId(n),
            h
        )),
        (
            any::<u64>(),
            leases(),
            any::<u32>(),
            any::<u32>(),
            vec(loans(), 1..40)
        )
            .prop_map(|(request, lease, ttl, pause, loans)| {
                let lent = loans.iter().any(|entry| entry.loan().is_ready());
                let lease = if lent { lease } else { LeaseId::NONE };
                Owned::Lease(RequestId(request), lease, ttl, pause, loans)
            }),
        (leases(), any::<u64>(), vec(any::<bool>(), 1..100)).prop_map(|(lease, epoch, good)| {
            let mut bitmap = Vec::new();
            let count = Outcomes::pack(&mut bitmap, good.into_iter());
            Owned::Complete(lease, NodeEpoch(epoch), count, bitmap)
        }),
        (leases(), any::<u32>(), vec(0..=31_u8, 1..60)).prop_map(|(l, pause, ranks)| Owned::Ranks(
            l,
            RanksStatus::Replayed,
            pause,
            ranks
        )),
        leases().prop_map(|lease| Owned::Ranks(lease, RanksStatus::Unknown, 0, Vec::new())),
        (leases(), any::<u32>())
            .prop_map(|(lease, ttl_ms)| Owned::Plain(Message::Renewed { lease, ttl_ms })),
    ]
}

/// What decodes is encoded in exactly one way.
fn check(bytes: &[u8]) {
    if let Ok(message) = decode(bytes) {
        let mut again = Vec::new();
        message.encode(&mut again);
        assert_eq!(again, bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn what_is_encoded_decodes_to_itself(owned in messages()) {
        let bytes = owned.encoded();
        prop_assert_eq!(decode(&bytes), Ok(owned.message()));
    }

    #[test]
    fn arbitrary_bytes_are_judged(bytes in vec(any::<u8>(), 0..200)) {
        check(&bytes);
    }

    #[test]
    fn mutated_messages_are_judged(
        owned in messages(),
        flips in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
        cut in proptest::option::of(any::<proptest::sample::Index>()),
    ) {
        let mut bytes = owned.encoded();
        for (at, value) in flips {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len() + 1));
            // A header that admits to the new length leads the decoder further in.
            if let Some(body) = bytes.len().checked_sub(8) {
                bytes[4..8].copy_from_slice(&u32::try_from(body).unwrap().to_le_bytes());
            }
        }
        check(&bytes);
    }
}
