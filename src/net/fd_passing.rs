//! Open files that travel over a Unix socket (`SCM_RIGHTS`).
//!
//! Files are attached to the first byte of a write and come with the read that returns that byte, so
//! sender and receiver agree on a message that begins there. Received files are close-on-exec, and
//! more of them than a message of ours ever carries are refused: the kernel has then closed the rest.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use arrayvec::ArrayVec;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::limits;

/// Received files, closed on drop and on `exec`.
pub type PassedFds = ArrayVec<OwnedFd, { limits::POOLS_MAX }>;

const SPACE: usize = rustix::cmsg_space!(ScmRights(limits::POOLS_MAX));

/// Writes a part of `bytes` with `files` attached to its first byte, and says how long it was. The
/// rest is to be written without files.
///
/// # Errors
/// What `sendmsg` answers; `InvalidInput` for more than [`limits::POOLS_MAX`] files.
pub fn send(socket: impl AsFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = rustix::net::sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(sent)
}

/// Reads into `bytes`, appends the files that came along to `files`, and says how much was read; 0 is
/// the end of the stream.
///
/// # Errors
/// What `recvmsg` answers; `InvalidData` where more files came than fit.
pub fn receive(socket: impl AsFd, bytes: &mut [u8], files: &mut PassedFds) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut complete = !received.flags.contains(ReturnFlags::CTRUNC);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            for file in passed {
                complete &= files.try_push(file).is_ok();
            }
        }
    }
    if complete {
        Ok(received.bytes)
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read as _, Seek as _, Write as _};
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_file_arrives_with_the_byte_that_it_was_attached_to() {
        let (one, other) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"pool").unwrap();
        assert_eq!(send(&one, b"ab", &[file.as_fd()]).unwrap(), 2);

        let mut files = PassedFds::new();
        let mut byte = [0];
        assert_eq!(receive(&other, &mut byte, &mut files).unwrap(), 1);
        assert_eq!((byte, files.len()), (*b"a", 1));
        assert_eq!(receive(&other, &mut byte, &mut files).unwrap(), 1);
        assert_eq!((byte, files.len()), (*b"b", 1));

        let mut arrived = File::from(files.pop().unwrap());
        arrived.rewind().unwrap();
        let mut text = String::new();
        arrived.read_to_string(&mut text).unwrap();
        assert_eq!(text, "pool");
    }

    #[test]
    fn more_files_than_pools_are_refused_on_both_sides() {
        let (one, other) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let many = vec![file.as_fd(); limits::POOLS_MAX + 8];
        let refused = send(&one, b"a", &many).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);

        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        let bytes = [IoSlice::new(b"a")];
        rustix::net::sendmsg(&one, &bytes, &mut control, SendFlags::empty()).unwrap();
        let refused = receive(&other, &mut [0], &mut PassedFds::new()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }
}
