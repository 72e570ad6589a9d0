//! Layouts that one end of a connection has told the other one, so that a loan names a block by its
//! number.
//!
//! Either end remembers the [`limits::PEER_LAYOUTS_MAX`] layouts that were told last, in the order in
//! which they were told, and so both always know the same ones.

use std::collections::{BTreeMap, VecDeque};

use arrayvec::ArrayVec;

use super::fetch::Violation;
use super::landing::Landing;
use super::outbox::Context;
use crate::fabric::{ConnectionId, RemoteSpan};
use crate::layout::{BlockId, Layout};
use crate::limits::PEER_LAYOUTS_MAX;
use crate::protocol::{Message, RegionEntry, TensorEntry};

/// A layout of a peer, and the regions that it lies in.
#[derive(Debug, Clone)]
struct Heard {
    number: u32,
    layout: Layout,
    regions: Vec<RegionEntry>,
}

/// What a peer has told us.
#[derive(Debug, Clone, Default)]
pub(super) struct HeardLayouts(VecDeque<Heard>);

impl HeardLayouts {
    pub(super) fn hear(
        &mut self,
        (number, blocks): (u32, u32),
        regions: &[RegionEntry],
        tensors: &[TensorEntry],
    ) -> Result<(), Violation> {
        let tensors = tensors.iter().map(TensorEntry::tensor).collect();
        let bytes =
            |id: crate::layout::AllocationId| regions.get(usize::from(id.0)).map(RegionEntry::len);
        let layout = Layout::readable(tensors, blocks, bytes).map_err(|_unfit| Violation)?;
        self.0.retain(|heard| heard.number != number);
        if self.0.len() == PEER_LAYOUTS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Heard { number, layout, regions: regions.to_vec() });
        Ok(())
    }

    /// Where the bytes of a block lie, in the order of its logical bytes; `None` unless the peer has
    /// told a layout of that number that has this block, of this length.
    pub(super) fn spans(
        &self,
        number: u32,
        block: BlockId,
        len: u32,
    ) -> Option<impl Iterator<Item = RemoteSpan> + '_> {
        let heard = self.0.iter().find(|heard| heard.number == number)?;
        if block.0 >= heard.layout.blocks() || len != heard.layout.block_bytes() {
            return None;
        }
        Some(heard.layout.segments(block).filter_map(|segment| {
            let region = heard.regions.get(usize::from(segment.allocation.0))?;
            let (rkey, address) = (region.rkey(), region.address() + segment.offset);
            Some(RemoteSpan { rkey, address, len: segment.len })
        }))
    }
}

/// Numbers of layouts, the one told last at the end.
type Numbers = ArrayVec<u32, PEER_LAYOUTS_MAX>;

/// What we have told our peers.
#[derive(Debug, Default)]
pub(super) struct ToldLayouts {
    told: BTreeMap<ConnectionId, Numbers>,
    /// Those of the lease in the making.
    named: Numbers,
}

impl ToldLayouts {
    /// Forgets the lease in the making.
    pub(super) fn begin(&mut self) {
        self.named.clear();
    }

    /// Whether one more loan of the lease in the making may name this layout: a lease that named more
    /// than a peer remembers could not be read.
    pub(super) fn name(&mut self, number: u32) -> bool {
        self.named.contains(&number) || self.named.try_push(number).is_ok()
    }

    /// Tells the peer those layouts of the lease in the making that it does not know, before the lease
    /// itself.
    pub(super) fn tell<L: Landing>(&mut self, on: ConnectionId, cx: &mut Context<'_, L>) {
        if self.named.is_empty() {
            return;
        }
        let told = self.told.entry(on).or_default();
        // Those that are known move to the end first, so that none of them makes way for another one.
        if self.named.iter().any(|number| !told.contains(number)) {
            told.retain(|number| !self.named.contains(number));
            let room = PEER_LAYOUTS_MAX - self.named.len();
            told.drain(..told.len().saturating_sub(room));
            for &number in &self.named {
                told.push(number);
                if let Some(lent) = cx.landing.layout(number) {
                    let (blocks, regions, tensors) = (lent.blocks, lent.regions, lent.tensors);
                    let message = Message::Layout { number, blocks, regions, tensors };
                    cx.outbox.send(on, &message);
                }
            }
        }
    }

    pub(super) fn handle_closed(&mut self, on: ConnectionId) {
        self.told.remove(&on);
    }
}
