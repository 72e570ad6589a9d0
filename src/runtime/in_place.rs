//! Layouts of local engines that peers read where they lie: registered with the fabric, served, and let
//! go, by the data thread. It is asked for each step; in which order they follow is the asker's affair:
//! memory is registered, then a layout in it is served, then blocks of it become residents; these are
//! withdrawn, and only then the layout is forgotten and its memory let go.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::data::{Command, DataHandle, DataThread, Stopped};
use super::door::Imported;
use super::mailroom::Answer;
use crate::fabric::{Access, FabricError, Region, RegionId, RegisteredSpan};
use crate::layout::{BlockId, Segment};
use crate::memory::{Climb, ForeignFabric, Pinner, Registrable, Rung};
use crate::peer::{Landing, Pressure, WithdrawalId};
use crate::protocol::{RegionEntry, TensorEntry};
use crate::types::{PoolId, ResidentId, Timestamp};

/// A layout as peers are told it.
#[derive(Debug, Clone)]
pub struct ServedLayout {
    /// What stands for it in extents.
    pub pool: PoolId,
    /// What peers name it by: no layout of this node ever had the same.
    pub number: u32,
    /// Its blocks.
    pub blocks: u32,
    /// Logical bytes of all of them.
    pub bytes: u64,
    /// The regions that its tensors lie in.
    pub regions: Vec<RegionEntry>,
    /// Its tensors; an allocation is a place in the list of regions.
    pub tensors: Vec<TensorEntry>,
    /// The layout as its engine knows it, and its memory.
    pub lies: Arc<Imported>,
    /// Whether all of it is host memory, which the CPU can look at.
    pub in_host_memory: bool,
    /// The region of each of its engine's allocations, by their numbers; `None` where it has nothing there.
    pub places: Vec<Option<RegionId>>,
}

impl ServedLayout {
    /// Whether no card reaches its memory: copies of its blocks are lent. It has no regions then, and
    /// peers are not told of it.
    #[must_use]
    pub fn is_staged(&self) -> bool {
        self.regions.is_empty()
    }

    /// Where the bytes of a block lie, in their order, as READs land there.
    pub fn spans(&self, block: BlockId) -> impl Iterator<Item = RegisteredSpan> + '_ {
        self.lies.layout.segments(block).map(|Segment { allocation, offset, len }| {
            let region = self.places.get(usize::from(allocation.0)).copied().flatten();
            // No fabric has such a region.
            RegisteredSpan { region: region.unwrap_or(RegionId(u16::MAX)), offset, len }
        })
    }
}

/// A landing that may serve layouts; without more, none.
pub trait InPlace: Landing {
    /// Serves a layout from now on.
    fn serve(&mut self, layout: ServedLayout) {
        drop(layout);
    }

    /// Serves a layout no more. No resident lies in it.
    fn forget(&mut self, pool: PoolId) {
        let _ = pool;
    }

    /// The marks for the memory that it serves now, and how many bytes of that each requester may have
    /// under leases beside its quota; `None` where they stay as they are.
    fn lendable(&self) -> Option<(Pressure, u64)> {
        None
    }
}

/// Memory that is registered, in the order asked: its region and, where it is another driver's, how it
/// came to that.
pub type Registered = Vec<(Region, Option<Climb>)>;

/// Why memory was not registered. None of it is.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotRegistered {
    /// The fabric refused.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// There is no way for cards into it.
    #[error("peers have no way into it: {}", .0.why_not())]
    NoWay(Climb),
    /// The data thread is gone.
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

/// What only the fabric of the data thread knows.
type Opaque = Box<dyn Any + Send>;

/// Pins memory for the fabric of the data thread, on another one.
pub(super) struct OpaquePinner(Pinner<Opaque>);

impl fmt::Debug for OpaquePinner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpaquePinner").finish_non_exhaustive()
    }
}

/// Pinned memory, and how it came to that where it is another driver's.
pub(super) type Pinned = Vec<(Opaque, Option<Climb>)>;

/// What is left of regions, which goes when this is dropped.
pub(super) type Leftovers = Vec<Opaque>;

/// Pins all of this memory, or none.
fn pin_all(
    OpaquePinner(pin): &OpaquePinner,
    memory: &[Registrable],
    rungs: &[Rung],
) -> Result<Pinned, NotRegistered> {
    let one = |memory: &Registrable| match (pin(memory, rungs)?, memory) {
        ((Some(pinned), _), Registrable::Host(_)) => Ok((pinned, None)),
        ((Some(pinned), climb), Registrable::Foreign(_)) => Ok((pinned, Some(climb))),
        ((None, climb), _) => Err(NotRegistered::NoWay(climb)),
    };
    memory.iter().map(one).collect()
}

impl<E> DataHandle<E> {
    /// Registers memory for peers to read, by these rungs where it is another driver's. Its pages are
    /// pinned on a thread of their own: peers are served meanwhile.
    ///
    /// # Errors
    /// [`NotRegistered`].
    pub async fn register(
        &self,
        memory: Vec<Registrable>,
        rungs: &'static [Rung],
    ) -> Result<Registered, NotRegistered> {
        let (answer, pinner) = oneshot::channel();
        self.send(Command::Pinner { answer })?;
        let pin = pinner.await.map_err(|_gone| Stopped)?;
        let pinned = tokio::task::spawn_blocking(move || pin_all(&pin, &memory, rungs));
        let pinned =
            pinned.await.unwrap_or_else(|died| std::panic::resume_unwind(died.into_panic()))?;
        let (answer, registered) = oneshot::channel();
        self.send(Command::Register { pinned, answer })?;
        registered.await.map_err(|_gone| Stopped)?
    }

    /// Serves a layout from now on.
    ///
    /// # Errors
    /// [`Stopped`].
    pub fn serve(&self, layout: ServedLayout) -> Result<(), Stopped> {
        self.send(Command::Serve { layout })
    }

    /// Withdraws residents. Done when none of them is one and nobody can read them any more.
    ///
    /// # Errors
    /// [`Stopped`].
    pub async fn withdraw(&self, residents: Vec<ResidentId>) -> Result<(), Stopped> {
        let (answer, done) = oneshot::channel();
        self.send(Command::Withdraw { residents, answer })?;
        done.await.map_err(|_gone| Stopped)
    }

    /// Forgets layouts and lets go of regions. Done when peers can read nothing there any more.
    ///
    /// # Errors
    /// [`Stopped`].
    pub async fn let_go(
        &self,
        layouts: Vec<PoolId>,
        regions: Vec<RegionId>,
    ) -> Result<(), Stopped> {
        let (answer, left) = oneshot::channel();
        self.send(Command::LetGo { layouts, regions, answer })?;
        let left = left.await.map_err(|_gone| Stopped)?;
        // Unpinning takes as long as pinning did.
        tokio::task::spawn_blocking(move || drop(left))
            .await
            .unwrap_or_else(|died| std::panic::resume_unwind(died.into_panic()));
        Ok(())
    }
}

impl<F: ForeignFabric, L: InPlace> DataThread<F, L> {
    /// Pins memory on another thread, for [`Self::register`].
    pub(super) fn pinner(&self) -> OpaquePinner {
        let pin = self.fabric.pinner(Access::RemoteRead);
        OpaquePinner(Box::new(move |memory, rungs| {
            let (pinned, climb) = pin(memory, rungs)?;
            Ok((pinned.map(|pinned| Box::new(pinned) as Opaque), climb))
        }))
    }

    /// Makes regions of pinned memory, of all of it or of none.
    pub(super) fn register(&mut self, pinned: Pinned) -> Result<Registered, NotRegistered> {
        let mut done = Registered::new();
        for (pinned, climb) in pinned {
            // Whatever else it were would be another fabric's, and a node has one.
            let Ok(pinned) = pinned.downcast::<F::Pinned>() else { continue };
            match self.fabric.adopt(*pinned) {
                Ok(region) => done.push((region, climb)),
                Err(error) => {
                    done.iter().for_each(|(region, _)| self.fabric.deregister(region.id));
                    return Err(error.into());
                }
            }
        }
        Ok(done)
    }

    pub(super) fn serve(&mut self, layout: ServedLayout) {
        self.landing.serve(layout);
        self.move_marks();
    }

    /// What an engine opened to peers is memory that leases may take, as long as it is open.
    fn move_marks(&mut self) {
        if let Some((pressure, in_place_quota)) = self.landing.lendable() {
            self.peers.set_memory(pressure, in_place_quota);
        }
    }

    pub(super) fn withdraw(
        &mut self,
        residents: Vec<ResidentId>,
        answer: oneshot::Sender<()>,
        now: Timestamp,
    ) {
        let id = WithdrawalId(self.next_withdrawal);
        self.next_withdrawal += 1;
        self.withdrawals.insert(id, answer);
        self.peers.withdraw(id, residents, &mut self.landing, now);
    }

    /// Tells whose withdrawals are over.
    pub(super) fn answer_withdrawals(&mut self) {
        while let Some(id) = self.peers.poll_withdrawn() {
            if let Some(answer) = self.withdrawals.remove(&id) {
                self.tell(Answer::Done(answer));
            }
        }
    }

    pub(super) fn let_go(
        &mut self,
        layouts: &[PoolId],
        regions: &[RegionId],
        answer: oneshot::Sender<Leftovers>,
    ) {
        layouts.iter().for_each(|pool| self.landing.forget(*pool));
        self.move_marks();
        let left = regions.iter().filter_map(|region| self.fabric.disown(*region));
        let left = left.map(|left| Box::new(left) as Opaque).collect();
        self.tell(Answer::LetGo(answer, left));
    }
}
