//! `kvrail get`: blocks of a node as a file.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;

use super::CliError;
use super::chain::Chain;
use super::door::{DoorArgs, Patience, progress, write_json, written};
use super::sink::{STDOUT, Target};
use crate::client::{Acquired, Client, ClientError, Held};
use crate::event::BusyReason;
use crate::protocol::door::{BlockOrigin, Source};
use crate::types::{BlockHash, Namespace, NodeId};

/// Bytes that are held at once, at most, once the blocks' size is known.
const BATCH_BYTES: u64 = 64 << 20;

/// Blocks that are asked for before their size is known.
const FIRST_BATCH: usize = 4;

/// Blocks that are held at once, at most.
const BATCH_MAX: usize = 256;

/// A batch takes at most this part of the pools.
const BATCH_SHARE: u64 = 4;

/// How often a block that failed is asked for.
const FAILURES_MAX: u32 = 3;

/// The pause before asking again for a block that was busy or failed.
const PAUSE: Duration = Duration::from_millis(20);

/// Longest list of hashes, bytes of text: a million blocks.
const LIST_BYTES_MAX: u64 = 66 << 20;

/// Arguments of `kvrail get`.
#[derive(Debug, Clone, Args)]
pub struct GetArgs {
    /// The blocks, in order, as `kvrail put` printed them; read from standard input where none is given
    #[arg(value_name = "HASH", conflicts_with = "hashes_from")]
    pub hashes: Vec<BlockHash>,
    /// A file with the blocks' hashes, one a line; - for standard input
    #[arg(long = "hashes", value_name = "FILE")]
    pub hashes_from: Option<PathBuf>,
    /// The set of blocks that the hashes belong to
    #[arg(long, value_name = "NAME")]
    pub namespace: Namespace,
    /// The file to write, replaced only when all of it is there; - for standard output
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,
    /// Take only what this node holds, fetch nothing from peers
    #[arg(long)]
    pub local: bool,
    /// Fetch what is not here from this peer only
    #[arg(long, value_name = "NODE_ID", conflicts_with = "local")]
    pub from: Option<NodeId>,
    /// Do not check that each hash continues the chain of those before it: for hashes that
    /// `kvrail put` did not make, or a part of its list. Checksums are verified all the same
    #[arg(long)]
    pub no_verify_chain: bool,
    /// Print one JSON object instead of a sentence
    #[arg(long)]
    pub json: bool,
    /// Where the node is.
    #[command(flatten)]
    pub door: DoorArgs,
}

impl GetArgs {
    fn source(&self) -> Source {
        match (self.local, self.from) {
            (true, _) => Source::Here,
            (false, Some(node)) => Source::From(node),
            (false, None) => Source::Anywhere,
        }
    }
}

/// Restores a file from its blocks, each verified by the checksum that it was saved with and, unless
/// that is turned off, by the chain of hashes.
///
/// # Errors
/// [`CliError::Usage`] for arguments and files that cannot work, [`CliError::Failed`] where a block
/// could not be had. No file is written then, and one that was there stays as it was.
pub fn run(args: &GetArgs) -> Result<ExitCode, CliError> {
    get(args, &mut io::stdin().lock(), &mut io::stdout().lock())
}

pub(super) fn get(
    args: &GetArgs,
    input: &mut dyn Read,
    out: &mut dyn Write,
) -> Result<ExitCode, CliError> {
    let hashes = hashes(args, input)?;
    let to_stdout = args.output == Path::new(STDOUT);
    if to_stdout && args.json {
        return Err(CliError::usage(
            "--json and `-o -` both write to standard output: leave one of them out",
        ));
    }
    let mut restore = Restore {
        args,
        chain: (!args.no_verify_chain).then(Chain::default),
        hashes: &hashes,
        done: 0,
        bytes: 0,
        fetched: 0,
        bar: progress(None),
        buffer: Vec::new(),
        unread: false,
    };
    if to_stdout {
        let client = args.door.connect()?;
        restore.all(&client, out)?;
        written(out.flush())?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut target = Target::new(&args.output, "-o")?;
    let client = args.door.connect()?;
    restore.all(&client, &mut target)?;
    target.keep()?;
    restore.report(out)?;
    Ok(ExitCode::SUCCESS)
}

/// The hashes, wherever they come from.
fn hashes(args: &GetArgs, input: &mut dyn Read) -> Result<Vec<BlockHash>, CliError> {
    let unreadable = |path: &Path, error: &io::Error| {
        CliError::usage(format_args!("cannot read {}: {error}", path.display()))
    };
    let hashes = match &args.hashes_from {
        _ if !args.hashes.is_empty() => args.hashes.clone(),
        Some(path) if path != Path::new(STDOUT) => {
            let mut file = File::open(path).map_err(|error| unreadable(path, &error))?;
            parse(&mut file, &path.display().to_string())?
        }
        None if io::stdin().is_terminal() => {
            return Err(CliError::usage(
                "no hashes: give them as arguments, by --hashes FILE, or on standard input",
            ));
        }
        _ => parse(input, "standard input")?,
    };
    if hashes.is_empty() {
        return Err(CliError::usage("the list of hashes is empty"));
    }
    Ok(hashes)
}

fn parse(input: &mut dyn Read, name: &str) -> Result<Vec<BlockHash>, CliError> {
    let mut text = String::new();
    input
        .take(LIST_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(|error| CliError::usage(format_args!("cannot read {name}: {error}")))?;
    if text.len() as u64 > LIST_BYTES_MAX {
        return Err(CliError::usage(format_args!(
            "{name} holds more than {LIST_BYTES_MAX} bytes: that is no list of hashes"
        )));
    }
    let lines = text.lines().zip(1_u64..);
    lines
        .map(|(line, number)| (line.trim(), number))
        .filter(|(line, _)| !line.is_empty())
        .map(|(line, number)| {
            line.parse()
                .map_err(|error| CliError::usage(format_args!("{name}, line {number}: {error}")))
        })
        .collect()
}

struct Restore<'a> {
    args: &'a GetArgs,
    hashes: &'a [BlockHash],
    /// `None` where the chain is not verified.
    chain: Option<Chain>,
    done: usize,
    bytes: u64,
    fetched: usize,
    bar: ProgressBar,
    buffer: Vec<u8>,
    /// Nobody reads the output any more.
    unread: bool,
}

/// Why a batch ended before its end.
enum Stop {
    Busy(BusyReason),
    Failed,
}

impl Restore<'_> {
    fn all(&mut self, client: &Client, out: &mut dyn Write) -> Result<(), CliError> {
        let mut patience = Patience::new(self.args.door.timeout);
        let mut failures = 0;
        let mut batch = FIRST_BATCH;
        while self.done < self.hashes.len() && !self.unread {
            let before = self.done;
            let stop = self.batch(client, batch, out)?;
            if self.done > before {
                patience = Patience::new(self.args.door.timeout);
                failures = 0;
            }
            batch = match stop {
                None => self.batch_for(client),
                // With fewer blocks held at once, a small pool has room for the next ones.
                Some(Stop::Busy(_)) => (batch / 2).max(1),
                Some(Stop::Failed) => {
                    failures += 1;
                    if failures >= FAILURES_MAX {
                        return Err(self.lacking("could not be read from any of its owners"));
                    }
                    batch
                }
            };
            if let Some(stop) = stop
                && !patience.wait(PAUSE)
            {
                return Err(match stop {
                    Stop::Busy(reason) => {
                        let why = reason.as_str();
                        self.lacking(&format!(
                            "was not to be had in time: {why} (see `kvrail stat`)"
                        ))
                    }
                    Stop::Failed => self.lacking("could not be read in time"),
                });
            }
        }
        self.bar.finish_and_clear();
        Ok(())
    }

    /// Asks for the next blocks and writes those at the front that are there.
    fn batch(
        &mut self,
        client: &Client,
        most: usize,
        out: &mut dyn Write,
    ) -> Result<Option<Stop>, CliError> {
        let rest = self.hashes.get(self.done..).unwrap_or_default();
        let asked = rest.get(..most.min(rest.len())).unwrap_or(rest);
        let acquired = match client.acquire(&self.args.namespace, asked, self.args.source()) {
            Ok(acquired) => acquired,
            Err(ClientError::Busy { reason, .. }) => return Ok(Some(Stop::Busy(reason))),
            Err(error) => return Err(error.into()),
        };
        for block in acquired {
            match block {
                _ if self.unread => return Ok(None),
                Acquired::Ready(held) => self.write(&held, out)?,
                Acquired::Busy(reason) => return Ok(Some(Stop::Busy(reason))),
                Acquired::Failed => return Ok(Some(Stop::Failed)),
                Acquired::NotFound if self.args.local => {
                    return Err(self.lacking("is not on this node: leave out --local to fetch it"));
                }
                Acquired::NotFound if self.args.from.is_some() => {
                    return Err(self.lacking(
                        "is not here, and no node of the id that --from gives has it and can be \
                         reached",
                    ));
                }
                Acquired::NotFound => {
                    return Err(self.lacking(
                        "is on no node that can be reached: it was evicted or never saved under \
                         this namespace",
                    ));
                }
            }
        }
        Ok(None)
    }

    fn write(&mut self, held: &Held<'_>, out: &mut dyn Write) -> Result<(), CliError> {
        self.buffer.resize(held.len() as usize, 0);
        held.read_into(&mut self.buffer)?;
        if let Some(chain) = &mut self.chain
            && chain.next(&self.buffer) != Some(held.hash())
        {
            return Err(self.lacking(
                "does not continue the chain of the hashes before it: give the hashes as `kvrail \
                 put` printed them, from the first one on, or --no-verify-chain where they are not \
                 from there",
            ));
        }
        self.unread = !written(out.write_all(&self.buffer))?;
        self.done += 1;
        self.bytes += self.buffer.len() as u64;
        self.fetched += usize::from(held.origin() == BlockOrigin::Fetched);
        self.bar.inc(self.buffer.len() as u64);
        Ok(())
    }

    /// As many blocks of the size seen last as may be held at once.
    fn batch_for(&self, client: &Client) -> usize {
        let pools: u64 = client.pools().iter().map(|pool| pool.bytes()).sum();
        let bytes = BATCH_BYTES.min(pools / BATCH_SHARE);
        let blocks = bytes / (self.buffer.len() as u64).max(1);
        usize::try_from(blocks).unwrap_or(BATCH_MAX).clamp(1, BATCH_MAX)
    }

    /// What is wrong with the first block that is not written.
    fn lacking(&self, why: &str) -> CliError {
        let hash = self.hashes.get(self.done);
        CliError::failed(format_args!(
            "block {} of {} ({}) {why}",
            self.done + 1,
            self.hashes.len(),
            hash.map(ToString::to_string).unwrap_or_default(),
        ))
    }

    fn report(&self, out: &mut dyn Write) -> Result<(), CliError> {
        let result = if self.args.json {
            write_json(
                out,
                &serde_json::json!({
                    "output": self.args.output,
                    "namespace": self.args.namespace.as_str(),
                    "bytes": self.bytes,
                    "blocks": self.done,
                    "fetched": self.fetched,
                    "verified": true,
                    "chain_verified": self.chain.is_some(),
                }),
            )
        } else {
            writeln!(
                out,
                "{}: {} bytes from {} blocks, {} of them fetched from peers, verified",
                self.args.output.display(),
                self.bytes,
                self.done,
                self.fetched,
            )
        };
        written(result.and_then(|()| out.flush()))?;
        Ok(())
    }
}
