//! `kvrail put`: a file as blocks of a node.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;

use super::CliError;
use super::chain::Chain;
use super::door::{DoorArgs, Patience, progress, write_json, written};
use crate::client::{Client, ClientError, Reservation};
use crate::config::Size;
use crate::limits;
use crate::protocol::door::PublishOutcome;
use crate::types::{BlockHash, Namespace};

/// Bytes that are reserved and published at once, at most: enough to hide the round trips.
const BATCH_BYTES: u64 = 64 << 20;

/// A batch takes at most this part of the pools, so that saving does not empty them.
const BATCH_SHARE: u64 = 4;

/// Arguments of `kvrail put`.
#[derive(Debug, Clone, Args)]
pub struct PutArgs {
    /// The file to save
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The set of blocks to save into, such as a model's name with its layout
    #[arg(long, value_name = "NAME")]
    pub namespace: Namespace,
    /// The size of a block, 1 byte to 1GiB; the last one may be shorter
    #[arg(long, value_name = "SIZE", default_value = "2MiB")]
    pub block_size: Size,
    /// Return before the registry knows the blocks
    #[arg(long)]
    pub no_wait: bool,
    /// Print one JSON object instead of one hash a line
    #[arg(long)]
    pub json: bool,
    /// Where the node is.
    #[command(flatten)]
    pub door: DoorArgs,
}

/// Saves a file and prints its blocks' hashes, in order, one a line. The hashes form a chain: each
/// names its block and all blocks before it. Ends with exit code 1 where all is saved but the
/// registry does not know it in time.
///
/// # Errors
/// [`CliError::Usage`] for an argument or file that cannot be saved; nothing was saved then.
/// [`CliError::Failed`] where the node could not take all blocks; those that it took stay as what
/// they are, blocks that may be evicted, and no hash is printed.
pub fn run(args: &PutArgs) -> Result<ExitCode, CliError> {
    put(args, &mut io::stdout().lock())
}

pub(super) fn put(args: &PutArgs, out: &mut dyn Write) -> Result<ExitCode, CliError> {
    let block = block_bytes(args.block_size)?;
    let (mut file, bytes) = open(&args.file)?;
    let client = args.door.connect()?;
    check_room(&client, block, bytes, &args.file)?;

    let mut save = Save {
        args,
        client: &client,
        chain: Chain::default(),
        bar: progress(Some(bytes)),
        saved: Saved::default(),
    };
    let share = client.pools().iter().map(|pool| pool.bytes()).sum::<u64>() / BATCH_SHARE;
    let most = (BATCH_BYTES.min(share) / u64::from(block)).clamp(1, limits::DOOR_BLOCKS_MAX as u64);
    let mut left = bytes;
    while left > 0 {
        let sizes = batch(left, block, most);
        left -= sizes.iter().map(|size| u64::from(*size)).sum::<u64>();
        save.batch(&sizes, &mut file)?;
    }
    save.bar.finish_and_clear();
    let saved = save.saved;

    let announced = if args.no_wait { Ok(None) } else { client.flush(args.door.timeout).map(Some) };
    // The hashes are of use whatever became of the registry.
    print(args, &saved, bytes, *announced.as_ref().unwrap_or(&None), out)?;
    if announced? == Some(false) {
        return Err(CliError::failed(format_args!(
            "all blocks are saved, but the registry did not learn of them within {}: other nodes \
             find them when it is back (see `kvrail stat`)",
            humantime::format_duration(args.door.timeout)
        )));
    }
    Ok(ExitCode::SUCCESS)
}

fn block_bytes(size: Size) -> Result<u32, CliError> {
    let most = limits::BLOCK_BYTES_MAX;
    u32::try_from(size.0)
        .ok()
        .filter(|bytes| (limits::BLOCK_BYTES_MIN..=most).contains(bytes))
        .ok_or_else(|| {
            CliError::usage(format_args!(
                "--block-size takes 1 byte to {}, got {size}",
                Size(most.into())
            ))
        })
}

/// Opens a file that can be saved, and says how long it is.
fn open(path: &Path) -> Result<(File, u64), CliError> {
    let refuse = |why: &str| Err(CliError::usage(format_args!("{} {why}", path.display())));
    let unreadable =
        |error: io::Error| CliError::usage(format_args!("cannot read {}: {error}", path.display()));
    // Looked at before it is opened: to open a pipe would wait for its writer.
    let found = std::fs::metadata(path).map_err(unreadable)?;
    if found.is_dir() {
        return refuse("is a directory: give a file");
    }
    if !found.is_file() {
        return refuse("is not a regular file: copy its content into one first");
    }
    let file = File::open(path).map_err(unreadable)?;
    let bytes = file.metadata().map_err(unreadable)?.len();
    if bytes == 0 {
        return refuse("is empty: there is nothing to save");
    }
    Ok((file, bytes))
}

/// Refuses a file that the node could not hold even if it were empty: its first blocks would be gone when
/// its last ones are saved.
fn check_room(client: &Client, block: u32, bytes: u64, path: &Path) -> Result<(), CliError> {
    let each = u64::from(block).min(bytes).next_multiple_of(limits::EXTENT_ALIGN);
    let blocks = bytes.div_ceil(u64::from(block));
    // A node that does not say how many it takes says 0.
    let most = client.stat()?.residents.capacity;
    if most > 0 && blocks > most {
        return Err(CliError::usage(format_args!(
            "{} has {bytes} bytes, which is {blocks} blocks of {}, and the node holds {most} blocks at \
             most: save it with a larger --block-size, or start the node with a larger --capacity",
            path.display(),
            Size(block.into()),
        )));
    }
    let room: u64 = client.pools().iter().map(|pool| pool.bytes() / each).sum();
    if blocks <= room {
        return Ok(());
    }
    let pools: u64 = client.pools().iter().map(|pool| pool.bytes()).sum();
    Err(CliError::usage(format_args!(
        "{} has {bytes} bytes, which is {blocks} blocks of {}, and the node's pools of {} hold {room} \
         of them at most: save a smaller file, or start the node with a larger pool",
        path.display(),
        Size(block.into()),
        Size(pools),
    )))
}

/// Sizes of the next batch: full blocks, and the shorter one at the file's end.
fn batch(left: u64, block: u32, most: u64) -> Vec<u32> {
    let full = left / u64::from(block);
    let rest = left % u64::from(block);
    let mut sizes = vec![block; usize::try_from(full.min(most)).unwrap_or(usize::MAX)];
    if full < most && rest > 0 {
        sizes.extend(u32::try_from(rest));
    }
    sizes
}

#[derive(Debug, Default)]
struct Saved {
    hashes: Vec<BlockHash>,
    stored: u64,
    resident: u64,
}

struct Save<'a> {
    args: &'a PutArgs,
    client: &'a Client,
    chain: Chain,
    bar: ProgressBar,
    saved: Saved,
}

impl<'a> Save<'a> {
    fn batch(&mut self, sizes: &[u32], file: &mut File) -> Result<(), CliError> {
        let memory = reserve(self.client, sizes, self.args.door.timeout)?;
        let mut blocks = Vec::with_capacity(memory.len());
        let mut bytes = Vec::new();
        for (mut memory, size) in memory.into_iter().zip(sizes) {
            bytes.resize(*size as usize, 0);
            file.read_exact(&mut bytes).map_err(|error| unread(&self.args.file, &error))?;
            memory.fill(&bytes)?;
            let hash = self.chain.next(&bytes);
            let hash = hash.ok_or_else(|| CliError::failed("a block has no hash"))?;
            blocks.push((hash, memory));
            self.bar.inc((*size).into());
        }
        self.saved.hashes.extend(blocks.iter().map(|(hash, _)| *hash));
        let outcomes = self.client.publish(&self.args.namespace, blocks, false)?;
        for outcome in outcomes {
            match outcome {
                PublishOutcome::Stored => self.saved.stored += 1,
                PublishOutcome::AlreadyResident(_) => self.saved.resident += 1,
                PublishOutcome::Refused => {
                    return Err(CliError::failed(
                        "the node does not take blocks any more: it is shutting down",
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Reserves, waiting as long as the node says that it is busy.
pub(super) fn reserve<'a>(
    client: &'a Client,
    sizes: &[u32],
    timeout: Duration,
) -> Result<Vec<Reservation<'a>>, CliError> {
    let mut patience = Patience::new(timeout);
    loop {
        let error = match client.reserve(sizes) {
            Ok(memory) => return Ok(memory),
            Err(error) => error,
        };
        let ClientError::Busy { pause, reason } = error else {
            return Err(error.into());
        };
        if !patience.wait(pause) {
            return Err(CliError::failed(format_args!(
                "the node had no memory for {} blocks within {}: {} (see `kvrail stat`)",
                sizes.len(),
                humantime::format_duration(timeout),
                reason.as_str(),
            )));
        }
    }
}

fn unread(path: &Path, error: &io::Error) -> CliError {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        CliError::failed(format_args!(
            "{} became shorter while it was read: save it again when nobody writes to it",
            path.display()
        ))
    } else {
        CliError::failed(format_args!("cannot read {}: {error}", path.display()))
    }
}

fn print(
    args: &PutArgs,
    saved: &Saved,
    bytes: u64,
    announced: Option<bool>,
    out: &mut dyn Write,
) -> Result<(), CliError> {
    let text: Vec<String> = saved.hashes.iter().map(ToString::to_string).collect();
    let result = if args.json {
        write_json(
            out,
            &serde_json::json!({
                "file": args.file,
                "namespace": args.namespace.as_str(),
                "bytes": bytes,
                "block_size": args.block_size.0,
                "blocks": saved.hashes.len(),
                "stored": saved.stored,
                "already_resident": saved.resident,
                "announced": announced,
                "hashes": text,
            }),
        )
    } else {
        text.iter().try_for_each(|hash| writeln!(out, "{hash}"))
    };
    written(result.and_then(|()| out.flush()))?;
    Ok(())
}
