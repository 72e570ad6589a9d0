//! The border with libibverbs: hand-written declarations, and the library opened at run time.
//!
//! Nothing here is safe to call; [`crate::verbs`] gives it owners, lifetimes and errors.

pub mod constants;
mod library;
mod types;

pub use library::{LIBRARY_NAME, Library, LibraryError};
pub use types::*;
