//! This process: how it ends with its parent, how it stops itself, and which boot of the host it runs
//! in.
#![expect(
    unsafe_code,
    reason = "a thread that stops its process must signal itself; a process's clock has no safe wrapper"
)]

use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// Asks the kernel to kill this process when its parent ends, so that no child of a demo or a test
/// stays behind, however the parent died: not one that is stopped, either, nor one that would end in good
/// order, and wait for others. Meant for the child's start: it makes two system calls.
///
/// The kernel takes the *thread* that made this process for the parent; make children from a thread
/// that lives as long as they should.
///
/// # Errors
/// `ESRCH` where the parent is not, or no longer, the process `parent`: it died before the kernel was
/// asked, and the caller should exit. Else what `prctl` answers.
pub fn end_with_parent(parent: u32) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let now = getppid().map(|pid| pid.as_raw_nonzero().get().cast_unsigned());
    if now == Some(parent) { Ok(()) } else { Err(Errno::SRCH.into()) }
}

/// Stops this process, as `SIGSTOP` does, before it does anything more on this thread. A signal to
/// the process would be taken by any of its threads, and this one might go on for a while.
pub fn stop_here() {
    // SAFETY: `raise` has no preconditions; SIGSTOP cannot be handled, so that no handler runs.
    let _cannot_fail = unsafe { libc::raise(libc::SIGSTOP) };
}

/// Processor time, of user and kernel and of all its threads, that a process has used so far.
///
/// # Errors
/// `ESRCH` where there is no such process, or what the system answers.
pub fn processor_time(process: u32) -> io::Result<Duration> {
    let process = libc::pid_t::try_from(process).map_err(|_too_large| Errno::SRCH)?;
    let mut clock = MaybeUninit::uninit();
    // SAFETY: the pointer is valid for writing one clock id.
    let refused = unsafe { libc::clock_getcpuclockid(process, clock.as_mut_ptr()) };
    if refused != 0 {
        return Err(io::Error::from_raw_os_error(refused));
    }
    // SAFETY: the call above succeeded, so it wrote the id.
    let clock = unsafe { clock.assume_init() };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid for writing one time.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Neither is negative, and nanoseconds are below a second.
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Ok(Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0)))
}

/// The identity of this boot of the host: two processes that read the same one can share memory,
/// unless a container is between them.
///
/// # Errors
/// What reading `/proc/sys/kernel/random/boot_id` answers.
pub fn boot_id() -> io::Result<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Command, Stdio};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    /// Set in the grandchild of the test below.
    const CHILD: &str = "KVRAIL_TEST_PARENT_CHILD";

    /// A shell is the parent that dies; its child is this very test again, which then waits for
    /// input that never comes. Its end shows as the end of its output.
    #[test]
    #[expect(
        clippy::disallowed_methods,
        reason = "the grandchild is told by a variable what it is"
    )]
    fn a_child_ends_with_its_parent() {
        if std::env::var_os(CHILD).is_some() {
            end_with_parent(std::os::unix::process::parent_id()).unwrap();
            println!("armed");
            let read = io::stdin().read(&mut [0]);
            panic!("the parent's death went unnoticed: {read:?}");
        }
        let mut shell = Command::new("sh")
            .args(["-c", "exec 3<&0; \"$0\" \"$@\" <&3 & wait"])
            .arg(std::env::current_exe().unwrap())
            .args(["sys::process::tests::a_child_ends_with_its_parent"])
            .args(["--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(shell.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("armed") {
            line.clear();
            assert_ne!(output.read_line(&mut line).unwrap(), 0, "no child came up");
        }
        let input = shell.stdin.take().unwrap();
        shell.kill().unwrap();
        shell.wait().unwrap();
        let mut fds = [PollFd::new(output.get_ref(), PollFlags::IN)];
        let deadline = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&deadline)).unwrap(), 1, "it lives on");
        line.clear();
        output.read_to_string(&mut line).unwrap();
        assert!(!line.contains("unnoticed"), "{line}");
        drop(input);
    }

    #[test]
    fn work_takes_time_of_its_process_and_nobody_has_none() {
        let before = processor_time(std::process::id()).unwrap();
        let mut sum = 0_u64;
        while processor_time(std::process::id()).unwrap() < before + Duration::from_millis(5) {
            sum = std::hint::black_box((0..10_000).sum());
        }
        assert!(sum > 0);
        assert!(processor_time(u32::MAX).is_err());
    }

    #[test]
    fn a_boot_has_one_identity() {
        let id = boot_id().unwrap();
        assert_eq!(id.len(), 36);
        assert_eq!(boot_id().unwrap(), id);
    }

    #[test]
    fn a_parent_that_is_not_ours_is_told() {
        let error = end_with_parent(0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
        set_parent_process_death_signal(None).unwrap();
    }
}
