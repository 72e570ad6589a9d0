//! Layouts of local engines that peers read where they lie: registered with the fabric, served, and let
//! go, by the data thread. It is asked for each step; in which order they follow is the asker's affair:
//! memory is registered, then a layout in it is served, then blocks of it become residents; these are
//! withdrawn, and only then the layout is forgotten and its memory let go.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::data::{Command, DataHandle, DataThread, Stopped};
use super::door::Imported;
use super::mailroom::Answer;
use crate::fabric::{Access, FabricError, Region, RegionId};
use crate::memory::{Climb, ForeignFabric, Registrable, Rung};
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
    /// Where no card reaches its memory: what copies of its blocks are made from. It has no regions then,
    /// and peers are not told of it.
    pub staged: Option<Arc<Imported>>,
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

    /// The marks for the memory that it serves now; `None` where they stay as they are.
    fn pressure(&self) -> Option<Pressure> {
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

impl<E> DataHandle<E> {
    /// Registers memory for peers to read, by these rungs where it is another driver's.
    ///
    /// # Errors
    /// [`NotRegistered`].
    pub async fn register(
        &self,
        memory: Vec<Registrable>,
        rungs: &'static [Rung],
    ) -> Result<Registered, NotRegistered> {
        let (answer, registered) = oneshot::channel();
        self.send(Command::Register { memory, rungs, answer })?;
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
        let (answer, done) = oneshot::channel();
        self.send(Command::LetGo { layouts, regions, answer })?;
        done.await.map_err(|_gone| Stopped)
    }
}

impl<F: ForeignFabric, L: InPlace> DataThread<F, L> {
    pub(super) fn register(
        &mut self,
        memory: &[Registrable],
        rungs: &[Rung],
    ) -> Result<Registered, NotRegistered> {
        let mut done = Registered::new();
        for memory in memory {
            match self.register_one(memory, rungs) {
                Ok(registered) => done.push(registered),
                Err(error) => {
                    done.iter().for_each(|(region, _)| self.fabric.deregister(region.id));
                    return Err(error);
                }
            }
        }
        Ok(done)
    }

    fn register_one(
        &mut self,
        memory: &Registrable,
        rungs: &[Rung],
    ) -> Result<(Region, Option<Climb>), NotRegistered> {
        let access = Access::RemoteRead;
        match memory {
            Registrable::Host(mapping) => {
                Ok((self.fabric.register(mapping.clone(), access)?, None))
            }
            Registrable::Foreign(memory) => {
                match self.fabric.register_foreign(memory, access, rungs)? {
                    (Some(region), climb) => Ok((region, Some(climb))),
                    (None, climb) => Err(NotRegistered::NoWay(climb)),
                }
            }
        }
    }

    pub(super) fn serve(&mut self, layout: ServedLayout) {
        self.landing.serve(layout);
        self.move_marks();
    }

    /// What an engine opened to peers is memory that leases may take, as long as it is open.
    fn move_marks(&mut self) {
        if let Some(pressure) = self.landing.pressure() {
            self.peers.set_pressure(pressure);
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
        answer: oneshot::Sender<()>,
    ) {
        layouts.iter().for_each(|pool| self.landing.forget(*pool));
        self.move_marks();
        regions.iter().for_each(|region| self.fabric.deregister(*region));
        self.tell(Answer::Done(answer));
    }
}
