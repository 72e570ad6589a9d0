//! A lease in the making.

use super::{LeaseTable, QuotaError, Residents};
use crate::types::{LeaseId, MemoryKind, ResidentId, Timestamp};

/// The positions of one lend request, answered one after the other. It owns the pins that it was
/// given: dropped without a grant, it unpins them.
#[must_use = "a draft that is dropped lends nothing"]
pub struct Draft<'a, R: Residents + ?Sized> {
    table: &'a mut LeaseTable,
    residents: &'a R,
    slot: u32,
    granted: bool,
}

impl<'a, R: Residents + ?Sized> Draft<'a, R> {
    pub(super) const fn new(table: &'a mut LeaseTable, residents: &'a R, slot: u32) -> Self {
        Self { table, residents, slot, granted: false }
    }

    /// Lends a block of so many bytes in such memory, which the caller has pinned, in the next position.
    /// The pin is the draft's from here on, also where this fails.
    ///
    /// # Errors
    /// [`QuotaError`]: the block is unpinned and the position counts as skipped.
    pub fn lend(
        &mut self,
        resident: ResidentId,
        bytes: u64,
        kind: MemoryKind,
    ) -> Result<(), QuotaError> {
        let own = if kind == MemoryKind::Engine { 0 } else { bytes };
        let lent = self.table.lend(self.slot, resident, (bytes, own));
        if lent.is_err() {
            self.residents.unpin(resident);
        }
        lent
    }

    /// Lends nothing in the next position.
    pub fn skip(&mut self) {
        self.table.skip(self.slot);
    }

    /// Makes it a lease, from now on; [`LeaseId::NONE`] where no block was lent.
    pub fn grant(mut self, now: Timestamp) -> LeaseId {
        self.granted = true;
        self.table.grant(self.slot, now)
    }
}

impl<R: Residents + ?Sized> Drop for Draft<'_, R> {
    fn drop(&mut self) {
        if !self.granted {
            self.table.cancel(self.slot, self.residents);
        }
    }
}

impl<R: Residents + ?Sized> std::fmt::Debug for Draft<'_, R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Draft").field("slot", &self.slot).finish_non_exhaustive()
    }
}
