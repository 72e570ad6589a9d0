//! Makes one thread of a child process stand still, wherever it is: what a bench or a test does to find
//! out who waits for it.
//!
//! The kernel does it (`ptrace`), so the child needs nothing for it and knows nothing of it: the thread
//! stops between two instructions of its own, and would stop while it holds a lock.
#![expect(unsafe_code, reason = "ptrace and waiting for a thread have no safe wrapper")]

use std::fs;
use std::io;
use std::marker::PhantomData;
use std::ptr;

use libc::{c_int, c_void, pid_t};

/// The ids of those threads of a process that have this name, as the kernel knows it: its first 15
/// bytes.
///
/// # Errors
/// What reading `/proc` answers: the process is gone.
pub fn threads_named(process: u32, name: &str) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        let task = task?;
        // A thread that ends meanwhile has no name any more.
        let its = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let number: Option<u32> = task.file_name().to_str().and_then(|number| number.parse().ok());
        if its.trim_end() == name {
            found.extend(number);
        }
    }
    Ok(found)
}

/// A thread of a child process that stands still until this is dropped. If this process ends first, the
/// kernel lets the thread go on.
#[derive(Debug)]
pub struct StoppedThread {
    thread: pid_t,
    /// A signal that arrived before the stop and that the thread is still to get; 0 where none did.
    signal: c_int,
    /// The kernel lets only the thread that stopped another one let it go on.
    _stays_on_this_thread: PhantomData<*const ()>,
}

impl StoppedThread {
    /// Stops a thread, and returns when it stands.
    ///
    /// # Errors
    /// What the kernel answers: `EPERM` where it may not be traced (it is no child of ours, somebody else
    /// traces it, or `seccomp` or `kernel.yama.ptrace_scope` forbid it), `ESRCH` where it is gone.
    pub fn stop(thread: u32) -> io::Result<Self> {
        let thread = pid_t::try_from(thread).map_err(|_too_large| gone())?;
        request(libc::PTRACE_SEIZE, thread, 0)?;
        let mut stopped = Self { thread, signal: 0, _stays_on_this_thread: PhantomData };
        request(libc::PTRACE_INTERRUPT, thread, 0)?;
        let mut status = 0;
        // SAFETY: `status` is a valid, writable int for the length of the call, and that is the only
        // pointer. The thread is traced by this one, so its stops are ours to wait for; no other code
        // waits for it, since `Child` waits for the whole process by its own number with no such flag.
        let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
        if waited != thread {
            return Err(io::Error::last_os_error());
        }
        if !libc::WIFSTOPPED(status) {
            return Err(gone());
        }
        if status >> 16 == 0 {
            // It stopped for a signal, which it gets when it goes on.
            stopped.signal = libc::WSTOPSIG(status);
        }
        Ok(stopped)
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        // A thread that was killed meanwhile has no need of it.
        request(libc::PTRACE_DETACH, self.thread, self.signal).ok();
    }
}

fn gone() -> io::Error {
    io::Error::from_raw_os_error(libc::ESRCH)
}

fn request(what: libc::c_uint, thread: pid_t, data: c_int) -> io::Result<()> {
    let data = ptr::without_provenance_mut::<c_void>(usize::try_from(data).unwrap_or(0));
    // SAFETY: of the requests made here none reads or writes memory of this process: SEIZE takes options
    // (none), INTERRUPT nothing, DETACH a signal's number. They change how the kernel schedules another
    // thread and no memory of that one.
    let done = unsafe { libc::ptrace(what, thread, ptr::null_mut::<c_void>(), data) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    use super::*;

    struct Idle(Child);

    impl Drop for Idle {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    /// The state of a process's first thread, as `/proc` has it.
    fn state(process: u32) -> String {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("State:")).unwrap();
        line.trim().chars().take(1).collect()
    }

    #[test]
    fn a_thread_stands_until_it_is_let_go() {
        let child = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        let idle = Idle(child);
        let process = idle.0.id();
        let mut wait = std::iter::repeat_n((), 10_000);
        let named = || threads_named(process, "sleep").unwrap();
        // Until it has become what it is.
        while named().is_empty() && wait.next().is_some() {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        assert_eq!(named(), [process]);
        assert!(threads_named(process, "slee").unwrap().is_empty());
        for _ in 0..3 {
            let stopped = StoppedThread::stop(process).unwrap();
            assert_eq!(state(process), "t");
            let again = std::thread::spawn(move || StoppedThread::stop(process).is_err());
            assert!(again.join().unwrap(), "two cannot stop one");
            drop(stopped);
            assert_ne!(state(process), "t");
        }
    }

    #[test]
    fn who_is_no_child_is_told() {
        assert!(StoppedThread::stop(u32::MAX).is_err());
        assert!(StoppedThread::stop(std::process::id()).is_err());
    }
}
