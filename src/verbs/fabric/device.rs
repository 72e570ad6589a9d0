//! One device of a fabric, a NIC: what is chosen before any connection, and whether it works now.

use std::sync::Arc;

use super::VerbsConfig;
use super::messages::{RECEIVES, SENDS};
use super::pairing::Candidate;
use super::probe;
use crate::limits::{LEASE_WINDOWS, READ_SEGMENTS_MAX, STREAMS_MAX};
use crate::sys::ibverbs::Library;
use crate::verbs::{
    CompletionChannel, Context, DeviceLimits, Gid, GidChoice, MemoryRegion, Port, ProtectionDomain,
    VerbsError, choose, describe,
};

/// READs of one connection that may be outstanding: enough to fill any path with small blocks.
const READS_MAX: u32 = 512;

/// What every port must carry and every device register at once, bytes: with less the longest READ
/// would be cut into more parts than a queue holds.
pub(super) const PART_BYTES_MIN: u32 = 64 << 10;

/// An open device with its chosen port and GID, and the sizes that follow from its limits.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) context: Arc<Context>,
    pub(super) domain: Arc<ProtectionDomain>,
    /// Where messages and the pattern are: what a peer reaches before it is admitted.
    pub(super) foyer: Arc<ProtectionDomain>,
    pub(super) probe: MemoryRegion,
    /// The pattern as lanes send it, and where they receive the peer's.
    pub(super) lane_probe: MemoryRegion,
    pub(super) channel: Arc<CompletionChannel>,
    pub(super) port: Port,
    pub(super) choice: GidChoice,
    pub(super) sgid_index: u8,
    pub(super) limits: DeviceLimits,
    /// Work requests of one connection that may be outstanding on it; they may all be on one lane.
    pub(super) reads: u32,
    /// Windows of one connection; 0 where peers read by the regions' keys.
    pub(super) windows: u16,
    /// Segments of one READ.
    pub(super) segments: u32,
    /// The NUMA node that it is attached to.
    pub(super) numa: Option<u32>,
    /// The peer's device that it shall talk to; empty for any.
    pub(super) wish: String,
    wanted_gid: Option<u32>,
    /// Retransmissions before a peer counts as gone.
    pub(super) retries: u8,
    /// Whether its port can carry data.
    pub(super) up: bool,
    /// Whether it was taken away.
    pub(super) gone: bool,
}

impl Device {
    pub(super) fn open(
        library: &Arc<Library>,
        name: &str,
        config: &VerbsConfig,
    ) -> Result<Self, VerbsError> {
        let context = Context::open(Arc::clone(library), name)?;
        let limits = context.limits()?;
        let port = active_port(&context, limits.ports)?;
        let table = context.gids(&port)?;
        let device = || name.to_owned();
        let choice = choose(&table, config.gid_index).ok_or_else(|| match config.gid_index {
            Some(index) => VerbsError::NoSuchGid {
                device: device(),
                port: port.number,
                index,
                table: describe(&table),
            },
            None => {
                VerbsError::NoGid { device: device(), port: port.number, table: describe(&table) }
            }
        })?;
        let incapable = |lack: &str| VerbsError::Incapable { device: device(), lack: lack.into() };
        let sgid_index = index(&choice.gid)
            .ok_or_else(|| incapable("has its GID beyond index 255: set --gid-index"))?;
        let windows = if config.lease_windows { LEASE_WINDOWS } else { 0 };
        if windows > 0 && limits.windows < u32::from(windows) {
            return Err(incapable(
                "has no memory windows of type 2, which --lease-windows needs: leave it out, or use \
                 another device",
            ));
        }
        let reads = reads(&limits, binds(windows));
        let segments = u32::try_from(READ_SEGMENTS_MAX).unwrap_or(1).min(limits.read_segments);
        if reads == 0 || segments == 0 || limits.reads_issued == 0 || limits.reads_served == 0 {
            return Err(incapable("does no RDMA READ: use another device, or --transport tcp"));
        }
        let short = u64::from(port.message_bytes).min(limits.mr_bytes);
        if short < u64::from(PART_BYTES_MIN) {
            return Err(incapable(
                "carries or registers less than 64 KiB at once: use another device, or \
                 --transport tcp",
            ));
        }
        let domain = ProtectionDomain::new(&context)?;
        let foyer = ProtectionDomain::new(&context)?;
        let probe = probe::register(&foyer)?;
        let lane_probe = probe::register_for_lanes(&domain)?;
        let channel = CompletionChannel::new(&context)?;
        let wish = config.pairs.iter().find(|pair| pair.ours == name);
        Ok(Self {
            context,
            domain,
            foyer,
            probe,
            lane_probe,
            channel,
            port,
            choice,
            sgid_index,
            limits,
            reads,
            windows,
            segments,
            numa: None,
            wish: wish.map(|pair| pair.theirs.clone()).unwrap_or_default(),
            wanted_gid: config.gid_index,
            retries: config.retries,
            up: true,
            gone: false,
        })
    }

    pub(super) fn name(&self) -> &str {
        self.context.name()
    }

    /// Whether new connections may use it.
    pub(super) const fn is_usable(&self) -> bool {
        self.up && !self.gone
    }

    pub(super) fn candidate(&self) -> Candidate<'_> {
        Candidate { name: self.name(), wish: &self.wish, numa: self.numa, up: self.is_usable() }
    }

    /// Looks at the port and its addresses again: an interface that comes back may have them at other
    /// places of the table. What cannot be read, or has no address now, stays as it was.
    pub(super) fn refresh(&mut self) {
        let Ok(port) = self.context.port(self.port.number) else { return };
        self.up = port.is_active();
        let Ok(table) = self.context.gids(&port) else { return };
        self.port = port;
        // Always the best of what is there: the table is filled bit by bit.
        let choice = choose(&table, self.wanted_gid).filter(|it| it.gid != self.choice.gid);
        if let Some((choice, at)) = choice.and_then(|it| index(&it.gid).map(|at| (it, at))) {
            tracing::info!(device = self.name(), gid = choice.reason, "another GID from now on");
            (self.choice, self.sgid_index) = (choice, at);
        }
    }

    /// Work requests that a lane can have outstanding: all READs, a marker, and what windows need.
    pub(super) fn lane_requests(&self) -> u32 {
        self.reads.saturating_add(1).saturating_add(binds(self.windows))
    }

    /// Completions that a connection can have outstanding on this device: READs or their parts, what
    /// else each lane has, all its messages, and what its windows need. Its completion queue is that
    /// deep, and no queue is shared.
    pub(super) fn completions(&self, lanes: usize) -> u32 {
        let lanes = u32::try_from(lanes).unwrap_or(u32::MAX).saturating_mul(LANE_OTHERS);
        let messages = u32::from(RECEIVES + SENDS);
        [lanes, messages, binds(self.windows)].into_iter().fold(self.reads, u32::saturating_add)
    }
}

/// What a lane can have outstanding beside READs: a marker, the pattern, and the peer's.
const LANE_OTHERS: u32 = 3;

/// Requests that so many windows can have outstanding: a bind and the invalidation of each.
fn binds(windows: u16) -> u32 {
    2 * u32::from(windows)
}

/// The index as queue pairs take it.
fn index(gid: &Gid) -> Option<u8> {
    u8::try_from(gid.index).ok()
}

/// READs that one connection may have outstanding on a device, beside so many requests of windows. All
/// may be on one lane, with a marker behind them, and each lane has its other requests: the completion
/// queue must hold all that at once, and the messages.
fn reads(limits: &DeviceLimits, binds: u32) -> u32 {
    let lanes = u32::try_from(STREAMS_MAX).unwrap_or(u32::MAX).saturating_mul(LANE_OTHERS);
    let others = u32::from(RECEIVES + SENDS).saturating_add(lanes).saturating_add(binds);
    let by_completions = limits.completions.saturating_sub(others);
    let by_queue = limits.work_requests.saturating_sub(1 + binds);
    READS_MAX.min(by_completions).min(by_queue)
}

fn active_port(context: &Context, ports: u8) -> Result<Port, VerbsError> {
    let mut states = Vec::new();
    for number in 1..=ports {
        let port = context.port(number)?;
        if port.is_active() {
            return Ok(port);
        }
        states.push(format!("port {number} is {}", port.state_name()));
    }
    Err(VerbsError::NoActivePort {
        device: context.name().to_owned(),
        states: if states.is_empty() { "it has none".to_owned() } else { states.join(", ") },
    })
}
