//! A client's memory on its way in, beside its other requests and all other clients.
//!
//! Opening a driver and registering pools with it takes seconds, once. And an engine that dies and is
//! started again may come back with the same memory before the node has let go of it, for peers that read
//! from it have their time to end: it waits for that instead of being refused.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::service::DoorService;
use crate::memory::{EngineMemory, ImportError, Owner};
use crate::protocol::door::MemorySource;

/// How often it is tried whether memory has been let go of.
const LOOK: Duration = Duration::from_millis(5);

/// Imports memory, waiting for so long where it was a client's who is gone.
pub(super) async fn import<S: DoorService>(
    service: Arc<S>,
    owner: Arc<Owner>,
    (source, bytes): (MemorySource, u64),
    file: Option<OwnedFd>,
    wait: Duration,
) -> Result<Arc<dyn EngineMemory>, ImportError> {
    let mut over = std::pin::pin!(sleep(wait));
    let system = |call, error: &dyn std::fmt::Display| {
        Err(ImportError::System { call, error: error.to_string() })
    };
    loop {
        // Each try takes the descriptor along.
        let file = match file.as_ref().map(OwnedFd::try_clone).transpose() {
            Ok(file) => file,
            Err(error) => return system("dup", &error),
        };
        let (service, importer) = (Arc::clone(&service), Arc::clone(&owner));
        let tried =
            tokio::task::spawn_blocking(move || service.import(&importer, (&source, bytes), file));
        match tried.await {
            Ok(Err(ImportError::Leaving)) if !owner.has_ended() => {}
            Ok(imported) => return imported,
            Err(died) => return system("importing", &died),
        }
        tokio::select! {
            biased;
            () = &mut over => return Err(ImportError::Leaving),
            () = sleep(LOOK) => {}
        }
    }
}
