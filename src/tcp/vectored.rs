//! Sends and receives whose bytes lie partly in registered memory.
//!
//! A [`Gather`] or [`Scatter`] lists spans and is then passed to the kernel once. It borrows what it
//! lists, so the spans outlive the call; it names mapped memory by pointers and makes no reference to
//! it. The kernel copies during the call only: when the call returns, nothing touches the spans.
#![expect(unsafe_code, reason = "sendmsg and recvmsg on raw pointers into shared mappings")]

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use arrayvec::ArrayVec;

use crate::limits::READ_SEGMENTS_MAX;
use crate::memory::{Mapping, OutOfBounds};

/// Spans of one call: enough for a READ's segments with the header behind them, and for sixteen
/// responses with their headers and the requests between them.
pub(super) const SPANS_MAX: usize = 40;

const _: () = assert!(SPANS_MAX > READ_SEGMENTS_MAX);

/// Spans to send, in order.
pub(super) struct Gather<'a> {
    spans: ArrayVec<libc::iovec, SPANS_MAX>,
    bytes: usize,
    borrowed: PhantomData<&'a [u8]>,
}

impl<'a> Gather<'a> {
    pub(super) fn new() -> Self {
        Self { spans: ArrayVec::new(), bytes: 0, borrowed: PhantomData }
    }

    /// Bytes listed so far.
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// Spans that still fit.
    pub(super) fn room(&self) -> usize {
        self.spans.remaining_capacity()
    }

    /// Lists private bytes. A span without room for it is left out: the caller asks
    /// [`Gather::room`] first, and what is left out is not sent, never sent wrongly.
    pub(super) fn bytes(&mut self, bytes: &'a [u8]) {
        self.span(bytes.as_ptr().cast_mut().cast(), bytes.len());
    }

    /// Lists bytes of a mapping.
    pub(super) fn mapped(
        &mut self,
        memory: &'a Mapping,
        offset: u64,
        len: usize,
    ) -> Result<(), OutOfBounds> {
        let start = memory.pointer(offset, len as u64)?;
        self.span(start.as_ptr().cast(), len);
        Ok(())
    }

    fn span(&mut self, base: *mut libc::c_void, len: usize) {
        push(&mut self.spans, &mut self.bytes, base, len);
    }

    /// Sends what fits into the socket now; answers the number of bytes.
    pub(super) fn send(mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let message = header(&mut self.spans);
        // SAFETY: `socket` is open while it is borrowed; `message` names no address and no control
        // data, and its iovec array lives in `self`; each span is readable for its length, since it
        // came from a live slice or from `Mapping::pointer` and `'a` keeps its owner borrowed.
        let sent = unsafe {
            libc::sendmsg(
                socket.as_raw_fd(),
                &raw const message,
                libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
            )
        };
        usize::try_from(sent).map_err(|_negative| io::Error::last_os_error())
    }
}

/// Spans to receive into, in order.
pub(super) struct Scatter<'a> {
    spans: ArrayVec<libc::iovec, SPANS_MAX>,
    bytes: usize,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl<'a> Scatter<'a> {
    pub(super) fn new() -> Self {
        Self { spans: ArrayVec::new(), bytes: 0, borrowed: PhantomData }
    }

    /// Bytes listed so far.
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// Lists a private buffer.
    pub(super) fn buffer(&mut self, buffer: &'a mut [u8]) {
        let len = buffer.len();
        push(&mut self.spans, &mut self.bytes, buffer.as_mut_ptr().cast(), len);
    }

    /// Lists bytes of a mapping.
    pub(super) fn mapped(
        &mut self,
        memory: &'a Mapping,
        offset: u64,
        len: usize,
    ) -> Result<(), OutOfBounds> {
        let start = memory.pointer(offset, len as u64)?;
        push(&mut self.spans, &mut self.bytes, start.as_ptr().cast(), len);
        Ok(())
    }

    /// Receives what has arrived; answers the number of bytes, zero at the end of the stream.
    pub(super) fn receive(mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut message = header(&mut self.spans);
        // SAFETY: `socket` is open while it is borrowed; `message` names no address and no control
        // data, and its iovec array lives in `self`; each span is writable for its length, since it
        // came from an exclusively borrowed buffer or from `Mapping::pointer`, whose memory other
        // writers may touch too, and `'a` keeps its owner borrowed.
        let received =
            unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        usize::try_from(received).map_err(|_negative| io::Error::last_os_error())
    }
}

fn push(
    spans: &mut ArrayVec<libc::iovec, SPANS_MAX>,
    bytes: &mut usize,
    base: *mut libc::c_void,
    len: usize,
) {
    if len > 0 && !spans.is_full() {
        spans.push(libc::iovec { iov_base: base, iov_len: len });
        *bytes += len;
    }
}

fn header(spans: &mut ArrayVec<libc::iovec, SPANS_MAX>) -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = ptr::null_mut();
    message.msg_iov = spans.as_mut_ptr();
    message.msg_iovlen = spans.len() as _;
    message
}
