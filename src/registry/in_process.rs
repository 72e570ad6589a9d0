//! The registry within the process that asks.

use std::fmt;
use std::future::ready;
use std::sync::Arc;

use super::{
    Announced, Batch, Beat, Directory, Heartbeat, Missing, NodeIdentity, OwnerRegistry, Partition,
    Plan, PlanQuery, RegistryFuture, Stamp, Withdrawn,
};
use crate::types::Timestamp;

/// A [`Directory`] behind the trait: for one node without a cluster, and for tests.
#[derive(Clone)]
pub struct InProcess {
    directory: Arc<Directory>,
    now: Arc<dyn Fn() -> Timestamp + Send + Sync>,
}

impl fmt::Debug for InProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcess").field("epoch", &self.directory.epoch()).finish_non_exhaustive()
    }
}

impl InProcess {
    /// Answers from `directory` at the time that `now` gives.
    pub fn new(
        directory: Arc<Directory>,
        now: impl Fn() -> Timestamp + Send + Sync + 'static,
    ) -> Self {
        Self { directory, now: Arc::new(now) }
    }

    /// The directory.
    #[must_use]
    pub const fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }
}

impl OwnerRegistry for InProcess {
    fn heartbeat<'a>(
        &'a self,
        node: &'a NodeIdentity,
        heartbeat: Heartbeat<'a>,
    ) -> RegistryFuture<'a, Beat> {
        let now = (self.now)();
        // Heartbeats are the one steady thing here: they keep the sweep going.
        self.directory.sweep(now);
        Box::pin(ready(self.directory.heartbeat(node, heartbeat, now)))
    }

    fn announce<'a>(&'a self, batch: Batch<'a>) -> RegistryFuture<'a, Announced> {
        Box::pin(ready(self.directory.announce(batch, (self.now)())))
    }

    fn withdraw<'a>(&'a self, batch: Batch<'a>) -> RegistryFuture<'a, Withdrawn> {
        Box::pin(ready(self.directory.withdraw(batch, (self.now)())))
    }

    fn forget<'a>(&'a self, stamp: Stamp, partition: Partition) -> RegistryFuture<'a, ()> {
        Box::pin(ready(self.directory.forget(stamp, partition, (self.now)())))
    }

    fn report_missing<'a>(&'a self, missing: Missing<'a>) -> RegistryFuture<'a, u32> {
        Box::pin(ready(self.directory.report_missing(missing, (self.now)())))
    }

    fn plan<'a>(&'a self, query: PlanQuery<'a>) -> RegistryFuture<'a, Plan> {
        Box::pin(ready(self.directory.plan(query, (self.now)())))
    }
}
