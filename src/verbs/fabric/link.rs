//! The queues of one connection, made together and brought up together.

use std::sync::Arc;

use super::device::Device;
use super::hello::{Hello, random_psn};
use super::lane::Lane;
use super::messages::{Messages, RECEIVES, SENDS};
use super::probe::{PROBE_BYTES, PathEnds};
use crate::fabric::{FabricError, RemoteSpan};
use crate::verbs::{CompletionQueue, Path, QueuePair, QueuePairAddress, QueueSizes, VerbsError};

/// One completion queue, one queue pair for messages, and the lanes.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) messages: Messages,
    pub(super) lanes: Vec<Lane>,
    /// Sequence numbers of the message queue pair, then of the lanes.
    psns: Vec<u32>,
    /// The peer's pattern, and the path to it, once its hello is known.
    probe: Option<(RemoteSpan, PathEnds)>,
    pub(super) cq: Arc<CompletionQueue>,
    /// The port's MTU when the link was made, as `IBV_MTU_*`: that of its interface may change.
    mtu: i32,
    /// Whether the next completion makes an event.
    pub(super) armed: bool,
}

impl Link {
    /// Queues with `count` lanes, whose events carry `token`; nothing is reachable yet.
    pub(super) fn new(device: &Device, count: usize, token: u64) -> Result<Self, VerbsError> {
        let cq = CompletionQueue::new(
            &device.context,
            &device.channel,
            device.completions(count),
            token,
        )?;
        let pair = |domain, sizes| {
            let pair = QueuePair::new(domain, &cq, sizes, token)?;
            pair.init(device.port.number)?;
            Ok::<_, VerbsError>(pair)
        };
        let messages = QueueSizes { sends: SENDS.into(), receives: RECEIVES.into(), segments: 1 };
        let reads = QueueSizes { sends: device.reads + 1, receives: 0, segments: device.segments };
        let messages = Messages::new(&device.foyer, pair(&device.foyer, messages)?)?;
        messages.post_receives()?;
        let mut lanes = Vec::with_capacity(count);
        for index in 0..count {
            let index = u8::try_from(index).unwrap_or(u8::MAX);
            lanes.push(Lane::new(index, pair(&device.domain, reads)?, device.reads as usize));
        }
        let psns = (0..=count).map(|_| random_psn()).collect::<Result<_, _>>();
        let psns = psns.map_err(|error| FabricError::Os {
            call: "getrandom".to_owned(),
            source: std::io::Error::other(error),
            remedy: "allow the getrandom system call in the container's seccomp profile",
        })?;
        let mtu = device.context.port(device.port.number)?.active_mtu;
        Ok(Self { messages, lanes, psns, probe: None, cq, mtu, armed: false })
    }

    fn pairs(&self) -> impl Iterator<Item = (&QueuePair, u32)> {
        let messages = std::iter::once(self.messages.pair());
        let pairs = messages.chain(self.lanes.iter().map(Lane::pair));
        pairs.zip(&self.psns).filter_map(|(pair, psn)| Some((pair?, *psn)))
    }

    /// What the peer must know.
    pub(super) fn hello(&self, device: &Device) -> Hello {
        let mut hello = Hello::new();
        hello.lanes = u32::try_from(self.lanes.len()).unwrap_or(0);
        hello.mtu = self.mtu.cast_unsigned();
        hello.reads_issued = device.limits.reads_issued.into();
        hello.reads_served = device.limits.reads_served.into();
        hello.message_bytes = device.port.message_bytes;
        hello.receives = RECEIVES.into();
        hello.lid = device.port.lid.into();
        hello.probe_address = device.probe.address();
        hello.probe_rkey = device.probe.rkey();
        hello.gid = device.choice.gid.raw;
        for (index, (pair, psn)) in self.pairs().enumerate() {
            hello.set_pair(index, QueuePairAddress { number: pair.number(), psn });
        }
        hello
    }

    /// Connects all queue pairs to the peer's; of every limit the smaller one holds. Lanes beyond
    /// what the peer granted are destroyed.
    pub(super) fn connect(&mut self, device: &Device, peer: &Hello) -> Result<(), VerbsError> {
        self.lanes.truncate(usize::try_from(peer.lanes).unwrap_or(0));
        let smaller = |ours: u8, theirs: u32| u8::try_from(theirs).map_or(ours, |it| it.min(ours));
        let path = Path {
            port: device.port.number,
            sgid_index: device.sgid_index,
            global: device.port.ethernet || device.port.lid == 0,
            dgid: peer.gid,
            dlid: u16::try_from(peer.lid).unwrap_or(0),
            mtu: self.mtu.min(i32::try_from(peer.mtu).unwrap_or(0)),
            reads_issued: smaller(device.limits.reads_issued, peer.reads_served),
            reads_served: smaller(device.limits.reads_served, peer.reads_issued),
            retries: device.retries,
        };
        for (index, (pair, psn)) in self.pairs().enumerate() {
            pair.ready_to_receive(&path, peer.pair(index))?;
            pair.ready_to_send(&path, psn)?;
        }
        self.messages.grant(peer.receives);
        // The pattern is all that this one can read.
        self.messages.pair().map_or(Ok(()), QueuePair::allow_reads)?;
        let len = u32::try_from(PROBE_BYTES).unwrap_or(0);
        let span = RemoteSpan { rkey: peer.probe_rkey, address: peer.probe_address, len };
        self.probe = Some((span, PathEnds::new(device, peer, path.mtu)));
        Ok(())
    }

    /// Reads the peer's pattern.
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

    /// Lets the peer READ.
    pub(super) fn admit(&self) -> Result<(), VerbsError> {
        self.lanes.iter().filter_map(Lane::pair).try_for_each(QueuePair::allow_reads)
    }
}
