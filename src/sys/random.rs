//! Random numbers of the system, for keys that no peer may guess.

use std::io;

use crate::fabric::FabricError;

/// One.
///
/// # Errors
/// [`FabricError::Os`] where the system gives none.
pub fn number() -> Result<u32, FabricError> {
    getrandom::u32().map_err(|error| FabricError::Os {
        call: "getrandom".to_owned(),
        source: io::Error::other(error),
        remedy: "allow the getrandom system call in the container's seccomp profile",
    })
}
