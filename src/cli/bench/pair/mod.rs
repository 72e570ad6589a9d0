//! Two nodes on this host as child processes, one of which reads from the other all the time: what stalls
//! and faults are tried on. Both run what `serve` runs.

mod head;
mod readers;
mod samples;

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;

pub(super) use head::Head;
pub(super) use readers::Readers;
pub(super) use samples::{Outcome, Sample, Window};

use super::read::DeviceArgs;
use crate::cli::cluster::{Cluster, Process};
use crate::cli::{CliError, put};
use crate::client::Client;
use crate::config::Size;
use crate::node::TransportChoice;
use crate::types::{BlockHash, Namespace};

/// The namespace of the blocks that are read, and of those that are only saved.
const READ: &str = "kvrail-bench-read";
const SAVED: &str = "kvrail-bench-saved";

/// Bytes of a block.
const BLOCK_BYTES: u32 = 64 << 10;

/// Blocks that are read in turn: four times as many as the reader has room for, so that each has gone
/// from there when its turn comes again.
const BLOCKS: u32 = 1024;
const READER_POOL: Size = Size(BLOCKS as u64 / 4 * BLOCK_BYTES as u64);

/// Room for the blocks that are read and as many more: the savers of a bench fill it to the mark above
/// which the reclaimer works.
const HOLDER_POOL: Size = Size(2 * BLOCKS as u64 * BLOCK_BYTES as u64);

/// Blocks saved with one call.
const SAVE_BLOCKS: usize = 64;

/// The longest that a save waits for memory, or the registry for what was saved.
const PATIENCE: Duration = Duration::from_secs(20);

/// The holder's identity, the same when it is started again.
pub(super) const HOLDER_ID: &str = "686f6c64657200000000000000000001";

/// What both ends of a pair are told.
#[derive(Debug, Clone, Args)]
pub struct PairArgs {
    /// Fabric between the two nodes: auto, verbs or tcp
    #[arg(long, value_name = "FABRIC", default_value_t = TransportChoice::Auto)]
    pub transport: TransportChoice,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Blocks asked for at once
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub batch: u16,
    /// Reads in flight, each by a client of its own
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub depth: u16,
}

/// A registry, a holder and a reader.
#[derive(Debug)]
pub(super) struct Pair {
    args: PairArgs,
    advertised: Option<SocketAddr>,
    pub(super) holder: Process,
    pub(super) reader: Process,
    registry: Process,
    cluster: Cluster,
}

/// The blocks that are read, in the order in which they were saved.
pub(super) fn blocks() -> Vec<BlockHash> {
    (0..BLOCKS).map(|number| hash(u64::from(number))).collect()
}

fn hash(number: u64) -> BlockHash {
    let mut bytes = [0; 32];
    bytes.iter_mut().zip(number.to_le_bytes()).for_each(|(to, byte)| *to = byte);
    BlockHash::padded(&bytes, 32)
}

/// What is in a block, but for its first bytes, which are its number.
fn filler() -> Vec<u8> {
    vec![7; BLOCK_BYTES as usize]
}

fn number_into(bytes: &mut [u8], number: u64) {
    bytes.iter_mut().zip(number.to_le_bytes()).for_each(|(to, byte)| *to = byte);
}

pub(super) fn namespace() -> Result<Namespace, CliError> {
    READ.parse().map_err(CliError::failed)
}

impl Pair {
    /// Starts all three, with the blocks at the holder. Peers are told `advertised` for its address,
    /// where there is one.
    pub(super) fn start(args: &PairArgs, advertised: Option<SocketAddr>) -> Result<Self, CliError> {
        if args.transport == TransportChoice::Shm {
            let sentence = "--transport: the two nodes stand for two hosts: auto, verbs or tcp";
            return Err(CliError::usage(sentence));
        }
        if args.transport == TransportChoice::Tcp && args.device.is_named() {
            return Err(DeviceArgs::pointless());
        }
        let cluster = Cluster::new(std::env::current_exe().map_err(CliError::failed)?)?;
        let registry = cluster.registry("registry", &[])?;
        let holder = holder(&cluster, &registry, args, (None, advertised))?;
        let pool = READER_POOL.to_string();
        let reader = node(&cluster, &registry, args, ("reader", &["--pool", &pool]))?;
        let args = args.clone();
        let pair = Self { args, advertised, holder, reader, registry, cluster };
        pair.fill()?;
        Ok(pair)
    }

    /// Starts a holder that is gone again, where it was, and saves its blocks anew.
    pub(super) fn restart_holder(&mut self) -> Result<(), CliError> {
        let listen = self.holder.addresses()?.listen;
        self.holder.kill();
        let addresses = (Some(listen), self.advertised);
        self.holder = holder(&self.cluster, &self.registry, &self.args, addresses)?;
        self.fill()
    }

    /// Saves the blocks, and waits until the registry knows them.
    fn fill(&self) -> Result<(), CliError> {
        let client = self.holder.client()?;
        let (namespace, mut bytes) = (namespace()?, filler());
        for (at, batch) in (0..).step_by(SAVE_BLOCKS).zip(blocks().chunks(SAVE_BLOCKS)) {
            let sizes = vec![BLOCK_BYTES; batch.len()];
            let mut memory = put::reserve(&client, &sizes, PATIENCE)?;
            for (number, reservation) in (at..).zip(&mut memory) {
                number_into(&mut bytes, number);
                reservation.fill(&bytes)?;
            }
            client.publish(&namespace, batch.iter().copied().zip(memory).collect(), false)?;
        }
        if client.flush(PATIENCE)? {
            Ok(())
        } else {
            Err(CliError::failed("the registry did not hear of the blocks in time"))
        }
    }

    pub(super) fn args(&self) -> &PairArgs {
        &self.args
    }

    /// The transport that the nodes chose.
    pub(super) fn transport(&self) -> Result<String, CliError> {
        Ok(self.reader.client()?.stat()?.node.transport)
    }
}

/// Starts the holder, empty.
fn holder(
    cluster: &Cluster,
    registry: &Process,
    args: &PairArgs,
    (listen, advertised): (Option<SocketAddr>, Option<SocketAddr>),
) -> Result<Process, CliError> {
    let pool = HOLDER_POOL.to_string();
    let listen = listen.map(|address| address.to_string());
    let advertised = advertised.map(|address| address.to_string());
    let mut arguments = vec!["--node-id", HOLDER_ID, "--pool", &pool];
    arguments.extend(listen.iter().flat_map(|address| ["--listen", address]));
    arguments.extend(advertised.iter().flat_map(|address| ["--advertise", address]));
    node(cluster, registry, args, ("holder", &arguments))
}

fn node(
    cluster: &Cluster,
    registry: &Process,
    args: &PairArgs,
    (name, arguments): (&str, &[&str]),
) -> Result<Process, CliError> {
    let mut all = vec!["--no-shm", "--log", "warn", "--transport", args.transport.as_str()];
    let device = args.device.arguments();
    all.extend(device.iter().map(String::as_str));
    all.extend(arguments);
    cluster.node(name, registry.addresses()?.listen, &all)
}

/// The namespace of what savers save, the bytes of it, and its hashes from a number on.
pub(super) fn to_save(client: &Client, from: u64, count: usize) -> Result<u64, CliError> {
    let namespace: Namespace = SAVED.parse().map_err(CliError::failed)?;
    let mut memory = put::reserve(client, &vec![BLOCK_BYTES; count], PATIENCE)?;
    let bytes = filler();
    for reservation in &mut memory {
        reservation.fill(&bytes)?;
    }
    let named = (from..).map(hash).zip(memory).collect();
    client.publish(&namespace, named, false)?;
    Ok(from + count as u64)
}
