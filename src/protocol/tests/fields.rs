//! Each field of each message, set to what no node sends.

use super::*;

/// The example of `kind`, with `bytes` written at `at`.
fn patched(kind: Kind, at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut message = example(kind).encoded();
    message[at..at + bytes.len()].copy_from_slice(bytes);
    message
}

/// A kind, an offset, what is written there, and the field that is then refused.
type Case = (Kind, usize, &'static [u8], &'static str);

const RESERVED: &str = "reserved part";

const HANDSHAKE: &[Case] = &[
    (Kind::Hello, 8, b"K", "magic"),
    (Kind::Beside, 8, b"K", "magic"),
    // A requester of no byte, of more bytes than there are, not UTF-8, with a space, and with
    // something behind its end.
    (Kind::Hello, 56, &[0], RESERVED),
    (Kind::Hello, 56, &[65], "requester"),
    (Kind::Hello, 64, &[0xff], "requester"),
    (Kind::Hello, 64, b" ", "requester"),
    (Kind::Hello, 127, b"x", RESERVED),
    (Kind::Hello, 57, &[1], RESERVED),
    (Kind::Welcome, 8 + 112 + 34, &[1], RESERVED),
    // A region of no length, and one that wraps the address space.
    (Kind::Confirm, 48 + 12, &[0; 8], "region"),
    (Kind::Confirm, 48 + 4, &[0xff; 8], "region"),
    (Kind::Reject, 8, &[99], "reason"),
    (Kind::Reject, 9, &[1], RESERVED),
    (Kind::Goodbye, 8, &[0], "reason"),
];

const LEASES: &[Case] = &[
    (Kind::Lend, 26, &[1], RESERVED),
    // A hash of no byte, of 33, and one with something behind its end.
    (Kind::Lend, 32, &[0], "hash"),
    (Kind::Lend, 32, &[33], "hash"),
    (Kind::Lend, 65 + 4, &[1], "hash"),
    // A loan of an unknown status, of rank 0 and 32, of no length and too long, that wraps the
    // address space, and an absent one that carries a key.
    (Kind::Lease, 48, &[9], "loan"),
    // A block of a number beyond 32 bits.
    (Kind::Lease, 48 + 4 * 32 + 20, &[1], "loan"),
    (Kind::Layout, 8 + 12, &[1], RESERVED),
    // A layout of no block and of too many, and a region of no length.
    (Kind::Layout, 8 + 4, &[0; 4], "blocks"),
    (Kind::Layout, 8 + 7, &[2], "blocks"),
    (Kind::Layout, 8 + 16 + 12, &[0; 8], "region"),
    (Kind::Lease, 49, &[0], "loan"),
    (Kind::Lease, 49, &[32], "loan"),
    (Kind::Lease, 50, &[1], "loan"),
    (Kind::Lease, 51, &[1], "loan"),
    (Kind::Lease, 60, &[0; 4], "loan"),
    (Kind::Lease, 60, &[1, 0, 0, 0x40], "loan"),
    (Kind::Lease, 64, &[0xff; 8], "loan"),
    (Kind::Lease, 80 + 8, &[1], "loan"),
    // A refusal without a reason, and one for a reason that there is not.
    (Kind::Lease, 112 + 2, &[0], "loan"),
    (Kind::Lease, 112 + 2, &[9], "loan"),
    // Loans without a lease.
    (Kind::Lease, 16, &[0; 8], "lease"),
    (Kind::Lease, 42, &[1], RESERVED),
    (Kind::Renew, 8, &[0; 8], "lease"),
    (Kind::Renewed, 8, &[0; 8], "lease"),
    (Kind::Complete, 8, &[0; 8], "lease"),
    (Kind::Complete, 33, &[4], "bitmap"),
    (Kind::Ranks, 30, &[4], "status"),
    (Kind::Ranks, 31, &[4], RESERVED),
    (Kind::Ranks, 32, &[32], "rank"),
    (Kind::Abort, 16, &[0], "reason"),
    (Kind::Ping, 3, &[1], RESERVED),
];

#[test]
fn each_field_is_judged() {
    for &(kind, at, bytes, field) in HANDSHAKE.iter().chain(LEASES) {
        let message = patched(kind, at, bytes);
        let refusal = Err(DecodeError::Value { kind, field });
        assert_eq!(decode(&message), refusal, "{} at {at}", kind.name());
    }
}

#[test]
fn kinds_and_versions_are_judged() {
    for got in [0, 18, 200] {
        let refusal = Err(DecodeError::Kind { got });
        assert_eq!(decode(&patched(Kind::Ping, 0, &[got])), refusal);
    }
    for got in [0, 3, 5] {
        let refusal = Err(DecodeError::Version { got });
        assert_eq!(decode(&patched(Kind::Ping, 1, &[got])), refusal);
    }
}

#[test]
fn counts_are_judged_before_their_lists() {
    let unknown = RanksStatus::Unknown.code();
    let cases: [(Kind, usize, &[u8], usize); 11] = [
        (Kind::Lend, 24, &[0, 0], 0),
        (Kind::Lend, 24, &[1, 2], 513),
        (Kind::Lease, 40, &[0xff, 0xff], 65_535),
        (Kind::Complete, 24, &[0, 0], 0),
        (Kind::Confirm, 40, &[0x41, 1], 321),
        (Kind::Ranks, 28, &[1, 2], 513),
        (Kind::Layout, 16, &[0, 0], 0),
        (Kind::Layout, 16, &[0x41, 1], 321),
        (Kind::Layout, 18, &[0, 0], 0),
        (Kind::Layout, 18, &[1, 1], 257),
        // An unknown lease with ranks.
        (Kind::Ranks, 30, &[unknown], 3),
    ];
    for (kind, at, bytes, got) in cases {
        let refusal = Err(DecodeError::Count { kind, got });
        assert_eq!(decode(&patched(kind, at, bytes)), refusal);
    }
    // Within the limits, but not what is there.
    for (kind, at, count) in [(Kind::Lend, 24, 3), (Kind::Lease, 40, 3), (Kind::Ranks, 28, 2)] {
        let refusal = Err(DecodeError::Length { kind });
        assert_eq!(decode(&patched(kind, at, &[count, 0])), refusal);
    }
}
