//! Engines give a node GPU memory. The driver is a stand-in over host memory, `ffi/cuda_standin.c`: no
//! GPU has part in this.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::AsFd;
use std::sync::Arc;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::{Client, ClientError, ImportedLayout};
use kvrail::cuda::{
    Context, CopyQueue, DeviceMemory, Driver, End, Event, HostRegistration, Piece, Stream,
};
use kvrail::layout::{BlockId, Layout, Tensor};
use kvrail::memory::Mapping;
use kvrail::protocol::door::{
    BlockOrigin, DeviceUuid, EngineEvent, ImportRefusal, LoadOutcome, MovedBlock, PublishOutcome,
    Source,
};

use crate::cuda_standin::StandIn;
use crate::engine_memory::{
    BLOCK, BLOCKS, BYTES, CACHE_LEN, at, blocks, by_blocks, by_layers, loaded, moved_bytes,
};
use crate::support::{
    BINARY, Blocks, Counts, PATIENCE, TestProcess, assert_at_rest, assert_rank, is_lending,
    namespace, node_id, read, save, transport, until, write_script,
};

/// A cluster whose nodes find the stand-in where others find the driver.
pub(crate) fn cluster(standin: &StandIn) -> Cluster {
    let library = standin.library();
    let directory = library.parent().unwrap();
    let script = directory.join("kvrail");
    let text = format!("#!/bin/sh\nLD_LIBRARY_PATH={} exec {BINARY} \"$@\"\n", directory.display());
    write_script(&script, &text);
    Cluster::new(script).unwrap()
}

/// A stand-in whose memory NICs can register; `None` where there is none, or no NIC.
pub(crate) fn within_reach() -> Option<StandIn> {
    let standin = StandIn::new().filter(|_| transport() == "verbs")?;
    standin.control("set registrable 1");
    Some(standin)
}

/// A GPU of this process: an engine has one, whatever else it does.
pub(crate) struct Gpu {
    pub(crate) context: Arc<Context>,
    device: DeviceUuid,
}

impl Gpu {
    pub(crate) fn new(library: impl AsRef<OsStr>) -> Self {
        let driver = Driver::open(library).unwrap();
        let device = driver.device(0).unwrap();
        let uuid = DeviceUuid(device.attributes().uuid);
        Self { context: Context::primary(&device).unwrap(), device: uuid }
    }
}

/// How an engine passes its memory on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// `cuIpcGetMemHandle`.
    Handle,
    /// `cuMemExportToShareableHandle`.
    Descriptor,
}

/// An engine with its KV cache on a GPU, and an image of it in host memory.
pub(crate) struct Engine<'c> {
    image: Arc<HostRegistration>,
    cache: Arc<DeviceMemory>,
    gpu: &'c Gpu,
    layout: Layout,
    pub(crate) imported: ImportedLayout<'c>,
}

impl<'c> Engine<'c> {
    pub(crate) fn new(client: &'c Client, gpu: &'c Gpu, (by, tensors): (By, &[Tensor])) -> Self {
        let bound = gpu.context.bind().unwrap();
        let cache = match by {
            By::Handle => DeviceMemory::allocate_plain(&bound, BYTES).unwrap(),
            By::Descriptor => DeviceMemory::allocate(&bound, BYTES).unwrap(),
        };
        let image = Arc::new(Mapping::anonymous("kvrail-test-image", BYTES).unwrap());
        image.write(0, &vec![0xee; CACHE_LEN]).unwrap();
        let image = HostRegistration::new(&bound, &image).unwrap();
        match by {
            By::Handle => {
                let handle = cache.ipc_handle(&bound).unwrap().0;
                client.import_cuda_ipc(gpu.device, handle, BYTES).unwrap();
            }
            By::Descriptor => {
                // As long as it was allocated, which is more than was asked for where a device rounds up.
                let fd = cache.export(&bound).unwrap();
                client.import_cuda_shareable(gpu.device, fd.as_fd(), cache.len()).unwrap();
            }
        }
        let layout = Layout::new(tensors.to_vec(), BLOCKS, |_| Some(BYTES)).unwrap();
        let imported = client.import_layout(BLOCKS, tensors).unwrap();
        let engine = Self { image, cache, gpu, layout, imported };
        engine.copy(true);
        engine
    }

    /// Copies the whole image to the GPU, or back.
    fn copy(&self, to_gpu: bool) {
        let bound = self.gpu.context.bind().unwrap();
        let host = End::Host(Arc::clone(&self.image));
        let device = End::Device(Arc::clone(&self.cache));
        let ends = if to_gpu { (&host, &device) } else { (&device, &host) };
        let mut queue = CopyQueue::new(&bound, 1).unwrap();
        queue.submit(&bound, ends, &[Piece::contiguous(0, 0, BYTES)], 0).unwrap();
        queue.drain(&bound, &mut Vec::new()).unwrap();
    }

    pub(crate) fn fill_all(&self, blocks: &Blocks, moved: &[MovedBlock]) {
        for (moved, bytes) in moved.iter().zip(&blocks.bytes) {
            moved_bytes(self.image.mapping(), &self.layout, moved.block, Some(bytes));
        }
        self.copy(true);
    }

    /// What lies on the GPU are these blocks.
    pub(crate) fn assert_bytes(&self, moved: &[MovedBlock], blocks: &Blocks) {
        self.copy(false);
        for (moved, want) in moved.iter().zip(&blocks.bytes) {
            assert!(self.bytes(moved.block) == *want, "{moved:?}");
        }
    }

    fn bytes(&self, block: BlockId) -> Vec<u8> {
        moved_bytes(self.image.mapping(), &self.layout, block, None)
    }
}

/// Publishes all blocks, which fill the first part of the engine's cache.
pub(crate) fn publish(client: &Client, engine: &Engine<'_>, blocks: &Blocks) -> Vec<MovedBlock> {
    let moved = at(blocks, |at| at);
    engine.fill_all(blocks, &moved);
    let published = engine.imported.publish(&namespace(), &moved, false).unwrap();
    assert_eq!(published, vec![PublishOutcome::Stored; blocks.len()]);
    assert!(client.flush(PATIENCE).unwrap());
    moved
}

#[test]
fn blocks_travel_from_gpu_to_gpu() {
    travels(By::Handle, By::Handle);
}

#[test]
fn blocks_travel_between_memories_that_were_passed_by_descriptor() {
    travels(By::Descriptor, By::Descriptor);
}

fn travels(from: By, to: By) {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let (prefill, decode) = (
        cluster.node("prefill", address, &[]).unwrap(),
        cluster.node("decode", address, &[]).unwrap(),
    );
    let (at_prefill, at_decode) = (prefill.client().unwrap(), decode.client().unwrap());
    let gpu = Gpu::new(standin.library());
    let writer = Engine::new(&at_prefill, &gpu, (from, &by_layers()));
    let reader = Engine::new(&at_decode, &gpu, (to, &by_blocks()));
    let blocks = blocks("from GPU to GPU");
    let (from, to) = (at(&blocks, |at| BLOCKS - 1 - at), at(&blocks, |at| (at * 5 + 2) % BLOCKS));
    writer.fill_all(&blocks, &from);
    let bound = gpu.context.bind().unwrap();
    let event = Event::for_other_processes(&bound).unwrap();
    event.record(&bound, &Stream::new(&bound).unwrap()).unwrap();
    let handle = EngineEvent(event.ipc_handle(&bound).unwrap().0);
    let saved = writer.imported.save_after(Some(handle), &namespace(), &from, false).unwrap();
    assert_eq!(saved, vec![PublishOutcome::Stored; blocks.len()]);
    assert!(at_prefill.flush(PATIENCE).unwrap());
    let outcomes = reader.imported.load(&namespace(), &to, Source::Anywhere).unwrap();
    assert_eq!(loaded(&outcomes, BlockOrigin::Fetched), blocks.len(), "{outcomes:?}");
    reader.assert_bytes(&to, &blocks);
    let ours = blocks.bytes.iter().flatten().filter(|byte| **byte != 0xee).count();
    let mut all = vec![0; CACHE_LEN];
    reader.image.mapping().read(0, &mut all).unwrap();
    let touched = all.into_iter().filter(|byte| *byte != 0xee).count();
    assert_eq!(touched, ours, "bytes beside the blocks were written");
    assert_rank(&at_prefill, &blocks, 2);
    assert_rank(&at_decode, &blocks, 1);
    assert_at_rest("prefill", &at_prefill);
    assert_at_rest("decode", &at_decode);
}

/// Where a line stands in the driver's log for the first time.
pub(crate) fn first(log: &[String], line: &str) -> Option<usize> {
    log.iter().position(|logged| logged == line)
}

#[test]
fn blocks_are_saved_behind_the_engines_event() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let registry = cluster.registry("registry", &[]).unwrap();
    let node = cluster.node("node", registry.addresses().unwrap().listen, &[]).unwrap();
    let client = node.client().unwrap();
    let gpu = Gpu::new(standin.library());
    let engine = Engine::new(&client, &gpu, (By::Handle, &by_layers()));
    let blocks = blocks("behind an event");
    let moved = at(&blocks, |at| at);
    engine.fill_all(&blocks, &moved);
    let bound = gpu.context.bind().unwrap();
    let (event, stream) =
        (Event::for_other_processes(&bound).unwrap(), Stream::new(&bound).unwrap());
    standin.log();
    // The work that the event is behind takes its time.
    standin.control("cuEventRecord late 200");
    event.record(&bound, &stream).unwrap();
    standin.control("");
    let handle = EngineEvent(event.ipc_handle(&bound).unwrap().0);
    let saved = engine.imported.save_after(Some(handle), &namespace(), &moved, false).unwrap();
    assert_eq!(saved, vec![PublishOutcome::Stored; blocks.len()]);
    let log = standin.logged();
    let engines = first(&log, "ran cuEventRecord").expect("the engine's event");
    let waited = first(&log, "ran cuStreamWaitEvent").expect("the node waits for it");
    let copied = first(&log, "ran cuMemcpy2DAsync_v2").expect("copies");
    assert!(engines < waited && waited < copied, "{log:?}");
    assert_eq!(read(&client, &blocks, Source::Here), Counts::all_ready(blocks.len()));
}

#[test]
fn memory_of_another_gpu_is_refused() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let registry = cluster.registry("registry", &[]).unwrap();
    let node = cluster.node("node", registry.addresses().unwrap().listen, &[]).unwrap();
    let client = node.client().unwrap();
    match client.import_cuda_ipc(DeviceUuid([0x77; 16]), [0; 64], BYTES) {
        Err(ClientError::ImportRefused { reason: ImportRefusal::OtherDevice, sentence }) => {
            assert!(sentence.contains(&"77".repeat(16)), "{sentence}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_gpu_that_is_lost_in_a_save_is_lost_to_the_node_at_once() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let other = cluster.node("other", address, &[]).unwrap();
    let node = cluster.node("node", address, &["--gpu", "0", "--gpu-pool", "4MiB"]).unwrap();
    let (at_other, client) = (other.client().unwrap(), node.client().unwrap());
    let gpu = Gpu::new(standin.library());
    let engine = Engine::new(&client, &gpu, (By::Handle, &by_layers()));
    let [in_host, on_gpu, unsaved] = ["in host memory", "on the GPU", "unsaved"].map(blocks);
    let moved = at(&in_host, |at| at);
    engine.fill_all(&in_host, &moved);
    let saved = engine.imported.save(&namespace(), &moved, false).unwrap();
    assert_eq!(saved, vec![PublishOutcome::Stored; in_host.len()]);
    save(&at_other, &on_gpu);
    let all = Counts::all_ready(on_gpu.len());
    assert_eq!(read(&client, &on_gpu, Source::From(node_id(&at_other))), all);
    assert!(!client.stat().unwrap().gpu.unwrap().lost);
    // Nothing of the node's own asks the driver for anything now.
    standin.control("cuMemcpy2DAsync_v2 fail 719");
    let refused = engine.imported.save(&namespace(), &at(&unsaved, |at| at), false).unwrap_err();
    assert!(refused.to_string().contains("could not be copied"), "{refused}");
    assert!(client.stat().unwrap().gpu.unwrap().lost, "the engine was told before the node");
    standin.control("");
    let none = Counts { not_found: on_gpu.len(), ..Counts::default() };
    assert_eq!(read(&client, &on_gpu, Source::Here), none);
    assert_eq!(read(&client, &unsaved, Source::Here), none);
    assert_eq!(read(&client, &in_host, Source::Here), all);
    assert_eq!(read(&client, &on_gpu, Source::Anywhere), all, "it goes on without the GPU");
    assert_at_rest("node", &client);
}

/// What a child process is told: the node's door, and the driver.
const DOOR: &str = "KVRAIL_TEST_GPU_ENGINE_DOOR";
const LIBRARY: &str = "KVRAIL_TEST_GPU_ENGINE_LIBRARY";
const BY_DESCRIPTOR: &str = "KVRAIL_TEST_GPU_ENGINE_BY_DESCRIPTOR";

/// Sets of blocks that a child saves over and over.
const ROUNDS: u32 = 3;

fn engine_process(node: &Process, standin: &StandIn, by: By) -> TestProcess {
    let (door, library) = (node.addresses().unwrap().socket.clone().unwrap(), standin.library());
    let mut told = vec![(DOOR, door.as_os_str()), (LIBRARY, library.as_os_str())];
    if by == By::Descriptor {
        told.push((BY_DESCRIPTOR, OsStr::new("yes")));
    }
    TestProcess::start("engine_gpu::an_engine_for_ever", &told)
}

/// No test of its own: what the children of the test below run.
#[test]
#[expect(clippy::disallowed_methods, reason = "the parent says by variables what a child is to do")]
fn an_engine_for_ever() {
    let (Some(door), Some(library)) = (std::env::var_os(DOOR), std::env::var_os(LIBRARY)) else {
        return;
    };
    TestProcess::begin();
    let client = Client::connect(std::path::Path::new(&door)).unwrap();
    let gpu = Gpu::new(library);
    let by = match std::env::var_os(BY_DESCRIPTOR) {
        None => By::Handle,
        Some(_yes) => By::Descriptor,
    };
    let engine = Engine::new(&client, &gpu, (by, &by_layers()));
    for round in (0..ROUNDS).cycle() {
        let blocks = blocks(&format!("round {round}"));
        let moved = at(&blocks, |at| at);
        engine.fill_all(&blocks, &moved);
        engine.imported.save(&namespace(), &moved, false).unwrap();
        engine.imported.load(&namespace(), &moved, Source::Here).unwrap();
    }
}

/// Kills an engine while the node copies from or to its memory.
fn killed_in_the_middle(standin: &StandIn, node: &Process, copy: &str) {
    standin.log();
    standin.control(&format!("{copy} late 30"));
    let mut engine = engine_process(node, standin, By::Handle);
    let logged = |what: &str| {
        let line = format!("{what} {copy}");
        standin.logged().iter().filter(|logged| **logged == line).count()
    };
    until("some copies have run", || logged("ran") >= 3);
    // Wherever it is by now: from here on no copy ends before the engine does.
    standin.control(&format!("{copy} hold 1"));
    until("a copy is under way", || logged("call") > logged("ran"));
    engine.kill();
    standin.control("");
}

#[test]
fn an_engine_that_dies_in_the_middle_of_a_save_or_load_leaves_whole_blocks_only() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let registry = cluster.registry("registry", &[]).unwrap();
    let node = cluster.node("node", registry.addresses().unwrap().listen, &[]).unwrap();
    let client = node.client().unwrap();
    // The engine saves and loads in turn: the first kill is in the middle of a save, later ones in either.
    for _ in 0..4 {
        killed_in_the_middle(&standin, &node, "cuMemcpy2DAsync_v2");
        assert_at_rest("node", &client);
        until("its memory is closed", || {
            first(&standin.logged(), "call cuIpcCloseMemHandle").is_some()
        });
        let log = standin.logged();
        let closed = first(&log, "call cuIpcCloseMemHandle").unwrap();
        let after = log.iter().skip(closed);
        assert!(after.clone().all(|line| line != "ran cuMemcpy2DAsync_v2"), "closed under a copy");
        for number in 0..ROUNDS {
            let blocks = blocks(&format!("round {number}"));
            let counts = read(&client, &blocks, Source::Here);
            assert_eq!((counts.ready + counts.not_found, counts.failed), (blocks.len(), 0));
        }
    }
}

#[test]
fn a_peer_reads_on_when_the_engine_that_saved_has_died() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let holder = cluster.node("holder", address, &[]).unwrap();
    let reader = cluster.node("reader", address, &["--gpu", "0", "--gpu-pool", "4MiB"]).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let mut engine = engine_process(&holder, &standin, By::Handle);
    let first = blocks("round 0");
    until("the engine has saved", || {
        read(&at_holder, &first, Source::Here) == Counts::all_ready(first.len())
    });
    assert!(at_holder.flush(PATIENCE).unwrap());
    // What the reader has read it copies to its GPU before it says so.
    standin.control("cuMemcpyHtoDAsync_v2 hold 1");
    let from = Source::From(node_id(&at_holder));
    let counts = std::thread::scope(|scope| {
        let reading = scope.spawn(|| read(&at_reader, &first, from));
        until("the holder lends", || is_lending(&at_holder));
        engine.kill();
        standin.control("");
        reading.join().unwrap()
    });
    assert_eq!(counts, Counts::all_ready(first.len()));
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}

/// Mappings of device memory in a node, which has none of its own here.
pub(crate) fn device_memory(node: &Process) -> usize {
    let maps = fs::read_to_string(format!("/proc/{}/maps", node.id())).unwrap();
    maps.lines().filter(|line| line.contains("/memfd:device-memory")).count()
}

#[test]
fn nothing_of_a_killed_engine_stays_and_what_it_saved_is_whole() {
    killed(By::Handle);
}

#[test]
fn nothing_stays_of_a_killed_engine_whose_memory_was_passed_by_descriptor() {
    killed(By::Descriptor);
}

fn killed(by: By) {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let registry = cluster.registry("registry", &[]).unwrap();
    let node = cluster.node("node", registry.addresses().unwrap().listen, &[]).unwrap();
    let client = node.client().unwrap();
    for round in 0..ROUNDS {
        let mut engine = engine_process(&node, &standin, by);
        let first = blocks(&format!("round {round}"));
        until("the engine has saved", || {
            read(&client, &first, Source::Here) == Counts::all_ready(first.len())
        });
        until("the engine's memory is open in the node", || device_memory(&node) > 0);
        engine.kill();
        assert_at_rest("node", &client);
        until("the engine's memory is let go", || device_memory(&node) == 0);
        for number in 0..ROUNDS {
            let blocks = blocks(&format!("round {number}"));
            let counts = read(&client, &blocks, Source::Here);
            assert_eq!((counts.ready + counts.not_found, counts.failed), (blocks.len(), 0));
        }
    }
    // The next engine finds everything as the first one did.
    let gpu = Gpu::new(standin.library());
    let engine = Engine::new(&client, &gpu, (by, &by_blocks()));
    let blocks = blocks("round 0");
    let moved = at(&blocks, |at| at);
    let outcomes = engine.imported.load(&namespace(), &moved, Source::Here).unwrap();
    assert!(outcomes.iter().all(|it| matches!(it, LoadOutcome::Loaded { .. })), "{outcomes:?}");
    engine.assert_bytes(&moved, &blocks);
    assert_eq!(blocks.bytes[0].len(), BLOCK);
}
