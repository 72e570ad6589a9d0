//! Queue pairs come up in a thread of their own.
//!
//! When a queue pair comes up the kernel looks for the way to its peer, and takes a second to find that
//! there is none, in the call. The thread that polls a fabric answers every peer of the node, so it hands a
//! connection's queues over for that long. Nothing is on them meanwhile: the peer learns of the
//! acceptor's once they are up, and the connector sends nothing before its own are.
//!
//! A connection that ends in between is buried without its queues; they are destroyed when they come back.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use super::EventWake;
use super::link::{Link, Way};
use crate::fabric::{ConnectionId, FabricError, Wake};
use crate::verbs::VerbsError;

/// Queues that are up, or why not and on which NIC of ours.
#[derive(Debug)]
pub(super) struct Raised {
    pub(super) id: ConnectionId,
    pub(super) link: Link,
    pub(super) outcome: Result<(), (u8, VerbsError)>,
}

/// Threads that raise queues, one for each connection that begins.
#[derive(Debug)]
pub(super) struct Raisers {
    raised: Receiver<Raised>,
    done: Sender<Raised>,
    wake: Arc<EventWake>,
    running: usize,
}

impl Raisers {
    /// Each one that is done ends a poll through `wake`.
    pub(super) fn new(wake: Arc<EventWake>) -> Self {
        let (done, raised) = channel();
        Self { raised, done, wake, running: 0 }
    }

    /// Raises the queues of a connection.
    ///
    /// # Errors
    /// Where the system has no thread for it.
    pub(super) fn raise(
        &mut self,
        id: ConnectionId,
        link: Link,
        ways: Vec<Way>,
    ) -> Result<(), VerbsError> {
        let (done, wake) = (self.done.clone(), Arc::clone(&self.wake));
        let raise = move || {
            let outcome = link.raise(&ways);
            // Without a receiver the fabric is gone, and the queues go too.
            done.send(Raised { id, link, outcome }).ok();
            wake.wake();
        };
        let started = thread::Builder::new().name("kvrail-raise".to_owned()).spawn(raise);
        started.map_err(|source| FabricError::Os {
            call: "starting a thread that connects queue pairs".to_owned(),
            source,
            remedy: "raise the limits of threads and of address space (ulimit -u, ulimit -v)",
        })?;
        self.running += 1;
        Ok(())
    }

    /// The next ones that are up, or are not to be had.
    pub(super) fn next(&mut self) -> Option<Raised> {
        if self.running == 0 {
            return None;
        }
        let raised = self.raised.try_recv().ok()?;
        self.running -= 1;
        Some(raised)
    }
}
