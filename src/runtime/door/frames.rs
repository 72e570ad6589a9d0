//! Whole frames out of a stream.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::{Instant, timeout_at};

use super::session::SessionError;
use crate::protocol::door::{HEADER_BYTES, Header, Request};

/// Bytes that one read may take beyond what is buffered. The buffer grows by at most so much beyond
/// what the client has really sent, whatever its header claims.
const READ_BYTES: usize = 64 << 10;

/// Bytes of a stream that are not consumed yet: at most one frame and one read.
pub(super) struct FrameReader {
    buffer: Vec<u8>,
    begun: Option<Instant>,
    patience: Duration,
}

impl FrameReader {
    /// A frame must be whole within `patience` of its first byte.
    pub(super) fn new(patience: Duration) -> Self {
        Self { buffer: Vec::new(), begun: None, patience }
    }

    /// The next request and its number; `None` at the end of the stream. Cancelling loses nothing.
    pub(super) async fn next<R: AsyncRead + Unpin>(
        &mut self,
        stream: &mut R,
    ) -> Result<Option<(u32, Request)>, SessionError> {
        loop {
            if let Some(request) = self.take()? {
                return Ok(Some(request));
            }
            self.buffer.reserve(READ_BYTES);
            let read = stream.read_buf(&mut self.buffer);
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
    fn take(&mut self) -> Result<Option<(u32, Request)>, SessionError> {
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
        Ok(Some((header.request, request)))
    }
}
