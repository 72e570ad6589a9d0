//! What the machine can do at best: copies in memory, and plain sockets.

use std::hint::black_box;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::panic::resume_unwind;
use std::time::Duration;

use serde::Serialize;

use crate::cli::CliError;
use crate::runtime::clock::Clock;

/// Memory that is copied from, and to: more than caches hold, and as much as READs read from and to
/// with the default pool.
const FROM_BYTES: usize = 256 << 20;
const TO_BYTES: usize = 64 << 20;

/// Bytes read from a socket at once.
const READ_BYTES: usize = 256 << 10;

/// The longest that a socket may be silent.
const SILENCE: Duration = Duration::from_secs(5);

/// Copies of one block size by one thread.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Copies {
    pub(super) size: u32,
    pub(super) gb_s: f64,
}

/// Plain sockets from the holder, one thread each at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Sockets {
    pub(super) streams: usize,
    pub(super) gb_s: f64,
}

/// Bytes per second of `memcpy` for each of these sizes.
pub(super) fn copies(sizes: &[u32], time: Duration) -> Vec<Copies> {
    let (from, mut to) = (vec![1_u8; FROM_BYTES], vec![2_u8; TO_BYTES]);
    let clock = Clock::start();
    let mut one = |size: u32| {
        let (mut bytes, start) = (0, clock.now());
        for from in from.chunks(TO_BYTES).cycle() {
            if clock.now().since(start) >= time {
                break;
            }
            for (from, to) in from.chunks(size as usize).zip(to.chunks_mut(size as usize)) {
                to.copy_from_slice(black_box(from));
            }
            bytes += black_box(&to).len();
        }
        Copies { size, gb_s: bytes as f64 / clock.now().since(start).as_secs_f64() / 1e9 }
    };
    sizes.iter().map(|size| one(*size)).collect()
}

/// Bytes per second of so many sockets that the other end fills as fast as it can.
pub(super) fn sockets(
    endpoint: SocketAddr,
    streams: usize,
    time: Duration,
) -> Result<Sockets, CliError> {
    let drain = || -> std::io::Result<f64> {
        let mut stream = TcpStream::connect_timeout(&endpoint, SILENCE)?;
        stream.set_read_timeout(Some(SILENCE))?;
        let mut buffer = vec![0; READ_BYTES];
        let (clock, mut bytes) = (Clock::start(), 0);
        let start = clock.now();
        while clock.now().since(start) < time {
            bytes += stream.read(&mut buffer)?;
        }
        Ok(bytes as f64 / clock.now().since(start).as_secs_f64())
    };
    let drain = &drain;
    let rates = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..streams).map(|_| scope.spawn(drain)).collect();
        let joined = threads.into_iter().map(|it| it.join().unwrap_or_else(|p| resume_unwind(p)));
        joined.collect::<Vec<_>>()
    });
    let failed = |error| CliError::failed(format!("plain sockets to {endpoint}: {error}"));
    let all: Vec<f64> = rates.into_iter().collect::<Result<_, _>>().map_err(failed)?;
    Ok(Sockets { streams, gb_s: all.iter().sum::<f64>() / 1e9 })
}
