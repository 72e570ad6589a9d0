//! What is measured: anything that keeps a bounded number of blocks and evicts old ones.

use std::fmt;

use super::load::{self, Load, Numbers};
use super::resident::{self, Footprint};
use crate::cli::CliError;
use crate::store::Payload;
use crate::types::{BlockKey, RequesterIndex};

/// A store of blocks that any number of threads use at once.
pub trait Contender: Sized + Send + Sync + 'static {
    /// What keeps a block from eviction.
    type Pin: Send;

    /// The buffers that one thread reuses.
    type Hand: Default + Send;

    /// An empty one for so many blocks.
    ///
    /// # Errors
    /// Where none can be that large.
    fn new(capacity: u32) -> Result<Self, CliError>;

    /// A local reader's hit: the block is touched and pinned. `None` where it is not here.
    fn read(&self, hand: &mut Self::Hand, key: &BlockKey) -> Option<Self::Pin>;

    /// Makes a block resident, and pins it; whatever has to go for it goes. `None` where somebody
    /// else made it resident.
    fn insert(&self, hand: &mut Self::Hand, key: &BlockKey, payload: Payload) -> Option<Self::Pin>;

    /// Gives a pin back.
    fn release(&self, pin: Self::Pin);

    /// Looks up and pins a batch for a peer, and appends the pins of those that are here.
    fn lend(&self, hand: &mut Self::Hand, keys: &[BlockKey], pins: &mut Vec<Self::Pin>);

    /// Gives the pins of a batch back, leaving none.
    fn give_back(&self, pins: &mut Vec<Self::Pin>);

    /// Evicts at most so many blocks that are not pinned; how many went. `None` where it evicts
    /// when it likes.
    fn reclaim(&self, hand: &mut Self::Hand, max: usize) -> Option<usize>;
}

/// A contender with ranks.
pub trait Ranked: Contender {
    /// A local reader's hits, without pins.
    fn touch(&self, hand: &mut Self::Hand, keys: &[BlockKey]);

    /// Ends the transfers of these blocks to a requester: rank step and unpin, leaving no pins.
    fn commit(&self, hand: &mut Self::Hand, pins: &mut Vec<Self::Pin>, requester: RequesterIndex);
}

/// Nanoseconds of a victim, out of so many entries inserted in this order, most of them pinned or none.
type Reclaim = fn(u32, &[u32], bool) -> Result<Option<f64>, CliError>;

/// A contender as the bench runs it.
#[derive(Clone, Copy)]
pub struct Entrant {
    pub(super) name: &'static str,
    pub(super) round: fn(&Load) -> Result<Numbers, CliError>,
    pub(super) reclaim: Reclaim,
    pub(super) resident: fn(&Footprint) -> Result<Vec<u64>, CliError>,
}

impl Entrant {
    /// One without ranks.
    #[must_use]
    pub const fn plain<C: Contender>(name: &'static str) -> Self {
        Self {
            name,
            round: load::plain::<C>,
            reclaim: load::reclaim::<C>,
            resident: resident::measure::<C>,
        }
    }

    /// One with ranks.
    #[must_use]
    pub const fn ranked<C: Ranked>(name: &'static str) -> Self {
        Self { round: load::ranked::<C>, ..Self::plain::<C>(name) }
    }
}

impl fmt::Debug for Entrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entrant").field("name", &self.name).finish_non_exhaustive()
    }
}
