//! One of each message, for tests.

use std::path::PathBuf;

use super::*;
use crate::event::{BusyReason, LendRefusal};
use crate::layout::{AllocationId, BlockId, KvSplit, Tensor};
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
    .into_iter()
    .chain(engine_requests())
    .chain(in_place_requests())
    .collect()
}

const DEVICE: DeviceUuid = DeviceUuid([0xd7; 16]);

fn moved() -> Vec<MovedBlock> {
    vec![
        MovedBlock { hash: hash(0xaa, 32), block: BlockId(0x0a0b_0c0d) },
        MovedBlock { hash: hash(0xbb, 1), block: BlockId(0) },
    ]
}

/// What an engine asks.
fn engine_requests() -> Vec<(&'static str, Request)> {
    let bytes = 0x0102_0304_0506;
    let memory = |source| Request::Engine(EngineRequest::ImportMemory { source, bytes });
    let tensor = Tensor {
        allocation: AllocationId(3),
        offset: 0x1000,
        layers: 80,
        layer_stride: 0x0102_0304_0500,
        kv: KvSplit::Split { stride: 0x0001_0000_0000 },
        block_stride: 0x8000,
        segment_bytes: 0x4000,
    };
    let fused = Tensor { kv: KvSplit::Fused, layers: 1, ..tensor };
    let layout = LayoutId(0x0102);
    vec![
        ("import_memfd", memory(MemorySource::Memfd)),
        ("import_ipc", memory(MemorySource::CudaIpc { device: DEVICE, handle: [0x1c; 64] })),
        ("import_shareable", memory(MemorySource::CudaShareable { device: DEVICE })),
        (
            "import_layout",
            Request::Engine(EngineRequest::ImportLayout {
                blocks: 40_000,
                tensors: vec![tensor, fused],
            }),
        ),
        (
            "save",
            Request::Engine(EngineRequest::Save {
                namespace: namespace(),
                pulled: true,
                layout,
                event: None,
                blocks: moved(),
            }),
        ),
        (
            "save_after",
            Request::Engine(EngineRequest::Save {
                namespace: namespace(),
                pulled: false,
                layout,
                event: Some(EngineEvent([0xe1; 64])),
                blocks: moved(),
            }),
        ),
        (
            "load",
            Request::Engine(EngineRequest::Load {
                namespace: namespace(),
                source: Source::Anywhere,
                layout,
                in_place: false,
                blocks: moved(),
            }),
        ),
    ]
}

/// What an engine asks about blocks that peers read where they lie.
fn in_place_requests() -> Vec<(&'static str, Request)> {
    let layout = LayoutId(0x0102);
    vec![
        (
            "load_in_place",
            Request::Engine(EngineRequest::Load {
                namespace: namespace(),
                source: Source::Anywhere,
                layout,
                in_place: true,
                blocks: moved(),
            }),
        ),
        (
            "publish_in_place",
            Request::Engine(EngineRequest::Publish {
                namespace: namespace(),
                pulled: false,
                layout,
                event: Some(EngineEvent([0xe1; 64])),
                blocks: moved(),
            }),
        ),
        (
            "withdraw",
            Request::Engine(EngineRequest::Withdraw {
                layout,
                blocks: vec![BlockId(0x0a0b_0c0d), BlockId(0)],
            }),
        ),
    ]
}

/// What an engine is told.
fn engine_replies() -> Vec<(&'static str, Reply)> {
    let rank = EvictionRank::clamped(3);
    let loaded = |origin, in_place| LoadOutcome::Loaded { origin, rank, in_place };
    let outcomes = vec![
        loaded(BlockOrigin::Local, false),
        loaded(BlockOrigin::Fetched, false),
        loaded(BlockOrigin::Fetched, true),
        LoadOutcome::NotFound,
        LoadOutcome::Busy(BusyReason::Owner(LendRefusal::Quota)),
        LoadOutcome::Failed,
    ];
    let (reason, sentence) = (ImportRefusal::Layout, "no".to_owned());
    let layout = LayoutId(0x0102);
    [
        ("memory_imported", EngineReply::MemoryImported { allocation: AllocationId(0x0102) }),
        ("layout_imported", EngineReply::LayoutImported { layout, block_bytes: 2 << 20 }),
        ("import_refused", EngineReply::ImportRefused { reason, sentence }),
        ("loaded", EngineReply::Loaded { outcomes }),
    ]
    .map(|(name, reply)| (name, Reply::Engine(reply)))
    .to_vec()
}

/// One of each reply, by the name of its golden file.
pub(super) fn replies() -> Vec<(&'static str, Reply)> {
    vec![
        ("welcome", Reply::Welcome { pools: vec![PoolSize { id: PoolId(2), bytes: 30 << 30 }] }),
        ("reserved", Reply::Reserved { extents: vec![EXTENT] }),
        ("busy", Reply::Busy { pause_ms: 20, reason: BusyReason::Waits }),
        ("refused", Reply::Refused { sentence: "no".to_owned() }),
        ("published", Reply::Published { outcomes: outcomes().to_vec() }),
        (
            "acquired",
            Reply::Acquired {
                outcomes: vec![
                    AcquireOutcome::Ready(held()),
                    AcquireOutcome::NotFound,
                    AcquireOutcome::Busy(BusyReason::Memory),
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
    .into_iter()
    .chain(engine_replies())
    .collect()
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
