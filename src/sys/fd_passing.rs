//! Descriptors that travel over a Unix socket, as `SCM_RIGHTS`: pools' memory files and event counters.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use arrayvec::ArrayVec;
use rustix::cmsg_space;
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Descriptors that one message may carry: a node's pools. One more is refused on either side.
pub const PASSED_FDS_MAX: usize = crate::limits::POOLS_MAX;

/// Room for the descriptors of one message.
const CONTROL_BYTES: usize = cmsg_space!(ScmRights(PASSED_FDS_MAX));

/// Received descriptors, closed on drop and on `exec`.
pub type PassedFds = ArrayVec<OwnedFd, PASSED_FDS_MAX>;

/// Sends bytes, and descriptors along with the first of them; answers how many bytes were taken. On
/// a stream the rest is sent without the descriptors.
///
/// # Errors
/// `InvalidInput` for descriptors without a byte or more than [`PASSED_FDS_MAX`]; else what `sendmsg`
/// answers: `WouldBlock` on a socket that does not block, `BrokenPipe` (no signal) where the other
/// end is gone. No descriptor was sent then.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if !fds.is_empty() && (bytes.is_empty() || fds.len() > PASSED_FDS_MAX) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let socket = socket.as_fd();
    let bytes = [IoSlice::new(bytes)];
    let sent =
        retry_on_intr(|| rustix::net::sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL))?;
    Ok(sent)
}

/// Receives bytes and appends the descriptors that came with them; answers how many bytes there
/// were, 0 at the end of the stream.
///
/// # Errors
/// `InvalidData` where more descriptors came than `fds` has room for, or than this process may have
/// open; all of this message are closed then, and its bytes are lost. Else what `recvmsg` answers.
pub fn receive(socket: impl AsFd, bytes: &mut [u8], fds: &mut PassedFds) -> io::Result<usize> {
    let socket = socket.as_fd();
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        let mut bytes = [IoSliceMut::new(bytes)];
        rustix::net::recvmsg(socket, &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    // Set where the kernel closed descriptors itself, for want of room or beyond the limit on open
    // files.
    let mut complete = !received.flags.contains(ReturnFlags::CTRUNC);
    let before = fds.len();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            for fd in passed {
                complete &= fds.try_push(fd).is_ok();
            }
        }
    }
    if complete {
        Ok(received.bytes)
    } else {
        fds.truncate(before);
        Err(io::ErrorKind::InvalidData.into())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::unix::net::UnixStream;

    use rustix::io::{FdFlags, fcntl_getfd};

    use super::*;

    #[test]
    fn a_passed_descriptor_is_the_same_file() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        let fds = [file.as_fd(), here.as_fd()];
        assert_eq!(send(&here, b"pools", &fds).unwrap(), 5);
        let mut bytes = [0; 16];
        let mut passed = PassedFds::new();
        assert_eq!(receive(&there, &mut bytes, &mut passed).unwrap(), 5);
        assert_eq!((&bytes[..5], passed.len()), (&b"pools"[..], 2));
        let fd = passed.remove(0);
        assert!(fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
        file.write_all(b"shared").unwrap();
        let mut copy = File::from(fd);
        copy.rewind().unwrap();
        let mut text = String::new();
        copy.read_to_string(&mut text).unwrap();
        assert_eq!(text, "shared");
    }

    #[test]
    fn bytes_travel_without_descriptors_and_the_end_is_zero() {
        let (here, there) = UnixStream::pair().unwrap();
        send(&here, b"x", &[]).unwrap();
        drop(here);
        let mut passed = PassedFds::new();
        assert_eq!(receive(&there, &mut [0; 4], &mut passed).unwrap(), 1);
        assert_eq!(receive(&there, &mut [0; 4], &mut passed).unwrap(), 0);
        assert!(passed.is_empty());
        let error = send(&there, b"x", &[]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_socket_that_does_not_block_says_so() {
        let (here, _there) = UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        let error = receive(&here, &mut [0; 4], &mut PassedFds::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn sixteen_descriptors_travel_and_a_seventeenth_is_refused() {
        let (here, there) = UnixStream::pair().unwrap();
        let many = [here.as_fd(); PASSED_FDS_MAX + 1];
        assert!(send(&here, b"x", &many).is_err());
        assert!(send(&here, b"", &many[..1]).is_err());
        send(&here, b"x", &many[..PASSED_FDS_MAX]).unwrap();
        let mut passed = PassedFds::new();
        receive(&there, &mut [0; 4], &mut passed).unwrap();
        assert_eq!(passed.len(), PASSED_FDS_MAX);
        // A list that is full already takes no more, and keeps what it had.
        send(&here, b"x", &many[..1]).unwrap();
        let error = receive(&there, &mut [0; 4], &mut passed).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert_eq!(passed.len(), PASSED_FDS_MAX);
    }

    #[test]
    fn more_descriptors_than_the_bound_from_a_hostile_peer_are_refused() {
        let (here, there) = UnixStream::pair().unwrap();
        let many = [here.as_fd(); PASSED_FDS_MAX + 8];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(PASSED_FDS_MAX + 8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        let bytes = [IoSlice::new(b"x")];
        rustix::net::sendmsg(&here, &bytes, &mut control, SendFlags::empty()).unwrap();
        let mut passed = PassedFds::new();
        let error = receive(&there, &mut [0; 4], &mut passed).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(passed.is_empty());
    }

    /// Set in the child process of the test below.
    const CHILD: &str = "KVRAIL_TEST_PASSED_FDS_CHILD";

    /// The limit on open files concerns the whole process, so the test runs itself again as a child.
    #[test]
    #[expect(
        clippy::disallowed_methods,
        reason = "the child process is told by a variable what it is"
    )]
    fn descriptors_beyond_the_limit_on_open_files_are_missed() {
        use rustix::process::{Resource, Rlimit, setrlimit};

        if std::env::var_os(CHILD).is_none() {
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .arg(
                    "sys::fd_passing::tests::descriptors_beyond_the_limit_on_open_files_are_missed",
                )
                .args(["--exact", "--nocapture", "--test-threads=1"])
                .env(CHILD, "1")
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{output:?}");
            return assert!(text.contains("1 passed"), "{text}");
        }
        let (here, there) = UnixStream::pair().unwrap();
        let next = here.try_clone().unwrap();
        send(&here, b"x", &[here.as_fd(); 4]).unwrap();
        // Room for the descriptor that comes next and for one more.
        let number = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&next)).unwrap();
        drop(next);
        let current = Some(number + 2);
        let maximum = current;
        setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
        let mut passed = PassedFds::new();
        let error = receive(&there, &mut [0; 4], &mut passed).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(passed.is_empty());
    }
}
