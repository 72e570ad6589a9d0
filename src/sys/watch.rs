//! One wait for two fabrics: the one that sleeps also watches what the other one waits for.

use std::os::fd::BorrowedFd;

use crate::fabric::{Fabric, FabricError};

/// A fabric whose polls also end when a descriptor of somebody else becomes readable.
pub trait Watch: Fabric {
    /// From now on a poll ends, too, when `fd` is readable. The caller keeps it open as long as it
    /// wants to know.
    ///
    /// # Errors
    /// [`FabricError::Os`] where the descriptor cannot be watched.
    fn watch(&mut self, fd: BorrowedFd<'_>) -> Result<(), FabricError>;

    /// Whether a poll has found that descriptor readable since the last call.
    fn take_watched(&mut self) -> bool;
}
