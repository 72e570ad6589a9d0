//! A link between two nodes that can be cut: it carries their TCP connections on, or does not.
//!
//! To the nodes a cut is what a pulled cable is: nothing arrives, nothing is refused, no connection ends,
//! and what was sent arrives once the link is whole again. What it cannot show is how the kernel's own
//! retransmissions back off meanwhile, which may delay a real link by as much again as it was down.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::cli::CliError;
use crate::runtime::deadline::Deadline;

/// How often a thread that has nothing to carry looks whether that is still so.
const LOOK: Duration = Duration::from_millis(2);

/// Bytes carried at once.
const BYTES: usize = 256 << 10;

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    cut: AtomicBool,
    to: OnceLock<SocketAddr>,
}

impl Shared {
    /// Waits while the link is cut; whether there is still a link afterwards.
    fn carries(&self) -> bool {
        while self.cut.load(Ordering::Relaxed) && !self.stop.load(Ordering::Relaxed) {
            // The loop looks again.
            let _more = Deadline::after(LOOK).pause(LOOK);
        }
        !self.stop.load(Ordering::Relaxed)
    }
}

/// The link. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Relay {
    /// A link whose end is not known yet.
    pub(super) fn start() -> Result<Self, CliError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(CliError::failed)?;
        listener.set_nonblocking(true).map_err(CliError::failed)?;
        let address = listener.local_addr().map_err(CliError::failed)?;
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        spawn(move || accept(&listener, &own))?;
        Ok(Self { address, shared })
    }

    /// Where it begins.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Says where it leads; once.
    pub(super) fn lead_to(&self, to: SocketAddr) {
        self.shared.to.get_or_init(|| to);
    }

    pub(super) fn cut(&self, cut: bool) {
        self.shared.cut.store(cut, Ordering::Relaxed);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> Result<(), CliError> {
    // It ends by the flag, at the latest with this process.
    let thread = std::thread::Builder::new().name("relay".into()).spawn(work);
    thread.map(drop).map_err(CliError::failed)
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    while shared.carries() {
        let (Ok((near, _)), Some(to)) = (listener.accept(), shared.to.get()) else {
            // The loop looks again.
            let _more = Deadline::after(LOOK).pause(LOOK);
            continue;
        };
        // Where nobody listens, the connection is dropped: a refusal that comes a moment late.
        let Ok(far) = TcpStream::connect(to) else { continue };
        let twice = |stream: &TcpStream| {
            stream.set_nonblocking(false)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(LOOK))?;
            stream.try_clone()
        };
        if let (Ok(near_too), Ok(far_too)) = (twice(&near), twice(&far)) {
            for (from, to) in [(near, far), (far_too, near_too)] {
                let shared = Arc::clone(shared);
                // Without a thread the connection is dropped.
                spawn(move || carry(from, to, &shared)).ok();
            }
        }
    }
}

/// Carries bytes one way until that end is closed.
fn carry(mut from: TcpStream, mut to: TcpStream, shared: &Shared) {
    let mut bytes = vec![0; BYTES];
    while shared.carries() {
        let read = match from.read(&mut bytes) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                continue;
            }
            Err(_broken) => break,
        };
        let part = bytes.get(..read).unwrap_or_default();
        if !shared.carries() || to.write_all(part).is_err() {
            break;
        }
    }
    // Whichever end is gone already needs no word.
    to.shutdown(Shutdown::Write).ok();
    from.shutdown(Shutdown::Read).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_link_keeps_what_was_sent_until_it_is_whole() {
        let end = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let relay = Relay::start().unwrap();
        relay.lead_to(end.local_addr().unwrap());
        let mut near = TcpStream::connect(relay.address()).unwrap();
        near.write_all(b"one").unwrap();
        let (mut far, _) = end.accept().unwrap();
        let mut got = [0; 3];
        far.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"one");
        relay.cut(true);
        far.write_all(b"two").unwrap();
        near.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let mut first = near.read(&mut got);
        // A thread that was in the middle of it may carry this much on.
        if first.is_ok() {
            far.write_all(b"two").unwrap();
            first = near.read(&mut got);
        }
        assert!(first.is_err(), "a cut link carries nothing");
        relay.cut(false);
        near.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        near.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"two");
        drop(far);
        assert_eq!(near.read(&mut got).unwrap(), 0, "the end of a connection is carried, too");
    }
}
