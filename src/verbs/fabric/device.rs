//! The device of a fabric: what is chosen once, before any connection.

use std::sync::Arc;

use super::VerbsConfig;
use super::messages::{RECEIVES, SENDS};
use super::probe;
use crate::limits::{READ_BYTES_MAX, READ_SEGMENTS_MAX};
use crate::sys::ibverbs::Library;
use crate::verbs::{
    CompletionChannel, Context, DeviceLimits, GidChoice, MemoryRegion, Port, ProtectionDomain,
    VerbsError, choose, describe,
};

/// READs of one connection that may be outstanding: enough to fill any path with small blocks.
const READS_MAX: u32 = 512;

/// An open device with its chosen port and GID, and the sizes that follow from its limits.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) context: Arc<Context>,
    pub(super) domain: Arc<ProtectionDomain>,
    /// Where messages and the pattern are: what a peer reaches before it is admitted.
    pub(super) foyer: Arc<ProtectionDomain>,
    pub(super) probe: MemoryRegion,
    pub(super) channel: Arc<CompletionChannel>,
    pub(super) port: Port,
    pub(super) choice: GidChoice,
    pub(super) sgid_index: u8,
    pub(super) limits: DeviceLimits,
    /// Data queue pairs per connection.
    pub(super) lanes: usize,
    /// READs of one connection that may be outstanding; they may all be on one lane.
    pub(super) reads: u32,
    /// Segments of one READ.
    pub(super) segments: u32,
    /// Longest READ, bytes.
    pub(super) read_bytes: u32,
    /// Retransmissions before a peer counts as gone.
    pub(super) retries: u8,
}

impl Device {
    /// The device that the configuration names, else the first that works.
    pub(super) fn open(config: &VerbsConfig) -> Result<Self, VerbsError> {
        let library = Arc::new(Library::open()?);
        if let Some(name) = &config.device {
            return Self::open_one(&library, name, config);
        }
        let mut refused = Vec::new();
        for name in Context::names(&library)? {
            match Self::open_one(&library, &name, config) {
                Ok(device) => return Ok(device),
                Err(error) => {
                    tracing::warn!(device = name, %error, "this RDMA device is not used");
                    refused.push(error);
                }
            }
        }
        Err(refused.into_iter().next().unwrap_or(VerbsError::NoDevices))
    }

    fn open_one(
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
        let sgid_index = u8::try_from(choice.gid.index)
            .map_err(|_beyond| incapable("has its GID beyond index 255: set --gid-index"))?;
        let lanes = config.lanes;
        let messages = u32::from(RECEIVES + SENDS);
        let lane_count = u32::try_from(lanes).unwrap_or(u32::MAX);
        // All READs may be on one lane, with a marker behind them, and each lane has a marker: the
        // completion queue must hold all that at once, and the messages.
        let by_completions = limits.completions.saturating_sub(messages + lane_count);
        let by_queue = limits.work_requests.saturating_sub(1);
        let reads = READS_MAX.min(by_completions).min(by_queue);
        let segments = u32::try_from(READ_SEGMENTS_MAX).unwrap_or(1).min(limits.read_segments);
        if reads == 0 || segments == 0 || limits.reads_issued == 0 || limits.reads_served == 0 {
            return Err(incapable("does no RDMA READ: use another device, or --transport tcp"));
        }
        let read_bytes = READ_BYTES_MAX.min(port.message_bytes);
        tracing::info!(
            device = name,
            port = port.number,
            gid = choice.reason,
            "RDMA device chosen"
        );
        let domain = ProtectionDomain::new(&context)?;
        let foyer = ProtectionDomain::new(&context)?;
        let probe = probe::register(&foyer)?;
        let channel = CompletionChannel::new(&context)?;
        Ok(Self {
            context,
            domain,
            foyer,
            probe,
            channel,
            port,
            choice,
            sgid_index,
            limits,
            lanes,
            reads,
            segments,
            read_bytes,
            retries: config.retries,
        })
    }

    /// Completions that a connection can have outstanding: all its READs, one marker per lane, all
    /// its messages. Its completion queue is that deep, and no queue is shared.
    pub(super) fn completions(&self, lanes: usize) -> u32 {
        let lanes = u32::try_from(lanes).unwrap_or(u32::MAX);
        self.reads.saturating_add(lanes).saturating_add(u32::from(RECEIVES + SENDS))
    }
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
