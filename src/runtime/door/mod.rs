//! The node's end of the local door: a Unix socket, one task per client, and what a client owns.
//!
//! A client owns its **reservations** (memory that only it may publish or give back) and its
//! **holds** (residents that are pinned for it, counted). Both are values of the client's task, so
//! they go back when the task ends, whatever ends it: a close, a kill, a violation, a shutdown. An
//! acquisition that is still running then is not cancelled; when it ends, its own guard releases
//! what it got, since nobody is left to take it.
//!
//! What a client **imported** (its KV cache, and how blocks lie in it) is a value of its task, too;
//! copies that run when the task ends hold what they touch until they are done. Of what it **published in
//! place** the node is told that the client has left, and takes it back.
//!
//! Input is hostile until decoded: a frame is bounded before it is read, must arrive whole within
//! [`limits::HANDSHAKE_TIMEOUT`] of its first byte, and a violation closes only its own connection.
//! Replies to a client that does not read them are given up after the same time.

mod engine;
#[cfg(test)]
mod engine_tests;
mod frames;
mod importing;
mod in_place;
#[cfg(test)]
mod in_place_tests;
mod moving;
mod owned;
mod service;
mod session;
mod socket;
#[cfg(test)]
pub(crate) mod stand_in;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::task::JoinSet;

pub use engine::pools;
pub use moving::{Batch, NotCopied};
pub use service::{
    DoorService, Imported, InPlace, NotLanded, Page, PoolHandle, Publish, ReserveError, Reserved,
};
pub use socket::{BindError, SocketFile};

use crate::limits;
use crate::runtime::clock::Clock;
use crate::runtime::seldom::Seldom;
use socket::OwnedFile;

/// A pause after the system refused to accept, so that a lack of file descriptors is no busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A bound socket that nobody is served on yet. Its file is removed when this, or the serving that
/// it turns into, ends.
#[derive(Debug)]
pub struct Door {
    listener: UnixListener,
    file: OwnedFile,
}

impl Door {
    /// Binds a socket at `path` with these permission bits (`0o600` for the owner alone). Nobody can
    /// connect before the bits are set. Must be called within a tokio runtime.
    ///
    /// A socket file that a dead node left is replaced; one that somebody answers on is not.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(path: &Path, mode: u32) -> Result<Self, BindError> {
        let (listener, file) = socket::bind(path, mode)?;
        let listener = UnixListener::from_std(listener)
            .map_err(|source| BindError::os("listen on", path, source))?;
        Ok(Self { listener, file })
    }

    /// Its file, for a process that ends at once: nobody else would remove it then.
    #[must_use]
    pub fn file(&self) -> Arc<SocketFile> {
        Arc::clone(self.file.file())
    }

    /// Serves clients until `shutdown` is done, then closes all connections and removes the socket.
    pub async fn serve<S: DoorService>(self, service: Arc<S>, shutdown: impl Future<Output = ()>) {
        let Self { listener, file } = self;
        let mut shutdown = pin!(shutdown);
        let mut sessions = JoinSet::new();
        let (clock, full, refused) = (Clock::start(), Seldom::default(), Seldom::default());
        loop {
            tokio::select! {
                () = &mut shutdown => break,
                Some(ended) = sessions.join_next() => log_end(&ended),
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) if sessions.len() < limits::DOOR_CLIENTS_MAX => {
                        sessions.spawn(session::run(Arc::clone(&service), stream));
                    }
                    Ok(_) if full.is_due(clock.now()) => tracing::warn!(
                        limit = limits::DOOR_CLIENTS_MAX,
                        "a local client was turned away: the door has as many as it takes"
                    ),
                    Ok(_) => {}
                    Err(error) => {
                        if refused.is_due(clock.now()) {
                            tracing::warn!(%error, "accepting a local client failed");
                        }
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        drop(file);
        drop(listener);
        sessions.shutdown().await;
    }
}

fn log_end(ended: &Result<Result<(), session::SessionError>, tokio::task::JoinError>) {
    match ended {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a local client's connection was closed"),
        Err(error) => tracing::error!(%error, "a local client's task died"),
    }
}
