//! Connections as the server takes them: a bounded number, each of which must begin like HTTP/2 before
//! its deadline. Later silence is the business of HTTP/2's own keepalive, which starts only then.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep};
use tonic::codegen::tokio_stream::Stream;
use tonic::transport::server::Connected;

/// The first bytes of every HTTP/2 connection ("PRI * HTTP/2.0…"), in number.
const PREFACE_BYTES: usize = 24;

/// Rest after a failed accept (no file descriptors left, for example), so that it is no busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

pub(super) struct Incoming {
    listener: TcpListener,
    permits: Arc<Semaphore>,
    handshake_timeout: Duration,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Incoming {
    pub(super) fn new(
        listener: TcpListener,
        connections_max: usize,
        handshake_timeout: Duration,
    ) -> Self {
        Self {
            listener,
            permits: Arc::new(Semaphore::new(connections_max.min(Semaphore::MAX_PERMITS))),
            handshake_timeout,
            pause: None,
        }
    }
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            if let Some(pause) = &mut this.pause {
                ready!(pause.as_mut().poll(cx));
                this.pause = None;
            }
            let Ok((stream, _)) = ready!(this.listener.poll_accept(cx)) else {
                this.pause = Some(Box::pin(sleep(ACCEPT_PAUSE)));
                continue;
            };
            // Without a permit, or where the socket is broken already, it is closed by the drop.
            let Ok(permit) = Arc::clone(&this.permits).try_acquire_owned() else {
                continue;
            };
            if stream.set_nodelay(true).is_ok() {
                return Poll::Ready(Some(Ok(Connection {
                    stream,
                    preface: Some((Box::pin(sleep(this.handshake_timeout)), PREFACE_BYTES)),
                    _permit: permit,
                })));
            }
        }
    }
}

pub(super) struct Connection {
    stream: TcpStream,
    /// The deadline and the bytes still expected by then.
    preface: Option<(Pin<Box<Sleep>>, usize)>,
    _permit: OwnedSemaphorePermit,
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        if let Some((deadline, left)) = &mut this.preface {
            *left = left.saturating_sub(buf.filled().len() - before);
            if *left == 0 {
                this.preface = None;
            } else if deadline.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        }
        polled
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
