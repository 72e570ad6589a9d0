//! Whatever a peer sends is refused, or decodes to a message whose one encoding it is.
//!
//! `cargo fuzz run peer_message --dev --sanitizer=none --fuzz-dir tests/fuzz -- -runs=20000` runs on
//! stable Rust. The input is tried as it is, and as a change of one of the golden encodings, so
//! that every kind of message is reached from the first run, without a corpus.

#![no_main]

use kvrail::protocol::{Message, decode};
use libfuzzer_sys::fuzz_target;

const GOLDEN: [&str; 14] = [
    include_str!("../../golden/peer/hello.hex"),
    include_str!("../../golden/peer/welcome.hex"),
    include_str!("../../golden/peer/confirm.hex"),
    include_str!("../../golden/peer/reject.hex"),
    include_str!("../../golden/peer/lend.hex"),
    include_str!("../../golden/peer/lease.hex"),
    include_str!("../../golden/peer/renew.hex"),
    include_str!("../../golden/peer/renewed.hex"),
    include_str!("../../golden/peer/complete.hex"),
    include_str!("../../golden/peer/ranks.hex"),
    include_str!("../../golden/peer/abort.hex"),
    include_str!("../../golden/peer/ping.hex"),
    include_str!("../../golden/peer/pong.hex"),
    include_str!("../../golden/peer/goodbye.hex"),
];

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if let [pick, at, change @ ..] = bytes {
        let mut message = golden(usize::from(*pick) % GOLDEN.len());
        let at = usize::from(*at) % message.len();
        for (byte, flip) in message[at..].iter_mut().zip(change) {
            *byte ^= flip;
        }
        check(&message);
    }
});

fn golden(pick: usize) -> Vec<u8> {
    let digits: Vec<u8> = GOLDEN[pick]
        .chars()
        .filter_map(|digit| digit.to_digit(16))
        .map(|digit| digit as u8)
        .collect();
    digits
        .chunks_exact(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect()
}

fn check(bytes: &[u8]) {
    let Ok(message) = decode(bytes) else {
        return;
    };
    let mut again = Vec::new();
    message.encode(&mut again);
    assert_eq!(again, bytes);
    walk(&message);
}

/// Looks at every element of the lists, so that no accessor can fail on what was admitted.
fn walk(message: &Message<'_>) {
    match message {
        Message::Welcome { regions, .. } | Message::Confirm { regions, .. } => {
            assert!(regions.iter().all(|region| region.len() > 0));
        }
        Message::Lend { hashes, .. } => {
            for entry in *hashes {
                assert!(!entry.hash().as_bytes().is_empty());
            }
        }
        Message::Lease { loans, .. } => {
            loans.iter().for_each(|entry| drop(format!("{entry:?}")));
        }
        Message::Complete { outcomes, .. } => {
            assert_eq!(outcomes.iter().count(), usize::from(outcomes.count()));
        }
        _ => {}
    }
}
