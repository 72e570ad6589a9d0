//! The data thread: one fabric, polled by the one thread that owns it, and the peers that speak
//! over it.
//!
//! Each round takes commands, polls the fabric once, gives the events to [`Peers`], and carries out
//! what they ask for: an answer leaves before anything else is looked after. The clock is read once a
//! round: deadlines are milliseconds and more, a round is microseconds. That moment is also the thread's
//! [`Heartbeat`]. The thread waits only in [`Fabric::poll`]; commands end that wait through the
//! fabric's waker. It has no lock in common with those who command it ([`super::mailroom`]).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::{oneshot, watch};

use super::clock::Clock;
pub use super::connected::{ConnectedPeer, PeerSnapshot};
use super::heartbeat::{Heartbeat, Rounds};
use super::in_place::{
    InPlace, Leftovers, NotRegistered, OpaquePinner, Pinned, Registered, ServedLayout,
};
use super::mailroom::{Answer, Inbox, Outbox};
use super::rejections::{By, Rejections};
use crate::fabric::{EventBatch, Fabric, FabricError, FabricEvent, ReadBatch, RegionId, Wake};
use crate::limits;
use crate::memory::ForeignFabric;
use crate::peer::{FetchId, FetchRequest, Fetched, Output, Peers, Wish, WithdrawalId};
use crate::types::{NodeId, PoolId, Reach, ResidentId, Scope, Timestamp};

/// The name of the data thread.
pub const DATA_THREAD: &str = "kvrail-data";

/// The longest that a round waits: a bound on how late an unexpected state is noticed.
const ROUND_MAX: Duration = Duration::from_secs(1);

/// A fetch that is over.
#[derive(Debug)]
pub struct Answered {
    /// What became of it.
    pub fetched: Fetched,
    /// What lies between this node and the owner; `None` where they are not connected any more.
    pub reach: Option<Reach>,
}

/// Asks the data thread for something.
#[derive(Debug)]
pub(super) enum Command<E> {
    Fetch {
        node: NodeId,
        endpoint: E,
        wish: Wish,
        answer: oneshot::Sender<Answered>,
    },
    Snapshot {
        answer: oneshot::Sender<PeerSnapshot>,
    },
    ResetHealth {
        node: Option<NodeId>,
        answer: oneshot::Sender<u32>,
    },
    Drain {
        drained: oneshot::Sender<()>,
    },
    Pinner {
        answer: oneshot::Sender<OpaquePinner>,
    },
    Register {
        pinned: Pinned,
        answer: oneshot::Sender<Result<Registered, NotRegistered>>,
    },
    Serve {
        layout: ServedLayout,
    },
    Withdraw {
        residents: Vec<ResidentId>,
        answer: oneshot::Sender<()>,
    },
    LetGo {
        layouts: Vec<PoolId>,
        regions: Vec<RegionId>,
        answer: oneshot::Sender<Leftovers>,
    },
    /// What was fetched for one who does not wait any more.
    Release {
        fetched: Fetched,
    },
    Stop,
}

/// The data thread is gone: the node is stopping, or its fabric failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the data thread has stopped; the node's log says why")]
pub struct Stopped;

/// A handle on the data thread, for any number of threads.
#[derive(Debug)]
pub struct DataHandle<E> {
    inbox: Arc<Inbox<Command<E>>>,
    waker: Arc<dyn Wake>,
    heartbeat: Heartbeat,
    /// Closed with the thread.
    alive: watch::Receiver<bool>,
}

impl<E> Clone for DataHandle<E> {
    fn clone(&self) -> Self {
        Self {
            inbox: Arc::clone(&self.inbox),
            waker: Arc::clone(&self.waker),
            heartbeat: self.heartbeat.clone(),
            alive: self.alive.clone(),
        }
    }
}

impl<E> DataHandle<E> {
    /// Fetches up to [`crate::limits::LEND_BLOCKS_MAX`] blocks from one owner. Blocks that are ready
    /// are resident and pinned once, for the caller to unpin.
    ///
    /// # Errors
    /// [`Stopped`].
    pub async fn fetch(&self, node: NodeId, endpoint: E, wish: Wish) -> Result<Answered, Stopped> {
        let (answer, fetched) = oneshot::channel();
        self.send(Command::Fetch { node, endpoint, wish, answer })?;
        fetched.await.map_err(|_gone| Stopped)
    }

    /// Peers and leases now.
    ///
    /// # Errors
    /// [`Stopped`].
    pub async fn snapshot(&self) -> Result<PeerSnapshot, Stopped> {
        let (answer, snapshot) = oneshot::channel();
        self.send(Command::Snapshot { answer })?;
        snapshot.await.map_err(|_gone| Stopped)
    }

    /// Forgets what speaks against one peer, or against all; how many breakers were not closed.
    ///
    /// # Errors
    /// [`Stopped`].
    pub async fn reset_health(&self, node: Option<NodeId>) -> Result<u32, Stopped> {
        let (answer, reset) = oneshot::channel();
        self.send(Command::ResetHealth { node, answer })?;
        reset.await.map_err(|_gone| Stopped)
    }

    /// No new leases and connections from now on; done when the last lease has ended, by its reader or
    /// by its deadline.
    ///
    /// # Errors
    /// [`Stopped`].
    pub async fn drain(&self) -> Result<(), Stopped> {
        let (drained, done) = oneshot::channel();
        self.send(Command::Drain { drained })?;
        done.await.map_err(|_gone| Stopped)
    }

    /// Closes all connections and ends the thread.
    pub fn stop(&self) {
        // Where the thread is gone already there is nothing to stop.
        self.send(Command::Stop).ok();
    }

    /// When the thread last went round.
    #[must_use]
    pub fn heartbeat(&self) -> &Heartbeat {
        &self.heartbeat
    }

    /// Whether the thread has not ended.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        // The sender goes with the thread.
        self.alive.has_changed().is_ok()
    }

    /// Done when the thread has ended, for whatever reason.
    pub async fn closed(&self) {
        self.alive.clone().wait_for(|alive| !alive).await.ok();
    }

    pub(super) fn send(&self, command: Command<E>) -> Result<(), Stopped> {
        if !self.inbox.put(command) {
            return Err(Stopped);
        }
        self.waker.wake();
        Ok(())
    }
}

/// The data thread; its result says why it ended.
pub type DataJoin = JoinHandle<Result<(), FabricError>>;

/// Starts the data thread, and on the current Tokio runtime a task that passes its answers on.
///
/// # Errors
/// Where the system refuses a thread, or the limit on open files is reached.
///
/// # Panics
/// Outside a Tokio runtime.
pub fn spawn<F, L>(
    fabric: F,
    peers: Peers<L>,
    landing: L,
    clock: Clock,
) -> std::io::Result<(DataHandle<F::Endpoint>, DataJoin)>
where
    F: ForeignFabric + Send + 'static,
    F::Endpoint: Send + 'static,
    L: InPlace + Send + 'static,
    L::Memory: Send,
{
    let (inbox, outbox) = (Arc::new(Inbox::new()), Arc::new(Outbox::new()?));
    let woken = outbox.watched()?;
    let (living, alive) = watch::channel(true);
    let heartbeat = Heartbeat::new(clock.now());
    let waker = fabric.waker();
    let own = Arc::clone(&inbox);
    let handle = DataHandle { inbox: own, waker, heartbeat: heartbeat.clone(), alive };
    let living = Living { inbox: Arc::clone(&inbox), outbox: Arc::clone(&outbox), _living: living };
    let thread = DataThread {
        fabric,
        peers,
        landing,
        clock,
        heartbeat,
        inbox,
        commands: Vec::new(),
        outbox: Arc::clone(&outbox),
        endpoints: BTreeMap::new(),
        answers: BTreeMap::new(),
        next_fetch: 0,
        withdrawals: BTreeMap::new(),
        next_withdrawal: 0,
        reads: ReadBatch::default(),
        rejections: Rejections::default(),
        next_widen: Timestamp::ZERO,
        drained: None,
        stopping: false,
    };
    let join = std::thread::Builder::new().name(DATA_THREAD.into()).spawn(move || {
        let _living = living;
        thread.run()
    })?;
    let release = handle.clone();
    tokio::spawn(outbox.deliver(woken, move |fetched| {
        // Without its thread a node serves nothing any more, and no pin matters.
        release.send(Command::Release { fetched }).ok();
    }));
    Ok((handle, join))
}

/// Goes with the thread, however that ends: nobody waits for it any more.
struct Living<E> {
    inbox: Arc<Inbox<Command<E>>>,
    outbox: Arc<Outbox<PeerSnapshot>>,
    _living: watch::Sender<bool>,
}

impl<E> Drop for Living<E> {
    fn drop(&mut self) {
        self.inbox.close();
        self.outbox.close();
    }
}

pub(super) struct DataThread<F: Fabric, L: InPlace> {
    pub(super) fabric: F,
    pub(super) peers: Peers<L>,
    pub(super) landing: L,
    clock: Clock,
    heartbeat: Heartbeat,
    inbox: Arc<Inbox<Command<F::Endpoint>>>,
    /// What was in it; kept for its memory.
    commands: Vec<Command<F::Endpoint>>,
    outbox: Arc<Outbox<PeerSnapshot>>,
    endpoints: BTreeMap<NodeId, F::Endpoint>,
    answers: BTreeMap<FetchId, oneshot::Sender<Answered>>,
    next_fetch: u64,
    pub(super) withdrawals: BTreeMap<WithdrawalId, oneshot::Sender<()>>,
    pub(super) next_withdrawal: u64,
    reads: ReadBatch,
    rejections: Rejections,
    /// When it is looked next which connections could be wider.
    pub(super) next_widen: Timestamp,
    /// Who waits for the last lease to end.
    drained: Option<oneshot::Sender<()>>,
    stopping: bool,
}

impl<F: ForeignFabric, L: InPlace> DataThread<F, L> {
    fn run(mut self) -> Result<(), FabricError> {
        let mut events = EventBatch::default();
        let mut now = self.clock.now();
        let mut rounds = Rounds::new(now);
        loop {
            self.take_commands(now);
            self.carry_out(now);
            if let Some(drained) = self.drained.take_if(|_| self.peers.leases_out() == 0) {
                self.tell(Answer::Done(drained));
            }
            if self.stopping {
                return Ok(());
            }
            let wait = match self.peers.poll_timeout() {
                Some(deadline) => deadline.since(now).min(ROUND_MAX),
                None => ROUND_MAX,
            };
            events.clear();
            self.fabric.poll(&mut events, wait)?;
            now = self.clock.now();
            self.heartbeat.beat(now);
            for event in &events.events {
                let bytes = match *event {
                    FabricEvent::Message { start, end, .. } => events.message(start, end),
                    _ => &[],
                };
                self.rejections.observe(By::Peer, bytes, || now);
                self.peers.handle_event(*event, bytes, &mut self.landing, now);
            }
            self.carry_out(now);
            if let Some(late) = rounds.end(wait, now) {
                tracing::warn!(?late, "this node's data thread was late: its peers get that time");
                self.peers.handle_stall(late, &mut self.landing, now);
            }
            if self.peers.poll_timeout().is_some_and(|deadline| deadline <= now) {
                self.peers.handle_timeout(&mut self.landing, now);
            }
            self.widen(now);
        }
    }

    fn take_commands(&mut self, now: Timestamp) {
        let mut commands = std::mem::take(&mut self.commands);
        self.inbox.take_into(&mut commands);
        for command in commands.drain(..) {
            match command {
                Command::Fetch { node, endpoint, wish, answer } => {
                    let id = FetchId(self.next_fetch);
                    self.next_fetch += 1;
                    if self.endpoints.len() >= limits::CONNECTIONS_MAX {
                        self.endpoints.clear();
                    }
                    self.endpoints.insert(node, endpoint);
                    self.answers.insert(id, answer);
                    self.peers.fetch(FetchRequest { id, node, wish }, now);
                }
                Command::Snapshot { answer } => {
                    let snapshot = self.snapshot(now);
                    self.tell(Answer::Snapshot(answer, snapshot));
                }
                Command::ResetHealth { node, answer } => {
                    let reset = self.peers.reset_health(node, now);
                    self.tell(Answer::Reset(answer, reset));
                }
                Command::Drain { drained } => {
                    self.peers.drain();
                    self.drained = Some(drained);
                }
                Command::Pinner { answer } => {
                    let pinner = self.pinner();
                    self.tell(Answer::Pinner(answer, pinner));
                }
                Command::Register { pinned, answer } => {
                    let registered = self.register(pinned);
                    self.tell(Answer::Registered(answer, registered));
                }
                Command::Serve { layout } => self.serve(layout),
                Command::Withdraw { residents, answer } => self.withdraw(residents, answer, now),
                Command::LetGo { layouts, regions, answer } => {
                    self.let_go(&layouts, &regions, answer);
                }
                Command::Release { fetched } => self.peers.release(&fetched),
                Command::Stop => {
                    self.peers.shut_down();
                    self.stopping = true;
                }
            }
        }
        self.commands = commands;
    }

    /// Carries out what the peers ask for, until they ask for nothing.
    fn carry_out(&mut self, now: Timestamp) {
        loop {
            while let Some(output) = self.peers.poll_output() {
                self.carry_out_one(output, now);
            }
            while let Some(connection) = self.peers.poll_post(&mut self.reads) {
                if let Err(error) = self.fabric.post(connection, &self.reads) {
                    self.peers.handle_post_refused(connection, &self.reads, error.scope());
                }
            }
            let mut idle = true;
            while let Some(fetched) = self.peers.poll_fetched() {
                idle = false;
                self.answer(fetched);
            }
            self.answer_withdrawals();
            if idle && !self.peers.has_output() {
                return;
            }
        }
    }

    fn carry_out_one(&mut self, output: Output, now: Timestamp) {
        match output {
            Output::Connect { node } => {
                let result = match self.endpoints.get(&node) {
                    Some(endpoint) => self.fabric.connect(endpoint).map_err(|error| {
                        tracing::warn!(%node, %error, "cannot connect");
                        error.scope()
                    }),
                    None => Err(Scope::Local),
                };
                self.peers.handle_connecting(node, result, now);
            }
            Output::Compare { connection, than } => self.compare(connection, than),
            // A connection that closed meanwhile says so by its own event.
            Output::Admit { connection } => {
                self.fabric.admit(connection).ok();
            }
            Output::Send { connection, start, end } => {
                let message = self.peers.message(start, end);
                self.rejections.observe(By::Us, message, || now);
                let sent = self.fabric.send(connection, message);
                if let Err(error) = sent {
                    self.peers.handle_send_refused(connection, error.scope());
                }
            }
            Output::Grant { connection, window, span, start, end } => {
                match self.fabric.grant(connection, window, &span) {
                    Ok(key) => self.peers.handle_granted(&span, (start, end), key),
                    Err(error) => {
                        tracing::warn!(%error, "a lease gets no key: its connection ends");
                        self.peers.handle_send_refused(connection, error.scope());
                    }
                }
            }
            // A connection that is gone has taken its keys along.
            Output::Revoke { connection, window } => {
                self.fabric.revoke(connection, window).ok();
            }
            Output::Close { connection } => self.fabric.close(connection),
        }
    }

    fn answer(&mut self, fetched: Fetched) {
        let Some(answer) = self.answers.remove(&fetched.id) else { return };
        let reach = self.peers.up_to(fetched.node).map(|on| self.fabric.reach(on));
        self.tell(Answer::Fetched(answer, Answered { fetched, reach }));
    }

    pub(super) fn tell(&self, answer: Answer<PeerSnapshot>) {
        if let Err(Answer::Fetched(_asker, unwanted)) = self.outbox.put(answer) {
            // No room, which the bound on askers rules out: the pins that were taken for this one go,
            // and it hears that there will be no answer.
            self.peers.release(&unwanted.fetched);
        }
    }
}
