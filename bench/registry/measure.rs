//! The measurements: each takes what it needs and answers numbers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrail::net::{GrpcRegistry, RedisRegistry, RegistryTimeouts};
use kvrail::registry::{
    Batch, Directory, DirectoryOptions, Heartbeat, InProcess, NodeIdentity, OwnerRegistry,
    PlanQuery, Presence, RegistryEpoch, Stamp,
};
use kvrail::runtime::clock::Clock;
use kvrail::types::{BlockHash, BlockKey, NamespaceId, NodeEpoch, NodeId, Timestamp};
use rustix::time::{ClockId, clock_gettime};
use tokio::task::JoinSet;

use crate::processes::{Server, cpu_seconds, resident_bytes};
use crate::redis_server::RedisServer;

/// Hashes in one call.
pub(crate) const BATCH: usize = 1024;

/// Calls under way at once.
const IN_FLIGHT: usize = 4;

/// Hashes per CPU second of the server, and its memory.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rates {
    pub(crate) announce: f64,
    pub(crate) withdraw: f64,
    pub(crate) plan: f64,
    pub(crate) bytes_per_entry: f64,
}

/// What the end of a node costs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Death {
    /// Until nothing that it announced counts.
    pub(crate) void: Duration,
    pub(crate) steps: u32,
    pub(crate) longest_step: Duration,
}

pub(crate) fn key(number: u32) -> BlockKey {
    let hash = blake3::hash(&number.to_le_bytes());
    BlockKey { namespace: NamespaceId(1), hash: BlockHash::new(hash.as_bytes()).unwrap() }
}

fn batches(keys: u32) -> Arc<Vec<Vec<BlockKey>>> {
    let all: Vec<BlockKey> = (0..keys).map(key).collect();
    Arc::new(all.chunks(BATCH).map(<[BlockKey]>::to_vec).collect())
}

pub(crate) fn identity() -> NodeIdentity {
    NodeIdentity { node: NodeId([1; 16]), epoch: NodeEpoch(1), address: "host:7070".to_owned() }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn long() -> RegistryTimeouts {
    RegistryTimeouts { connect: Duration::from_secs(10), call: Duration::from_secs(60) }
}

fn thread_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

async fn register(registry: &dyn OwnerRegistry, presence: Presence) -> u64 {
    let heartbeat = Heartbeat { presence, ..Heartbeat::default() };
    registry.heartbeat(&identity(), heartbeat).await.unwrap().registration.number
}

fn stamp(registration: u64, sequence: u64) -> Stamp {
    let identity = identity();
    // No batch of a pass shares a key with another.
    let settled = sequence.saturating_sub(1 << 20);
    Stamp { node: identity.node, epoch: identity.epoch, registration, sequence, settled }
}

#[derive(Debug, Clone, Copy)]
enum Pass {
    Announce,
    Withdraw,
    Plan,
}

async fn one(registry: &dyn OwnerRegistry, pass: Pass, stamp: Stamp, keys: &[BlockKey]) {
    match pass {
        Pass::Announce => {
            let answer = registry.announce(Batch { stamp, keys }).await.unwrap();
            assert!(answer.owners.iter().all(|owners| *owners == 1));
        }
        Pass::Withdraw => {
            assert!(registry.withdraw(Batch { stamp, keys }).await.unwrap().sole.is_empty());
        }
        Pass::Plan => {
            let asker = NodeId([9; 16]);
            let query = PlanQuery::new(asker, keys);
            assert_eq!(registry.plan(query).await.unwrap().segments.len(), 1);
        }
    }
}

async fn pass(
    registry: &Arc<dyn OwnerRegistry>,
    pass: Pass,
    batches: &Arc<Vec<Vec<BlockKey>>>,
    (registration, first): (u64, u64),
) {
    let mut calls = JoinSet::new();
    for (at, sequence) in (0..batches.len()).zip(first..) {
        if calls.len() == IN_FLIGHT {
            calls.join_next().await.unwrap().unwrap();
        }
        let (registry, batches) = (Arc::clone(registry), Arc::clone(batches));
        calls.spawn(async move {
            one(registry.as_ref(), pass, stamp(registration, sequence), &batches[at]).await;
        });
    }
    while let Some(done) = calls.join_next().await {
        done.unwrap();
    }
}

/// The three passes against a registry whose cost `cpu` and whose memory `bytes` tells.
fn passes(
    registry: &Arc<dyn OwnerRegistry>,
    keys: u32,
    cpu: impl Fn() -> f64,
    bytes: impl Fn() -> f64,
) -> Rates {
    let runtime = runtime();
    let batches = batches(keys);
    let number = runtime.block_on(register(registry.as_ref(), Presence::Afresh));
    let empty = bytes();
    let mut rates = Rates::default();
    let passed = |kind, first| {
        let start = cpu();
        runtime.block_on(pass(registry, kind, &batches, (number, first)));
        f64::from(keys) / (cpu() - start)
    };
    rates.announce = passed(Pass::Announce, 1);
    rates.bytes_per_entry = (bytes() - empty) / f64::from(keys);
    rates.plan = passed(Pass::Plan, 0);
    // Beyond what the announces had: they are settled by then.
    rates.withdraw = passed(Pass::Withdraw, 1 << 21);
    rates
}

pub(crate) fn in_process(keys: u32) -> Rates {
    let directory = Arc::new(Directory::new(RegistryEpoch(1), DirectoryOptions::default()));
    let registry: Arc<dyn OwnerRegistry> =
        Arc::new(InProcess::new(Arc::clone(&directory), || Timestamp::ZERO));
    let batches = batches(keys);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let number = runtime.block_on(register(registry.as_ref(), Presence::Afresh));
    // Calls that are ready at once, on this thread alone.
    let passed = |kind, first: u64| {
        let start = thread_seconds();
        runtime.block_on(async {
            for (batch, sequence) in batches.iter().zip(first..) {
                one(registry.as_ref(), kind, stamp(number, sequence), batch).await;
            }
        });
        f64::from(keys) / (thread_seconds() - start)
    };
    let announce = passed(Pass::Announce, 1);
    let bytes_per_entry = directory.stats(Timestamp::ZERO).bytes as f64 / f64::from(keys);
    let plan = passed(Pass::Plan, 0);
    Rates { announce, plan, bytes_per_entry, withdraw: passed(Pass::Withdraw, 1 << 21) }
}

pub(crate) fn over_grpc(server: &Server, keys: u32) -> Rates {
    let runtime = runtime();
    let entered = runtime.enter();
    let client = GrpcRegistry::new(&server.address.to_string(), long()).unwrap();
    drop(entered);
    let registry: Arc<dyn OwnerRegistry> = Arc::new(client);
    let process = server.process();
    passes(&registry, keys, || cpu_seconds(process), || resident_bytes(process))
}

fn used_memory(redis: &RedisServer) -> f64 {
    let info = redis.say(&["INFO", "memory"]);
    let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
    line.trim().parse().unwrap()
}

pub(crate) fn on_redis(redis: &RedisServer, keys: u32) -> Rates {
    let lease = Duration::from_secs(600);
    let client = RedisRegistry::new(&[redis.address()], lease, long(), 1).unwrap();
    let registry: Arc<dyn OwnerRegistry> = Arc::new(client);
    let process = redis.process();
    passes(&registry, keys, || cpu_seconds(process), || used_memory(redis))
}

/// A sorted set of owners for each key, by expiry; one script call per batch.
const PLAIN: [&str; 3] = [
    "local out = {} for i = 2, #ARGV do redis.call('ZADD', ARGV[i], 1e13, ARGV[1]) \
     out[i-1] = redis.call('ZCARD', ARGV[i]) end return out",
    "local out = {} for i = 2, #ARGV do redis.call('ZREM', ARGV[i], ARGV[1]) \
     out[i-1] = redis.call('ZCARD', ARGV[i]) end return out",
    "local out = {} for i = 2, #ARGV do out[i-1] = redis.call('ZRANGE', ARGV[i], 0, -1) end return out",
];

pub(crate) fn plain_redis(redis: &RedisServer, keys: u32) -> Rates {
    let runtime = runtime();
    let batches = batches(keys);
    let empty = used_memory(redis);
    let passed = |script: &str| {
        let start = cpu_seconds(redis.process());
        runtime.block_on(async {
            let url = format!("redis://{}", redis.address());
            let client = redis::Client::open(url).unwrap();
            let mut wire = client.get_multiplexed_async_connection().await.unwrap();
            let script = redis::Script::new(script);
            for batch in batches.iter() {
                let mut call = script.prepare_invoke();
                call.arg(&identity().node.0[..]);
                batch.iter().for_each(|key| {
                    call.arg(key.hash.as_bytes());
                });
                let _answer: redis::Value = call.invoke_async(&mut wire).await.unwrap();
            }
        });
        f64::from(keys) / (cpu_seconds(redis.process()) - start)
    };
    let [add, remove, list] = PLAIN;
    let announce = passed(add);
    let bytes_per_entry = (used_memory(redis) - empty) / f64::from(keys);
    Rates { announce, plan: passed(list), withdraw: passed(remove), bytes_per_entry }
}

pub(crate) fn death(keys: u32) -> Death {
    let clock = Clock::start();
    let directory = Directory::new(RegistryEpoch(1), DirectoryOptions::default());
    let heartbeat = |presence| Heartbeat { presence, ..Heartbeat::default() };
    let beat = directory.heartbeat(&identity(), heartbeat(Presence::Afresh), clock.now()).unwrap();
    for (batch, sequence) in batches(keys).iter().zip(1..) {
        let stamp = stamp(beat.registration.number, sequence);
        directory.announce(Batch { stamp, keys: batch }, clock.now()).unwrap();
    }
    let start = Instant::now();
    directory.heartbeat(&identity(), heartbeat(Presence::Leaving), clock.now()).unwrap();
    let void = start.elapsed();
    let (mut steps, mut longest_step) = (0, Duration::ZERO);
    while directory.stats(clock.now()).owners > 0 {
        let start = Instant::now();
        for _ in 0..64 {
            let start = Instant::now();
            directory.sweep(clock.now());
            longest_step = longest_step.max(start.elapsed());
            steps += 1;
        }
        assert!(start.elapsed() < Duration::from_secs(60));
    }
    Death { void, steps, longest_step }
}
