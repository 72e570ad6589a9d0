//! What an engine waits for blocks that a peer holds: copied through the node's pool (`load`), or read
//! straight into its memory (`load_in_place`), in turn. The peer holds each block in a pool of its own.
//!
//! ```sh
//! cargo bench --bench load -- [ROUNDS] [ARGUMENTS OF BOTH NODES]
//! ```
//!
//! `cargo test --bench load` goes round once, with small blocks.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a measurement prints, reads a clock, and may panic"
)]

use std::env;
use std::time::{Duration, Instant};

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::{Client, ImportedLayout};
use kvrail::layout::{AllocationId, BlockId, KvSplit, Tensor};
use kvrail::memory::Mapping;
use kvrail::protocol::door::{LoadOutcome, MovedBlock, PublishOutcome, Source};
use kvrail::types::{BlockHash, Namespace};

/// Blocks of one load.
const BATCH: u32 = 32;

/// Layers, keys and values apart: a block has 16 segments.
const LAYERS: u16 = 8;

const PATIENCE: Duration = Duration::from_secs(60);

const SIZES: [u32; 4] = [16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// An engine whose whole cache is one batch.
struct Engine<'c> {
    layout: ImportedLayout<'c>,
    _cache: Mapping,
}

impl<'c> Engine<'c> {
    fn new(client: &'c Client, block: u32) -> Self {
        let bytes = u64::from(block) * u64::from(BATCH);
        let cache = Mapping::anonymous("kvrail-bench-cache", bytes).unwrap();
        client.import_memfd(cache.file().unwrap(), bytes).unwrap();
        let segment = block / (2 * u32::from(LAYERS));
        let half = u64::from(segment) * u64::from(BATCH);
        let tensor = Tensor {
            allocation: AllocationId(0),
            offset: 0,
            layers: LAYERS,
            layer_stride: 2 * half,
            kv: KvSplit::Split { stride: half },
            block_stride: segment.into(),
            segment_bytes: segment,
        };
        let layout = client.import_layout(BATCH, &[tensor]).unwrap();
        // All pages are there.
        cache.write(0, &vec![1; usize::try_from(bytes).unwrap()]).unwrap();
        Self { layout, _cache: cache }
    }
}

/// Blocks that no other set has.
fn blocks(number: &mut u64) -> Vec<MovedBlock> {
    let one = |at: u32| {
        let hash = blake3::hash(&[number.to_le_bytes(), u64::from(at).to_le_bytes()].concat());
        MovedBlock { hash: BlockHash::new(hash.as_bytes()).unwrap(), block: BlockId(at) }
    };
    let all = (0..BATCH).map(one).collect();
    *number += 1;
    all
}

/// What one side took, for a batch.
#[derive(Default)]
struct Took(Vec<Duration>);

impl Took {
    fn by<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let begin = Instant::now();
        let done = work();
        self.0.push(begin.elapsed());
        done
    }

    fn median_us(&mut self) -> f64 {
        self.0.sort_unstable();
        self.0.get(self.0.len() / 2).unwrap().as_secs_f64() * 1e6
    }
}

struct Sides {
    holder: Process,
    reader: Process,
}

impl Sides {
    /// Loads each way, as often as that; a line of the table.
    fn row(&self, block: u32, rounds: u32, number: &mut u64) -> String {
        let (at_holder, at_reader) = (self.holder.client().unwrap(), self.reader.client().unwrap());
        let (writer, engine) = (Engine::new(&at_holder, block), Engine::new(&at_reader, block));
        let namespace: Namespace = "bench".parse().unwrap();
        let from = Source::From(at_holder.stat().unwrap().node.id.parse().unwrap());
        let (mut copied, mut landed, mut withdrawn) =
            (Took::default(), Took::default(), Took::default());
        for round in 0..=rounds {
            for in_place in [false, true] {
                let moved = blocks(number);
                let saved = writer.layout.save(&namespace, &moved, false).unwrap();
                assert!(saved.iter().all(|it| *it == PublishOutcome::Stored), "{saved:?}");
                assert!(at_holder.flush(PATIENCE).unwrap());
                let outcomes = match in_place {
                    false => copied.by(|| engine.layout.load(&namespace, &moved, from)),
                    true => landed.by(|| engine.layout.load_in_place(&namespace, &moved, from)),
                };
                for outcome in outcomes.unwrap() {
                    let is_so = matches!(outcome, LoadOutcome::Loaded { in_place: it, .. } if it == in_place);
                    assert!(is_so, "{outcome:?}");
                }
                if in_place {
                    let numbers: Vec<BlockId> = moved.iter().map(|moved| moved.block).collect();
                    withdrawn.by(|| engine.layout.withdraw(&numbers)).unwrap();
                }
            }
            if round == 0 {
                // Connections come up, and memory is pinned.
                for took in [&mut copied, &mut landed, &mut withdrawn] {
                    took.0.clear();
                }
            }
        }
        let ratios = copied.0.iter().zip(&landed.0);
        let mut ratios: Vec<f64> =
            ratios.map(|(load, landed)| landed.as_secs_f64() / load.as_secs_f64()).collect();
        ratios.sort_unstable_by(f64::total_cmp);
        let ratio = ratios.get(ratios.len() / 2).unwrap();
        let (load, in_place, withdraw) =
            (copied.median_us(), landed.median_us(), withdrawn.median_us());
        format!("| {} KiB | {load:.0} | {in_place:.0} | {ratio:.2} | {withdraw:.0} |", block >> 10)
    }
}

fn main() {
    let (modes, arguments): (Vec<String>, Vec<String>) =
        env::args().skip(1).partition(|it| it == "--bench");
    let measured = !modes.is_empty();
    let rounds: Option<u32> = arguments.first().and_then(|it| it.parse().ok());
    let told = arguments.iter().skip(usize::from(rounds.is_some())).map(String::as_str);
    let both: Vec<&str> = ["--pool", "512MiB"].into_iter().chain(told).collect();
    let rounds = rounds.unwrap_or(40);
    let cluster = Cluster::new(env!("CARGO_BIN_EXE_kvrail")).unwrap();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let [holder, reader] =
        ["holder", "reader"].map(|name| cluster.node(name, address, &both).unwrap());
    let transport = holder.client().unwrap().stat().unwrap().node.transport;
    let sides = Sides { holder, reader };
    let (sizes, rounds) = if measured { (&SIZES[..], rounds) } else { (&SIZES[..1], 1) };
    println!(
        "{BATCH} blocks of 16 segments at a time, {rounds} rounds each way in turn, {transport}"
    );
    println!("| block | load µs | load in place µs | in place/load | withdraw µs |");
    println!("| --- | --- | --- | --- | --- |");
    let mut number = 0;
    for size in sizes {
        println!("{}", sides.row(*size, rounds, &mut number));
    }
}
