//! Blocks of the GPU's pool for local engines that map the host pools: a copy each, as long as the
//! engine holds the block.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::GPU_POOL;
use crate::cuda::{Bound, Context, CopyQueue, CudaError, End, GpuPool, HostRegistration, Piece};
use crate::memory::Reservation;
use crate::node::residency::Residency;
use crate::protocol::door::AcquireOutcome;
use crate::sync::{Mutex, lock};
use crate::types::{Extent, PoolId, ResidentId};

/// Copies in flight at once; a batch has as many blocks at most, or goes in parts.
const COPIES: usize = 64;

/// The copies that engines hold, and the way to make them.
#[derive(Debug)]
pub(in crate::node) struct Shadows {
    context: Arc<Context>,
    pool: Arc<GpuPool>,
    /// The host pools, each registered with the driver once.
    hosts: Vec<(PoolId, Arc<HostRegistration>)>,
    queue: Mutex<CopyQueue>,
    held: Mutex<BTreeMap<ResidentId, Vec<Reservation>>>,
}

impl Shadows {
    pub(super) fn new(
        bound: &Bound<'_>,
        pool: &Arc<GpuPool>,
        hosts: Vec<(PoolId, Arc<HostRegistration>)>,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            context: Arc::clone(bound.context()),
            pool: Arc::clone(pool),
            hosts,
            queue: Mutex::new(CopyQueue::new(bound, COPIES)?),
            held: Mutex::default(),
        })
    }

    /// The host pools, as they are registered.
    pub(super) fn hosts(&self) -> Arc<[Arc<HostRegistration>]> {
        self.hosts.iter().map(|(_, host)| Arc::clone(host)).collect()
    }

    /// Puts copies in host memory in the place of blocks in the GPU's, each as long as the block is
    /// held. What cannot be copied now is busy, and is not held any more.
    pub(in crate::node) async fn in_host_memory(
        self: Arc<Self>,
        residency: &Residency,
        outcomes: &mut [AcquireOutcome],
    ) {
        let on_gpu = |outcome: &&mut AcquireOutcome| matches!(outcome, AcquireOutcome::Ready(held) if held.extent.pool == GPU_POOL);
        let outcomes: Vec<_> = outcomes.iter_mut().filter(on_gpu).collect();
        let mut sources = Vec::new();
        for outcome in &outcomes {
            if let AcquireOutcome::Ready(held) = outcome {
                sources.push(held.extent);
            }
        }
        let mut memory = Vec::with_capacity(sources.len());
        let sizes: Vec<u32> = sources.iter().map(|extent| extent.len).collect();
        residency.reserve_some(&sizes, &mut memory);
        let targets = memory.iter().map(Reservation::extent);
        let pairs: Vec<_> = sources.into_iter().zip(targets).collect();
        let this = Arc::clone(&self);
        // The reservations stay here, and the pins with the outcomes, until the copies have ended.
        let copied = match pairs.is_empty() {
            true => Ok(Ok(())),
            false => tokio::task::spawn_blocking(move || this.copy(&pairs)).await,
        };
        let copied = match copied {
            Ok(Ok(())) => true,
            other => {
                tracing::warn!(?other, "blocks could not be copied out of the GPU's memory");
                false
            }
        };
        let mut memory = memory.into_iter();
        for outcome in outcomes {
            let AcquireOutcome::Ready(held) = outcome else { continue };
            match memory.next().filter(|_| copied) {
                Some(memory) => {
                    held.extent = memory.extent();
                    self.keep(held.hold, memory);
                }
                None => {
                    residency.store.unpin_batch(&[held.hold]);
                    *outcome = AcquireOutcome::Busy;
                }
            }
        }
    }

    /// Copies blocks of the GPU's pool, which the caller has pinned, into host memory. Waits: not for
    /// the data thread.
    fn copy(&self, blocks: &[(Extent, Extent)]) -> Result<(), CudaError> {
        let bound = self.context.bind()?;
        // One batch at a time: they share the way out of the GPU anyway.
        let mut queue = lock(&self.queue);
        let from = End::Device(Arc::clone(self.pool.memory()));
        let mut ended = Vec::new();
        for (source, target) in blocks {
            let host = self.hosts.iter().find(|(pool, _)| *pool == target.pool);
            let Some((_, host)) = host else {
                return Err(CudaError::Unsupported { what: "a copy", why: "the pool is unknown" });
            };
            let len = u64::from(source.len.min(target.len));
            let piece = Piece::contiguous(source.offset, target.offset, len);
            if queue.room() == 0 {
                queue.drain(&bound, &mut ended)?;
            }
            queue.submit(&bound, (&from, &End::Host(Arc::clone(host))), &[piece], 0)?;
        }
        queue.drain(&bound, &mut ended)
    }

    /// Keeps a copy until the hold on its resident is released once more.
    fn keep(&self, hold: ResidentId, memory: Reservation) {
        lock(&self.held).entry(hold).or_default().push(memory);
    }

    /// One hold on each of these residents ends, and a copy with it.
    pub(in crate::node) fn release(&self, holds: &[ResidentId]) {
        let mut held = lock(&self.held);
        for hold in holds {
            if let Some(copies) = held.get_mut(hold) {
                copies.pop();
                if copies.is_empty() {
                    held.remove(hold);
                }
            }
        }
    }
}
