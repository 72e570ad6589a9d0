//! How a reader tells the holder what to do: one line of JSON asks, one answers, over a TCP connection
//! of their own.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::fabric::Transport;
use super::usage::Usage;
use crate::cli::CliError;
use crate::fabric::RemoteSpan;
use crate::shm::PeerEndpoint;
use crate::types::NodeId;

/// The longest that the other end may take to do what it is asked.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often a holder that waits looks whether it is to end.
const LOOK: Duration = Duration::from_millis(20);

/// The longest line.
const LINE_MAX: u64 = 64 << 10;

/// What a reader asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ask {
    /// A fabric that serves so many bytes.
    Open { transport: Transport, bytes: u64 },
    /// A node that holds so many blocks of this size in a pool of so many bytes.
    Fill { transport: Transport, pool: u64, size: u32, count: u32 },
    /// Bytes over so many plain sockets, as fast as they take them, until they are closed.
    Blast { streams: usize },
    /// What was used so far; `start`: for the start of a row.
    Usage { start: bool },
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// Where the fabric is, and what may be read there.
    Opened { node: String, endpoint: SocketAddr, rkey: u32, address: u64, len: u64 },
    /// Where the node is, and its registry.
    Filled { node: String, endpoint: SocketAddr, registry: SocketAddr },
    /// Where to connect that many sockets.
    Blasting { endpoint: SocketAddr },
    /// What it is.
    Used(Usage),
    /// It cannot be done.
    Failed { sentence: String },
}

/// Memory that a fabric serves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Served {
    node: NodeId,
    pub(super) address: SocketAddr,
    rkey: u32,
    base: u64,
    pub(super) len: u64,
}

impl Served {
    /// A part of it.
    pub(super) const fn span(&self, offset: u64, len: u32) -> RemoteSpan {
        RemoteSpan { rkey: self.rkey, address: self.base + offset, len }
    }

    /// Where a fabric finds it.
    pub(super) const fn endpoint(&self) -> PeerEndpoint<SocketAddr> {
        PeerEndpoint { node: self.node, address: self.address }
    }
}

/// A node that holds what was asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct FilledNode {
    node: NodeId,
    address: SocketAddr,
    pub(super) registry: SocketAddr,
}

impl FilledNode {
    /// Where a fabric finds it.
    pub(super) const fn endpoint(&self) -> PeerEndpoint<SocketAddr> {
        PeerEndpoint { node: self.node, address: self.address }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// One end of the conversation.
#[derive(Debug)]
pub(super) struct Line(BufReader<TcpStream>);

impl Line {
    pub(super) fn new(stream: TcpStream) -> Result<Self, CliError> {
        stream.set_nodelay(true).map_err(CliError::failed)?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Waits until the other end says something, or is gone; `false` where `stop` comes first. Each
    /// end answers before it hears more, so nothing else has been read by then.
    pub(super) fn waits_until(&mut self, stop: &AtomicBool) -> Result<bool, CliError> {
        let stream = self.0.get_ref();
        stream.set_read_timeout(Some(LOOK)).map_err(CliError::failed)?;
        loop {
            if stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            match stream.peek(&mut [0]) {
                Err(error) if is_timeout(&error) => {}
                _heard_or_gone => break,
            }
        }
        stream.set_read_timeout(Some(PATIENCE)).map_err(CliError::failed)?;
        Ok(true)
    }

    /// The next thing that the other end says; `None` where it is gone.
    pub(super) fn hear<T: DeserializeOwned>(&mut self) -> Result<Option<T>, CliError> {
        let mut line = String::new();
        let heard = self.0.by_ref().take(LINE_MAX).read_line(&mut line);
        match heard.map_err(|error| CliError::failed(format!("the other end: {error}")))? {
            0 => Ok(None),
            _ => serde_json::from_str(&line).map(Some).map_err(|error| {
                CliError::failed(format!("the other end is no kvrail of this version: {error}"))
            }),
        }
    }

    pub(super) fn say<T: Serialize>(&mut self, what: &T) -> Result<(), CliError> {
        let mut line = serde_json::to_string(what).map_err(CliError::failed)?;
        line.push('\n');
        let said = self.0.get_mut().write_all(line.as_bytes());
        said.map_err(|error| CliError::failed(format!("the other end: {error}")))
    }
}

/// The holder, as the reader talks to it.
#[derive(Debug)]
pub(super) struct Holder {
    line: Line,
    /// Whether it is another host's: what it says about itself has its own address.
    peer: SocketAddr,
}

impl Holder {
    pub(super) fn connect(to: SocketAddr) -> Result<Self, CliError> {
        let refused = |error| CliError::failed(format!("no kvrail bench hold at {to}: {error}"));
        let stream = TcpStream::connect_timeout(&to, Duration::from_secs(5)).map_err(refused)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(CliError::failed)?;
        Ok(Self { line: Line::new(stream)?, peer: to })
    }

    fn ask(&mut self, ask: Ask) -> Result<Answer, CliError> {
        self.line.say(&ask)?;
        match self.line.hear()? {
            Some(Answer::Failed { sentence }) => Err(CliError::failed(sentence)),
            Some(answer) => Ok(answer),
            None => Err(CliError::failed(format!("the holder at {} is gone", self.peer))),
        }
    }

    fn unexpected<T>(&self, answer: &Answer) -> Result<T, CliError> {
        Err(CliError::failed(format!("the holder at {} answered {answer:?}", self.peer)))
    }

    pub(super) fn open(&mut self, transport: Transport, bytes: u64) -> Result<Served, CliError> {
        match self.ask(Ask::Open { transport, bytes })? {
            Answer::Opened { node, endpoint, rkey, address, len } => {
                let node = node.parse().map_err(CliError::failed)?;
                Ok(Served { node, address: endpoint, rkey, base: address, len })
            }
            other => self.unexpected(&other),
        }
    }

    pub(super) fn fill(
        &mut self,
        transport: Transport,
        pool: u64,
        (size, count): (u32, u32),
    ) -> Result<FilledNode, CliError> {
        match self.ask(Ask::Fill { transport, pool, size, count })? {
            Answer::Filled { node, endpoint, registry } => {
                let node = node.parse().map_err(CliError::failed)?;
                Ok(FilledNode { node, address: endpoint, registry })
            }
            other => self.unexpected(&other),
        }
    }

    pub(super) fn blast(&mut self, streams: usize) -> Result<SocketAddr, CliError> {
        match self.ask(Ask::Blast { streams })? {
            Answer::Blasting { endpoint } => Ok(endpoint),
            other => self.unexpected(&other),
        }
    }

    /// What it has used so far; `start`: so that the difference to a later one is what a row took.
    pub(super) fn usage(&mut self, start: bool) -> Result<Usage, CliError> {
        match self.ask(Ask::Usage { start })? {
            Answer::Used(usage) => Ok(usage),
            other => self.unexpected(&other),
        }
    }
}
