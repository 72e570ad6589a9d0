//! Blocks of the GPU's pool for local engines that map the host pools: a copy each, as long as the
//! engine holds the block.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::note_loss;
use crate::cuda::{Bound, Context, CopyQueue, CudaError, End, GpuPool, HostRegistration, Piece};
use crate::event::BusyReason;
use crate::memory::Reservation;
use crate::node::residency::{Patience, Residency};
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
    /// One copy for all that hold a resident, and how many those are.
    held: Mutex<BTreeMap<ResidentId, (Reservation, usize)>>,
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
    /// held. What finds no room is busy, what cannot be copied has failed; neither is held any more.
    /// Where one copy is refused the whole batch has failed. Where the GPU is lost, blocks that have no
    /// copy stay as they are: the caller lets go of them.
    pub(in crate::node) async fn in_host_memory(
        self: Arc<Self>,
        residency: &Residency,
        outcomes: &mut [AcquireOutcome],
    ) {
        let on_gpu = |outcome: &&mut AcquireOutcome| match outcome {
            AcquireOutcome::Ready(held) => held.extent.pool == PoolId::GPU,
            _ => false,
        };
        let mut wanted: Vec<&mut AcquireOutcome> = outcomes.iter_mut().filter(on_gpu).collect();
        wanted.retain_mut(|outcome| match outcome {
            AcquireOutcome::Ready(held) => match self.share(held.hold) {
                Some(extent) => {
                    held.extent = extent;
                    false
                }
                None => true,
            },
            _ => false,
        });
        if residency.device_is_lost() {
            return;
        }
        let mut sources = Vec::new();
        for outcome in &wanted {
            if let AcquireOutcome::Ready(held) = outcome {
                sources.push(held.extent);
            }
        }
        let mut memory = Vec::with_capacity(sources.len());
        let sizes: Vec<u32> = sources.iter().map(|extent| extent.len).collect();
        residency.reserve_some(&sizes, &mut memory, Patience::Waits);
        let pairs: Vec<_> =
            sources.into_iter().zip(memory.iter().map(Reservation::extent)).collect();
        let this = Arc::clone(&self);
        // The reservations go along: a caller that goes away takes none from under a copy.
        let copying = tokio::task::spawn_blocking(move || {
            let copied = if pairs.is_empty() { Ok(()) } else { this.copy(&pairs) };
            copied.map(|()| memory)
        });
        let (memory, otherwise) = match copying.await {
            Ok(Ok(memory)) => (memory, AcquireOutcome::Busy(BusyReason::Memory)),
            Ok(Err(error)) => {
                note_loss(residency, &error);
                if residency.device_is_lost() {
                    return;
                }
                tracing::warn!(%error, "blocks could not be copied out of the GPU's memory");
                (Vec::new(), AcquireOutcome::Failed)
            }
            // It panicked, which was reported then.
            Err(_panicked) => (Vec::new(), AcquireOutcome::Failed),
        };
        let mut memory = memory.into_iter();
        for outcome in wanted {
            let AcquireOutcome::Ready(held) = outcome else { continue };
            match memory.next() {
                Some(memory) => held.extent = self.keep(held.hold, memory),
                None => {
                    residency.store.unpin_batch(&[held.hold]);
                    *outcome = otherwise;
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
        let begun = blocks.iter().try_for_each(|pair| self.begin(&bound, &mut queue, *pair));
        // What was begun before a refusal has its memory until it has ended.
        queue.drain(&bound, &mut Vec::new()).and(begun)
    }

    fn begin(
        &self,
        bound: &Bound<'_>,
        queue: &mut CopyQueue,
        (source, target): (Extent, Extent),
    ) -> Result<(), CudaError> {
        let host = self.hosts.iter().find(|(pool, _)| *pool == target.pool);
        let Some((_, host)) = host else {
            return Err(CudaError::Unsupported { what: "a copy", why: "the pool is unknown" });
        };
        if queue.room() == 0 {
            queue.drain(bound, &mut Vec::new())?;
        }
        let from = End::Device(Arc::clone(self.pool.memory()));
        let to = End::Host(Arc::clone(host));
        let len = u64::from(source.len.min(target.len));
        let piece = Piece::contiguous(source.offset, target.offset, len);
        queue.submit(bound, (&from, &to), &[piece], 0)
    }

    /// Whether a resident has a copy now.
    pub(in crate::node) fn has(&self, hold: ResidentId) -> bool {
        lock(&self.held).contains_key(&hold)
    }

    /// One more holds a resident that has a copy already: where that is.
    fn share(&self, hold: ResidentId) -> Option<Extent> {
        let mut held = lock(&self.held);
        let (memory, holders) = held.get_mut(&hold)?;
        *holders += 1;
        Some(memory.extent())
    }

    /// Keeps a copy until the last hold on its resident is released; where it is. Another one that was
    /// made at the same time takes its place.
    fn keep(&self, hold: ResidentId, memory: Reservation) -> Extent {
        let mut held = lock(&self.held);
        let (memory, holders) = held.entry(hold).or_insert((memory, 0));
        *holders += 1;
        memory.extent()
    }

    /// One hold on each of these residents ends.
    pub(in crate::node) fn release(&self, holds: &[ResidentId]) {
        let mut held = lock(&self.held);
        for hold in holds {
            if let Some((_, holders)) = held.get_mut(hold) {
                *holders -= 1;
                if *holders == 0 {
                    held.remove(hold);
                }
            }
        }
    }
}
