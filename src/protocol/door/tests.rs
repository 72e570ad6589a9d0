use std::fmt::Write as _;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::samples::{HOLD, frames, golden, outcomes, replies, reports, requests};
use super::wire::busy_code;
use super::*;
use crate::event::BusyReason;
use crate::types::{BlockHash, EvictionRank, Extent, Namespace, NamespaceId, NodeId, PoolId};

/// Sixteen bytes to a line.
fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for line in bytes.chunks(16) {
        for byte in line {
            write!(text, "{byte:02x}").unwrap();
        }
        text.push('\n');
    }
    text
}

fn split(frame: &[u8]) -> (Header, &[u8]) {
    let (head, body) = frame.split_first_chunk().unwrap();
    let header = Header::decode(*head).unwrap();
    assert_eq!(header.len as usize, body.len());
    (header, body)
}

#[test]
fn encodings_are_the_golden_ones() {
    for (name, frame) in frames() {
        let file = golden(name);
        crate::protocol::rewrite_golden(&file, &hex(&frame));
        let golden = std::fs::read_to_string(&file).unwrap();
        assert_eq!(hex(&frame), golden, "{name}: a change of the encoding needs another VERSION");
    }
}

#[test]
fn each_message_decodes_in_its_own_direction_only() {
    for (name, request) in requests() {
        let mut frame = Vec::new();
        request.encode(5, &mut frame).unwrap();
        let (header, body) = split(&frame);
        assert_eq!(header.request, 5);
        assert_eq!(Request::decode(header, body).as_ref(), Ok(&request), "{name}");
        let kind = header.kind;
        assert_eq!(Reply::decode(header, body), Err(DecodeError::Kind { kind }));
    }
    for (name, reply) in replies().into_iter().chain(reports()) {
        let mut frame = Vec::new();
        reply.encode(5, &mut frame).unwrap();
        let (header, body) = split(&frame);
        assert_eq!(Reply::decode(header, body).as_ref(), Ok(&reply), "{name}");
        let kind = header.kind;
        assert_eq!(Request::decode(header, body), Err(DecodeError::Kind { kind }));
    }
}

#[test]
fn headers_of_others_are_refused() {
    let good = Header { len: 0, kind: 1, request: 9 }.encode();
    let with = |at: usize, byte| {
        let mut bytes = good;
        bytes[at] = byte;
        Header::decode(bytes)
    };
    assert!(Header::decode(good).is_ok());
    assert_eq!(with(5, 1), Err(DecodeError::Version { got: 1 }));
    assert_eq!(with(6, 1), Err(DecodeError::Field { field: "reserved" }));
    assert!(matches!(with(3, 1), Err(DecodeError::TooLong { .. })));
}

#[test]
fn fields_outside_their_ranges_are_refused() {
    let broken = |name: &str, at: usize, byte: u8| {
        let (_, mut frame) = frames().into_iter().find(|frame| frame.0 == name).unwrap();
        frame[HEADER_BYTES + at] = byte;
        let (header, body) = split(&frame);
        Request::decode(header, body)
            .map(drop)
            .or_else(|error| match error {
                DecodeError::Kind { .. } => Reply::decode(header, body).map(drop),
                error => Err(error),
            })
            .unwrap_err()
    };
    let field = |field| DecodeError::Field { field };
    // An acquire is a name (length, 64 bytes), a source with its node (16 bytes), a count and hashes
    // (length, 32 bytes).
    assert_eq!(broken("acquire", 0, 0), field("namespace"));
    assert_eq!(broken("acquire", 0, 65), field("namespace"));
    assert_eq!(broken("acquire", 1, b' '), field("namespace"));
    assert_eq!(broken("acquire", 1, 0xff), field("namespace"));
    assert_eq!(broken("acquire", 64, 1), field("namespace"));
    assert_eq!(broken("acquire", 65, 3), field("source"));
    assert_eq!(broken("acquire", 66, 1), field("source"));
    assert_eq!(broken("acquire", 82, 3), DecodeError::Length);
    assert!(matches!(
        broken("acquire", 85, 1),
        DecodeError::Count { limit: limits::DOOR_BLOCKS_MAX, .. }
    ));
    assert_eq!(broken("acquire", 86, 0), field("hash"));
    assert_eq!(broken("acquire", 86, 33), field("hash"));
    assert_eq!(broken("acquire", 121, 1), field("hash"));
    assert_eq!(broken("published", 4, 9), field("outcome"));
    assert_eq!(broken("acquired", 4, 9), field("status"));
    assert_eq!(broken("acquired", 4, 1), field("status"));
    assert_eq!(broken("acquired", 5, 9), field("origin"));
    assert_eq!(broken("acquired", 6, 32), field("rank"));
    assert_eq!(broken("acquired", 6, 0), field("rank"));
    assert_eq!(broken("flushed", 0, 2), field("known"));
    assert_eq!(broken("refused", 0, 0xff), field("text"));
    assert_eq!(broken("reserve", 4, 0), field("size"));
    assert_eq!(broken("list", 74, 0xff), field("max"));
    // A memory is a source, a device (16 bytes), a handle (64) and a length.
    assert_eq!(broken("import_memfd", 0, 3), field("memory source"));
    assert_eq!(broken("import_memfd", 1, 1), field("memory source"));
    assert_eq!(broken("import_shareable", 17, 1), field("memory source"));
    assert_eq!(broken("import_ipc", 88, 1), field("bytes"));
    // A load is a name, a source with its node, a layout (2) and a flag.
    assert_eq!(broken("load", 65, 3), field("source"));
    assert_eq!(broken("load", 84, 2), field("in place"));
    // A save is a name and a flag (66 bytes), a layout (2), and an event behind a flag.
    assert_eq!(broken("save", 68, 2), field("event"));
    assert_eq!(broken("save", 69, 1), field("event"));
    assert_eq!(broken("import_refused", 0, 0), field("reason"));
    assert_eq!(broken("loaded", 4, 9), field("status"));
    assert_eq!(broken("loaded", 5, 9), field("origin"));
    assert_eq!(broken("loaded", 6, 32), field("rank"));
    assert_eq!(broken("loaded", 14, 1), field("status"));
}

#[test]
fn lists_beyond_the_limit_are_not_sent() {
    let mut out = vec![1, 2, 3];
    let many = Request::Reserve { sizes: vec![1; limits::DOOR_BLOCKS_MAX + 1] };
    let refused = many.encode(1, &mut out).unwrap_err();
    assert_eq!(refused.count, limits::DOOR_BLOCKS_MAX + 1);
    let long = Reply::Stat { json: "x".repeat(limits::DOOR_MESSAGE_BYTES_MAX + 1) };
    assert!(long.encode(1, &mut out).is_err());
    assert_eq!(out, [1, 2, 3]);
}

fn hashes() -> impl Strategy<Value = BlockHash> {
    vec(any::<u8>(), 1..=32).prop_map(|bytes| BlockHash::new(&bytes).unwrap())
}

fn namespaces() -> impl Strategy<Value = Namespace> {
    "[!-~é]{1,32}".prop_map(|name| name.parse().unwrap())
}

fn extents() -> impl Strategy<Value = Extent> {
    let len = 1..=limits::BLOCK_BYTES_MAX;
    (any::<u16>(), 0..u64::MAX / 2, len).prop_map(|(pool, offset, len)| Extent {
        pool: PoolId(pool),
        offset,
        len,
    })
}

fn ranks() -> impl Strategy<Value = EvictionRank> {
    (1..=31_u32).prop_map(EvictionRank::clamped)
}

fn sources() -> impl Strategy<Value = Source> {
    prop_oneof![
        Just(Source::Here),
        Just(Source::Anywhere),
        any::<[u8; 16]>().prop_map(|node| Source::From(NodeId(node))),
    ]
}

fn any_request() -> impl Strategy<Value = Request> {
    let publish = (hashes(), extents(), any::<u64>())
        .prop_map(|(hash, extent, checksum)| PublishBlock { hash, extent, checksum });
    let list = (proptest::option::of(namespaces()), any::<u64>(), 1..=4096_u32);
    prop_oneof![
        select(requests()).prop_map(|(_, request)| request),
        (namespaces(), any::<bool>(), vec(publish, 0..20))
            .prop_map(|(namespace, pulled, blocks)| Request::Publish { namespace, pulled, blocks }),
        (namespaces(), sources(), vec(hashes(), 0..20))
            .prop_map(|(namespace, source, hashes)| Request::Acquire { namespace, source, hashes }),
        vec(extents(), 0..20).prop_map(|extents| Request::Discard { extents }),
        list.prop_map(|(namespace, cursor, max)| Request::List { namespace, cursor, max }),
    ]
}

fn any_reply() -> impl Strategy<Value = Reply> {
    let ready = (any::<bool>(), ranks(), extents(), any::<u64>()).prop_map(
        |(fetched, rank, extent, checksum)| {
            AcquireOutcome::Ready(HeldBlock {
                origin: if fetched { BlockOrigin::Fetched } else { BlockOrigin::Local },
                rank,
                extent,
                checksum,
                hold: HOLD,
            })
        },
    );
    let entry =
        (proptest::option::of(namespaces()), hashes(), ranks(), any::<(u64, u32, u16, u16)>())
            .prop_map(|(name, hash, rank, (namespace, bytes, pins, requesters))| ListEntry {
                namespace: NamespaceId(namespace),
                name,
                hash,
                rank,
                bytes,
                pins,
                requesters,
            });
    prop_oneof![
        select([replies(), reports()].concat()).prop_map(|(_, reply)| reply),
        vec(select(outcomes().to_vec()), 0..20).prop_map(|outcomes| Reply::Published { outcomes }),
        vec(ready, 0..20).prop_map(|outcomes| Reply::Acquired { outcomes }),
        (any::<u64>(), vec(entry, 0..20))
            .prop_map(|(next, entries)| Reply::Listed { next, entries }),
    ]
}

/// What decodes must encode to the same bytes; nothing may panic.
fn decode_both(header: Header, body: &[u8]) {
    let mut again = Vec::new();
    if let Ok(request) = Request::decode(header, body) {
        request.encode(header.request, &mut again).unwrap();
        assert_eq!(again, [&header.encode(), body].concat());
    }
    again.clear();
    if let Ok(reply) = Reply::decode(header, body) {
        reply.encode(header.request, &mut again).unwrap();
        assert_eq!(again, [&header.encode(), body].concat());
    }
}

fn header(kind: u8, body: &[u8]) -> Header {
    Header { len: u32::try_from(body.len()).unwrap(), kind, request: 1 }
}

proptest! {
    #[test]
    fn requests_survive_the_wire(request in any_request(), number in any::<u32>()) {
        let mut frame = Vec::new();
        request.encode(number, &mut frame).unwrap();
        let (header, body) = split(&frame);
        prop_assert_eq!(header.request, number);
        prop_assert_eq!(Request::decode(header, body), Ok(request));
    }

    #[test]
    fn replies_survive_the_wire(reply in any_reply(), number in any::<u32>()) {
        let mut frame = Vec::new();
        reply.encode(number, &mut frame).unwrap();
        let (header, body) = split(&frame);
        prop_assert_eq!(header.request, number);
        prop_assert_eq!(Reply::decode(header, body), Ok(reply));
    }

    #[test]
    fn garbage_is_decoded_without_a_panic(kind in any::<u8>(), body in vec(any::<u8>(), 0..300)) {
        decode_both(header(kind, &body), &body);
    }

    #[test]
    fn damaged_messages_are_decoded_without_a_panic(
        frame in select(frames()),
        damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<proptest::sample::Index>(),
        is_cut in any::<bool>(),
    ) {
        let (head, body) = split(&frame.1);
        let mut body = body.to_vec();
        if is_cut {
            body.truncate(cut.index(body.len() + 1));
        }
        for (at, byte) in damage {
            if !body.is_empty() {
                let at = at.index(body.len());
                body[at] = byte;
            }
        }
        decode_both(header(head.kind, &body), &body);
    }

    #[test]
    fn any_header_is_decoded_without_a_panic(bytes in any::<[u8; HEADER_BYTES]>()) {
        if let Ok(header) = Header::decode(bytes) {
            prop_assert_eq!(header.encode(), bytes);
        }
    }
}

#[test]
fn each_reason_to_wait_has_a_byte_of_its_own_wherever_it_stands() {
    let reply = |reason| {
        [
            Reply::Busy { pause_ms: 7, reason },
            Reply::Acquired { outcomes: vec![AcquireOutcome::Busy(reason)] },
            Reply::Engine(EngineReply::Loaded { outcomes: vec![LoadOutcome::Busy(reason)] }),
        ]
    };
    let mut seen = std::collections::BTreeSet::new();
    for reason in BusyReason::ALL {
        assert!(seen.insert(busy_code(reason)) && !reason.as_str().is_empty());
        for reply in reply(reason) {
            let mut frame = Vec::new();
            reply.encode(1, &mut frame).unwrap();
            let (header, body) = split(&frame);
            assert_eq!(Reply::decode(header, body), Ok(reply));
        }
    }
    for byte in (0..=u8::MAX).filter(|byte| !seen.contains(byte)) {
        for reply in reply(BusyReason::Memory) {
            let mut frame = Vec::new();
            reply.encode(1, &mut frame).unwrap();
            let known = busy_code(BusyReason::Memory);
            let at = frame.iter().rposition(|at| *at == known).unwrap();
            frame[at] = byte;
            let (header, body) = split(&frame);
            assert_eq!(Reply::decode(header, body), Err(DecodeError::Field { field: "reason" }));
        }
    }
}
