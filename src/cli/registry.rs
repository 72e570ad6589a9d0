//! `kvrail registry`.

use std::process::ExitCode;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::watch;

use super::process::{Stop, runtime};
use super::{CliError, Ready, announce_ready, end_with_parent, start_logging};
use crate::config::{RegistryConfig, RegistrySettings};
use crate::metrics::{RegistryMetrics, RegistrySnapshot};
use crate::registry::DirectoryOptions;
use crate::registryd::{Registryd, RegistrydOptions};
use crate::runtime::clock::Clock;
use crate::runtime::http::{self, Observation, Observed};

/// Checks the settings and runs a registry until it is told to stop.
pub(super) fn run(settings: RegistrySettings) -> Result<ExitCode, CliError> {
    let config = RegistryConfig::load(settings)?;
    end_with_parent(&config.process)?;
    start_logging(&config.process)?;
    runtime()?.block_on(serve(config))
}

async fn serve(config: RegistryConfig) -> Result<ExitCode, CliError> {
    let stop = Stop::listen()?;
    let bind = async |flag: &str, address| {
        TcpListener::bind(address).await.map_err(|error| {
            CliError::usage(format!("{flag}: cannot listen on {address}: {error}"))
        })
    };
    let listener = bind("--listen", config.listen).await?;
    let listen = listener.local_addr().map_err(CliError::failed)?;
    let directory = DirectoryOptions { lease: config.node_lease, ..DirectoryOptions::default() };
    let registry = Registryd::new(
        Clock::start(),
        RegistrydOptions { directory, ..RegistrydOptions::default() },
    );
    let (stopping, stopped) = watch::channel(false);
    let until = |mut stopped: watch::Receiver<bool>| async move {
        stopped.wait_for(|stop| *stop).await.ok();
    };
    let mut metrics = None;
    if let Some(address) = config.process.metrics_listen {
        let listener = bind("--metrics-listen", address).await?;
        metrics = listener.local_addr().ok();
        let observed = Arc::new(ObservedRegistry {
            metrics: RegistryMetrics::new(),
            registry: registry.clone(),
        });
        tokio::spawn(http::serve(listener, observed, until(stopped.clone())));
    }
    let server = registry.clone();
    let serving = until(stopped);
    let mut server = tokio::spawn(async move { server.serve(listener, serving).await });
    let ready = Ready { listen, socket: None, metrics, pid: std::process::id() };
    let ready = announce_ready(&config.process, &ready)?;
    tracing::info!(%listen, ?metrics, "the registry serves");
    let outcome = stop
        .wait(async {
            match (&mut server).await {
                Ok(Err(error)) => error.to_string(),
                _ => "the registry's server ended".to_owned(),
            }
        })
        .await;
    drop(ready);
    Stop::exit_on_second(|| ());
    stopping.send_replace(true);
    if !server.is_finished() {
        server.await.ok();
    }
    outcome
}

/// A registry as scrapers and probers see it.
#[derive(Debug)]
struct ObservedRegistry {
    metrics: RegistryMetrics,
    registry: Registryd,
}

impl Observed for ObservedRegistry {
    fn render(&self) -> Observation<'_, String> {
        Box::pin(async {
            let now = self.registry.stats();
            self.metrics.render(&RegistrySnapshot {
                nodes: now.directory.nodes,
                blocks_by_owners: now.directory.by_owners,
                served: now.answered,
            })
        })
    }

    fn health(&self) -> Observation<'_, (bool, serde_json::Value)> {
        Box::pin(async {
            let now = self.registry.stats().directory;
            (true, serde_json::json!({ "healthy": true, "nodes": now.nodes, "blocks": now.keys }))
        })
    }
}
