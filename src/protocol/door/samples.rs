//! One of each message, for tests.

use std::path::PathBuf;

use super::*;
use crate::types::{
    BlockHash, EvictionRank, Extent, Generation, Namespace, NamespaceId, NodeId, PoolId,
    ResidentCause, ResidentId,
};

pub(super) fn hash(byte: u8, len: usize) -> BlockHash {
    BlockHash::new(&vec![byte; len]).unwrap()
}

pub(super) fn namespace() -> Namespace {
    "llama-70b/tp8".parse().unwrap()
}

pub(super) const EXTENT: Extent =
    Extent { pool: PoolId(2), offset: 0x0102_0304_0506, len: 2 << 20 };

pub(super) const HOLD: ResidentId = ResidentId { slot: 0x0a0b_0c0d, generation: Generation(7) };

/// One of each request, by the name of its golden file.
pub(super) fn requests() -> Vec<(&'static str, Request)> {
    vec![
        ("hello", Request::Hello),
        ("reserve", Request::Reserve { sizes: vec![1, 2 << 20, limits::BLOCK_BYTES_MAX] }),
        (
            "publish",
            Request::Publish {
                namespace: namespace(),
                pulled: true,
                blocks: vec![PublishBlock {
                    hash: hash(0xaa, 32),
                    extent: EXTENT,
                    checksum: 0x1122_3344_5566_7788,
                }],
            },
        ),
        ("discard", Request::Discard { extents: vec![EXTENT] }),
        (
            "acquire",
            Request::Acquire {
                namespace: namespace(),
                source: Source::Anywhere,
                hashes: vec![hash(0xaa, 32), hash(0xbb, 1)],
            },
        ),
        ("release", Request::Release { holds: vec![HOLD] }),
        (
            "finished_sending",
            Request::FinishedSending { namespace: namespace(), hashes: vec![hash(0xaa, 8)] },
        ),
        ("flush", Request::Flush { deadline_ms: 1500 }),
        ("stat", Request::Stat),
        ("list", Request::List { namespace: None, cursor: 0x0102, max: 100 }),
        ("evictions", Request::Evictions { since: 0x0102 }),
        ("reset_health", Request::ResetHealth { node: Some(NodeId([0x5a; 16])) }),
    ]
}

/// One of each reply, by the name of its golden file.
pub(super) fn replies() -> Vec<(&'static str, Reply)> {
    vec![
        ("welcome", Reply::Welcome { pools: vec![PoolSize { id: PoolId(2), bytes: 30 << 30 }] }),
        ("reserved", Reply::Reserved { extents: vec![EXTENT] }),
        ("busy", Reply::Busy { pause_ms: 20 }),
        ("refused", Reply::Refused { sentence: "no".to_owned() }),
        ("published", Reply::Published { outcomes: outcomes().to_vec() }),
        (
            "acquired",
            Reply::Acquired {
                outcomes: vec![
                    AcquireOutcome::Ready(held()),
                    AcquireOutcome::NotFound,
                    AcquireOutcome::Busy,
                    AcquireOutcome::Failed,
                ],
            },
        ),
        ("done", Reply::Done { count: 3 }),
        ("flushed", Reply::Flushed { known: true }),
    ]
}

/// The rest of the replies: what the node says of itself.
pub(super) fn reports() -> Vec<(&'static str, Reply)> {
    vec![
        ("stat_reply", Reply::Stat { json: "{}".to_owned() }),
        (
            "listed",
            Reply::Listed {
                next: 0x0102,
                entries: vec![ListEntry {
                    namespace: namespace().id(),
                    name: Some(namespace()),
                    hash: hash(0xaa, 32),
                    rank: EvictionRank::LAST,
                    bytes: 4096,
                    pins: 3,
                    requesters: 4,
                }],
            },
        ),
        (
            "evicted",
            Reply::Evicted {
                entries: vec![EvictedBlock {
                    sequence: 9,
                    namespace: NamespaceId(0x0102_0304),
                    hash: hash(0xaa, 32),
                    rank: EvictionRank::FIRST,
                }],
            },
        ),
    ]
}

pub(super) fn outcomes() -> [PublishOutcome; 5] {
    let [one, two, three] = ResidentCause::ALL.map(PublishOutcome::AlreadyResident);
    [PublishOutcome::Stored, one, two, three, PublishOutcome::Refused]
}

pub(super) fn held() -> HeldBlock {
    HeldBlock {
        origin: BlockOrigin::Fetched,
        rank: EvictionRank::clamped(3),
        extent: EXTENT,
        checksum: 0x1122_3344_5566_7788,
        hold: HOLD,
    }
}

pub(super) fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/door").join(format!("{name}.hex"))
}

/// Every message with its golden file's name and its frame under number 0x01020304.
pub(super) fn frames() -> Vec<(&'static str, Vec<u8>)> {
    let number = 0x0102_0304;
    let mut all = Vec::new();
    for (name, request) in requests() {
        let mut frame = Vec::new();
        request.encode(number, &mut frame).unwrap();
        all.push((name, frame));
    }
    for (name, reply) in replies().into_iter().chain(reports()) {
        let mut frame = Vec::new();
        reply.encode(number, &mut frame).unwrap();
        all.push((name, frame));
    }
    all
}
