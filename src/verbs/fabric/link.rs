//! The queues of one connection, made together and brought up together.

use std::sync::Arc;

use super::device::Device;
use super::hello::{Card, Hello, Seat, random_psn};
use super::lane::{Lane, Rail};
use super::messages::{INLINE_BYTES, Messages, RECEIVES, SENDS};
use super::nics::Nics;
use super::pairing::Reason;
use super::probe::{PROBE_BYTES, PathEnds};
use super::rails::RailState;
use super::windows::Windows;
use crate::fabric::RemoteSpan;
use crate::verbs::{
    CompletionQueue, Path, ProtectionDomain, QueuePair, QueuePairAddress, QueueSizes, VerbsError,
};

/// The completion queue of a connection on one NIC.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) nic: u8,
    pub(super) cq: Arc<CompletionQueue>,
    /// The port's MTU when this was made, as `IBV_MTU_*`: that of its interface may change.
    mtu: i32,
    /// Whether the next completion makes an event.
    pub(super) armed: bool,
    /// Work requests of its lanes that it has room for, parts of READs counted one by one.
    pub(super) depth: usize,
}

/// How one queue pair gets to its peer's.
#[derive(Debug)]
pub(super) struct Way {
    /// Our NIC that it is on.
    nic: u8,
    path: Path,
    to: QueuePairAddress,
    psn: u32,
}

/// A completion queue on each NIC that is used, one queue pair for messages, and the lanes.
#[derive(Debug)]
pub(super) struct Link {
    /// Made when the peer is admitted. Before the queue pairs, so that they go first.
    pub(super) windows: Option<Windows>,
    /// Whether the peer's keys name the lane to read by.
    pub(super) by_window: bool,
    pub(super) messages: Messages,
    pub(super) lanes: Vec<Lane>,
    pub(super) queues: Vec<Queue>,
    /// Sequence numbers of the message queue pair, then of the lanes.
    pub(super) psns: Vec<u32>,
    /// Where those queue pairs are.
    pub(super) seats: Vec<Seat>,
    /// The pairs of NICs that lanes go over, once the peer's hello is known.
    pub(super) rails: Vec<RailState>,
    /// Whether the peer's pattern has arrived over the path of messages.
    pub(super) is_proven: bool,
    /// The peer's pattern, and the path to it, once its hello is known.
    probe: Option<(RemoteSpan, PathEnds)>,
}

impl Link {
    /// Queues whose events carry `token`: messages at the first seat, lanes at the others. Nothing is
    /// reachable yet.
    pub(super) fn new(nics: &Nics, seats: Vec<Seat>, token: u64) -> Result<Self, VerbsError> {
        let lane_count = seats.len().saturating_sub(1);
        let mut queues: Vec<Queue> = Vec::new();
        let mut pair = |nic: u8, wants: fn(&Device) -> (&Arc<ProtectionDomain>, QueueSizes)| {
            let device = nics.get(nic).ok_or_else(|| no_such_nic(nic))?;
            let cq = match queues.iter().find(|queue| queue.nic == nic) {
                Some(queue) => Arc::clone(&queue.cq),
                None => {
                    let depth = device.completions(lane_count);
                    let cq = CompletionQueue::new(&device.context, &device.channel, depth, token)?;
                    let (made, depth) = (Arc::clone(&cq), device.reads as usize);
                    let mtu = device.context.port(device.port.number)?.active_mtu;
                    queues.push(Queue { nic, cq: made, mtu, armed: false, depth });
                    cq
                }
            };
            let (domain, sizes) = wants(device);
            let pair = QueuePair::new(domain, &cq, sizes, token)?;
            pair.init(device.port.number)?;
            Ok::<_, VerbsError>((pair, device))
        };
        let (first, lane_seats) = seats.split_first().ok_or_else(|| no_such_nic(0))?;
        let (messages, device) = pair(first.nic, |device| {
            let (sends, receives) = (SENDS.into(), RECEIVES.into());
            (&device.foyer, QueueSizes { sends, receives, segments: 1, inline: INLINE_BYTES })
        })?;
        let messages = Messages::new(&device.foyer, messages)?;
        messages.post_receives()?;
        let mut lanes = Vec::with_capacity(lane_count);
        for (index, seat) in (0..).zip(lane_seats) {
            let (made, device) = pair(seat.nic, |device| {
                let (sends, segments) = (device.lane_requests(), device.segments);
                (&device.domain, QueueSizes { sends, receives: 1, segments, inline: 0 })
            })?;
            lanes.push(Lane::new(index, made, device.reads as usize));
        }
        let psns = seats.iter().map(|_| random_psn()).collect::<Result<_, _>>()?;
        Ok(Self {
            windows: None,
            by_window: false,
            messages,
            lanes,
            queues,
            psns,
            seats,
            rails: Vec::new(),
            is_proven: false,
            probe: None,
        })
    }

    fn pairs(&self) -> impl Iterator<Item = (&QueuePair, u32, Seat)> {
        let messages = std::iter::once(self.messages.pair());
        let pairs = messages.chain(self.lanes.iter().map(Lane::pair));
        let numbered = pairs.zip(&self.psns).zip(&self.seats);
        numbered.filter_map(|((pair, psn), seat)| Some((pair?, *psn, *seat)))
    }

    /// Whether something speaks for each pair of NICs that READs go over: a rail, or the operator's word.
    pub(super) fn keeps_to_rails(&self) -> bool {
        let mut reasons = self.seats.iter().skip(1).map(|seat| seat.reason);
        !self.lanes.is_empty()
            && reasons.all(|reason| reason.is_some_and(|reason| reason != Reason::Balance))
    }

    /// What the peer must know.
    pub(super) fn hello(&self, nics: &Nics) -> Hello {
        let mut hello = Hello::new(&nics.devices);
        hello.lanes = u32::try_from(self.lanes.len()).unwrap_or(0);
        hello.receives = RECEIVES.into();
        hello.windows = u32::from(nics.windows > 0);
        self.queues.iter().for_each(|queue| hello.set_mtu(queue.nic, queue.mtu));
        for (index, (pair, psn, seat)) in self.pairs().enumerate() {
            hello.set_pair(index, QueuePairAddress { number: pair.number(), psn }, seat);
        }
        hello
    }

    /// What the acceptor made of our offer. `false` where that is no answer to it.
    pub(super) fn settle(&mut self, peer: &Hello) -> bool {
        let lanes = usize::try_from(peer.lanes).unwrap_or(usize::MAX);
        if lanes > self.lanes.len() {
            return false;
        }
        // Lanes beyond what the peer granted are destroyed.
        self.lanes.truncate(lanes);
        self.seats.truncate(1 + lanes);
        let seats = &self.seats;
        self.queues.retain(|queue| seats.iter().any(|seat| seat.nic == queue.nic));
        (0..).zip(&mut self.seats).all(|(index, seat)| {
            let theirs = peer.seat(index);
            let fits = theirs.peer == seat.nic && theirs.reason.is_some();
            *seat = Seat { nic: seat.nic, peer: theirs.nic, reason: theirs.reason };
            fits
        })
    }

    /// How each queue pair gets to the peer's.
    pub(super) fn ways(&self, nics: &Nics, peer: &Hello) -> Result<Vec<Way>, VerbsError> {
        let way = |(index, (_, psn, seat)): (usize, (_, u32, Seat))| {
            let device = nics.get(seat.nic).ok_or_else(|| no_such_nic(seat.nic))?;
            let card = peer.cards().get(usize::from(seat.peer));
            let card = card.ok_or_else(|| no_such_nic(seat.peer))?;
            let path = path(device, card, self.mtu(seat.nic));
            Ok(Way { nic: seat.nic, path, to: peer.pair(index), psn })
        };
        self.pairs().enumerate().map(way).collect()
    }

    /// Connects all queue pairs to the peer's, which takes as long as the kernel looks for the way. Where
    /// one cannot be, the error comes with our NIC that it is on.
    pub(super) fn raise(&self, ways: &[Way]) -> Result<(), (u8, VerbsError)> {
        self.pairs().zip(ways).try_for_each(|((pair, ..), way)| {
            let raised = pair.ready_to_receive(&way.path, way.to);
            raised
                .and_then(|()| pair.ready_to_send(&way.path, way.psn))
                .map_err(|error| (way.nic, error))
        })
    }

    /// Notes what goes where, now that all queue pairs are up.
    pub(super) fn lay_out(&mut self, nics: &Nics, peer: &Hello) -> Result<(), VerbsError> {
        for (lane, seat) in self.lanes.iter_mut().zip(self.seats.iter().skip(1)) {
            let ours = nics.get(seat.nic).map_or(0, |device| device.port.message_bytes);
            let theirs = peer.cards().get(usize::from(seat.peer)).map_or(0, |it| it.message_bytes);
            lane.set_rail(Rail { nic: seat.nic, peer: seat.peer, longest: ours.min(theirs) });
        }
        self.messages.grant(peer.receives);
        self.by_window = peer.windows != 0;
        // The pattern is all that this one can read.
        self.messages.pair().map_or(Ok(()), QueuePair::allow_reads)?;
        let seat = self.seats.first().ok_or_else(|| no_such_nic(0))?;
        let device = nics.get(seat.nic).ok_or_else(|| no_such_nic(seat.nic))?;
        let card = peer.cards().get(usize::from(seat.peer));
        let card = card.ok_or_else(|| no_such_nic(seat.peer))?;
        let len = u32::try_from(PROBE_BYTES).unwrap_or(0);
        let span = RemoteSpan { rkey: card.probe_rkey, address: card.probe_address, len };
        let mtu = self.path_mtu(device, card, seat.nic);
        self.probe = Some((span, PathEnds::new(device, card, mtu)));
        self.lay_rails(nics, peer)
    }

    /// The MTU between a NIC of ours and one of the peer's, as `IBV_MTU_*`.
    pub(super) fn path_mtu(&self, device: &Device, card: &Card, nic: u8) -> i32 {
        path(device, card, self.mtu(nic)).mtu
    }

    fn mtu(&self, nic: u8) -> i32 {
        self.queues.iter().find(|queue| queue.nic == nic).map_or(0, |queue| queue.mtu)
    }

    /// Reads the peer's pattern, over the path of messages.
    pub(super) fn start_probe(&mut self) -> Result<(), VerbsError> {
        match &self.probe {
            Some((span, _)) => self.messages.probe(span),
            None => Ok(()),
        }
    }

    /// Says that the path does not work.
    pub(super) fn warn(&self, what: &str) {
        if let Some((_, ends)) = &self.probe {
            ends.warn(what);
        }
    }

    /// Whether a queue pair of it is on this NIC.
    pub(super) fn uses(&self, nic: u8) -> bool {
        self.queues.iter().any(|queue| queue.nic == nic)
    }

    /// The NIC that messages travel over.
    pub(super) fn messages_nic(&self) -> u8 {
        self.seats.first().map_or(0, |seat| seat.nic)
    }

    /// Lets the peer READ.
    pub(super) fn admit(&mut self, nics: &Nics) -> Result<(), VerbsError> {
        if nics.windows > 0 && self.windows.is_none() {
            self.windows = Some(Windows::new(nics, &self.lanes)?);
        }
        self.lanes.iter().filter_map(Lane::pair).try_for_each(QueuePair::allow_reads)
    }
}

/// The path from a NIC of ours to one of the peer's; of every limit the smaller one holds.
fn path(device: &Device, peer: &Card, mtu: i32) -> Path {
    let smaller = |ours: u8, theirs: u32| u8::try_from(theirs).map_or(ours, |it| it.min(ours));
    Path {
        port: device.port.number,
        sgid_index: device.sgid_index,
        global: device.port.ethernet || device.port.lid == 0,
        dgid: peer.gid,
        dlid: u16::try_from(peer.lid).unwrap_or(0),
        mtu: mtu.min(i32::try_from(peer.mtu).unwrap_or(0)),
        reads_issued: smaller(device.limits.reads_issued, peer.reads_served),
        reads_served: smaller(device.limits.reads_served, peer.reads_issued),
        retries: device.retries,
    }
}

/// Seats name only NICs that both ends told of.
fn no_such_nic(nic: u8) -> VerbsError {
    VerbsError::Incapable {
        device: format!("NIC {nic}"),
        lack: "is not there: report this as a defect".to_owned(),
    }
}
