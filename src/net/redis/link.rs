//! The way to a Redis or Valkey server, or to a cluster of them.

use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;
use redis::{
    AsyncConnectionConfig, Client, Cmd, FromRedisValue, RedisError, Script, ServerErrorKind,
};
use tokio::sync::Mutex;

use crate::net::RegistryTimeouts;
use crate::registry::RegistryError;

/// Attempts of one command on a cluster whose slots move or whose master is replaced, within the
/// call's deadline.
const CLUSTER_RETRIES: u32 = 3;

#[derive(Clone)]
enum Wire {
    Single(MultiplexedConnection),
    Cluster(ClusterConnection),
}

/// Connects when first asked, and again after a failure when next asked.
pub(super) struct Link {
    seeds: Vec<String>,
    timeouts: RegistryTimeouts,
    wire: Mutex<Option<Wire>>,
}

/// A script, sent whole only where the server does not know it.
#[derive(Debug)]
pub(super) struct Code {
    script: Script,
    text: &'static str,
}

impl Code {
    pub(super) fn new(text: &'static str) -> Self {
        Self { script: Script::new(text), text }
    }
}

/// The arguments of one script call.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) keys: Vec<Vec<u8>>,
    pub(super) values: Vec<Vec<u8>>,
}

impl Arguments {
    fn command(&self, name: &str, code: &str) -> Cmd {
        let mut cmd = redis::cmd(name);
        cmd.arg(code).arg(self.keys.len()).arg(&self.keys).arg(&self.values);
        cmd
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("seeds", &self.seeds).finish_non_exhaustive()
    }
}

impl Link {
    pub(super) fn new(seeds: Vec<String>, timeouts: RegistryTimeouts) -> Self {
        Self { seeds, timeouts, wire: Mutex::new(None) }
    }

    async fn connect(&self) -> Result<Wire, RedisError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeouts.connect))
            .set_response_timeout(Some(self.timeouts.call));
        let mut last = RedisError::from((redis::ErrorKind::InvalidClientConfig, "no address"));
        for seed in &self.seeds {
            let client = Client::open(seed.as_str())?;
            let connected = client.get_multiplexed_async_connection_with_config(&config).await;
            let mut single = match connected {
                Ok(single) => single,
                Err(error) => {
                    last = error;
                    continue;
                }
            };
            let info: String = redis::cmd("INFO").arg("cluster").query_async(&mut single).await?;
            if !info.contains("cluster_enabled:1") {
                return Ok(Wire::Single(single));
            }
            let client = ClusterClientBuilder::new(self.seeds.iter().map(String::as_str))
                .connection_timeout(self.timeouts.connect)
                .response_timeout(self.timeouts.call)
                .retries(CLUSTER_RETRIES)
                .build()?;
            return Ok(Wire::Cluster(client.get_async_connection().await?));
        }
        Err(last)
    }

    async fn wire(&self) -> Result<Wire, RedisError> {
        let mut wire = self.wire.lock().await;
        if let Some(wire) = &*wire {
            return Ok(wire.clone());
        }
        let fresh = self.connect().await?;
        *wire = Some(fresh.clone());
        Ok(fresh)
    }

    /// Whether the servers are a cluster, so that a call's keys must have one hash tag.
    pub(super) async fn is_cluster(&self) -> Result<bool, RegistryError> {
        self.within(async { Ok(matches!(self.wire().await?, Wire::Cluster(_))) }).await
    }

    /// Sends one command.
    pub(super) async fn command<T: FromRedisValue>(&self, cmd: &Cmd) -> Result<T, RegistryError> {
        self.within(self.send(cmd)).await
    }

    /// Runs a script.
    pub(super) async fn run<T: FromRedisValue>(
        &self,
        code: &Code,
        arguments: &Arguments,
    ) -> Result<T, RegistryError> {
        let run = async {
            let known = arguments.command("EVALSHA", code.script.get_hash());
            match self.send(&known).await {
                Err(error) if error.kind() == ServerErrorKind::NoScript.into() => {
                    self.send(&arguments.command("EVAL", code.text)).await
                }
                other => other,
            }
        };
        self.within(run).await
    }

    async fn send<T: FromRedisValue>(&self, cmd: &Cmd) -> Result<T, RedisError> {
        match self.wire().await? {
            Wire::Single(mut wire) => cmd.query_async(&mut wire).await,
            Wire::Cluster(mut wire) => cmd.query_async(&mut wire).await,
        }
    }

    /// The result within the deadline of a call. A connection that broke is not used again.
    async fn within<T>(
        &self,
        answer: impl Future<Output = Result<T, RedisError>>,
    ) -> Result<T, RegistryError> {
        let answer = tokio::time::timeout(self.timeouts.call, answer).await;
        let Ok(answer) = answer else {
            *self.wire.lock().await = None;
            return Err(RegistryError::TimedOut(self.timeouts.call));
        };
        match answer {
            Ok(value) => Ok(value),
            Err(error) => {
                if !is_answer(&error) {
                    *self.wire.lock().await = None;
                }
                Err(self.meaning(&error))
            }
        }
    }

    fn meaning(&self, error: &RedisError) -> RegistryError {
        let reason: String = error.to_string().chars().take(200).collect();
        match error.code() {
            Some("LATE") => RegistryError::Late,
            Some("OOM") => RegistryError::Full { reason },
            _ if error.is_timeout() => RegistryError::TimedOut(self.timeouts.call),
            Some("ERR") => RegistryError::Nonsense { reason },
            _ => RegistryError::Unreachable { reason },
        }
    }
}

/// Whether the server itself said no to this one command.
fn is_answer(error: &RedisError) -> bool {
    matches!(error.code(), Some("LATE" | "OOM" | "ERR"))
}
