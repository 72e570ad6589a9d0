//! One client: its requests in, the node's answers out.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::engine::{Imports, Purpose};
use super::frames::{FrameReader, Received};
use super::importing;
use super::owned::{Acquired, Holds, Reservations};
use super::service::{DoorService, ReserveError};
use crate::event::BusyReason;
use crate::layout::BlockId;
use crate::limits;
use crate::memory::{EngineMemory, ImportError, Owner};
use crate::protocol::door::{
    DecodeError, EngineRequest, LayoutId, MemorySource, PoolSize, Reply, Request,
    SENTENCE_BYTES_MAX, Source, TooMany,
};
use crate::sys::fd_passing;
use crate::types::{BlockHash, Extent, Namespace, NodeId};

/// Why a connection was closed, other than by its client between two frames.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the client broke the protocol: {0}")]
    Decode(#[from] DecodeError),
    #[error("the client's first request is not hello, or a later one is")]
    Hello,
    #[error("a frame did not arrive within {:?}", limits::HANDSHAKE_TIMEOUT)]
    Slow,
    #[error("the stream ended within a frame")]
    Cut,
    #[error("a descriptor came that no request carries")]
    StrayFile,
    #[error("the client does not read its replies")]
    Unread,
    #[error("a reply could not be encoded: {0}")]
    Encode(#[from] TooMany),
    #[error("an acquisition died: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// Serves one client until it goes. Whatever ends this, what the client owned goes back.
pub(super) async fn run<S: DoorService>(
    service: Arc<S>,
    mut stream: UnixStream,
) -> Result<(), SessionError> {
    let mut frames = FrameReader::new(limits::HANDSHAKE_TIMEOUT);
    let hello = timeout(limits::HANDSHAKE_TIMEOUT, frames.next(&stream))
        .await
        .map_err(|_elapsed| SessionError::Slow)??;
    match hello {
        None => return Ok(()),
        Some(Received { number, request: Request::Hello, .. }) => {
            welcome(&*service, &mut stream, number).await?;
        }
        Some(_) => return Err(SessionError::Hello),
    }
    let owner = Owner::of(&stream)?;
    let (read, mut write) = stream.split();
    let mut session = Session::new(service, owner);
    loop {
        tokio::select! {
            frame = frames.next(read.as_ref()) => match frame? {
                None => return Ok(()),
                Some(Received { request: Request::Hello, .. }) => return Err(SessionError::Hello),
                Some(received) => {
                    let number = received.number;
                    if let Some(reply) = session.handle(received) {
                        session.send(&mut write, number, &reply).await?;
                    }
                }
            },
            Some(done) = session.running.join_next() => {
                let (number, done) = done?;
                let reply = session.finish(done);
                session.send(&mut write, number, &reply).await?;
            }
        }
    }
}

/// Answers the hello with the pools and their files.
async fn welcome<S: DoorService>(
    service: &S,
    stream: &mut UnixStream,
    request: u32,
) -> Result<(), SessionError> {
    let mut frame = Vec::new();
    let sent = {
        let pools = service.pools();
        let files: Vec<BorrowedFd<'_>> = pools.iter().map(|pool| pool.file).collect();
        let pools = pools.iter().map(|pool| PoolSize { id: pool.id, bytes: pool.bytes }).collect();
        Reply::Welcome { pools }.encode(request, &mut frame)?;
        let send =
            stream.async_io(Interest::WRITABLE, || fd_passing::send(&*stream, &frame, &files));
        timeout(limits::HANDSHAKE_TIMEOUT, send)
            .await
            .map_err(|_elapsed| SessionError::Unread)??
    };
    write_all(stream, frame.get(sent..).unwrap_or_default()).await
}

async fn write_all(
    stream: &mut (impl AsyncWrite + Unpin),
    bytes: &[u8],
) -> Result<(), SessionError> {
    timeout(limits::HANDSHAKE_TIMEOUT, stream.write_all(bytes))
        .await
        .map_err(|_elapsed| SessionError::Unread)??;
    Ok(())
}

/// How a request ended that took its time.
enum Done<S: DoorService> {
    Acquired { asked: usize, acquired: Acquired<S> },
    Flushed { known: bool },
    Stated { json: String },
    Counted { count: u32 },
    Moved { reply: Reply },
    Imported { memory: Result<Arc<dyn EngineMemory>, ImportError> },
}

struct Session<S: DoorService> {
    service: Arc<S>,
    client: Arc<S::Client>,
    reserved: Reservations<S::Reserved>,
    holds: Holds<S>,
    imports: Imports,
    /// Blocks that running acquisitions may yet hold.
    asked: usize,
    running: JoinSet<(u32, Done<S>)>,
    out: Vec<u8>,
}

impl<S: DoorService> Drop for Session<S> {
    /// Lets running acquisitions end by themselves, so that a fetch is never cut in the middle.
    fn drop(&mut self) {
        self.running.detach_all();
        Arc::clone(&self.service).leave(Arc::clone(&self.client));
    }
}

impl<S: DoorService> Session<S> {
    fn new(service: Arc<S>, owner: Owner) -> Self {
        Self {
            client: service.client(),
            reserved: Reservations::new(),
            holds: Holds::new(Arc::clone(&service)),
            imports: Imports::new(owner),
            asked: 0,
            running: JoinSet::new(),
            out: Vec::new(),
            service,
        }
    }

    async fn send(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        number: u32,
        reply: &Reply,
    ) -> Result<(), SessionError> {
        self.out.clear();
        reply.encode(number, &mut self.out)?;
        write_all(stream, &self.out).await
    }

    /// The reply, where there is one at once.
    fn handle(&mut self, received: Received) -> Option<Reply> {
        let Received { number, request, file } = received;
        Some(match request {
            Request::Hello => refused("hello comes first, and once"),
            Request::Reserve { sizes } => self.reserve(&sizes),
            Request::Publish { namespace, pulled, blocks } => Reply::Published {
                outcomes: self.reserved.publish(&*self.service, &namespace, &blocks, pulled),
            },
            Request::Discard { extents } => self.discard(&extents),
            Request::Acquire { namespace, source, hashes } => {
                return self.acquire(number, namespace, hashes, source);
            }
            Request::Release { holds } => done(self.holds.release(&holds)),
            Request::FinishedSending { namespace, hashes } => {
                Reply::Done { count: self.service.finished_sending(&namespace, &hashes) }
            }
            Request::Flush { deadline_ms } => return self.flush(number, deadline_ms),
            Request::Stat => return self.stat(number),
            Request::ResetHealth { node } => return self.reset_health(number, node),
            Request::List { namespace, cursor, max } => {
                let page = self.service.list(namespace.as_ref(), cursor, max as usize);
                Reply::Listed { next: page.next, entries: page.entries }
            }
            Request::Evictions { since } => {
                Reply::Evicted { entries: self.service.evictions(since, limits::DOOR_BLOCKS_MAX) }
            }
            Request::Engine(request) => return self.handle_engine(number, request, file),
        })
    }

    fn handle_engine(
        &mut self,
        number: u32,
        request: EngineRequest,
        file: Option<OwnedFd>,
    ) -> Option<Reply> {
        let (layout, blocks, purpose) = match &request {
            EngineRequest::ImportMemory { source, bytes } => {
                return self.import(number, (*source, *bytes), file);
            }
            EngineRequest::ImportLayout { blocks, tensors } => {
                return Some(self.imports.add_layout(*blocks, tensors.clone()));
            }
            EngineRequest::Withdraw { layout, blocks } => {
                return self.withdraw(number, *layout, blocks.clone());
            }
            EngineRequest::Save { layout, blocks, .. } => (layout, blocks, Purpose::Save),
            EngineRequest::Load { layout, blocks, .. } => (layout, blocks, Purpose::Load),
            EngineRequest::Publish { layout, blocks, .. } => (layout, blocks, Purpose::Publish),
        };
        if self.waits_for_most() {
            return Some(too_many_waits());
        }
        let moving = match self.imports.moving(*layout, blocks.clone(), purpose) {
            Ok(moving) => moving,
            Err(reply) => return Some(reply),
        };
        if purpose == Purpose::Load
            && let Some(why) = self.service.in_use(&self.client, *layout, blocks)
        {
            return Some(refused(&why));
        }
        let (service, client) = (Arc::clone(&self.service), Arc::clone(&self.client));
        self.start(async move {
            let reply = match request {
                EngineRequest::Save { namespace, pulled, event, .. } => {
                    moving.after(event).save(service, namespace, pulled).await
                }
                EngineRequest::Load { namespace, source, in_place, .. } => {
                    let client = in_place.then_some(client);
                    moving.load((service, client), namespace, source).await
                }
                EngineRequest::Publish { namespace, pulled, event, .. } => {
                    moving.after(event).publish((service, client), namespace, pulled).await
                }
                EngineRequest::ImportMemory { .. }
                | EngineRequest::ImportLayout { .. }
                | EngineRequest::Withdraw { .. } => refused("this is answered elsewhere"),
            };
            (number, Done::Moved { reply })
        })
    }

    fn import(
        &mut self,
        number: u32,
        memory: (MemorySource, u64),
        file: Option<OwnedFd>,
    ) -> Option<Reply> {
        if self.waits_for_most() {
            return Some(too_many_waits());
        }
        let owner = match self.imports.expect_memory() {
            Ok(owner) => owner,
            Err(reply) => return Some(reply),
        };
        let import =
            importing::import(Arc::clone(&self.service), owner, memory, file, limits::IMPORT_WAIT);
        self.start(async move { (number, Done::Imported { memory: import.await }) })
    }

    fn withdraw(&mut self, number: u32, id: LayoutId, blocks: Vec<BlockId>) -> Option<Reply> {
        if let Err(reply) = self.imports.layout(id, blocks.iter().copied()) {
            return Some(reply);
        }
        let (service, client) = (Arc::clone(&self.service), Arc::clone(&self.client));
        self.start(async move {
            let count = service.withdraw(client, id, blocks).await;
            (number, Done::Counted { count })
        })
    }

    fn waits_for_most(&self) -> bool {
        self.running.len() >= limits::DOOR_WAITS_MAX
    }

    /// Waits for a request beside those that come; a reply at once where too many are waited for.
    fn start(
        &mut self,
        waits: impl Future<Output = (u32, Done<S>)> + Send + 'static,
    ) -> Option<Reply> {
        if self.waits_for_most() {
            return Some(too_many_waits());
        }
        self.running.spawn(waits);
        None
    }

    fn reserve(&mut self, sizes: &[u32]) -> Reply {
        let most = limits::DOOR_RESERVATIONS_MAX;
        if self.reserved.len() + sizes.len() > most {
            return refused(&format!(
                "a connection may have {most} reservations: publish or discard some first"
            ));
        }
        match self.service.reserve(sizes) {
            Ok(memory) => Reply::Reserved {
                extents: memory.into_iter().map(|one| self.reserved.add(one)).collect(),
            },
            Err(ReserveError::Busy { pause_ms }) => no_memory(pause_ms),
            Err(ReserveError::Refused(sentence)) => refused(&sentence),
        }
    }

    fn discard(&mut self, extents: &[Extent]) -> Reply {
        let gone: Vec<S::Reserved> =
            extents.iter().filter_map(|extent| self.reserved.take(*extent)).collect();
        done(gone.len())
    }

    fn acquire(
        &mut self,
        number: u32,
        namespace: Namespace,
        hashes: Vec<BlockHash>,
        source: Source,
    ) -> Option<Reply> {
        let most = limits::DOOR_HOLDS_MAX;
        let asked = hashes.len();
        if self.holds.total() + self.asked + asked > most {
            return Some(refused(&format!(
                "a connection may hold {most} blocks: release some first"
            )));
        }
        let service = Arc::clone(&self.service);
        let refused = self.start(async move {
            let outcomes = Arc::clone(&service).acquire(namespace, hashes, source).await;
            let acquired = Acquired::new(service, outcomes);
            (number, Done::Acquired { asked, acquired })
        });
        if refused.is_none() {
            self.asked += asked;
        }
        refused
    }

    fn flush(&mut self, number: u32, deadline_ms: u32) -> Option<Reply> {
        let wait = Duration::from_millis(deadline_ms.into()).min(limits::DOOR_FLUSH_MAX);
        let service = Arc::clone(&self.service);
        self.start(async move {
            let known = timeout(wait, service.flush()).await.unwrap_or(false);
            (number, Done::Flushed { known })
        })
    }

    fn finish(&mut self, ended: Done<S>) -> Reply {
        match ended {
            Done::Acquired { asked, acquired } => {
                self.asked -= asked;
                Reply::Acquired { outcomes: self.holds.take_over(acquired) }
            }
            Done::Flushed { known } => Reply::Flushed { known },
            Done::Stated { json } if json.len() > limits::DOOR_MESSAGE_BYTES_MAX => {
                refused("the node's state is longer than a message: read its metrics instead")
            }
            Done::Stated { json } => Reply::Stat { json },
            Done::Counted { count } => Reply::Done { count },
            Done::Moved { reply } => reply,
            Done::Imported { memory } => self.imports.add_memory(memory),
        }
    }

    fn reset_health(&mut self, number: u32, node: Option<NodeId>) -> Option<Reply> {
        let service = Arc::clone(&self.service);
        self.start(async move {
            let count = service.reset_health(node).await;
            (number, Done::Counted { count })
        })
    }

    fn stat(&mut self, number: u32) -> Option<Reply> {
        let service = Arc::clone(&self.service);
        self.start(async move {
            let json = service.stat().await.to_string();
            (number, Done::Stated { json })
        })
    }
}

fn done(count: usize) -> Reply {
    Reply::Done { count: u32::try_from(count).unwrap_or(u32::MAX) }
}

/// This client has to wait for its own requests.
fn too_many_waits() -> Reply {
    Reply::Busy { pause_ms: limits::DOOR_WAITS_PAUSE_MS, reason: BusyReason::Waits }
}

pub(super) const fn no_memory(pause_ms: u32) -> Reply {
    Reply::Busy { pause_ms, reason: BusyReason::Memory }
}

pub(super) fn refused(sentence: &str) -> Reply {
    let end = sentence.floor_char_boundary(SENTENCE_BYTES_MAX);
    Reply::Refused { sentence: sentence.get(..end).unwrap_or_default().to_owned() }
}
