//! Caches of other crates, on the same keys and payloads as the store. A pin is a shared pointer to the
//! payload, as their users hold it; where that keeps nothing from eviction, it keeps the memory.

mod caches;
mod lru;
mod pegaflow;

pub(super) use caches::{Foyer, Moka, Quick};
pub(super) use lru::Lru;
pub(super) use pegaflow::PegaFlow;
