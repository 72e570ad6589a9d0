//! The stand-in behind a door.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::super::Door;
use super::StandIn;

/// A door that is served until this is dropped.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) service: Arc<StandIn>,
    pub(crate) directory: tempfile::TempDir,
    stop: Option<oneshot::Sender<()>>,
    served: Option<tokio::task::JoinHandle<()>>,
    runtime: tokio::runtime::Runtime,
}

impl Running {
    pub(crate) fn start(pool_bytes: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let service = Arc::new(StandIn::new(pool_bytes));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let (stop, stopped) = oneshot::channel();
        let door = {
            let _in_runtime = runtime.enter();
            Door::bind(&directory.path().join("door"), 0o600).unwrap()
        };
        let served = runtime.spawn(door.serve(Arc::clone(&service), async {
            stopped.await.ok();
        }));
        Self { service, directory, stop: Some(stop), served: Some(served), runtime }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("door")
    }

    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// Ends the door and waits until it has ended.
    pub(crate) fn stop(&mut self) {
        drop(self.stop.take());
        if let Some(served) = self.served.take() {
            self.runtime.block_on(served).unwrap();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A test that fails while copies wait would wait for them.
        self.service.gate.set(true);
        self.stop();
    }
}
