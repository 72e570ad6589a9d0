//! Blocks that a client publishes where they lie, at the door.

use std::sync::atomic::Ordering;

use xxhash_rust::xxh3::xxh3_64;

use super::engine_tests::{load, load_from, moved, save};
use super::stand_in::{Running, eventually, hash, namespace};
use super::tests::{POOL, Raw};
use crate::layout::BlockId;
use crate::protocol::door::{
    BlockOrigin, EngineEvent, EngineReply, EngineRequest, LayoutId, LoadOutcome, PublishOutcome,
    Reply, Request, Source,
};
use crate::types::{BlockKey, EvictionRank};

fn key_of(byte: u8) -> BlockKey {
    BlockKey { namespace: namespace().id(), hash: hash(byte) }
}

fn publish_in(layout: u16, event: Option<EngineEvent>, blocks: &[(u8, u32)]) -> Request {
    let (layout, blocks) = (LayoutId(layout), moved(blocks));
    let (namespace, pulled) = (namespace(), false);
    Request::Engine(EngineRequest::Publish { namespace, pulled, layout, event, blocks })
}

fn publish(blocks: &[(u8, u32)]) -> Request {
    publish_in(0, None, blocks)
}

fn withdraw(layout: u16, blocks: &[u32]) -> Request {
    let (layout, blocks) = (LayoutId(layout), blocks.iter().copied().map(BlockId).collect());
    Request::Engine(EngineRequest::Withdraw { layout, blocks })
}

fn sentence(reply: Reply) -> String {
    match reply {
        Reply::Refused { sentence } => sentence,
        other => panic!("{other:?}"),
    }
}

#[test]
fn blocks_are_published_with_the_checksum_of_their_segments_and_no_memory_is_kept() {
    let running = Running::start(POOL);
    let (mut raw, memory) = Raw::engine(&running);
    for (at, byte) in [128, 640, 1152, 1664].into_iter().zip(b'a'..) {
        memory.write(at, &[byte; 64]).unwrap();
    }
    let bytes: Vec<u8> = (b'a'..b'e').flat_map(|byte| [byte; 64]).collect();
    let outcomes = vec![PublishOutcome::Stored; 4];
    let published = raw.ask(&publish(&[(1, 1), (2, 0), (3, 3), (4, 2)]));
    assert_eq!(published, Reply::Published { outcomes });
    {
        let all = running.service.in_place.lock().unwrap();
        assert_eq!(all.len(), 4);
        assert_eq!(all[&(LayoutId(0), BlockId(1))], (hash(1), xxh3_64(&bytes)));
        assert_eq!(all[&(LayoutId(0), BlockId(3))], (hash(3), xxh3_64(&[0; 256])));
    }
    assert_eq!(running.service.occupied(), 0, "what was summed up is given back");
    assert_eq!(raw.ask(&withdraw(0, &[1, 3])), Reply::Done { count: 2 });
    assert_eq!(raw.ask(&withdraw(0, &[1, 2])), Reply::Done { count: 1 });
    assert_eq!(
        raw.ask(&save(&[(9, 1)])),
        Reply::Published { outcomes: vec![PublishOutcome::Stored] }
    );
}

#[test]
fn what_cannot_be_published_or_is_published_is_refused_with_the_reason() {
    let running = Running::start(POOL);
    let (mut raw, _memory) = Raw::engine(&running);
    let twice = sentence(raw.ask(&publish(&[(1, 2), (2, 2)])));
    assert!(twice.contains("block 2 is named twice in one publication"), "{twice}");
    let beyond = sentence(raw.ask(&publish(&[(1, 4)])));
    assert!(beyond.contains("block 4 is not in layout 0"), "{beyond}");
    for other in [publish_in(1, None, &[(1, 0)]), withdraw(1, &[0])] {
        let elsewhere = sentence(raw.ask(&other));
        assert!(elsewhere.contains("layout 1 was not imported"), "{elsewhere}");
    }
    let event = publish_in(0, Some(EngineEvent([1; 64])), &[(1, 0)]);
    let eventful = sentence(raw.ask(&event));
    assert!(eventful.contains("host memory has no events"), "{eventful}");
    running.service.reachable.store(false, Ordering::Relaxed);
    assert_eq!(sentence(raw.ask(&publish(&[(1, 0)]))), "save them instead");
    running.service.reachable.store(true, Ordering::Relaxed);
    assert!(running.service.in_place.lock().unwrap().is_empty());
    assert!(matches!(raw.ask(&publish(&[(1, 0)])), Reply::Published { .. }));
    let published = sentence(raw.ask(&load(&[(2, 1), (3, 0)])));
    assert!(published.contains("block 0 is published in place"), "{published}");
    assert_eq!(raw.ask(&withdraw(0, &[0])), Reply::Done { count: 1 });
    assert!(matches!(raw.ask(&load(&[(3, 0)])), Reply::Engine(EngineReply::Loaded { .. })));
}

#[test]
fn what_a_peer_has_lands_in_the_layout_and_what_is_here_is_copied_there() {
    let running = Running::start(POOL);
    let service = &running.service;
    let (mut raw, memory) = Raw::engine(&running);
    memory.write(128, &[b'x'; 64]).unwrap();
    assert!(matches!(raw.ask(&save(&[(1, 1)])), Reply::Published { .. }));
    let bytes: Vec<u8> = (b'a'..b'e').flat_map(|byte| [byte; 64]).collect();
    let held = service.remote.lock().unwrap().insert(key_of(2), bytes);
    assert_eq!(held, None);
    let blocks = [(1, 3), (2, 0), (3, 2)];
    let load = load_from(Source::Anywhere, true, &blocks);
    let rank = EvictionRank::FIRST;
    let loaded = |origin, in_place| LoadOutcome::Loaded { origin, rank, in_place };
    let outcomes = vec![
        loaded(BlockOrigin::Local, false),
        loaded(BlockOrigin::Fetched, true),
        LoadOutcome::NotFound,
    ];
    assert_eq!(raw.ask(&load), Reply::Engine(EngineReply::Loaded { outcomes }));
    let mut here = [0; 1];
    memory.read(3 * 128, &mut here).unwrap();
    assert_eq!(&here, b"x");
    for (at, byte) in [0, 512, 1024, 1536].into_iter().zip(b'a'..) {
        memory.read(at, &mut here).unwrap();
        assert_eq!(here, [byte]);
    }
    assert_eq!((service.pins(), service.occupied()), (0, 1), "the pool has the saved one alone");
    // It is published, and the engine has to have it back.
    let published = sentence(raw.ask(&load));
    assert!(published.contains("block 0 is published in place"), "{published}");
    assert_eq!(raw.ask(&withdraw(0, &[0, 3])), Reply::Done { count: 1 });
    // Where no bytes of peers come into the layout they land in the pool.
    service.reachable.store(false, Ordering::Relaxed);
    let outcomes = vec![loaded(BlockOrigin::Fetched, false)];
    let load = load_from(Source::Anywhere, true, &[(2, 0)]);
    assert_eq!(raw.ask(&load), Reply::Engine(EngineReply::Loaded { outcomes }));
    assert_eq!((service.pins(), service.occupied()), (0, 2));
}

#[test]
fn a_client_waits_for_its_blocks_and_for_nothing_else_meanwhile() {
    let running = Running::start(POOL);
    let (mut raw, _memory) = Raw::engine(&running);
    assert!(matches!(raw.ask(&publish(&[(1, 0)])), Reply::Published { .. }));
    running.service.open.send_replace(false);
    raw.send(1, &withdraw(0, &[0]));
    raw.send(2, &Request::Stat);
    assert!(matches!(raw.receive(), (2, Reply::Stat { .. })), "the withdrawal is not over");
    running.service.open.send_replace(true);
    assert_eq!(raw.receive(), (1, Reply::Done { count: 1 }));
}

#[test]
fn a_publication_whose_client_is_gone_comes_to_nothing() {
    let running = Running::start(POOL);
    let service = &running.service;
    let (mut raw, _memory) = Raw::engine(&running);
    service.gate.set(false);
    raw.send(1, &publish(&[(1, 0), (2, 1)]));
    eventually("the copy runs", || service.occupied() == 2);
    raw.leave();
    assert_eq!(service.claims.len(), 1, "the copy holds the memory");
    service.gate.set(true);
    eventually("all is given back", || service.claims.is_empty() && service.occupied() == 0);
    assert!(service.in_place.lock().unwrap().is_empty());
    eventually("the node knows", || service.left.load(Ordering::Relaxed) == 1);
}
