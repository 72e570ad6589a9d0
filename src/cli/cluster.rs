//! A cluster on this machine: a registry and nodes as child processes in a directory of their own.
//!
//! What `kvrail demo` runs, and the tests of real processes. Ports are chosen by the kernel and read
//! from ready files. Everything goes with the [`Cluster`]: processes are told to stop, killed where
//! they do not, and the directory is removed. A child is also killed when the thread that started it
//! ends, so that a killed parent leaves none behind; the directory of such a one goes with the next
//! cluster of that user.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;

use super::CliError;
use super::scratch::Scratch;
use crate::client::Client;
use crate::runtime::deadline::Deadline;

/// How long a process may take to be ready.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a process that is told to stop may take before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a condition is looked at.
const POLL: Duration = Duration::from_millis(2);

/// What a process says about itself once it serves.
#[derive(Debug, Clone, Deserialize)]
pub struct Addresses {
    /// Where peers, or nodes, connect.
    pub listen: SocketAddr,
    /// The local door.
    pub socket: Option<PathBuf>,
    /// `/metrics` and `/health`.
    pub metrics: Option<SocketAddr>,
}

/// A registry and nodes, in a directory of their own.
#[derive(Debug)]
pub struct Cluster {
    binary: PathBuf,
    directory: Scratch,
}

impl Cluster {
    /// An empty cluster of this `kvrail` binary.
    ///
    /// # Errors
    /// [`CliError::Failed`] where no temporary directory can be made.
    pub fn new(binary: impl Into<PathBuf>) -> Result<Self, CliError> {
        let directory = Scratch::new().map_err(|error| {
            let place = std::env::temp_dir();
            let error = io::Error::from(error.kind());
            CliError::failed(format!(
                "cannot make a directory in {}: {error}; TMPDIR names another place",
                place.display()
            ))
        })?;
        Ok(Self { binary: binary.into(), directory })
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Starts a registry and waits until it serves.
    ///
    /// # Errors
    /// [`CliError::Failed`] with what it said where it does not.
    pub fn registry(&self, name: &str, arguments: &[&str]) -> Result<Process, CliError> {
        let mut all = vec!["registry"];
        if !arguments.contains(&"--listen") {
            all.extend(["--listen", "127.0.0.1:0"]);
        }
        all.extend(arguments);
        self.start(name, &all)?.ready()
    }

    /// Starts a node named `name`, which is also its identity as a reader, and waits until it
    /// serves. Its registry is `kvrail registry` there, unless the arguments name another.
    ///
    /// # Errors
    /// [`CliError::Failed`] with what it said where it does not.
    pub fn node(
        &self,
        name: &str,
        registry: SocketAddr,
        arguments: &[&str],
    ) -> Result<Process, CliError> {
        self.start_node(name, registry, arguments)?.ready()
    }

    /// As [`Self::node`], without the wait.
    ///
    /// # Errors
    /// [`CliError::Failed`] where no process can be started.
    pub fn start_node(
        &self,
        name: &str,
        registry: SocketAddr,
        arguments: &[&str],
    ) -> Result<Process, CliError> {
        let socket = self.path().join(format!("{name}.sock"));
        let (socket, registry) = (socket.display().to_string(), format!("http://{registry}"));
        let mut all = vec!["serve", "--socket", &socket];
        for (flag, value) in [
            ("--registry", registry.as_str()),
            ("--listen", "127.0.0.1:0"),
            ("--requester-id", name),
            ("--pool", "16MiB"),
        ] {
            if !arguments.contains(&flag) {
                all.extend([flag, value]);
            }
        }
        // Its nodes stand for hosts, unless they are told how to reach each other.
        let is_told = |one: &&str| one.starts_with("--transport") || one.starts_with("--no-shm");
        if !arguments.iter().any(is_told) {
            all.push("--no-shm");
        }
        all.extend(arguments);
        self.start(name, &all)
    }

    /// Starts the other end of `kvrail bench read`, and waits until it serves.
    pub(super) fn bench_holder(&self, arguments: &[String]) -> Result<Process, CliError> {
        let mut all = vec!["bench", "hold", "--listen", "127.0.0.1:0"];
        all.extend(arguments.iter().map(String::as_str));
        self.start("holder", &all)?.ready()
    }

    fn start(&self, name: &str, arguments: &[&str]) -> Result<Process, CliError> {
        let ready_file = self.path().join(format!("{name}.ready"));
        let log = self.path().join(format!("{name}.log"));
        // A process that is started again under its name is ready by its own word.
        fs::remove_file(&ready_file).ok();
        let cannot = |error| CliError::failed(format!("cannot start {name}: {error}"));
        let child = Command::new(&self.binary)
            // What a child does is in its arguments: a user's KVRAIL_ variables are not meant for it. How
            // libraries and GPUs are found is this machine's affair.
            .env_clear()
            .envs(std::env::vars_os().filter(|(name, _)| is_of_the_machine(name)))
            .args(arguments)
            .arg("--parent-death")
            .arg(std::process::id().to_string())
            .arg("--ready-file")
            .arg(&ready_file)
            .stdin(self.directory.empty_input().map_err(cannot)?)
            .stdout(Stdio::null())
            .stderr(File::create(&log).map_err(cannot)?)
            .spawn()
            .map_err(cannot)?;
        Ok(Process { name: name.to_owned(), child, ready_file, log, addresses: None })
    }
}

/// Whether a variable says where libraries are, or which GPUs are there.
fn is_of_the_machine(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name == "LD_LIBRARY_PATH" || name.starts_with("CUDA_") || name.starts_with("NVIDIA_")
}

/// A process of a cluster. Dropping it stops it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    ready_file: PathBuf,
    log: PathBuf,
    addresses: Option<Addresses>,
}

impl Process {
    /// Waits until it serves.
    ///
    /// # Errors
    /// [`CliError::Failed`] with what it said where it ends, or takes too long.
    pub fn ready(mut self) -> Result<Self, CliError> {
        let deadline = Deadline::after(READY_TIMEOUT);
        loop {
            if let Ok(text) = fs::read_to_string(&self.ready_file) {
                let addresses = serde_json::from_str(&text).map_err(CliError::failed)?;
                self.addresses = Some(addresses);
                return Ok(self);
            }
            let ended = self.child.try_wait().map_err(CliError::failed)?;
            if ended.is_some() || !deadline.pause(POLL) {
                let why = if ended.is_some() { "ended" } else { "took too long" };
                let said = self.said();
                return Err(CliError::failed(format!("{} {why} at its start: {said}", self.name)));
            }
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it has logged.
    #[must_use]
    pub fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default().trim_end().to_owned()
    }

    /// Where it serves.
    ///
    /// # Errors
    /// [`CliError::Failed`] where it was never waited for.
    pub fn addresses(&self) -> Result<&Addresses, CliError> {
        let unknown = || CliError::failed(format!("{} is not known to be ready", self.name));
        self.addresses.as_ref().ok_or_else(unknown)
    }

    /// A client at its door.
    ///
    /// # Errors
    /// Where it does not answer.
    pub fn client(&self) -> Result<Client, CliError> {
        let socket = self.addresses()?.socket.clone().unwrap_or_default();
        Ok(Client::connect(&socket)?)
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal, where it still runs.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // The child is not reaped before `self` ends, so its number is nobody else's.
            kill_process(pid, signal).ok();
        }
    }

    /// Waits for its end; `None` where it does not come in time.
    pub fn wait(&mut self, within: Duration) -> Option<ExitStatus> {
        let deadline = Deadline::after(within);
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            if !deadline.pause(POLL) {
                return None;
            }
        }
    }

    /// Kills it, as `kill -9` does, and waits for its end.
    pub fn kill(&mut self) {
        // Where it is gone already there is nothing to kill.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A stopped process would not hear that it is to end.
        self.signal(Signal::CONT);
        self.signal(Signal::TERM);
        if self.wait(STOP_TIMEOUT).is_none() {
            self.kill();
        }
    }
}
