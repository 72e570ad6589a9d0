//! Blocks that a client publishes where they lie.
//!
//! The node looks at each block once, before it is visible: its checksum is taken of a copy, in memory
//! that goes back at once. From then on the bytes are the client's to leave alone, until it has had the
//! block back or its connection has ended; readers find by the checksum where it did not.

use std::sync::Arc;

use super::engine::Move;
use super::service::{DoorService, InPlace};
use super::session::refused;
use crate::protocol::door::Reply;
use crate::types::Namespace;

/// Bytes of blocks that are copied at once to be summed up: some pieces for each thread of a batch.
const SCRATCH_BYTES: u64 = if cfg!(test) { 1 << 10 } else { 64 << 20 };

impl Move {
    /// Publishes the blocks in place: open, sum up, make visible.
    pub(super) async fn publish<S: DoorService>(
        self,
        (service, client): (Arc<S>, Arc<S::Client>),
        namespace: Namespace,
        pulled: bool,
    ) -> Reply {
        let layout = (self.id, Arc::clone(&self.imported));
        let opened =
            Arc::clone(&service).open(client, layout, (namespace, self.blocks.clone())).await;
        let opened = match opened {
            Ok(opened) => opened,
            Err(sentence) => return refused(&sentence),
        };
        let sums = match self.sums(&*service).await {
            Ok(sums) => sums,
            Err(reply) => return reply,
        };
        if !self.is_wanted() {
            return refused("the client is gone");
        }
        let blocks = self.blocks.iter().zip(sums).map(|(moved, checksum)| InPlace {
            hash: moved.hash,
            block: moved.block,
            checksum,
        });
        let outcomes = service.publish_in_place(opened, &namespace, blocks.collect(), pulled);
        Reply::Published { outcomes }
    }

    /// The checksum of each block, from copies that are dropped again.
    async fn sums<S: DoorService>(&self, service: &S) -> Result<Vec<u64>, Reply> {
        // A part of the pools alone, so that no more than that has to make room.
        let largest = service.pools().iter().map(|pool| pool.bytes).max().unwrap_or(0);
        let bytes = SCRATCH_BYTES.min(largest / 4);
        let count = bytes / u64::from(self.imported.layout.block_bytes());
        let count = usize::try_from(count).unwrap_or(usize::MAX).max(1);
        let mut sums = Vec::with_capacity(self.blocks.len());
        for blocks in self.blocks.chunks(count) {
            let (_scratch, found) = self.copy_out(service, blocks).await?;
            sums.extend(found);
        }
        Ok(sums)
    }
}
