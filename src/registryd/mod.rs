//! `kvrail registry`: a [`Directory`] served over gRPC.
//!
//! Bounds against hostile or broken clients: connections, calls at once on each and on all, message
//! bytes, the time for a connection's first bytes and for each call; idle connections are probed and dropped.

mod admission;
mod incoming;
mod service;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::event::RegistryCall;
use crate::limits;
use crate::net::wire::owner_registry_server::OwnerRegistryServer;
use crate::registry::{Directory, DirectoryOptions, DirectoryStats, RegistryEpoch};
use crate::runtime::clock::Clock;
use admission::Admission;
use incoming::Incoming;
use service::{Calls, Service};

/// Calls at once on one connection. A node has a few batches and one heartbeat in flight, and a plan
/// for each read that starts.
const CALLS_PER_CONNECTION: u32 = 64;

/// Calls at once over all connections, so that messages fill at most 1 GiB.
const CALLS_MAX: usize = 512;

/// What a client may send ahead on a connection, bytes: a full batch arrives in three parts.
const WINDOW_BYTES: u32 = 256 << 10;

/// Longest time of one call from its first byte, so that one that trickles in ends.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Time that running calls have when the server stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Time between sweeps of one shard; a whole round takes about a minute.
const SWEEP_INTERVAL: Duration = Duration::from_millis(50);

/// How the service behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegistrydOptions {
    /// Leases and the bound on keys.
    pub directory: DirectoryOptions,
    /// Connections at once; one more is closed. Default [`limits::CONNECTIONS_MAX`].
    pub connections_max: usize,
    /// Calls at once over all connections; others wait. Default 512, with which messages fill at most
    /// 1 GiB.
    pub calls_max: usize,
    /// Time in which a new connection must say something that begins like HTTP/2. Default
    /// [`limits::HANDSHAKE_TIMEOUT`].
    pub handshake_timeout: Duration,
}

impl Default for RegistrydOptions {
    fn default() -> Self {
        Self {
            directory: DirectoryOptions::default(),
            connections_max: limits::CONNECTIONS_MAX,
            calls_max: CALLS_MAX,
            handshake_timeout: limits::HANDSHAKE_TIMEOUT,
        }
    }
}

/// Why the service stopped.
#[derive(Debug, thiserror::Error)]
#[error("the registry's server failed: {0}")]
pub struct RegistrydError(#[from] tonic::transport::Error);

/// What the service holds and did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RegistrydStats {
    /// Nodes, keys, owners and their memory.
    pub directory: DirectoryStats,
    /// Calls answered, in the order of [`RegistryCall::ALL`].
    pub answered: [u64; RegistryCall::ALL.len()],
    /// Calls refused, likewise.
    pub refused: [u64; RegistryCall::ALL.len()],
    /// Keys in announces, withdraws and plans that were answered.
    pub keys: u64,
}

impl RegistrydStats {
    /// Memory per owner, bytes; 0 without owners.
    #[must_use]
    pub const fn bytes_per_owner(&self) -> u64 {
        match self.directory.bytes.checked_div(self.directory.owners) {
            Some(bytes) => bytes,
            None => 0,
        }
    }
}

/// The service. Clones share it.
#[derive(Debug, Clone)]
pub struct Registryd {
    directory: Arc<Directory>,
    calls: Arc<Calls>,
    clock: Clock,
    options: RegistrydOptions,
}

impl Registryd {
    /// An empty registry; its epoch is the clock's.
    #[must_use]
    pub fn new(clock: Clock, options: RegistrydOptions) -> Self {
        let epoch = RegistryEpoch(clock.epoch().0);
        Self {
            directory: Arc::new(Directory::new(epoch, options.directory)),
            calls: Arc::default(),
            clock,
            options,
        }
    }

    /// The directory, for a node in the same process.
    #[must_use]
    pub const fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    /// What it holds and did. Takes about a thousand short locks: for metrics, not for each call.
    #[must_use]
    pub fn stats(&self) -> RegistrydStats {
        let mut stats = RegistrydStats {
            directory: self.directory.stats(self.clock.now()),
            ..RegistrydStats::default()
        };
        self.calls.read(&mut stats);
        stats
    }

    /// Serves on `listener` until `shutdown` is done; then running calls have two seconds to end.
    ///
    /// # Errors
    /// [`RegistrydError`] where the server cannot go on.
    pub async fn serve(
        &self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), RegistrydError> {
        let service =
            Service::new(Arc::clone(&self.directory), Arc::clone(&self.calls), self.clock);
        let service = OwnerRegistryServer::new(service)
            .max_decoding_message_size(limits::REGISTRY_MESSAGE_BYTES_MAX)
            .max_encoding_message_size(limits::REGISTRY_MESSAGE_BYTES_MAX);
        let incoming =
            Incoming::new(listener, self.options.connections_max, self.options.handshake_timeout);
        let (stopping, mut stopped) = watch::channel(false);
        let signal = async move {
            shutdown.await;
            stopping.send_replace(true);
        };
        let server = tonic::transport::Server::builder()
            .max_concurrent_streams(CALLS_PER_CONNECTION)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .http2_max_header_list_size(16 << 10)
            .http2_keepalive_interval(Some(Duration::from_secs(10)))
            .http2_keepalive_timeout(Some(Duration::from_secs(5)))
            .timeout(CALL_TIMEOUT)
            .add_service(Admission::new(service, self.options.calls_max))
            .serve_with_incoming_shutdown(incoming, signal);
        let drained = async move {
            // The sender goes only with the server itself.
            let _stopping = stopped.wait_for(|stop| *stop).await.is_ok();
            tokio::time::sleep(DRAIN_TIMEOUT).await;
        };
        tokio::select! {
            served = server => Ok(served?),
            () = drained => Ok(()),
            () = self.sweep() => Ok(()),
        }
    }

    async fn sweep(&self) {
        let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.directory.sweep(self.clock.now());
        }
    }
}
