//! A Redis server of this run, where the machine has one: on a port that the kernel chose, in a directory
//! of its own, gone with the bench however that ends.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::net::TcpSocket;

use crate::cli::CliError;
use crate::cli::scratch::Scratch;
use crate::runtime::deadline::Deadline;
use crate::sys::process::end_with_parent;

/// Its program.
const PROGRAM: &str = "redis-server";

/// The longest that it may take to serve.
const PATIENCE: Duration = Duration::from_secs(20);

/// How often it is looked whether it does.
const POLL: Duration = Duration::from_millis(10);

/// What this machine's server says it is; `None` where there is none.
pub(super) fn version() -> Option<String> {
    let output = Command::new(PROGRAM).arg("--version").stdin(Stdio::null()).output().ok()?;
    let said = String::from_utf8(output.stdout).ok()?;
    let number = said.split_whitespace().find_map(|word| word.strip_prefix("v="))?;
    Some(format!("Redis {number}"))
}

/// Makes this process a server that ends with its parent. Comes back where it cannot, with the reason.
pub(super) fn become_one(parent: u32, port: u32) -> CliError {
    if let Err(error) = end_with_parent(parent) {
        return CliError::failed(format!("the parent process {parent} is gone: {error}"));
    }
    let mut command = Command::new(PROGRAM);
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1"]);
    let error = command.args(["--save", "", "--appendonly", "no"]).exec();
    CliError::failed(format!("cannot run {PROGRAM}: {error}"))
}

/// One server, empty at first. Dropping it kills it.
pub(super) struct RedisServer {
    child: Child,
    address: SocketAddr,
    _directory: Scratch,
    /// Bound with `SO_REUSEADDR` and never listened on: the kernel gives the port to nobody else.
    _port: TcpSocket,
}

impl RedisServer {
    /// Starts it, and waits until it answers.
    pub(super) fn start() -> Result<Self, CliError> {
        let directory = Scratch::new().map_err(CliError::failed)?;
        let port = TcpSocket::new_v4().map_err(CliError::failed)?;
        port.set_reuseaddr(true).map_err(CliError::failed)?;
        port.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).map_err(CliError::failed)?;
        let address = port.local_addr().map_err(CliError::failed)?;
        let program = std::env::current_exe().map_err(CliError::failed)?;
        let child = Command::new(program)
            .args(["bench", "registry", "--redis-of", &std::process::id().to_string()])
            .arg(address.port().to_string())
            .current_dir(directory.path())
            .stdin(directory.empty_input().map_err(CliError::failed)?)
            .stdout(Stdio::null())
            .spawn()
            .map_err(CliError::failed)?;
        let mut server = Self { child, address, _directory: directory, _port: port };
        let deadline = Deadline::after(PATIENCE);
        while server.connection().is_err() {
            let ended = server.child.try_wait().map_err(CliError::failed)?;
            if ended.is_some() || !deadline.pause(POLL) {
                return Err(CliError::failed(format!("{PROGRAM} does not answer at {address}")));
            }
        }
        Ok(server)
    }

    pub(super) fn address(&self) -> String {
        self.address.to_string()
    }

    pub(super) fn process(&self) -> u32 {
        self.child.id()
    }

    /// A connection that waits for its answers.
    pub(super) fn connection(&self) -> Result<redis::Connection, CliError> {
        let client = redis::Client::open(format!("redis://{}", self.address));
        let client = client.map_err(CliError::failed)?;
        client.get_connection_with_timeout(PATIENCE).map_err(CliError::failed)
    }

    /// Memory that it has allocated, bytes.
    pub(super) fn bytes(&self) -> Result<u64, CliError> {
        let mut connection = self.connection()?;
        let info: String =
            redis::cmd("INFO").arg("memory").query(&mut connection).map_err(CliError::failed)?;
        let used = info.lines().find_map(|line| line.strip_prefix("used_memory:")?.parse().ok());
        used.ok_or_else(|| CliError::failed(format!("{PROGRAM} does not say what it uses")))
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // Where it is gone already there is nothing to end.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
