//! GPUs that are lost, with blocks in their memory that engines have published there.
//!
//! A loss is noticed by whoever the driver tells of it: the data thread, or a copy for an engine or for a
//! local reader. From then on no local reader is given such a block and none is published, and all that
//! were are withdrawn in the same order as when their engine asks for it: peers that have a lease on one
//! have their grace, for a card may still read what the GPU's processors lost. The layouts stay open, and
//! say that they are lost, until their engine goes; an engine that withdraws such blocks itself finds that
//! none of them is published any more.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use tokio::sync::watch;

use super::Engine;
use crate::node::Inner;
use crate::protocol::door::DeviceUuid;

/// Takes back what lies on GPUs that are lost, as often as one is, until the node is gone.
pub(in crate::node) async fn mind_losses(
    node: Weak<Inner>,
    mut losses: watch::Receiver<BTreeSet<DeviceUuid>>,
) {
    while losses.changed().await.is_ok() {
        let Some(node) = node.upgrade() else { return };
        let lost = losses.borrow_and_update().clone();
        for engine in node.in_place.engines_on(&lost) {
            // Each for itself: readers of one engine's blocks keep no other engine's.
            let (node, lost) = (Arc::clone(&node), lost.clone());
            tokio::spawn(async move {
                let blocks = engine.published(|open| open.lies_on(&lost));
                node.withdraw_from(&engine, &blocks).await;
            });
        }
    }
}

impl super::Layouts {
    /// The engines that have a layout open on any of these GPUs.
    fn engines_on(&self, gpus: &BTreeSet<DeviceUuid>) -> Vec<Arc<Engine>> {
        let open = crate::sync::lock(&self.open);
        let on = open.values().filter(|open| open.lies_on(gpus));
        let mut engines: Vec<Arc<Engine>> = Vec::new();
        for engine in on.filter_map(|open| open.engine.upgrade()) {
            if !engines.iter().any(|other| Arc::ptr_eq(other, &engine)) {
                engines.push(engine);
            }
        }
        engines
    }
}
