//! A client's own memory at the door: what it may import, and what its end leaves behind.

use std::fs::File;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::importing::import;
use super::stand_in::{Running, eventually, hash, namespace};
use super::tests::{POOL, Raw};
use crate::layout::{AllocationId, BlockId, KvSplit, Layout, Tensor};
use crate::limits;
use crate::memory::{Identity, ImportError, Mapping, Owner};
use crate::protocol::door::{
    DeviceUuid, EngineEvent, EngineReply, EngineRequest, ImportRefusal, LayoutId, LoadOutcome,
    MemorySource, MovedBlock, PublishOutcome, Reply, Request, Source,
};
use crate::sys::fd_passing;
use crate::types::Namespace;

pub(super) const BYTES: u64 = 64 << 10;

/// Four blocks of 2 layers with K and V of 64 bytes.
pub(super) const TENSOR: Tensor = Tensor {
    allocation: AllocationId(0),
    offset: 0,
    layers: 2,
    layer_stride: 1024,
    kv: KvSplit::Split { stride: 512 },
    block_stride: 128,
    segment_bytes: 64,
};

pub(super) fn memory() -> (Mapping, File) {
    let mapping = Mapping::anonymous("kvrail-test", BYTES).unwrap();
    let file = mapping.file().unwrap().try_clone().unwrap();
    (mapping, file)
}

pub(super) fn memfd(bytes: u64) -> Request {
    Request::Engine(EngineRequest::ImportMemory { source: MemorySource::Memfd, bytes })
}

pub(super) fn layout(tensors: Vec<Tensor>) -> Request {
    Request::Engine(EngineRequest::ImportLayout { blocks: 4, tensors })
}

pub(super) fn moved(blocks: &[(u8, u32)]) -> Vec<MovedBlock> {
    let one = |&(byte, block): &_| MovedBlock { hash: hash(byte), block: BlockId(block) };
    blocks.iter().map(one).collect()
}

pub(super) fn save(blocks: &[(u8, u32)]) -> Request {
    let (namespace, blocks) = (namespace(), moved(blocks));
    save_of((namespace, LayoutId(0)), None, blocks)
}

fn save_of(
    (namespace, layout): (Namespace, LayoutId),
    event: Option<EngineEvent>,
    blocks: Vec<MovedBlock>,
) -> Request {
    Request::Engine(EngineRequest::Save { namespace, pulled: false, layout, event, blocks })
}

pub(super) fn load(blocks: &[(u8, u32)]) -> Request {
    load_from(Source::Here, false, blocks)
}

pub(super) fn load_from(source: Source, in_place: bool, blocks: &[(u8, u32)]) -> Request {
    let (namespace, layout, blocks) = (namespace(), LayoutId(0), moved(blocks));
    Request::Engine(EngineRequest::Load { namespace, source, layout, in_place, blocks })
}

fn refusal(reply: Reply) -> (ImportRefusal, String) {
    match reply {
        Reply::Engine(EngineReply::ImportRefused { reason, sentence }) => (reason, sentence),
        other => panic!("{other:?}"),
    }
}

impl Raw {
    /// Sends a request and a descriptor along with it.
    pub(super) fn pass(&mut self, request: &Request, file: &File) -> Reply {
        self.pass_only(request, file);
        self.receive().1
    }

    pub(super) fn pass_only(&mut self, request: &Request, file: &File) {
        let mut frame = Vec::new();
        request.encode(7, &mut frame).unwrap();
        assert_eq!(fd_passing::send(&self.0, &frame, &[file.as_fd()]).unwrap(), frame.len());
    }

    /// Ends the connection; when this returns the node has seen it and has let go of what was the
    /// client's.
    pub(super) fn leave(mut self) {
        self.0.shutdown(Shutdown::Write).unwrap();
        assert!(self.is_closed());
    }

    /// A client with memory and a layout of it.
    pub(super) fn engine(running: &Running) -> (Self, Mapping) {
        let mut raw = Self::greeted(running);
        let (mapping, file) = memory();
        let imported = raw.pass(&memfd(BYTES), &file);
        let allocation = AllocationId(0);
        assert_eq!(imported, Reply::Engine(EngineReply::MemoryImported { allocation }));
        let imported = EngineReply::LayoutImported { layout: LayoutId(0), block_bytes: 256 };
        assert_eq!(raw.ask(&layout(vec![TENSOR])), Reply::Engine(imported));
        (raw, mapping)
    }
}

#[test]
fn blocks_are_saved_from_their_segments_and_loaded_into_others() {
    let running = Running::start(POOL);
    let (mut raw, memory) = Raw::engine(&running);
    // Block 1: K and V of layer 0, then of layer 1.
    let segments = [128, 640, 1152, 1664];
    for (at, byte) in segments.into_iter().zip(b'a'..) {
        memory.write(at, &[byte; 64]).unwrap();
    }
    let stored = vec![PublishOutcome::Stored];
    assert_eq!(raw.ask(&save(&[(1, 1)])), Reply::Published { outcomes: stored });
    let loaded = match raw.ask(&load(&[(1, 3), (2, 0)])) {
        Reply::Engine(EngineReply::Loaded { outcomes }) => outcomes,
        other => panic!("{other:?}"),
    };
    assert!(matches!(loaded[..], [LoadOutcome::Loaded { .. }, LoadOutcome::NotFound]));
    let mut bytes = vec![0; usize::try_from(BYTES).unwrap()];
    memory.read(0, &mut bytes).unwrap();
    for (at, byte) in segments.into_iter().zip(b'a'..) {
        let at = usize::try_from(at).unwrap() + 2 * 128;
        assert_eq!(bytes[at..at + 64], [byte; 64]);
    }
    let written = bytes.iter().filter(|byte| **byte != 0).count();
    assert_eq!(written, 2 * 256, "nothing else was written");
    running.service.damage(&namespace(), hash(1));
    let damaged = EngineReply::Loaded { outcomes: vec![LoadOutcome::Failed] };
    assert_eq!(raw.ask(&load(&[(1, 2)])), Reply::Engine(damaged));
    assert_eq!((running.service.pins(), running.service.occupied()), (0, 1));
}

#[test]
fn a_batch_of_many_pieces_keeps_its_order() {
    const COUNT: u8 = 60;
    let running = Running::start(POOL);
    let mut raw = Raw::greeted(&running);
    let (memory, file) = memory();
    assert!(matches!(raw.pass(&memfd(BYTES), &file), Reply::Engine(_)));
    let tensor = Tensor {
        layers: 2,
        layer_stride: 32 << 10,
        kv: KvSplit::Split { stride: 16 << 10 },
        ..TENSOR
    };
    let tensors = vec![tensor];
    let layout = Layout::new(tensors.clone(), 64, |_| Some(BYTES)).unwrap();
    let imported = raw.ask(&Request::Engine(EngineRequest::ImportLayout { blocks: 64, tensors }));
    assert!(matches!(imported, Reply::Engine(EngineReply::LayoutImported { .. })));
    // Every segment of every block has bytes of its own.
    let byte = |block: u8, segment: usize| block ^ u8::try_from(segment * 64).unwrap();
    let all: Vec<(u8, u32)> = (0..COUNT).map(|block| (block, block.into())).collect();
    for (block, number) in &all {
        for (at, segment) in layout.segments(BlockId(*number)).enumerate() {
            memory.write(segment.offset, &[byte(*block, at); 64]).unwrap();
        }
    }
    let stored = vec![PublishOutcome::Stored; COUNT.into()];
    assert_eq!(raw.ask(&save(&all)), Reply::Published { outcomes: stored });
    running.service.damage(&namespace(), hash(7));
    memory.write(0, &vec![0; usize::try_from(BYTES).unwrap()]).unwrap();
    let back: Vec<(u8, u32)> =
        (0..COUNT).map(|block| (block, (u32::from(block) * 5 + 3) % 64)).collect();
    let Reply::Engine(EngineReply::Loaded { outcomes }) = raw.ask(&load(&back)) else { panic!() };
    for ((block, number), outcome) in back.iter().zip(&outcomes) {
        let whole = matches!(outcome, LoadOutcome::Loaded { .. });
        assert_eq!(whole, *block != 7, "{block}: {outcome:?}");
        for (at, segment) in layout.segments(BlockId(*number)).enumerate() {
            let mut bytes = [0; 64];
            memory.read(segment.offset, &mut bytes).unwrap();
            let want = if whole { byte(*block, at) } else { 0 };
            assert_eq!(bytes, [want; 64], "block {block}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_reason_and_the_connection_goes_on() {
    let running = Running::start(POOL);
    let (mut raw, _memory) = Raw::engine(&running);
    let (_, file) = memory();
    assert_eq!(refusal(raw.ask(&memfd(BYTES))).0, ImportRefusal::NotMemory);
    assert_eq!(refusal(raw.pass(&memfd(BYTES + 1), &file)).0, ImportRefusal::TooShort);
    let device = DeviceUuid([1; 16]);
    let source = MemorySource::CudaIpc { device, handle: [2; 64] };
    let ipc = Request::Engine(EngineRequest::ImportMemory { source, bytes: BYTES });
    assert_eq!(refusal(raw.ask(&ipc)).0, ImportRefusal::NoGpu);

    let overlapping = Tensor { kv: KvSplit::Split { stride: 256 }, ..TENSOR };
    let (reason, sentence) = refusal(raw.ask(&layout(vec![overlapping])));
    assert_eq!(reason, ImportRefusal::Layout);
    assert!(sentence.contains("256+64"), "{sentence}");
    let outside = Tensor { layer_stride: BYTES, ..TENSOR };
    let (reason, sentence) = refusal(raw.ask(&layout(vec![outside])));
    assert_eq!(reason, ImportRefusal::Layout);
    assert!(sentence.contains(&BYTES.to_string()), "{sentence}");
    let (reason, sentence) = refusal(raw.ask(&layout(vec![Tensor { offset: 64, ..TENSOR }])));
    assert_eq!(reason, ImportRefusal::AlreadyImported, "{sentence}");
    // In part, and with the numbers of both.
    assert!(sentence.contains("bytes 64..") && sentence.contains("meet bytes 0.."), "{sentence}");

    assert!(matches!(raw.ask(&save(&[(1, 4)])), Reply::Refused { .. }), "no such block");
    assert!(matches!(raw.ask(&load(&[(1, 1), (2, 1)])), Reply::Refused { .. }), "twice");
    let elsewhere = save_of((namespace(), LayoutId(1)), None, moved(&[(1, 0)]));
    assert!(matches!(raw.ask(&elsewhere), Reply::Refused { .. }), "no such layout");
    let event = Some(EngineEvent([1; 64]));
    let eventful = save_of((namespace(), LayoutId(0)), event, moved(&[(1, 0)]));
    assert!(matches!(raw.ask(&eventful), Reply::Refused { .. }), "host memory has no events");
    for at in 1..limits::ENGINE_LAYOUTS_MAX as u64 {
        let imported = raw.ask(&layout(vec![Tensor { offset: at * 2048, ..TENSOR }]));
        assert!(matches!(imported, Reply::Engine(EngineReply::LayoutImported { .. })), "{at}");
    }
    let one_more = raw.ask(&layout(vec![Tensor { offset: 40 << 10, ..TENSOR }]));
    assert_eq!(refusal(one_more).0, ImportRefusal::TooMany);
    assert_eq!((running.service.occupied(), running.service.claims.len()), (0, 1));
}

#[test]
fn memory_is_imported_once_by_whomever() {
    let running = Running::start(POOL);
    let (mut one, mut other) = (Raw::greeted(&running), Raw::greeted(&running));
    let (_, file) = memory();
    assert!(matches!(one.pass(&memfd(BYTES), &file), Reply::Engine(_)));
    for raw in [&mut one, &mut other] {
        assert_eq!(refusal(raw.pass(&memfd(64), &file)).0, ImportRefusal::AlreadyImported);
    }
    drop(one);
    eventually("the first import is gone", || running.service.claims.is_empty());
    assert!(matches!(
        other.pass(&memfd(64), &file),
        Reply::Engine(EngineReply::MemoryImported { .. })
    ));
}

#[test]
fn a_client_that_comes_back_waits_for_the_last_copy_of_its_last_connection() {
    let running = Running::start(POOL);
    let service = &running.service;
    let (mut first, memory) = Raw::engine(&running);
    let file = memory.file().unwrap().try_clone().unwrap();
    service.gate.set(false);
    first.send(1, &save(&[(1, 0)]));
    eventually("the copy runs", || service.occupied() == 1);
    // Whether its end has been dealt with by the time the next one asks is nobody's to know.
    drop(first);
    let (mut again, mut other) = (Raw::greeted(&running), Raw::greeted(&running));
    again.pass_only(&memfd(BYTES), &file);
    again.send(8, &Request::Stat);
    assert_eq!(again.receive().0, 8, "its other requests do not wait");
    assert!(matches!(other.ask(&Request::Stat), Reply::Stat { .. }), "nor do other clients");
    assert_eq!(service.claims.len(), 1);
    service.gate.set(true);
    let (number, imported) = again.receive();
    let allocation = AllocationId(0);
    assert_eq!(number, 7);
    assert_eq!(imported, Reply::Engine(EngineReply::MemoryImported { allocation }));
    // Now that it has come nobody waits for it any more.
    let taken = refusal(other.pass(&memfd(BYTES), &file));
    assert!(taken.1.contains("import each allocation once"), "{taken:?}");
}

#[test]
fn nobody_waits_for_ever_for_memory_nor_for_one_who_is_gone() {
    let running = Running::start(POOL);
    let (_, file) = memory();
    let gone = Arc::new(Owner::default());
    let _claim = running.service.claims.claim(Identity::of_file(&file).unwrap(), &gone).unwrap();
    gone.end();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let for_ever = Duration::from_secs(1 << 30);
    for (owner, wait) in [(Arc::default(), Duration::ZERO), (gone, for_ever)] {
        let file = OwnedFd::from(file.try_clone().unwrap());
        let memory = (MemorySource::Memfd, BYTES);
        let service = Arc::clone(&running.service);
        let imported = runtime.block_on(import(service, owner, memory, Some(file), wait));
        let refused = imported.unwrap_err();
        assert!(matches!(refused, ImportError::Leaving), "{refused}");
        assert_eq!(refused.reason(), ImportRefusal::AlreadyImported);
    }
}

#[test]
fn a_descriptor_that_no_request_carries_ends_its_connection_alone() {
    let running = Running::start(POOL);
    let (mut good, mut bad) = (Raw::greeted(&running), Raw::greeted(&running));
    let (_, file) = memory();
    bad.pass_only(&Request::Stat, &file);
    assert!(bad.is_closed());
    assert!(matches!(good.ask(&Request::Stat), Reply::Stat { .. }));
}

#[test]
fn a_save_whose_client_is_gone_publishes_nothing_and_keeps_its_memory_to_the_end() {
    let running = Running::start(POOL);
    let service = &running.service;
    let (mut raw, _memory) = Raw::engine(&running);
    service.gate.set(false);
    raw.send(1, &save(&[(1, 0), (2, 1)]));
    eventually("the copy runs", || service.occupied() == 2);
    raw.leave();
    assert_eq!((service.claims.len(), service.occupied()), (1, 2), "the copy holds both");
    service.gate.set(true);
    eventually("all is given back", || service.claims.is_empty() && service.occupied() == 0);
    assert_eq!(service.residents(), 0);
}

#[test]
fn a_load_whose_client_is_gone_keeps_its_pins_to_the_end() {
    let running = Running::start(POOL);
    let service = &running.service;
    let (mut raw, _memory) = Raw::engine(&running);
    assert!(matches!(raw.ask(&save(&[(1, 0)])), Reply::Published { .. }));
    service.gate.set(false);
    raw.send(1, &load(&[(1, 3)]));
    eventually("the copy runs", || service.pins() == 1);
    raw.leave();
    assert_eq!((service.claims.len(), service.pins()), (1, 1), "the copy holds both");
    service.gate.set(true);
    eventually("all is given back", || service.claims.is_empty() && service.pins() == 0);
    assert_eq!(service.residents(), 1);
}
