//! The other process: it has GPU memory, passes it on by handle, and stays until it is told to go.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};

use crate::cli::CliError;
use crate::cuda::{Context, CudaError, Device, DeviceMemory, IpcMemoryHandle, PinnedMemory};

use super::{Run, pattern};

/// What begins the line with the handle, and the one that says why there is none.
const HANDLE: &str = "handle ";
const REFUSED: &str = "refused ";

/// The seed of the bytes that are in the memory.
pub(super) const SEED: &str = "exported";

/// Allocates, fills, tells the handle, and waits for the end of standard input.
pub(super) fn run(device: &Device, bytes: usize) -> Result<ExitCode, CliError> {
    let context = Context::primary(device).map_err(CliError::failed)?;
    let bound = context.bind().map_err(CliError::failed)?;
    let exported = || {
        let memory = DeviceMemory::allocate_plain(&bound, bytes as u64)?;
        let mut pinned = PinnedMemory::new(&bound, bytes)?;
        pinned.write(&pattern(SEED, bytes))?;
        pinned.copy_to(&bound, &memory, bytes)?;
        let handle = memory.ipc_handle(&bound)?;
        Ok::<_, CudaError>((memory, handle))
    };
    let exported = exported();
    let line = match &exported {
        Ok((_memory, IpcMemoryHandle(handle))) => {
            let hex: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{HANDLE}{hex}\n")
        }
        Err(error) => format!("{REFUSED}{error}\n"),
    };
    let mut out = io::stdout().lock();
    out.write_all(line.as_bytes()).and_then(|()| out.flush()).map_err(CliError::failed)?;
    io::stdin().lock().lines().for_each(drop);
    Ok(ExitCode::SUCCESS)
}

/// The process, as its parent has it. It ends when this is dropped.
pub(super) struct Exporter {
    child: Child,
    stdin: Option<ChildStdin>,
    pub(super) handle: [u8; 64],
}

impl Exporter {
    /// Starts it; what it was refused, in words.
    pub(super) fn start(run: &Run<'_>, bytes: usize) -> Result<Self, CliError> {
        let cannot = |error: io::Error| {
            CliError::failed(format!("cannot start the process that has memory: {error}"))
        };
        let gpu = run.bound.context().device().ordinal();
        let program = std::env::current_exe().map_err(cannot)?;
        let mut child = Command::new(program)
            .args(["bench", "gpu", "--gpu", &gpu.to_string(), "--exporter", &bytes.to_string()])
            .args(&run.driver)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(cannot)?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let mut line = String::new();
        let mut exporter = Self { child, stdin, handle: [0; 64] };
        if let Some(stdout) = stdout {
            BufReader::new(stdout).read_line(&mut line).map_err(cannot)?;
        }
        match line.trim_end().strip_prefix(HANDLE).and_then(unhex) {
            Some(handle) => exporter.handle = handle,
            None => {
                let why = line.trim_end().strip_prefix(REFUSED).unwrap_or("it ended");
                return Err(CliError::failed(why));
            }
        }
        Ok(exporter)
    }

    /// Kills it, as `kill -9` does.
    pub(super) fn kill(&mut self) {
        // Where it is gone already there is nothing to kill.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        drop(self.stdin.take());
        self.child.wait().ok();
    }
}

fn unhex(text: &str) -> Option<[u8; 64]> {
    let mut bytes = [0; 64];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}
