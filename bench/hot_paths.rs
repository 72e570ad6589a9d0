//! The steps that a lend and a read are made of, one by one: the store, the transfer plan, the in-flight
//! table, the messages.
//!
//! `cargo bench --bench hot_paths` measures them; `cargo test --bench hot_paths` runs each once.
#![expect(clippy::unwrap_used, reason = "a failure in a measurement may panic")]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use kvrail::cli::bench::store::{key, payload, shuffled};
use kvrail::event::Discard;
use kvrail::fabric::{
    Capabilities, Completion, CompletionStatus, ConnectionId, ReadBatch, RegionId, RegisteredSpan,
    RemoteSpan,
};
use kvrail::policy::{Origin, Policy};
use kvrail::protocol::{HashEntry, Loan, LoanEntry, Message, Place, decode};
use kvrail::store::{Store, StoreConfig};
use kvrail::transfer::{Plan, ReadList, Transfers};
use kvrail::types::{
    BlockKey, EvictionRank, Generation, LeaseId, Load, MemoryKind, NamespaceId, Path, RequestId,
    RequesterIndex, Timestamp,
};

/// Blocks of a batch.
const BATCH: usize = 64;

/// Residents of the store.
const ENTRIES: u32 = 20_000;

const SAVED: Origin = Origin::Saved { owners: None };

const CAPABILITIES: Capabilities = Capabilities {
    transport: "bench",
    reads_outstanding: 1024,
    segments: 16,
    read_bytes: 8 << 20,
    windows: 0,
    opening: std::time::Duration::ZERO,
};

fn filled() -> Store {
    let config = StoreConfig { capacity: ENTRIES, policy: Policy::default() };
    let store = Store::new(config, Arc::new(Discard)).unwrap();
    for number in shuffled(ENTRIES).into_iter().map(u64::from) {
        store.insert(key(number), payload(number), SAVED, false).unwrap();
    }
    store
}

/// The keys of one batch after the other, over and over.
fn batches() -> impl Iterator<Item = Vec<BlockKey>> {
    let keys: Vec<BlockKey> = (0..u64::from(ENTRIES)).map(key).collect();
    let all: Vec<Vec<BlockKey>> = keys.chunks_exact(BATCH).map(<[_]>::to_vec).collect();
    (0..).filter_map(move |at: usize| all.get(at % all.len()).cloned())
}

fn store(bench: &mut Criterion) {
    let mut group = bench.benchmark_group("store");
    group.throughput(Throughput::Elements(BATCH as u64));
    let store = filled();
    let mut next = batches();
    group.bench_function("touch", |bencher| {
        let mut found = Vec::new();
        bencher.iter_batched(
            || next.next().unwrap(),
            |keys| store.hit_batch(&keys, false, &mut found),
            BatchSize::SmallInput,
        );
    });
    group.bench_function("pin and unpin", |bencher| {
        let (mut found, mut ids) = (Vec::new(), Vec::new());
        bencher.iter_batched(
            || next.next().unwrap(),
            |keys| {
                store.pin_batch(&keys, &mut found);
                ids.clear();
                ids.extend(found.iter().flatten().map(|found| found.id));
                store.unpin_batch(&ids)
            },
            BatchSize::SmallInput,
        );
    });
    let mut requester = 0;
    group.bench_function("commit", |bencher| {
        let mut committed = Vec::new();
        bencher.iter_batched(
            || {
                let mut found = Vec::new();
                store.pin_batch(&next.next().unwrap(), &mut found);
                requester = (requester + 1) % 48;
                let ids: Vec<_> = found.iter().flatten().map(|found| found.id).collect();
                (ids, RequesterIndex(requester))
            },
            |(ids, requester)| store.commit_batch(&ids, requester, &mut committed),
            BatchSize::SmallInput,
        );
    });
    let mut fresh = 1 << 40;
    group.bench_function("reclaim and insert", |bencher| {
        let mut victims = Vec::new();
        bencher.iter(|| {
            victims.clear();
            let gone = store.evict_batch(MemoryKind::Host, BATCH, &mut victims);
            for _ in 0..gone {
                fresh += 1;
                store.insert(key(fresh), payload(fresh), SAVED, false).unwrap();
            }
            gone
        });
    });
    group.finish();
}

/// Blocks of 4 KiB in runs of so many neighbours, asked for by their addresses or far from that.
fn blocks(run: u64, in_order: bool) -> ReadList {
    let (len, mut list) = (4096, ReadList::default());
    for at in 0..BATCH as u64 {
        let offset = at * u64::from(len);
        // A number without a factor of the batch's reaches each block once.
        let at = if in_order { at } else { at * 29 % BATCH as u64 };
        let address = (at / run * 2 * run + at % run) * u64::from(len);
        let remote = RemoteSpan { rkey: 7, address, len };
        list.push([remote], [RegisteredSpan { region: RegionId(0), offset, len }]).unwrap();
    }
    list
}

fn plans(bench: &mut Criterion) {
    let mut group = bench.benchmark_group("plan");
    group.throughput(Throughput::Elements(BATCH as u64));
    for (run, in_order) in [(1, true), (8, true), (8, false)] {
        let (blocks, mut plan) = (blocks(run, in_order), Plan::default());
        let name = format!("runs of {run}{}", if in_order { "" } else { ", in no order" });
        group.bench_function(name, |bencher| {
            bencher.iter(|| plan.make(black_box(&blocks), &CAPABILITIES));
        });
    }
    group.finish();
}

fn in_flight(bench: &mut Criterion) {
    let mut group = bench.benchmark_group("in-flight table");
    group.throughput(Throughput::Elements(BATCH as u64));
    let connection = ConnectionId { slot: 1, generation: 1 };
    let (now, until) = (Timestamp::ZERO, Timestamp::from_nanos(u64::MAX));
    let (blocks, mut table) = (blocks(1, true), Transfers::new(CAPABILITIES));
    let (mut posts, mut finished) = (ReadBatch::default(), Vec::new());
    group.bench_function("begin, post, complete", |bencher| {
        bencher.iter(|| {
            table.begin(connection, until, &blocks, std::iter::repeat_n((), BATCH));
            while table.poll_post(&mut posts).is_some() {
                for work in &posts.works {
                    let (wr_id, status) = (work.wr_id, CompletionStatus::Success);
                    let done = Completion { connection, wr_id, status, path: Path::default() };
                    assert!(table.handle_completion(&done, now));
                }
            }
            finished.clear();
            table.poll_finished(&mut finished).unwrap()
        });
    });
    group.finish();
}

fn messages(bench: &mut Criterion) {
    let mut group = bench.benchmark_group("messages");
    group.throughput(Throughput::Elements(BATCH as u64));
    let hashes: Vec<HashEntry> =
        (0..BATCH as u64).map(|number| HashEntry::from(key(number).hash)).collect();
    let (request, namespace) = (RequestId(7), NamespaceId(1));
    let lend = Message::Lend { request, namespace, hashes: &hashes };
    let span = RemoteSpan { rkey: 7, address: 4096, len: 4096 };
    let (rank, generation) = (EvictionRank::clamped(1), Generation(1));
    let loan =
        LoanEntry::from(Loan::Ready { rank, generation, place: Place::Span(span), checksum: 9 });
    let loans = vec![loan; BATCH];
    let lease = Message::Lease {
        request,
        lease: LeaseId(1),
        ttl_ms: 1000,
        load: Load::default(),
        loans: &loans,
    };
    for (name, message) in [("lend", lend), ("lease", lease)] {
        let mut bytes = Vec::new();
        group.bench_function(format!("encode {name}"), |bencher| {
            bencher.iter(|| {
                bytes.clear();
                black_box(&message).encode(&mut bytes);
            });
        });
        bytes.clear();
        message.encode(&mut bytes);
        group.bench_function(format!("decode {name}"), |bencher| {
            bencher.iter(|| decode(black_box(&bytes)).is_ok());
        });
        assert!(decode(&bytes).is_ok());
    }
    group.finish();
}

criterion_group!(hot_paths, store, plans, in_flight, messages);
criterion_main!(hot_paths);
