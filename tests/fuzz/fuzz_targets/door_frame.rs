//! Whatever comes through the local door, from either side, is refused or decodes to a frame whose
//! one encoding it is.
//!
//! `cargo fuzz run door_frame --dev --sanitizer=none --fuzz-dir tests/fuzz -- -runs=20000` runs on
//! stable Rust. The first byte picks the kind, so that every kind is reached without a corpus.

#![no_main]

use kvrail::protocol::door::{HEADER_BYTES, Header, Reply, Request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some((head, body)) = bytes.split_first_chunk::<HEADER_BYTES>()
        && let Ok(header) = Header::decode(*head)
    {
        check(header, body);
    }
    if let [kind, body @ ..] = bytes {
        let len = u32::try_from(body.len()).unwrap();
        check(Header { len, kind: *kind, request: 7 }, body);
    }
});

fn check(header: Header, body: &[u8]) {
    let mut again = Vec::new();
    if let Ok(request) = Request::decode(header, body) {
        request.encode(header.request, &mut again).unwrap();
        assert_eq!(&again[HEADER_BYTES..], body, "{request:?}");
    }
    again.clear();
    if let Ok(reply) = Reply::decode(header, body) {
        reply.encode(header.request, &mut again).unwrap();
        assert_eq!(&again[HEADER_BYTES..], body, "{reply:?}");
    }
}
