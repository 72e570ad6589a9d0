//! One fetch per block: leads what nobody fetches yet, follows the rest.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{Fetcher, Wanted};
use crate::event::{BusyReason, Event};
use crate::peer::{FetchOutcome, Wish};
use crate::protocol::door::Source;
use crate::store::PinError;
use crate::sync::lock;
use crate::types::BlockKey;

/// How a follower is told what became of its block, and where it was looked for. Dropped unsent, it
/// sees to itself.
pub(super) type Waiter = oneshot::Sender<(FetchOutcome, Source)>;

/// A follower's end of it.
type Told = oneshot::Receiver<(FetchOutcome, Source)>;

/// Times that a reader follows others before it takes what they got for an answer. One that follows
/// finds the block gone again only where memory is very short.
const FOLLOWS: usize = 3;

/// The fetches of blocks that one read leads. What it has not landed when it is dropped, whatever
/// dropped it, is landed then.
struct Led<'a> {
    fetcher: &'a Fetcher,
    keys: Vec<Option<BlockKey>>,
    source: Source,
}

impl Led<'_> {
    fn land(&mut self, at: usize, outcome: FetchOutcome) {
        let Some(key) = self.keys.get_mut(at).and_then(Option::take) else { return };
        let waiters = lock(&self.fetcher.flights).land(&key);
        for waiter in waiters {
            // One that does not wait any more needs no answer.
            waiter.send((outcome, self.source)).ok();
        }
    }
}

impl Drop for Led<'_> {
    fn drop(&mut self) {
        let mut flights = lock(&self.fetcher.flights);
        for key in self.keys.drain(..).flatten() {
            drop(flights.land(&key));
        }
    }
}

impl Fetcher {
    /// One outcome per hash. Those that are ready are resident and pinned once; a block that somebody else
    /// was fetching may be elsewhere than where it was to land.
    pub(in crate::node) async fn fetch(
        self: &Arc<Self>,
        wish: &Wish,
        source: Source,
    ) -> Vec<FetchOutcome> {
        let wanted = Wanted { wish, source };
        let keys = wanted.keys();
        let mut outcomes = vec![FetchOutcome::NotFound; keys.len()];
        let mut open: Vec<usize> = (0..keys.len()).collect();
        for _ in 0..FOLLOWS {
            let (lead, follow) = self.join(&keys, &open);
            self.lead_some(wanted, (&keys, &lead), &mut outcomes).await;
            open.clear();
            for (at, told) in follow {
                let Some(&key) = keys.get(at) else { continue };
                let outcome = match told.await {
                    // The leader has a pin of its own; this reader needs one, too.
                    Ok((FetchOutcome::Ready { .. }, _)) => self.pin(&key),
                    // It may be elsewhere than where the leader looked.
                    Ok((outcome, looked)) if looked == source || looked == Source::Anywhere => {
                        Some(outcome)
                    }
                    _ => None,
                };
                match (outcome, outcomes.get_mut(at)) {
                    (Some(outcome), Some(slot)) => *slot = outcome,
                    _ => open.push(at),
                }
            }
            if open.is_empty() {
                break;
            }
        }
        outcomes
    }

    /// Sorts positions into those that this read leads and those that it follows.
    fn join(&self, keys: &[BlockKey], open: &[usize]) -> (Vec<usize>, Vec<(usize, Told)>) {
        let (mut lead, mut follow) = (Vec::with_capacity(open.len()), Vec::new());
        let mut flights = lock(&self.flights);
        for at in open {
            let Some(key) = keys.get(*at) else { continue };
            let (waiter, told) = oneshot::channel();
            if flights.join(*key, || waiter) {
                lead.push(*at);
            } else {
                follow.push((*at, told));
            }
        }
        drop(flights);
        if !follow.is_empty() {
            self.parts.sink.emit(Event::FetchesShared { blocks: follow.len() as u64 });
        }
        (lead, follow)
    }

    /// Fetches the blocks at these positions and tells whoever follows.
    async fn lead_some(
        self: &Arc<Self>,
        wanted: Wanted<'_>,
        (keys, lead): (&[BlockKey], &[usize]),
        outcomes: &mut [FetchOutcome],
    ) {
        let key = |at: &usize| keys.get(*at).copied();
        let mut led =
            Led { fetcher: self, keys: lead.iter().map(key).collect(), source: wanted.source };
        // What landed between this reader's look at the store and now is not fetched again.
        let mut absent = Vec::with_capacity(lead.len());
        for (at, position) in lead.iter().enumerate() {
            match key(position).and_then(|key| self.pin(&key)) {
                Some(outcome) => {
                    led.land(at, outcome);
                    set(outcomes, *position, outcome);
                }
                None => absent.push(at),
            }
        }
        let positions: Vec<usize> = absent.iter().filter_map(|at| lead.get(*at)).copied().collect();
        if positions.is_empty() {
            return;
        }
        let wish = &wanted.wish.part(&positions);
        let got = self
            .lead(Wanted { wish, ..wanted }, |at, outcome| {
                if let Some(at) = absent.get(at) {
                    led.land(*at, outcome);
                }
            })
            .await;
        for ((at, position), outcome) in absent.iter().zip(positions).zip(got) {
            led.land(*at, outcome);
            set(outcomes, position, outcome);
        }
    }

    /// A resident, pinned once; `None` where it is not here.
    fn pin(&self, key: &BlockKey) -> Option<FetchOutcome> {
        match self.parts.store.pin(key) {
            Ok(found) => Some(FetchOutcome::Ready { found, fetched: true }),
            Err(PinError::NotFound) => None,
            Err(PinError::TooManyPins) => Some(FetchOutcome::Busy(BusyReason::Pins)),
        }
    }
}

fn set(outcomes: &mut [FetchOutcome], at: usize, outcome: FetchOutcome) {
    if let Some(slot) = outcomes.get_mut(at) {
        *slot = outcome;
    }
}
