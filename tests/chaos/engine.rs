//! An engine beside a node: it saves and reads, and comes back when the node does.

use std::ops::AddAssign;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvrail::client::{Client, ClientError};
use kvrail::protocol::door::Source;
use kvrail::runtime::deadline::Deadline;
use kvrail::sim::Random;

use crate::support::{Blocks, PATIENCE, namespace, try_read};

/// Prompts that there are: few, so that engines want what others have.
const PROMPTS: u64 = 48;

/// Blocks of a prompt, and bytes of a block.
const BLOCKS: u32 = 8;
const BLOCK_BYTES: usize = 24 << 10;

/// What engines got done, in blocks.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) saved: u64,
    pub(crate) local: u64,
    pub(crate) fetched: u64,
    /// Asked for in vain: nobody had it, or whoever had it died.
    pub(crate) missed: u64,
    /// Calls that ended with the node.
    pub(crate) cut_off: u64,
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.saved += other.saved;
        self.local += other.local;
        self.fetched += other.fetched;
        self.missed += other.missed;
        self.cut_off += other.cut_off;
    }
}

#[derive(Debug)]
pub(crate) struct Engine {
    socket: PathBuf,
    random: Random,
}

impl Engine {
    pub(crate) fn new(socket: PathBuf, seed: u64) -> Self {
        Self { socket, random: Random::new(seed) }
    }

    /// Works until it is told that it is over.
    pub(crate) fn run(mut self, over: &AtomicBool) -> Work {
        let mut work = Work::default();
        while !over.load(Ordering::Relaxed) {
            let client = self.connect();
            while !over.load(Ordering::Relaxed) {
                if let Err(error) = self.one_call(&client, &mut work) {
                    assert!(is_the_nodes_end(&error), "{error}");
                    work.cut_off += 1;
                    break;
                }
            }
        }
        work
    }

    fn connect(&self) -> Client {
        let deadline = Deadline::after(PATIENCE);
        loop {
            match Client::connect_within(&self.socket, Duration::from_secs(10)) {
                Ok(client) => return client,
                Err(error) => {
                    assert!(deadline.pause(Duration::from_millis(10)), "no door: {error}");
                }
            }
        }
    }

    fn one_call(&mut self, client: &Client, work: &mut Work) -> Result<(), ClientError> {
        let prompt =
            Blocks::new(&format!("prompt {}", self.random.below(PROMPTS)), BLOCKS, BLOCK_BYTES);
        match self.random.below(10) {
            0..3 => self.save(client, &prompt, work),
            3 => client.finished_sending(&namespace(), &prompt.hashes).map(drop),
            from => {
                let source = if from < 6 { Source::Here } else { Source::Anywhere };
                let counts = try_read(client, &prompt, source)?;
                let ready = counts.ready as u64;
                *(if from < 6 { &mut work.local } else { &mut work.fetched }) += ready;
                work.missed += prompt.len() as u64 - ready;
                Ok(())
            }
        }
    }

    fn save(&self, client: &Client, blocks: &Blocks, work: &mut Work) -> Result<(), ClientError> {
        for (hash, bytes) in blocks.hashes.iter().zip(&blocks.bytes) {
            let size = u32::try_from(bytes.len()).unwrap();
            let mut memory = match client.reserve(&[size]) {
                Ok(mut memory) => memory.pop().unwrap(),
                // Everything is pinned just now: an engine goes on without this cache.
                Err(ClientError::Busy { .. }) => return Ok(()),
                Err(error) => return Err(error),
            };
            memory.fill(bytes)?;
            client.publish(&namespace(), vec![(*hash, memory)], false)?;
            work.saved += 1;
        }
        Ok(())
    }
}

/// Whether a call failed because the node was killed, stopped or is shutting down.
fn is_the_nodes_end(error: &ClientError) -> bool {
    !matches!(error, ClientError::Busy { .. } | ClientError::Refused { .. })
}
