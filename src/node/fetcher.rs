//! Misses: ask the registry who holds them, fetch from several owners at once, and once more from
//! others what failed.
//!
//! [`Read`] decides whom to ask for what; here are the calls that it wants made. Concurrent readers of
//! one block share one fetch (see [`Flights`]). An acquisition is never cancelled while the node runs,
//! whatever became of the client that asked for it, so the death of the first asker takes nothing from
//! the others.

mod addresses;
mod shared;

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::task::JoinSet;

use super::transport::PeerAddress;
use crate::event::{Event, EventSink, RegistryCall};
use crate::peer::{FetchOutcome, Wish};
use crate::protocol::door::Source;
use crate::registry::{Missing, OwnerRegistry, Plan, PlanQuery};
use crate::route::{Flights, Lend, Lent, Question, Read, Sources, Step};
use crate::runtime::clock::Clock;
use crate::runtime::data::{Answered, DataHandle};
use crate::store::Store;
use crate::sync::{Mutex, lock};
use crate::types::{BlockKey, Load, NodeId, Scope, Timestamp};
use addresses::Addresses;
use shared::Waiter;

/// What a fetcher works with.
#[derive(Debug)]
pub(super) struct FetcherParts {
    pub(super) node: NodeId,
    /// Where this node listens.
    pub(super) listen: SocketAddr,
    pub(super) registry: Arc<dyn OwnerRegistry>,
    pub(super) data: DataHandle<PeerAddress>,
    pub(super) store: Arc<Store>,
    pub(super) clock: Clock,
    pub(super) sink: Arc<dyn EventSink>,
}

/// Fetches blocks from their owners.
#[derive(Debug)]
pub(super) struct Fetcher {
    parts: FetcherParts,
    sources: Mutex<Sources>,
    flights: Mutex<Flights<Waiter>>,
    addresses: Addresses,
}

/// The blocks of one read that nobody else is fetching.
#[derive(Debug, Clone, Copy)]
struct Wanted<'a> {
    wish: &'a Wish,
    source: Source,
}

impl Wanted<'_> {
    fn keys(&self) -> Vec<BlockKey> {
        let Wish { namespace, hashes, .. } = self.wish;
        hashes.iter().map(|hash| BlockKey { namespace: *namespace, hash: *hash }).collect()
    }
}

impl Fetcher {
    pub(super) fn new(parts: FetcherParts) -> Self {
        let sources = Mutex::new(Sources::new(parts.node));
        let addresses = Addresses::new(parts.clock, parts.listen);
        Self { parts, sources, flights: Mutex::default(), addresses }
    }

    fn now(&self) -> Timestamp {
        self.parts.clock.now()
    }

    /// One outcome per hash of a read whose blocks nobody else is fetching. Those that are ready are
    /// resident and pinned once. `landed` hears of each of these as soon as it is.
    async fn lead(
        self: &Arc<Self>,
        wanted: Wanted<'_>,
        mut landed: impl FnMut(usize, FetchOutcome),
    ) -> Vec<FetchOutcome> {
        let mut read = Read::new(wanted.keys(), wanted.source, &lock(&self.sources), self.now());
        let mut lends = JoinSet::new();
        loop {
            let step = read.poll(&mut lock(&self.sources), self.now());
            match step {
                Step::Ask(question) => {
                    let plan = self.plan(&question).await;
                    read.handle_plan(plan.as_ref(), &mut lock(&self.sources), self.now());
                }
                Step::Lend(lend) => {
                    let wish = wanted.wish.part(&lend.positions);
                    let fetcher = Arc::clone(self);
                    lends.spawn(async move {
                        let lent = fetcher.borrow(&lend, wish).await;
                        (lend, lent)
                    });
                }
                Step::Wait => {
                    let Some(joined) = lends.join_next().await else { break };
                    let Ok((lend, lent)) = joined else {
                        read.handle_lost();
                        continue;
                    };
                    let sources = &mut lock(&self.sources);
                    let missing = read.handle_lent(&lend, &lent, sources, self.now());
                    for (at, outcome) in lend.positions.iter().zip(lent.outcomes) {
                        if matches!(outcome, FetchOutcome::Ready { .. }) {
                            landed(*at, outcome);
                        }
                    }
                    self.report_missing(&lend, missing);
                }
                Step::Over => break,
            }
        }
        read.outcomes().to_vec()
    }

    /// What the registry says.
    async fn plan(&self, question: &Question) -> Option<Plan> {
        let (asker, call) = (self.parts.node, RegistryCall::Plan);
        let Question { keys, avoid, same_host, same_rail, choice } = question;
        let choice = *choice;
        let query = PlanQuery { asker, keys, avoid, same_host, same_rail, choice };
        match self.parts.registry.plan(query).await {
            Ok(plan) => {
                self.parts.sink.emit(Event::RegistryAnswered { call });
                Some(plan)
            }
            Err(error) => {
                tracing::debug!(%error, "no plan: only local blocks can be read");
                self.parts.sink.emit(Event::RegistryFailed { call });
                None
            }
        }
    }

    /// Tells the registry which blocks an owner was listed for and does not hold. The read does not
    /// wait for that.
    fn report_missing(self: &Arc<Self>, lend: &Lend, keys: Vec<BlockKey>) {
        if keys.is_empty() {
            return;
        }
        self.parts.sink.emit(Event::OwnerMissed { blocks: keys.len() as u64 });
        let (fetcher, owner, epoch) = (Arc::clone(self), lend.owner, lend.epoch);
        tokio::spawn(async move {
            let call = RegistryCall::Report;
            let missing = Missing { owner, epoch, keys: &keys };
            let event = match fetcher.parts.registry.report_missing(missing).await {
                Ok(_removed) => Event::RegistryAnswered { call },
                Err(_unheard) => Event::RegistryFailed { call },
            };
            fetcher.parts.sink.emit(event);
        });
    }

    /// Asks an owner for blocks, and reads them.
    async fn borrow(&self, lend: &Lend, wish: Wish) -> Lent {
        let failed = |scope| {
            let outcomes = vec![FetchOutcome::Failed(scope); lend.positions.len()];
            Lent { outcomes, load: Load::default(), reach: None, suspended: None }
        };
        let Some(address) = self.addresses.of(lend.owner, &lend.address).await else {
            return failed(Scope::Peer);
        };
        let endpoint = PeerAddress { node: lend.owner, address };
        match self.parts.data.fetch(lend.owner, endpoint, wish).await {
            Ok(Answered { fetched, reach }) => Lent {
                outcomes: fetched.outcomes,
                load: fetched.load,
                reach,
                suspended: fetched.suspended.map(|suspended| suspended.until),
            },
            Err(_stopped) => failed(Scope::Local),
        }
    }
}
