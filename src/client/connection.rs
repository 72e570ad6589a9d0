//! Requests and replies on one socket, each within a deadline.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::ClientError;
use crate::protocol::door::{HEADER_BYTES, Header, PoolSize, Reply, Request};
use crate::runtime::deadline::Deadline;
use crate::sys::fd_passing::{self, PassedFds};

/// One connection: a request, then its reply, before the next request.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    number: u32,
    closed: bool,
    frame: Vec<u8>,
}

impl Connection {
    pub(super) fn open(path: &Path, within: Duration) -> Result<Self, ClientError> {
        let stream = connect(path, within).map_err(|error| {
            let path = path.to_owned();
            match error {
                // The kernel refuses a connection to any file that is not a socket.
                Errno::CONNREFUSED if !is_socket(&path) => ClientError::NotASocket { path },
                Errno::NOENT | Errno::CONNREFUSED => ClientError::NoNode { path },
                Errno::ACCESS | Errno::PERM => ClientError::NotAllowed { path },
                Errno::NAMETOOLONG | Errno::INVAL | Errno::NOTDIR | Errno::PROTOTYPE => {
                    ClientError::NotASocket { path }
                }
                Errno::AGAIN => ClientError::TimedOut { within },
                error => {
                    ClientError::Io { action: "connect to the node's socket", source: error.into() }
                }
            }
        })?;
        Ok(Self { stream, number: 0, closed: false, frame: Vec::new() })
    }

    /// The first exchange: the pools and their files.
    pub(super) fn hello(
        &mut self,
        within: Duration,
    ) -> Result<(Vec<PoolSize>, PassedFds), ClientError> {
        let mut files = PassedFds::new();
        match self.exchange((&Request::Hello, None), within, Some(&mut files))? {
            Reply::Welcome { pools } => Ok((pools, files)),
            Reply::Refused { sentence } => Err(ClientError::Refused { sentence }),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// One request and its reply. After an error other than a request that cannot be encoded, the
    /// connection is closed.
    pub(super) fn call(
        &mut self,
        request: &Request,
        within: Duration,
    ) -> Result<Reply, ClientError> {
        self.exchange((request, None), within, None)
    }

    /// As [`Self::call`], with a descriptor that the request carries.
    pub(super) fn call_with(
        &mut self,
        request: &Request,
        file: Option<BorrowedFd<'_>>,
        within: Duration,
    ) -> Result<Reply, ClientError> {
        self.exchange((request, file), within, None)
    }

    /// Ends the connection; the node takes back what it owned.
    pub(super) fn close(&mut self) {
        self.closed = true;
        // A socket that cannot be shut down is closed already.
        drop(self.stream.shutdown(Shutdown::Both));
    }

    fn exchange(
        &mut self,
        (request, file): (&Request, Option<BorrowedFd<'_>>),
        within: Duration,
        files: Option<&mut PassedFds>,
    ) -> Result<Reply, ClientError> {
        if self.closed {
            return Err(ClientError::Closed);
        }
        self.number = self.number.wrapping_add(1);
        self.frame.clear();
        request.encode(self.number, &mut self.frame)?;
        let deadline = Deadline::after(within);
        let reply = self.write(deadline, file).and_then(|()| self.read(deadline, files));
        reply.map_err(|error| {
            self.close();
            match error {
                Broken::Io(source) => match source.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                        ClientError::TimedOut { within }
                    }
                    io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::ConnectionReset => ClientError::Closed,
                    _ => ClientError::Io { action: "talk to the node", source },
                },
                Broken::Client(error) => error,
            }
        })
    }

    /// Sends the frame, and the descriptor along with its first byte.
    fn write(
        &mut self,
        deadline: Deadline,
        mut file: Option<BorrowedFd<'_>>,
    ) -> Result<(), Broken> {
        let mut rest = self.frame.as_slice();
        while !rest.is_empty() {
            self.stream.set_write_timeout(Some(left(deadline)?))?;
            let written = match file.take() {
                Some(file) => fd_passing::send(&self.stream, rest, &[file])?,
                None => retried(|| (&self.stream).write(rest))?,
            };
            rest = rest.get(written..).unwrap_or_default();
        }
        Ok(())
    }

    fn read(
        &mut self,
        deadline: Deadline,
        mut files: Option<&mut PassedFds>,
    ) -> Result<Reply, Broken> {
        let mut head = [0; HEADER_BYTES];
        let mut got = 0;
        while got < head.len() {
            let free = head.get_mut(got..).unwrap_or_default();
            got += self.read_some(deadline, free, files.as_deref_mut())?;
        }
        let header = Header::decode(head).map_err(ClientError::from)?;
        self.frame.clear();
        self.frame.resize(header.len as usize, 0);
        let mut body = std::mem::take(&mut self.frame);
        let mut got = 0;
        while got < body.len() {
            let free = body.get_mut(got..).unwrap_or_default();
            got += self.read_some(deadline, free, None)?;
        }
        let reply = Reply::decode(header, &body).map_err(ClientError::from)?;
        self.frame = body;
        if header.request == self.number {
            Ok(reply)
        } else {
            Err(Broken::Client(ClientError::Unexpected))
        }
    }

    fn read_some(
        &mut self,
        deadline: Deadline,
        bytes: &mut [u8],
        files: Option<&mut PassedFds>,
    ) -> Result<usize, Broken> {
        let read = match files {
            Some(files) => retried(|| {
                self.stream.set_read_timeout(Some(left(deadline)?))?;
                fd_passing::receive(&self.stream, bytes, files)
            }),
            None => retried(|| {
                self.stream.set_read_timeout(Some(left(deadline)?))?;
                (&self.stream).read(bytes)
            }),
        };
        match read? {
            0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            got => Ok(got),
        }
    }
}

fn retried(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}
fn is_socket(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Connects within a time: a node that is stuck with a full queue of clients would else be waited for
/// without end.
fn connect(path: &Path, within: Duration) -> rustix::io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let within = within.max(Duration::from_millis(1));
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(within))?;
    retry_on_intr(|| rustix::net::connect(&socket, &address))?;
    Ok(socket.into())
}

/// The time left, never zero, which a socket would take for "wait for ever".
fn left(deadline: Deadline) -> Result<Duration, io::Error> {
    deadline.remaining().ok_or_else(|| io::ErrorKind::TimedOut.into())
}

/// Why an exchange failed, before its deadline and the system's words are made into sentences.
enum Broken {
    Io(io::Error),
    Client(ClientError),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<ClientError> for Broken {
    fn from(error: ClientError) -> Self {
        Self::Client(error)
    }
}
