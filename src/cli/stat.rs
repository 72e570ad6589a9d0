//! `kvrail stat`: the state of a node.

mod health;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Args;
use comfy_table::Table;

use super::CliError;
use super::door::{DoorArgs, write_json, written};
use super::table::table;
use crate::config::Size;
use crate::protocol::door::stat::{GpuStat, GpuWayRefused, GpuWayStat, InPlaceStat, StatReport};
use crate::types::{NodeId, WordError};

/// Arguments of `kvrail stat`.
#[derive(Debug, Clone, Args)]
pub struct StatArgs {
    /// Print the node's state as one JSON object
    #[arg(long)]
    pub json: bool,
    /// Show the health of peers, of the ways to them, and of this node's NICs
    #[arg(long)]
    pub health: bool,
    /// First forget what speaks against this peer, or against all
    #[arg(long, value_name = "PEER|all", requires = "health", value_parser = reset)]
    pub reset: Option<Reset>,
    /// Where the node is.
    #[command(flatten)]
    pub door: DoorArgs,
}

/// Whose health is to be forgotten: a peer's, or all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reset(pub Option<NodeId>);

fn reset(text: &str) -> Result<Reset, WordError> {
    if text == "all" { Ok(Reset(None)) } else { text.parse().map(|node| Reset(Some(node))) }
}

/// Prints the node's residents by rank, its pools, the leases by requester, the registry's state and
/// the peers.
///
/// # Errors
/// [`CliError::Failed`] where there is no node or it does not answer.
pub fn run(args: &StatArgs) -> Result<ExitCode, CliError> {
    stat(args, &mut io::stdout().lock())
}

pub(super) fn stat(args: &StatArgs, out: &mut dyn Write) -> Result<ExitCode, CliError> {
    let client = args.door.connect()?;
    if let Some(reset) = args.reset {
        client.reset_health(reset.0)?;
    }
    let result = match (args.json, args.health) {
        (true, false) => write_json(out, &client.stat_json()?),
        (true, true) => {
            let all = client.stat_json()?;
            write_json(out, all.get("health").unwrap_or(&serde_json::Value::Null))
        }
        (false, false) => out.write_all(text(&client.stat()?).as_bytes()),
        (false, true) => out.write_all(health::text(&client.stat()?.health).as_bytes()),
    };
    written(result.and_then(|()| out.flush()))?;
    Ok(ExitCode::SUCCESS)
}

/// The GPU and the way into its memory, and what was refused.
fn gpu_rows(gpu: &GpuStat) -> Vec<[String; 2]> {
    let GpuStat { ordinal, name, pci, pool, way, .. } = gpu;
    let ways = gpu.nics.iter().map(|it| format!(", {} on {}", it.rung, it.nic)).collect::<String>();
    let near = gpu.nics.iter().map(|GpuWayStat { nic, near, near_why, .. }| {
        let near = if *near { "near" } else { "not near" };
        [String::new(), format!("{nic} is {near}: {near_why}")]
    });
    let lost = if gpu.lost { "lost: start the node again to have it back; " } else { "" };
    let line = format!("{lost}{ordinal}, {name} at {pci}, pool {pool}, {way}{ways}");
    let refused = gpu.refused.iter().map(refused_row);
    [["gpu".to_owned(), line]].into_iter().chain(near).chain(refused).collect()
}

/// Whether peers on this host are reached over shared memory.
fn shared_memory(why_not: &str) -> String {
    if why_not.is_empty() {
        return "with peers on this host".to_owned();
    }
    format!("none: {why_not}")
}

fn refused_row(refused: &GpuWayRefused) -> [String; 2] {
    let errno = refused.errno.map(|errno| format!(" (errno {errno})")).unwrap_or_default();
    let GpuWayRefused { nic, rung, call, why, .. } = refused;
    [String::new(), format!("no {rung} on {nic}: {call}: {why}{errno}")]
}

/// The layouts of engines that peers read from, and what was refused.
fn in_place_rows(in_place: &InPlaceStat) -> Vec<[String; 2]> {
    let mut rows = Vec::new();
    for layout in &in_place.layouts {
        let ways = layout.nics.iter().map(|it| format!(", {} on {}", it.rung, it.nic));
        let (blocks, bytes) = (layout.blocks, human(layout.bytes));
        let lost = if layout.lost { "on a lost GPU, " } else { "" };
        let line = format!(
            "layout {:#06x}, {lost}{blocks} blocks, {bytes}, {}{}",
            layout.pool,
            layout.way,
            ways.collect::<String>()
        );
        rows.push(["in place".to_owned(), line]);
        let lands = match layout.not_landed.as_str() {
            "" => "blocks from peers land in it".to_owned(),
            why => format!("blocks from peers are copied into it: {why}"),
        };
        rows.push([String::new(), lands]);
        rows.extend(layout.refused.iter().map(refused_row));
    }
    if !in_place.not_opened.is_empty() {
        let line = format!("a layout that is not open to peers: {}", in_place.not_opened);
        rows.push(["in place".to_owned(), line]);
        rows.extend(in_place.refused.iter().map(refused_row));
    }
    let InPlaceStat { landed, copied, .. } = in_place;
    if landed + copied > 0 {
        let line = format!("{landed} blocks landed in engines' memory, {copied} were copied there");
        rows.push(["loaded".to_owned(), line]);
    }
    rows
}

/// The node itself, line by line.
fn summary(report: &StatReport) -> Table {
    let node = &report.node;
    let residents = &report.residents;
    let registry = &report.registry;
    let mut summary = table([], 0);
    summary.add_row(["node", &node.id]);
    summary.add_row(["address", &node.address]);
    summary.add_row(["requester", &node.requester]);
    summary.add_row(["transport", &node.transport]);
    summary.add_row(["shared memory", &shared_memory(&node.no_shared_memory)]);
    summary.add_row(["policy", &node.policy]);
    let age = format!("{} ms ago", node.heartbeat_age_ms);
    summary.add_row(["heartbeat", &age]);
    let held = format!(
        "{} blocks of at most {}, {}, {} pinned",
        residents.blocks,
        residents.capacity,
        human(residents.bytes),
        residents.pinned
    );
    summary.add_row(["residents", &held]);
    let registry = format!(
        "{} ({}), {} changes not confirmed",
        registry.state, registry.endpoint, registry.pending
    );
    summary.add_row(["registry", &registry]);
    if !report.registry.error.is_empty() {
        summary.add_row(["", &report.registry.error]);
    }
    for row in report.gpu.iter().flat_map(gpu_rows).chain(in_place_rows(&report.in_place)) {
        summary.add_row(row);
    }
    summary
}

/// NICs that connections go without.
fn lacks(report: &StatReport) -> Table {
    let mut lacks = table(["peer", "goes without NIC", "why", "tried again in"], 4);
    for peer in &report.peers {
        for lack in &peer.lacks {
            let again = peer.widens_in_ms.map(|millis| format!("{:.1} s", millis as f64 / 1e3));
            lacks.add_row([&peer.id, &lack.local, &lack.reason, &again.unwrap_or_default()]);
        }
    }
    lacks
}

/// The state as a person reads it.
fn text(report: &StatReport) -> String {
    let mut ranks = table(["rank", "blocks"], 0);
    for (count, rank) in report.residents.ranks.iter().zip(1..) {
        if *count > 0 {
            ranks.add_row([format!("{rank}"), format!("{count}")]);
        }
    }
    let mut pools = table(["pool", "size", "used", "free"], 1);
    for pool in &report.pools {
        let used = pool.bytes.saturating_sub(pool.free_bytes);
        pools.add_row([
            pool.id.to_string(),
            Size(pool.bytes).to_string(),
            human(used),
            human(pool.free_bytes),
        ]);
    }
    let mut requesters = table(["requester", "leases", "blocks", "bytes"], 1);
    for one in &report.requesters {
        requesters.add_row([
            one.name.clone(),
            one.leases.to_string(),
            one.blocks.to_string(),
            human(one.bytes),
        ]);
    }
    let mut peers = table(["peer", "requester", "state", "transport"], 4);
    let mut rails = table(["peer", "NIC", "its NIC", "queue pairs", "why"], 5);
    for peer in &report.peers {
        peers.add_row([&peer.id, &peer.requester, &peer.state, &peer.transport]);
        for rail in &peer.rails {
            let pairs = rail.queue_pairs.to_string();
            rails.add_row([&peer.id, &rail.local, &rail.remote, &pairs, &rail.reason]);
        }
    }
    [summary(report), ranks, pools, requesters, peers, rails, lacks(report)]
        .iter()
        .filter(|table| !table.is_empty())
        .map(|table| format!("{}\n", table.trim_fmt()))
        .collect::<Vec<_>>()
        .join("\n")
}

fn human(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().iec().to_string()
}
