//! Engines give a node their KV cache: blocks are saved from one engine's strides and loaded into
//! another's, and nothing of a killed engine stays.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use kvrail::cli::cluster::Process;
use kvrail::client::{Client, ClientError, ImportedLayout};
use kvrail::layout::{AllocationId, BlockId, KvSplit, Layout, Tensor};
use kvrail::memory::Mapping;
use kvrail::protocol::door::{
    BlockOrigin, DeviceUuid, ImportRefusal, LoadOutcome, MovedBlock, PublishOutcome, Source,
};

use crate::support::{
    Blocks, Counts, OVER_SHM, TestProcess, assert_at_rest, assert_at_rest_over, assert_rank,
    cluster, holder_and_reader, namespace, node_id, read, transport, until,
};

/// Logical bytes of a block.
pub(crate) const BLOCK: usize = 48 << 10;

/// Blocks of a cache; tests use some of them.
pub(crate) const BLOCKS: u32 = 24;

/// Bytes of a cache: what its layout takes, and room that nobody may touch.
pub(crate) const BYTES: u64 = 2 << 20;
pub(crate) const CACHE_LEN: usize = 2 << 20;

/// The name of a cache's memory file, which tells in `/proc/PID/maps` who has it mapped.
const CACHE: &str = "kvrail-test-engine-cache";

/// `[layers, 2, blocks]`: 24 segments of 2 KiB, far apart.
pub(crate) fn by_layers() -> Vec<Tensor> {
    vec![Tensor {
        allocation: AllocationId(0),
        offset: 4096,
        layers: 12,
        layer_stride: 2 * 2064 * u64::from(BLOCKS),
        kv: KvSplit::Split { stride: 2064 * u64::from(BLOCKS) },
        block_stride: 2064,
        segment_bytes: 2 << 10,
    }]
}

/// `[blocks, layers]` in two kinds of layers: one segment of 16 KiB and four of 8 KiB.
pub(crate) fn by_blocks() -> Vec<Tensor> {
    let tensor = Tensor {
        allocation: AllocationId(0),
        offset: 0,
        layers: 1,
        layer_stride: 0,
        kv: KvSplit::Fused,
        block_stride: 80 << 10,
        segment_bytes: 16 << 10,
    };
    let others = Tensor {
        offset: 16 << 10,
        layers: 4,
        layer_stride: 12 << 10,
        segment_bytes: 8 << 10,
        ..tensor
    };
    vec![tensor, others]
}

/// Memory for a cache.
pub(crate) fn cache() -> Mapping {
    Mapping::anonymous(CACHE, BYTES).unwrap()
}

/// An engine: a connection, a cache that the node has imported, and how it lies.
pub(crate) struct Engine<'c> {
    pub(crate) cache: Mapping,
    pub(crate) layout: Layout,
    pub(crate) imported: ImportedLayout<'c>,
}

impl<'c> Engine<'c> {
    pub(crate) fn new(client: &'c Client, tensors: &[Tensor]) -> Self {
        Self::with_cache(client, cache(), tensors)
    }

    /// One whose cache is there already.
    pub(crate) fn with_cache(client: &'c Client, cache: Mapping, tensors: &[Tensor]) -> Self {
        cache.write(0, &vec![0xee; CACHE_LEN]).unwrap();
        client.import_memfd(cache.file().unwrap(), BYTES).unwrap();
        let layout = Layout::new(tensors.to_vec(), BLOCKS, |_| Some(BYTES)).unwrap();
        let imported = client.import_layout(BLOCKS, tensors).unwrap();
        assert_eq!(imported.block_bytes() as usize, BLOCK);
        Self { cache, layout, imported }
    }

    fn fill(&self, block: BlockId, bytes: &[u8]) {
        moved_bytes(&self.cache, &self.layout, block, Some(bytes));
    }

    pub(crate) fn bytes(&self, block: BlockId) -> Vec<u8> {
        moved_bytes(&self.cache, &self.layout, block, None)
    }

    /// What lies in the cache are these blocks.
    pub(crate) fn assert_bytes(&self, moved: &[MovedBlock], blocks: &Blocks) {
        for (moved, want) in moved.iter().zip(&blocks.bytes) {
            assert!(self.bytes(moved.block) == *want, "{moved:?}");
        }
    }

    /// How many bytes of the cache are not those that it began with.
    fn touched(&self) -> usize {
        let mut all = vec![0; CACHE_LEN];
        self.cache.read(0, &mut all).unwrap();
        all.into_iter().filter(|byte| *byte != 0xee).count()
    }

    pub(crate) fn fill_all(&self, blocks: &Blocks, moved: &[MovedBlock]) {
        moved.iter().zip(&blocks.bytes).for_each(|(moved, bytes)| self.fill(moved.block, bytes));
    }
}

/// Writes a block as an engine's kernels do, segment by segment, where bytes are given; what lies there
/// then.
pub(crate) fn moved_bytes(
    cache: &Mapping,
    layout: &Layout,
    block: BlockId,
    bytes: Option<&[u8]>,
) -> Vec<u8> {
    let mut all = vec![0; BLOCK];
    let mut done = 0;
    for segment in layout.segments(block) {
        let range = done..done + segment.len as usize;
        if let Some(bytes) = bytes {
            cache.write(segment.offset, &bytes[range.clone()]).unwrap();
        }
        cache.read(segment.offset, &mut all[range.clone()]).unwrap();
        done = range.end;
    }
    assert_eq!(done, BLOCK);
    all
}

/// The blocks at these numbers of a cache, in order.
pub(crate) fn at(blocks: &Blocks, number: impl Fn(u32) -> u32) -> Vec<MovedBlock> {
    let one = |(hash, at)| MovedBlock { hash, block: BlockId(number(at)) };
    blocks.hashes.iter().copied().zip(0..).map(one).collect()
}

pub(crate) fn blocks(name: &str) -> Blocks {
    Blocks::new(name, 16, BLOCK)
}

/// How many blocks were loaded, all of them from one place.
pub(crate) fn loaded(outcomes: &[LoadOutcome], from: BlockOrigin) -> usize {
    let is_loaded = |outcome: &&LoadOutcome| matches!(outcome, LoadOutcome::Loaded { origin, .. } if *origin == from);
    outcomes.iter().filter(is_loaded).count()
}

/// Mappings of engines' caches in a node.
pub(crate) fn caches(node: &Process) -> usize {
    let maps = fs::read_to_string(format!("/proc/{}/maps", node.id())).unwrap();
    maps.lines().filter(|line| line.contains(CACHE)).count()
}

fn travels(over: &[&str]) {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let (prefill, decode) = (
        cluster.node("prefill", address, over).unwrap(),
        cluster.node("decode", address, over).unwrap(),
    );
    let (at_prefill, at_decode) = (prefill.client().unwrap(), decode.client().unwrap());
    let blocks = blocks("from stride to stride");
    let (writer, reader) =
        (Engine::new(&at_prefill, &by_layers()), Engine::new(&at_decode, &by_blocks()));
    let (from, to) = (at(&blocks, |at| BLOCKS - 1 - at), at(&blocks, |at| (at * 5 + 2) % BLOCKS));
    writer.fill_all(&blocks, &from);
    let outcomes = writer.imported.save(&namespace(), &from, false).unwrap();
    assert_eq!(outcomes, vec![PublishOutcome::Stored; blocks.len()]);
    assert!(at_prefill.flush(crate::support::PATIENCE).unwrap());

    let outcomes = reader.imported.load(&namespace(), &to, Source::Anywhere).unwrap();
    assert_eq!(loaded(&outcomes, BlockOrigin::Fetched), blocks.len(), "{outcomes:?}");
    reader.assert_bytes(&to, &blocks);
    let ours = blocks.bytes.iter().flatten().filter(|byte| **byte != 0xee).count();
    assert_eq!(reader.touched(), ours, "bytes beside the blocks were written");
    // One step at the source; the copy has the rank that the source had before it.
    assert_rank(&at_prefill, &blocks, 2);
    assert_rank(&at_decode, &blocks, 1);

    // The same blocks once more are here, and whoever reads in place finds the logical bytes.
    let outcomes = reader.imported.load(&namespace(), &to, Source::Anywhere).unwrap();
    assert_eq!(loaded(&outcomes, BlockOrigin::Local), blocks.len(), "{outcomes:?}");
    let all = Counts::all_ready(blocks.len());
    assert_eq!(read(&at_decode, &blocks, Source::Here), all);
    assert_eq!(read(&at_prefill, &blocks, Source::From(node_id(&at_decode))), all);
    let transport = if over.is_empty() { transport() } else { "shm" };
    assert_at_rest_over(transport, "prefill", &at_prefill);
    assert_at_rest_over(transport, "decode", &at_decode);
}

#[test]
fn blocks_travel_from_one_engines_strides_to_anothers() {
    travels(&[]);
}

#[test]
fn blocks_travel_from_one_engines_strides_to_anothers_over_shm() {
    travels(&OVER_SHM);
}

#[test]
fn what_a_node_will_not_import_is_refused_with_the_reason() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let node = cluster.node("node", registry.addresses().unwrap().listen, &[]).unwrap();
    let (client, other) = (node.client().unwrap(), node.client().unwrap());
    let engine = Engine::new(&client, &by_layers());
    let reason = |result: Result<AllocationId, ClientError>| match result {
        Err(ClientError::ImportRefused { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    let cache = engine.cache.file().unwrap();
    assert_eq!(reason(client.import_memfd(cache, BYTES)), ImportRefusal::AlreadyImported);
    assert_eq!(reason(other.import_memfd(cache, BYTES)), ImportRefusal::AlreadyImported);
    let spare = Mapping::anonymous(CACHE, 4096).unwrap();
    assert_eq!(reason(client.import_memfd(spare.file().unwrap(), 4097)), ImportRefusal::TooShort);
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    assert_eq!(reason(client.import_memfd(&file, 4096)), ImportRefusal::NotMemory);
    // The node's own pool, by one of its descriptors.
    let pool = fs::read_dir(format!("/proc/{}/fd", node.id()))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| fs::read_link(path).is_ok_and(|to| is_pool(&to)))
        .unwrap();
    let pool = fs::OpenOptions::new().read(true).write(true).open(pool).unwrap();
    assert_eq!(reason(client.import_memfd(&pool, 4096)), ImportRefusal::AlreadyImported);
    let gpu = reason(client.import_cuda_ipc(DeviceUuid([7; 16]), [7; 64], 4096));
    assert!(matches!(gpu, ImportRefusal::NoGpu | ImportRefusal::OtherDevice), "{gpu:?}");

    let mut beyond = by_layers();
    beyond[0].block_stride = 1 << 20;
    let refused = client.import_layout(BLOCKS, &beyond).unwrap_err().to_string();
    assert!(refused.contains("which has 2097152"), "{refused}");
    let mut over = by_layers();
    over[0].block_stride = 1 << 10;
    let refused = client.import_layout(BLOCKS, &over).unwrap_err().to_string();
    assert!(refused.contains("5120+2048") && refused.contains("4096+2048"), "{refused}");
    // All of that has changed nothing.
    let blocks = blocks("still at work");
    let moved = at(&blocks, |at| at);
    engine.fill_all(&blocks, &moved);
    engine.imported.save(&namespace(), &moved, false).unwrap();
    assert_eq!(read(&other, &blocks, Source::Here), Counts::all_ready(blocks.len()));
    let far = MovedBlock { block: BlockId(BLOCKS), ..moved[0] };
    assert!(matches!(
        engine.imported.save(&namespace(), &[far], false),
        Err(ClientError::Refused { .. })
    ));
    assert_eq!(caches(&node), 1);
    drop(client);
    until("the cache is let go", || caches(&node) == 0);
    assert_at_rest("node", &other);
}

fn is_pool(path: &Path) -> bool {
    path.to_string_lossy().contains("memfd:kvrail-pool-")
}

/// What a child process does for ever, as an engine of the node at `door`.
const DOOR: &str = "KVRAIL_TEST_ENGINE_DOOR";
const DOES: &str = "KVRAIL_TEST_ENGINE_DOES";

/// Sets of blocks that a child saves over and over.
const ROUNDS: u32 = 3;

/// A child process that is an engine.
fn engine_process(node: &Process, does: &str) -> TestProcess {
    let door: PathBuf = node.addresses().unwrap().socket.clone().unwrap();
    let told = [(DOOR, door.as_os_str()), (DOES, OsStr::new(does))];
    TestProcess::start("engine_memory::an_engine_for_ever", &told)
}

/// No test of its own: what the children of the test below run.
#[test]
#[expect(clippy::disallowed_methods, reason = "the parent says by variables what a child is to do")]
fn an_engine_for_ever() {
    let (Some(door), Some(does)) = (std::env::var_os(DOOR), std::env::var_os(DOES)) else { return };
    TestProcess::begin();
    let client = Client::connect(Path::new(&door)).unwrap();
    let engine = Engine::new(&client, &by_layers());
    // All rounds fit into the pool: nothing that the parent looks for is evicted.
    for round in (0..ROUNDS).cycle() {
        let name = if does == "save" { format!("round {round}") } else { "loaded".to_owned() };
        let blocks = blocks(&name);
        let moved = at(&blocks, |at| at);
        engine.fill_all(&blocks, &moved);
        // A full pool is no reason to end: the parent decides when this is over.
        if does == "save" {
            engine.imported.save(&namespace(), &moved, false).ok();
        } else {
            engine.imported.load(&namespace(), &moved, Source::Anywhere).ok();
        }
    }
}

#[test]
fn nothing_of_a_killed_engine_stays_and_what_it_saved_is_whole() {
    let cluster = cluster();
    let (_registry, holder, reader) = holder_and_reader(&cluster, &[]);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let shared = blocks("loaded");
    crate::support::save(&at_holder, &shared);
    let peer = Engine::new(&at_reader, &by_blocks());
    for round in 0..ROUNDS {
        let mut saving = engine_process(&holder, "save");
        let mut loading = engine_process(&reader, "load");
        let first = blocks(&format!("round {round}"));
        let moved = at(&first, |at| at);
        // A peer reads what the engine saves while it saves on.
        until("a peer has read what the engine saved", || {
            let from = Source::From(node_id(&at_holder));
            let outcomes = peer.imported.load(&namespace(), &moved, from).unwrap();
            outcomes.iter().all(|outcome| matches!(outcome, LoadOutcome::Loaded { .. }))
        });
        until("both caches are there", || caches(&holder) == 1 && caches(&reader) == 2);
        for engine in [&mut saving, &mut loading] {
            engine.kill();
        }
        for (moved, want) in moved.iter().zip(&first.bytes) {
            assert!(peer.bytes(moved.block) == *want, "{moved:?}");
        }
        until("both caches are let go", || caches(&holder) == 0 && caches(&reader) == 1);
        // Whatever the engine had come to: a block is whole, or not there.
        for number in 0..ROUNDS {
            let blocks = blocks(&format!("round {number}"));
            let counts = read(&at_holder, &blocks, Source::Here);
            assert_eq!((counts.ready + counts.not_found, counts.failed), (blocks.len(), 0));
        }
        assert_at_rest("holder", &at_holder);
        assert_at_rest("reader", &at_reader);
    }
}
