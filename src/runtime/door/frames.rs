//! Whole frames out of a stream.

use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout_at};

use super::session::SessionError;
use crate::protocol::door::{HEADER_BYTES, Header, Request};
use crate::sys::fd_passing::{self, PassedFds};

/// Bytes that one read may take beyond what is buffered. The buffer grows by at most so much beyond
/// what the client has really sent, whatever its header claims.
const READ_BYTES: usize = 64 << 10;

/// A request, its number, and the descriptor that came with it, where it carries one.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) number: u32,
    pub(super) request: Request,
    pub(super) file: Option<OwnedFd>,
}

/// Bytes of a stream that are not consumed yet: at most one frame and one read. Descriptors wait for
/// the requests that carry them, in their order; one that no request carries is a violation.
pub(super) struct FrameReader {
    buffer: Vec<u8>,
    files: PassedFds,
    begun: Option<Instant>,
    patience: Duration,
}

impl FrameReader {
    /// A frame must be whole within `patience` of its first byte.
    pub(super) fn new(patience: Duration) -> Self {
        Self { buffer: Vec::new(), files: PassedFds::new(), begun: None, patience }
    }

    /// The next request; `None` at the end of the stream. Cancelling loses nothing.
    pub(super) async fn next(
        &mut self,
        stream: &UnixStream,
    ) -> Result<Option<Received>, SessionError> {
        loop {
            if let Some(received) = self.take()? {
                return Ok(Some(received));
            }
            let (buffer, files) = (&mut self.buffer, &mut self.files);
            let read = stream.async_io(Interest::READABLE, || {
                let before = buffer.len();
                buffer.resize(before + READ_BYTES, 0);
                let free = buffer.get_mut(before..).unwrap_or_default();
                let got = fd_passing::receive(stream, free, files);
                buffer.truncate(before + got.as_ref().copied().unwrap_or(0));
                got
            });
            let got = match self.begun {
                Some(begun) => timeout_at(begun + self.patience, read)
                    .await
                    .map_err(|_elapsed| SessionError::Slow)??,
                None => read.await?,
            };
            if got == 0 {
                return if self.buffer.is_empty() { Ok(None) } else { Err(SessionError::Cut) };
            }
            self.begun.get_or_insert_with(Instant::now);
        }
    }

    /// Consumes a whole frame at the front of the buffer, where there is one.
    fn take(&mut self) -> Result<Option<Received>, SessionError> {
        let Some((head, rest)) = self.buffer.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = Header::decode(*head)?;
        let Some(body) = rest.get(..header.len as usize) else {
            return Ok(None);
        };
        let request = Request::decode(header, body)?;
        self.buffer.drain(..HEADER_BYTES + header.len as usize);
        self.begun = (!self.buffer.is_empty()).then(Instant::now);
        if self.buffer.is_empty() && self.buffer.capacity() > 2 * READ_BYTES {
            self.buffer = Vec::new();
        }
        let file = if request.carries_file() { self.files.pop_at(0) } else { None };
        if self.buffer.is_empty() && !self.files.is_empty() {
            return Err(SessionError::StrayFile);
        }
        Ok(Some(Received { number: header.request, request, file }))
    }
}
