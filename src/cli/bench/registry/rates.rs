//! Hashes per processor second of whoever serves, and its memory per entry.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::Server;
use super::redis_server::RedisServer;
use crate::cli::CliError;
use crate::cli::bench::Bench;
use crate::cli::bench::cpu::CpuTime;
use crate::cli::bench::machine::resident_bytes;
use crate::cli::bench::store::key;
use crate::net::{GrpcRegistry, RedisRegistry, RegistryTimeouts};
use crate::registry::{
    Batch, Directory, DirectoryOptions, Heartbeat, InProcess, NodeIdentity, OwnerRegistry,
    PlanQuery, Presence, RegistryEpoch, Stamp,
};
use crate::types::{BlockKey, NodeEpoch, NodeId, Timestamp};

/// Hashes in one call.
pub(super) const BATCH: usize = 1024;

/// Calls under way at once.
const IN_FLIGHT: usize = 4;

/// Number of the first withdrawal: beyond those of all announcements, which are settled by then.
const WITHDRAWALS: u64 = 1 << 21;

/// For how long a node that is silent stays registered: for longer than any pass.
pub(super) const LEASE: Duration = Duration::from_secs(3600);

/// A machine that has other work may be slow, and that is no failure here.
pub(super) const TIMEOUTS: RegistryTimeouts =
    RegistryTimeouts { connect: Duration::from_secs(10), call: Duration::from_secs(60) };

/// Keys, by the calls that name them.
pub(super) type Batches = Arc<Vec<Vec<BlockKey>>>;

/// Hashes per processor second of the one that serves, and its memory.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Rates {
    pub(super) announce: f64,
    pub(super) plan: f64,
    pub(super) withdraw: f64,
    pub(super) bytes_per_entry: f64,
}

/// What is asked, in this order.
#[derive(Debug, Clone, Copy)]
enum Pass {
    Announce,
    Plan,
    Withdraw,
}

pub(super) fn batches(keys: u32) -> Batches {
    let all: Vec<BlockKey> = (0..u64::from(keys)).map(key).collect();
    Arc::new(all.chunks(BATCH).map(<[BlockKey]>::to_vec).collect())
}

/// The node that announces.
pub(super) fn identity() -> NodeIdentity {
    NodeIdentity { node: NodeId([1; 16]), epoch: NodeEpoch(1), address: "host:7070".to_owned() }
}

pub(super) fn stamp(registration: u64, sequence: u64) -> Stamp {
    let identity = identity();
    // No two batches of a pass share a key, so nothing waits for what is under way.
    let settled = sequence.saturating_sub(WITHDRAWALS / 2);
    Stamp { node: identity.node, epoch: identity.epoch, registration, sequence, settled }
}

pub(super) fn runtime() -> Result<Runtime, CliError> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().map_err(CliError::failed)
}

/// What the one that serves has used.
struct Meter<'a> {
    cpu: &'a dyn Fn() -> Result<CpuTime, CliError>,
    bytes: &'a dyn Fn() -> Result<u64, CliError>,
}

impl Meter<'_> {
    /// Runs the three passes; `None` where one of them says that a signal came.
    fn rates(
        &self,
        keys: usize,
        mut run: impl FnMut(Pass) -> Result<bool, CliError>,
    ) -> Result<Option<Rates>, CliError> {
        let empty = (self.bytes)()?;
        let mut rate = |pass| -> Result<Option<f64>, CliError> {
            let start = (self.cpu)()?;
            let all = run(pass)?;
            Ok(all.then_some(keys as f64 / ((self.cpu)()? - start).seconds()))
        };
        let Some(announce) = rate(Pass::Announce)? else { return Ok(None) };
        let bytes = (self.bytes)()?.saturating_sub(empty);
        let Some(plan) = rate(Pass::Plan)? else { return Ok(None) };
        let Some(withdraw) = rate(Pass::Withdraw)? else { return Ok(None) };
        Ok(Some(Rates { announce, plan, withdraw, bytes_per_entry: bytes as f64 / keys as f64 }))
    }
}

fn count(batches: &Batches) -> usize {
    batches.iter().map(Vec::len).sum()
}

/// Registers the node; the number of its registration.
async fn register(registry: &dyn OwnerRegistry) -> Result<u64, CliError> {
    let heartbeat = Heartbeat { presence: Presence::Afresh, ..Heartbeat::default() };
    let beat = registry.heartbeat(&identity(), heartbeat).await.map_err(CliError::failed)?;
    Ok(beat.registration.number)
}

/// One call, whose answer must be right.
async fn call(
    registry: &dyn OwnerRegistry,
    pass: Pass,
    (registration, sequence): (u64, u64),
    keys: &[BlockKey],
) -> Result<(), CliError> {
    let stamp = |sequence| stamp(registration, sequence);
    let is_right = match pass {
        Pass::Announce => {
            let batch = Batch { stamp: stamp(sequence), keys };
            let answer = registry.announce(batch).await.map_err(CliError::failed)?;
            answer.owners.iter().all(|owners| *owners == 1)
        }
        Pass::Plan => {
            let query = PlanQuery::new(NodeId([9; 16]), keys);
            registry.plan(query).await.map_err(CliError::failed)?.segments.len() == 1
        }
        Pass::Withdraw => {
            let batch = Batch { stamp: stamp(WITHDRAWALS + sequence), keys };
            registry.withdraw(batch).await.map_err(CliError::failed)?.sole.is_empty()
        }
    };
    let wrong = || CliError::failed(format!("a registry answered {pass:?} wrongly"));
    is_right.then_some(()).ok_or_else(wrong)
}

/// All batches, some under way at once; `false` where a signal came.
async fn calls(
    registry: &Arc<dyn OwnerRegistry>,
    (pass, number): (Pass, u64),
    batches: &Batches,
    bench: &Bench,
) -> Result<bool, CliError> {
    let mut under_way: JoinSet<Result<(), CliError>> = JoinSet::new();
    for (at, sequence) in (0..batches.len()).zip(1..) {
        if bench.is_interrupted() {
            return Ok(false);
        }
        if under_way.len() == IN_FLIGHT
            && let Some(done) = under_way.join_next().await
        {
            done.map_err(CliError::failed)??;
        }
        let (registry, batches) = (Arc::clone(registry), Arc::clone(batches));
        under_way.spawn(async move {
            let keys = batches.get(at).map_or(&[][..], Vec::as_slice);
            call(registry.as_ref(), pass, (number, sequence), keys).await
        });
    }
    while let Some(done) = under_way.join_next().await {
        done.map_err(CliError::failed)??;
    }
    Ok(true)
}

/// The passes over a connection.
fn asked(
    (runtime, registry): (&Runtime, Arc<dyn OwnerRegistry>),
    meter: &Meter<'_>,
    batches: &Batches,
    bench: &Bench,
) -> Result<Option<Rates>, CliError> {
    let number = runtime.block_on(register(registry.as_ref()))?;
    meter.rates(count(batches), |pass| {
        runtime.block_on(calls(&registry, (pass, number), batches, bench))
    })
}

/// Of the directory, by this thread alone: its calls are ready at once.
pub(super) fn in_process(batches: &Batches, bench: &Bench) -> Result<Option<Rates>, CliError> {
    let options = DirectoryOptions { lease: LEASE, ..DirectoryOptions::default() };
    let directory = Arc::new(Directory::new(RegistryEpoch(1), options));
    let registry = InProcess::new(Arc::clone(&directory), || Timestamp::ZERO);
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.build().map_err(CliError::failed)?;
    let number = runtime.block_on(register(&registry))?;
    let meter = Meter {
        cpu: &|| Ok(CpuTime::of_thread()),
        bytes: &|| Ok(directory.stats(Timestamp::ZERO).bytes),
    };
    meter.rates(count(batches), |pass| {
        runtime.block_on(async {
            for (batch, sequence) in batches.iter().zip(1..) {
                if bench.is_interrupted() {
                    return Ok(false);
                }
                call(&registry, pass, (number, sequence), batch).await?;
            }
            Ok(true)
        })
    })
}

/// Of a registry process.
pub(super) fn over_grpc(
    server: &Server,
    batches: &Batches,
    bench: &Bench,
) -> Result<Option<Rates>, CliError> {
    let runtime = runtime()?;
    let client = {
        let _entered = runtime.enter();
        GrpcRegistry::new(&server.address()?, TIMEOUTS).map_err(CliError::failed)?
    };
    let process = server.process.id();
    let meter = Meter { cpu: &|| CpuTime::of(process), bytes: &|| resident_bytes(process) };
    asked((&runtime, Arc::new(client)), &meter, batches, bench)
}

/// Of a Redis server.
pub(super) fn on_redis(
    redis: &RedisServer,
    batches: &Batches,
    bench: &Bench,
) -> Result<Option<Rates>, CliError> {
    let runtime = runtime()?;
    let client =
        RedisRegistry::new(&[redis.address()], LEASE, TIMEOUTS, 1).map_err(CliError::failed)?;
    let meter = Meter { cpu: &|| CpuTime::of(redis.process()), bytes: &|| redis.bytes() };
    asked((&runtime, Arc::new(client)), &meter, batches, bench)
}

/// A sorted set of owners for each key, by expiry; one script call for each batch.
const fn script(pass: Pass) -> &'static str {
    match pass {
        Pass::Announce => {
            "local out = {} for i = 2, #ARGV do redis.call('ZADD', ARGV[i], 1e13, ARGV[1]) \
             out[i-1] = redis.call('ZCARD', ARGV[i]) end return out"
        }
        Pass::Plan => {
            "local out = {} for i = 2, #ARGV do out[i-1] = redis.call('ZRANGE', ARGV[i], 0, -1) end \
             return out"
        }
        Pass::Withdraw => {
            "local out = {} for i = 2, #ARGV do redis.call('ZREM', ARGV[i], ARGV[1]) \
             out[i-1] = redis.call('ZCARD', ARGV[i]) end return out"
        }
    }
}

/// Of a Redis server that nothing of ours talks to.
pub(super) fn plain_redis(
    redis: &RedisServer,
    batches: &Batches,
    bench: &Bench,
) -> Result<Option<Rates>, CliError> {
    let mut connection = redis.connection()?;
    let node = identity().node;
    let meter = Meter { cpu: &|| CpuTime::of(redis.process()), bytes: &|| redis.bytes() };
    meter.rates(count(batches), |pass| {
        let script = redis::Script::new(script(pass));
        for batch in batches.iter() {
            if bench.is_interrupted() {
                return Ok(false);
            }
            let mut call = script.prepare_invoke();
            call.arg(node.0.as_slice());
            batch.iter().for_each(|key| {
                call.arg(key.hash.as_bytes());
            });
            let answer: redis::Value = call.invoke(&mut connection).map_err(CliError::failed)?;
            if !matches!(answer, redis::Value::Array(all) if all.len() == batch.len()) {
                return Err(CliError::failed("redis-server answered a script wrongly"));
            }
        }
        Ok(true)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_that_ends_early_has_no_rates() {
        let used = std::cell::Cell::new(0);
        let cpu = || {
            used.set(used.get() + 1);
            Ok(CpuTime::of_thread())
        };
        let meter = Meter { cpu: &cpu, bytes: &|| Ok(used.get() * 100) };
        for last in [Pass::Announce, Pass::Plan, Pass::Withdraw] {
            let runs = |pass: Pass| Ok(pass as usize != last as usize);
            assert!(meter.rates(10, runs).unwrap().is_none(), "{last:?}");
        }
        used.set(0);
        // The memory is looked at before and after the first pass, which takes two looks at the clock.
        let rates = meter.rates(10, |_| Ok(true)).unwrap().unwrap();
        assert_eq!(rates.bytes_per_entry, 20.0);
        assert!(meter.rates(10, |_| Err(CliError::failed("no"))).is_err());
    }

    #[test]
    fn batches_name_all_keys_once() {
        let batches = batches(3000);
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [1024, 1024, 952]);
        let keys: std::collections::HashSet<_> = batches.iter().flatten().collect();
        assert_eq!((keys.len(), count(&batches)), (3000, 3000));
    }
}
