//! Whatever a peer sends is refused, or decodes to a message whose one encoding it is.
//!
//! `cargo fuzz run peer_message --sanitizer=none --fuzz-dir tests/fuzz -- -runs=20000` runs on
//! stable Rust. The golden encodings in `tests/golden/peer` make a good corpus.

#![no_main]

use kvrail::protocol::{Message, decode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(message) = decode(bytes) else {
        return;
    };
    let mut again = Vec::new();
    message.encode(&mut again);
    assert_eq!(again, bytes);
    walk(&message);
});

/// Looks at every element of the lists, so that no accessor can fail on what was admitted.
fn walk(message: &Message<'_>) {
    match message {
        Message::Welcome { regions, .. } | Message::Confirm { regions, .. } => {
            assert!(regions.iter().all(|region| region.len() > 0));
        }
        Message::Lend { hashes, .. } => {
            assert!(
                hashes
                    .iter()
                    .all(|entry| !entry.hash().as_bytes().is_empty())
            );
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
