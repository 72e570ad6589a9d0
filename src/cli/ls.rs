//! `kvrail ls`: the residents of a node.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Args;

use super::CliError;
use super::door::{DoorArgs, write_json, written};
use crate::protocol::door::ListEntry;
use crate::types::Namespace;

/// Residents that one request asks for.
const PAGE: usize = 1024;

/// Arguments of `kvrail ls`.
#[derive(Debug, Clone, Args)]
pub struct LsArgs {
    /// Only this set of blocks
    #[arg(long, value_name = "NAME")]
    pub namespace: Option<Namespace>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
    /// Where the node is.
    #[command(flatten)]
    pub door: DoorArgs,
}

/// Prints the residents as the node lists them, page by page. Residents that come or go meanwhile
/// may be missing.
///
/// # Errors
/// [`CliError::Failed`] where there is no node or it does not answer.
pub fn run(args: &LsArgs) -> Result<ExitCode, CliError> {
    ls(args, &mut io::stdout().lock())
}

pub(super) fn ls(args: &LsArgs, out: &mut dyn Write) -> Result<ExitCode, CliError> {
    let client = args.door.connect()?;
    let mut cursor = None;
    if !args.json && !written(row(out, ["RANK", "BYTES", "PINS", "READERS", "HASH NAMESPACE"]))? {
        return Ok(ExitCode::SUCCESS);
    }
    loop {
        let page = client.list(args.namespace.as_ref(), cursor, PAGE)?;
        let result = page
            .entries
            .iter()
            .try_for_each(|entry| print(entry, args.json, out))
            .and_then(|()| out.flush());
        cursor = page.next;
        if !written(result)? || cursor.is_none() {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

fn print(entry: &ListEntry, json: bool, out: &mut dyn Write) -> io::Result<()> {
    let id = format!("{:016x}", entry.namespace.0);
    if json {
        let object = serde_json::json!({
            "hash": entry.hash.to_string(),
            "namespace": entry.name.as_ref().map(Namespace::as_str),
            "namespace_id": id,
            "rank": entry.rank.get(),
            "bytes": entry.bytes,
            "pins": entry.pins,
            "requesters": entry.requesters,
        });
        return write_json(out, &object);
    }
    let name = entry.name.map_or_else(|| format!("#{id}"), |name| name.to_string());
    row(
        out,
        [
            &entry.rank.to_string(),
            &entry.bytes.to_string(),
            &entry.pins.to_string(),
            &entry.requesters.to_string(),
            &format!("{} {name}", entry.hash),
        ],
    )
}

/// Columns that do not depend on the other rows, so that pages line up.
fn row(out: &mut dyn Write, cells: [&str; 5]) -> io::Result<()> {
    let [rank, bytes, pins, readers, rest] = cells;
    writeln!(out, "{rank:>4} {bytes:>10} {pins:>5} {readers:>7}  {rest}")
}
