//! `kvrail bench hold`: the end that is read from. It serves one reader after the other.

use std::fmt::Display;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use clap::Args;

use super::blocks::{BENCH, SET_MAX, hashes};
use super::control::{Answer, Ask, Line};
use super::fabric::{self, DeviceArgs, Transport, Wire};
use super::usage::Usage;
use crate::cli::cluster::{Cluster, Process};
use crate::cli::process::{Ready, announce_ready, end_with_parent, watch_signals};
use crate::cli::{CliError, put, say};
use crate::client::Client;
use crate::config::{ProcessConfig, socket_address};
use crate::fabric::{Access, EventBatch, FabricEvent, Region, Wake};
use crate::limits::STREAMS_MAX;
use crate::memory::{HostPool, PoolOptions};
use crate::runtime::deadline::Deadline;
use crate::types::{Namespace, NodeId, PoolId};
use crate::verbs::PollMode;

/// How long a poll waits.
const WAIT: Duration = Duration::from_millis(20);

/// Bytes written to a plain socket at once.
const BLAST_BYTES: usize = 256 << 10;

/// The longest that sockets may take to be connected.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Blocks saved with one call.
const SAVE_BLOCKS: usize = 64;

/// Bytes saved with one call, unless one block is longer.
const SAVE_BYTES: usize = 8 << 20;

/// The longest that a save waits for memory, or the registry for what was saved.
const PATIENCE: Duration = Duration::from_secs(20);

/// Where the nodes of a bench tell what they allocated.
pub(super) const METRICS: &str = "127.0.0.1:0";

/// Arguments of `kvrail bench hold`.
#[derive(Debug, Clone, Args)]
pub struct HoldArgs {
    /// Address that readers connect to; the other end's --peer
    #[arg(long, value_name = "IP:PORT", value_parser = socket_address)]
    pub listen: SocketAddr,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// File that gets one JSON line with the address once a reader may come.
    #[arg(long, hide = true)]
    pub ready_file: Option<PathBuf>,
    /// End when this process, the parent, ends.
    #[arg(long, hide = true)]
    pub parent_death: Option<u32>,
}

/// Serves readers until a signal ends it.
pub(in super::super) fn run(args: &HoldArgs) -> Result<ExitCode, CliError> {
    if args.listen.ip().is_unspecified() {
        return Err(CliError::usage(
            "--listen: name an address of this host that the reader reaches; nodes are told it",
        ));
    }
    let process = ProcessConfig {
        metrics_listen: None,
        log: "off".to_owned(),
        ready_file: args.ready_file.clone(),
        parent_death: args.parent_death,
    };
    end_with_parent(&process)?;
    let stop = Arc::new(AtomicBool::new(false));
    watch_signals(Arc::clone(&stop))?;
    let listener = TcpListener::bind(args.listen).map_err(|error| {
        CliError::usage(format!("--listen: cannot listen on {}: {error}", args.listen))
    })?;
    let listen = listener.local_addr().map_err(CliError::failed)?;
    let ready = Ready { listen, socket: None, metrics: None, pid: std::process::id() };
    let _ready = announce_ready(&process, &ready)?;
    if process.ready_file.is_none() {
        say(format_args!("kvrail bench read --peer {listen} can come now"));
    }
    listener.set_nonblocking(true).map_err(CliError::failed)?;
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, reader)) => {
                let mut hold = Hold { args, stop: &stop, fabric: None, nodes: None };
                if let Err(error) = hold.serve(stream) {
                    say(format_args!("the reader {reader} ended: {error}"));
                }
            }
            Err(_none_yet) => {
                // It is accepting that waits, and for a signal, too.
                let _more = Deadline::after(WAIT).pause(WAIT);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What one reader has.
struct Hold<'a> {
    args: &'a HoldArgs,
    stop: &'a AtomicBool,
    fabric: Option<Serving>,
    nodes: Option<Nodes>,
}

impl Hold<'_> {
    fn serve(&mut self, stream: TcpStream) -> Result<(), CliError> {
        stream.set_nonblocking(false).map_err(CliError::failed)?;
        let mut line = Line::new(stream)?;
        while line.waits_until(self.stop)?
            && let Some(ask) = line.hear()?
        {
            let answer = self.answer(ask);
            let failed = |error: CliError| Answer::Failed { sentence: error.to_string() };
            line.say(&answer.unwrap_or_else(failed))?;
        }
        Ok(())
    }

    fn answer(&mut self, ask: Ask) -> Result<Answer, CliError> {
        match ask {
            Ask::Open { transport, bytes } => self.open(transport, bytes),
            Ask::Fill { transport, pool, size, count } => {
                self.fill((transport, pool), (size, count))
            }
            Ask::Blast { streams } => blast(self.args.listen, streams),
            Ask::Usage { start } => {
                let node = self.nodes.as_ref().map(|nodes| &nodes.node);
                let of = if start { Usage::start_of } else { Usage::of };
                let node = node.map(of).transpose()?;
                Ok(Answer::Used(Usage::own()? + node.unwrap_or_default()))
            }
        }
    }

    /// An address of its own beside the one that readers come to.
    fn beside(&self) -> SocketAddr {
        SocketAddr::new(self.args.listen.ip(), 0)
    }

    fn open(&mut self, transport: Transport, bytes: u64) -> Result<Answer, CliError> {
        self.fabric = None;
        self.nodes = None;
        let listen = self.beside();
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(failed)?;
        let node = NodeId(id);
        let serving = match transport {
            Transport::Tcp => Serving::start(fabric::tcp(Some(listen), STREAMS_MAX)?, bytes),
            Transport::Shm => {
                Serving::start(fabric::shm(Some((listen, node)), STREAMS_MAX)?, bytes)
            }
            Transport::Verbs => {
                // It has no part in READs: a processor that it spins on is one that the device lacks.
                let device = DeviceArgs { poll: Some(PollMode::Event), ..self.args.device.clone() };
                Serving::start(fabric::verbs(&device, Some(listen), STREAMS_MAX)?, bytes)
            }
        }?;
        let Serving { endpoint, region, .. } = serving;
        self.fabric = Some(serving);
        let Region { rkey, address, len, .. } = region;
        Ok(Answer::Opened { node: node.to_string(), endpoint, rkey, address, len })
    }

    fn fill(
        &mut self,
        (transport, pool): (Transport, u64),
        (size, count): (u32, u32),
    ) -> Result<Answer, CliError> {
        // Nothing else runs beside what is measured: a fabric may poll without pause.
        self.fabric = None;
        let nodes = match self.nodes.take() {
            Some(nodes) => nodes,
            None => Nodes::start(self.args, transport, pool)?,
        };
        let nodes = self.nodes.insert(nodes);
        nodes.fill(size, count)?;
        Ok(Answer::Filled {
            node: nodes.client.stat()?.node.id,
            endpoint: nodes.node.addresses()?.listen,
            registry: nodes.registry.addresses()?.listen,
        })
    }
}

/// A fabric that serves a pool on a thread of its own.
struct Serving {
    endpoint: SocketAddr,
    region: Region,
    stop: Arc<AtomicBool>,
    waker: Arc<dyn Wake>,
    thread: Option<JoinHandle<()>>,
}

impl Serving {
    fn start<F: Wire + 'static>(mut fabric: F, bytes: u64) -> Result<Self, CliError> {
        let pool = written_pool(bytes)?;
        let region = fabric.register(Arc::clone(pool.mapping()), Access::RemoteRead);
        let region = region.map_err(CliError::failed)?;
        let endpoint = fabric.listens().ok_or_else(|| CliError::failed("it does not listen"))?;
        let (stop, waker) = (Arc::new(AtomicBool::new(false)), fabric.waker());
        let stopped = Arc::clone(&stop);
        let work = move || serve(fabric, &stopped);
        let thread = std::thread::Builder::new().name("holder".into()).spawn(work);
        let thread = Some(thread.map_err(CliError::failed)?);
        Ok(Self { endpoint, region, stop, waker, thread })
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // What it panicked about is on standard error.
            thread.join().ok();
        }
    }
}

/// Memory with something in every page.
pub(super) fn written_pool(bytes: u64) -> Result<Arc<HostPool>, CliError> {
    let options =
        PoolOptions { id: PoolId(0), bytes, huge_pages: None, lock: false, numa_node: None };
    let pool = HostPool::create(&options).map_err(CliError::usage)?;
    let page = [7; 4096];
    for offset in (0..bytes).step_by(page.len()) {
        let end = (bytes - offset).min(page.len() as u64);
        let part = page.get(..usize::try_from(end).unwrap_or(0)).unwrap_or_default();
        pool.mapping().write(offset, part).map_err(CliError::failed)?;
    }
    Ok(pool)
}

/// Lets everybody read who connects, and says so.
fn serve<F: Wire>(mut fabric: F, stop: &AtomicBool) {
    let mut batch = EventBatch::default();
    while !stop.load(Ordering::Relaxed) {
        batch.clear();
        if let Err(error) = fabric.poll(&mut batch, WAIT) {
            say(format_args!("the holder's fabric ended: {error}"));
            return;
        }
        for event in &batch.events {
            if let FabricEvent::Accepted { connection } = *event {
                // A connection that is gone again needs neither.
                fabric.admit(connection).ok();
                fabric.send(connection, b"go").ok();
            }
        }
    }
}

/// A registry and the node that lends.
struct Nodes {
    client: Client,
    node: Process,
    registry: Process,
    _cluster: Cluster,
}

impl Nodes {
    fn start(args: &HoldArgs, transport: Transport, pool: u64) -> Result<Self, CliError> {
        let binary = std::env::current_exe().map_err(CliError::failed)?;
        let cluster = Cluster::new(binary)?;
        let listen = SocketAddr::new(args.listen.ip(), 0).to_string();
        let registry = cluster.registry("registry", &["--listen", &listen])?;
        let (pool, streams) = (pool.to_string(), STREAMS_MAX.to_string());
        let mut arguments = vec!["--listen", &listen, "--pool", &pool, "--streams", &streams];
        arguments.extend(["--transport", transport.as_str(), "--log", "warn"]);
        arguments.extend(["--metrics-listen", METRICS]);
        let capacity = (2 * SET_MAX).to_string();
        arguments.extend(["--capacity", &capacity]);
        let device = args.device.arguments();
        arguments.extend(device.iter().map(String::as_str));
        let node = cluster.node("bench-holder", registry.addresses()?.listen, &arguments)?;
        Ok(Self { client: node.client()?, node, registry, _cluster: cluster })
    }

    /// Saves the blocks of this size that are not there yet.
    fn fill(&self, size: u32, count: u32) -> Result<(), CliError> {
        let namespace = format!("{BENCH}{size}").parse().map_err(failed)?;
        save(&self.client, &namespace, (size, count))
    }
}

/// Saves so many blocks of this size, and waits until the registry knows them.
pub(super) fn save(
    client: &Client,
    namespace: &Namespace,
    (size, count): (u32, u32),
) -> Result<(), CliError> {
    let filler = vec![7; size as usize];
    let together = (SAVE_BYTES / filler.len().max(1)).clamp(1, SAVE_BLOCKS);
    for batch in hashes(size, count).chunks(together) {
        let mut memory = put::reserve(client, &vec![size; batch.len()], PATIENCE)?;
        for reservation in &mut memory {
            reservation.fill(&filler)?;
        }
        client.publish(namespace, batch.iter().copied().zip(memory).collect(), false)?;
    }
    if !client.flush(PATIENCE)? {
        return Err(CliError::failed("the registry did not hear of the blocks in time"));
    }
    Ok(())
}

fn failed(error: impl Display) -> CliError {
    CliError::failed(error)
}

/// Writes into plain sockets until they are closed.
fn blast(listen: SocketAddr, streams: usize) -> Result<Answer, CliError> {
    let listener = TcpListener::bind(SocketAddr::new(listen.ip(), 0)).map_err(failed)?;
    let endpoint = listener.local_addr().map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let accept = move || {
        let deadline = Deadline::after(CONNECT_TIMEOUT);
        let mut left = streams;
        while left > 0 {
            match listener.accept() {
                Ok((stream, _)) => {
                    left -= 1;
                    std::thread::spawn(move || pour(stream));
                }
                Err(_none_yet) if deadline.pause(Duration::from_millis(1)) => {}
                Err(_) => return,
            }
        }
    };
    std::thread::spawn(accept);
    Ok(Answer::Blasting { endpoint })
}

fn pour(mut stream: TcpStream) {
    if stream.set_nonblocking(false).is_err() {
        return;
    }
    let bytes = vec![7; BLAST_BYTES];
    while stream.write_all(&bytes).is_ok() {}
}
