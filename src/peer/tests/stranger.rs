//! A peer that says what a test tells it to.

use std::sync::Arc;
use std::time::Duration;

use super::cluster::{Cluster, endpoint, key_of, node_id, requester_id};
use crate::fabric::{
    Access, CloseReason, CompletionStatus, ConnectionId, EventBatch, Fabric, FabricEvent,
    ReadBatch, ReadWork, Region, RegisteredSpan, RemoteSpan, WrId,
};
use crate::limits::PROBE_BYTES;
use crate::memory::{HostPool, PoolOptions};
use crate::protocol::{
    HashEntry, Introduction, LoanEntry, Message, Outcomes, RegionEntry, Role, SecretKey, decode,
};
use crate::sim::SimFabric;
use crate::types::{LeaseId, Load, NodeEpoch, NodeId, PoolId, RequestId, RequesterId};

pub(super) struct Stranger {
    pub(super) fabric: SimFabric,
    pub(super) node: NodeId,
    pub(super) epoch: NodeEpoch,
    pub(super) requester: RequesterId,
    pub(super) secret: SecretKey,
    pub(super) pool: Arc<HostPool>,
    pub(super) region: Region,
    nonce: u8,
    inbox: Vec<(FabricEvent, Vec<u8>)>,
}

/// A decoded message that keeps its bytes.
pub(super) struct Said(Vec<u8>);

impl Said {
    pub(super) fn message(&self) -> Message<'_> {
        decode(&self.0).unwrap()
    }
}

impl Stranger {
    /// A stranger at the place of node `at`, which the cluster does not run.
    pub(super) fn new(cluster: &Cluster, at: usize) -> Self {
        Self::with_memory(cluster, at, 16 << 10)
    }

    /// One whose whole memory is a page for probes.
    pub(super) fn with_probe_page(cluster: &Cluster, at: usize) -> Self {
        Self::with_memory(cluster, at, PROBE_BYTES.into())
    }

    fn with_memory(cluster: &Cluster, at: usize, bytes: u64) -> Self {
        let mut fabric = cluster.network.fabric(endpoint(at));
        let options =
            PoolOptions { id: PoolId(0), bytes, huge_pages: None, lock: false, numa_node: None };
        let pool = HostPool::create(&options).unwrap();
        let region = fabric.register(Arc::clone(pool.mapping()), Access::RemoteRead).unwrap();
        Self {
            fabric,
            node: node_id(at),
            epoch: NodeEpoch(1),
            requester: requester_id(at),
            secret: SecretKey::derive(b"secret"),
            pool,
            region,
            nonce: 0,
            inbox: Vec::new(),
        }
    }

    pub(super) fn introduction(&mut self) -> Introduction {
        self.nonce += 1;
        let (node, epoch, requester) = (self.node, self.epoch, self.requester);
        Introduction { node, epoch, requester, nonce: [self.nonce; 16] }
    }

    fn poll(&mut self) {
        let mut batch = EventBatch::default();
        self.fabric.poll(&mut batch, Duration::ZERO).unwrap();
        for event in &batch.events {
            let bytes = match *event {
                FabricEvent::Message { start, end, .. } => batch.message(start, end).to_vec(),
                _ => Vec::new(),
            };
            self.inbox.push((*event, bytes));
        }
    }

    /// Runs the cluster until something that `which` picks has come here.
    pub(super) fn wait(
        &mut self,
        cluster: &mut Cluster,
        which: impl Fn(&FabricEvent) -> bool,
    ) -> (FabricEvent, Vec<u8>) {
        let limit = cluster.now() + Duration::from_secs(30);
        for _ in 0..100_000 {
            self.poll();
            if let Some(found) = self.inbox.iter().position(|(event, _)| which(event)) {
                return self.inbox.remove(found);
            }
            cluster.turn();
            cluster.check();
            let next = cluster.next().unwrap_or(limit);
            assert!(next < limit, "nothing like it came");
            cluster.network.advance_to(next);
        }
        panic!("a deadline in the past keeps the nodes spinning");
    }

    pub(super) fn connect(&mut self, cluster: &mut Cluster, to: usize) -> ConnectionId {
        let on = self.fabric.connect(&endpoint(to)).unwrap();
        self.wait(cluster, |event| *event == FabricEvent::Connected { connection: on });
        on
    }

    pub(super) fn accepted(&mut self, cluster: &mut Cluster) -> ConnectionId {
        match self.wait(cluster, |event| matches!(event, FabricEvent::Accepted { .. })).0 {
            FabricEvent::Accepted { connection } => connection,
            _ => unreachable!(),
        }
    }

    pub(super) fn say(&mut self, on: ConnectionId, message: &Message<'_>) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        self.fabric.send(on, &bytes).unwrap();
    }

    /// The next message on a connection.
    pub(super) fn hear(&mut self, cluster: &mut Cluster, on: ConnectionId) -> Said {
        let here = |event: &FabricEvent| match event {
            FabricEvent::Message { connection, .. } => *connection == on,
            _ => false,
        };
        Said(self.wait(cluster, here).1)
    }

    /// The next message that `which` picks; others before it are dropped.
    pub(super) fn hear_a(
        &mut self,
        cluster: &mut Cluster,
        on: ConnectionId,
        which: impl Fn(&Message<'_>) -> bool,
    ) -> Said {
        loop {
            let said = self.hear(cluster, on);
            if which(&said.message()) {
                return said;
            }
        }
    }

    /// Answers pings for so long, and leaves all else unanswered.
    pub(super) fn live_for(&mut self, cluster: &mut Cluster, on: ConnectionId, span: Duration) {
        let end = cluster.now() + span;
        while cluster.now() < end {
            self.poll();
            let mut tokens = Vec::new();
            self.inbox.retain(|(_, bytes)| match decode(bytes) {
                Ok(Message::Ping { token }) => {
                    tokens.push(token);
                    false
                }
                _ => true,
            });
            for token in tokens {
                self.say(on, &Message::Pong { token, load: Load::default() });
            }
            cluster.run_for(Duration::from_millis(1).min(end.since(cluster.now())));
        }
    }

    pub(super) fn closed(&mut self, cluster: &mut Cluster, on: ConnectionId) -> CloseReason {
        let here = |event: &FabricEvent| match event {
            FabricEvent::Closed { connection, .. } => *connection == on,
            _ => false,
        };
        match self.wait(cluster, here).0 {
            FabricEvent::Closed { reason, .. } => reason,
            _ => unreachable!(),
        }
    }

    /// Up to and with `Confirm`, as the initiator.
    pub(super) fn shake_hands(&mut self, cluster: &mut Cluster, to: usize) -> ConnectionId {
        let on = self.connect(cluster, to);
        let hello = self.introduction();
        self.say(on, &Message::Hello(hello));
        let said = self.hear(cluster, on);
        let Message::Welcome { introduction: welcome, .. } = said.message() else {
            panic!("{:?}", said.message())
        };
        let proof = self.secret.proof(Role::Initiator, &hello, &welcome);
        self.say(on, &Message::Confirm { proof, regions: &[RegionEntry::from(&self.region)] });
        self.fabric.admit(on).unwrap();
        on
    }

    /// The whole handshake as the acceptor of a node's connection.
    pub(super) fn welcome(&mut self, cluster: &mut Cluster) -> ConnectionId {
        let on = self.accepted(cluster);
        let said = self.hear(cluster, on);
        let Message::Hello(hello) = said.message() else { panic!("{:?}", said.message()) };
        let introduction = self.introduction();
        let proof = self.secret.proof(Role::Acceptor, &hello, &introduction);
        let regions = [RegionEntry::from(&self.region)];
        self.say(on, &Message::Welcome { introduction, proof, regions: &regions });
        self.hear_a(cluster, on, |message| matches!(message, Message::Confirm { .. }));
        self.fabric.admit(on).unwrap();
        on
    }

    pub(super) fn lend(
        &mut self,
        cluster: &mut Cluster,
        on: ConnectionId,
        blocks: &[u16],
    ) -> (LeaseId, Vec<LoanEntry>) {
        let hashes: Vec<_> = blocks.iter().map(|b| HashEntry::from(key_of(*b).hash)).collect();
        let (request, namespace) = (RequestId(1), key_of(0).namespace);
        self.say(on, &Message::Lend { request, namespace, hashes: &hashes });
        let said = self.hear_a(cluster, on, |message| matches!(message, Message::Lease { .. }));
        match said.message() {
            Message::Lease { lease, loans, .. } => (lease, loans.to_vec()),
            _ => unreachable!(),
        }
    }

    /// Completes a lease; the ranks that are answered.
    pub(super) fn complete(
        &mut self,
        cluster: &mut Cluster,
        on: ConnectionId,
        lease: LeaseId,
        good: &[bool],
    ) -> Said {
        let mut bitmap = Vec::new();
        let count = Outcomes::pack(&mut bitmap, good.iter().copied());
        let (epoch, outcomes) = (self.epoch, Outcomes::new(count, &bitmap).unwrap());
        self.say(on, &Message::Complete { lease, epoch, outcomes });
        self.hear_a(cluster, on, |message| matches!(message, Message::Ranks { .. }))
    }

    /// Reads a peer's span into the start of this one's pool.
    pub(super) fn read(
        &mut self,
        cluster: &mut Cluster,
        on: ConnectionId,
        remote: RemoteSpan,
    ) -> CompletionStatus {
        self.try_read(cluster, on, remote).unwrap()
    }

    /// The same on a connection that may be closed by now: `None` where nothing could be posted.
    pub(super) fn try_read(
        &mut self,
        cluster: &mut Cluster,
        on: ConnectionId,
        remote: RemoteSpan,
    ) -> Option<CompletionStatus> {
        let wr_id = WrId { slot: 0, generation: 0 };
        let local = RegisteredSpan { region: self.region.id, offset: 0, len: remote.len };
        let works = vec![ReadWork { wr_id, remote, segments: 1 }];
        self.fabric.post(on, &ReadBatch { works, segments: vec![local] }).ok()?;
        match self.wait(cluster, |event| matches!(event, FabricEvent::Completed(_))).0 {
            FabricEvent::Completed(completion) => Some(completion.status),
            _ => None,
        }
    }
}
