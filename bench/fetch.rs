//! What a reader gets from a peer, next to what the machine can do: blocks fetched by one node from
//! another over TCP on loopback, with leases, checksums, ranks and the store, and `iperf3` with as
//! many streams, in turn, in one run.
//!
//! ```text
//! cargo bench --bench fetch -- [MIB] [BLOCK_KIB] [ROUNDS]
//! ```
//!
//! Compare the ratios; the absolute numbers of a shared machine mean little.
#![expect(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a bench measures time and prints what it found"
)]

use std::error::Error;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::{Acquired, Client};
use kvrail::protocol::door::Source;
use kvrail::types::{BlockHash, Namespace};

/// Blocks of one acquisition.
const BATCH: usize = 64;

/// Seconds of one iperf3 run.
const IPERF_SECONDS: &str = "2";

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    // `cargo bench` passes its own flag.
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|it| it.parse().ok()).collect();
    let number = |at: usize, default| numbers.get(at).copied().unwrap_or(default);
    let (mib, block_kib, rounds) = (number(0, 128), number(1, 1024), number(2, 5));
    let bytes = mib << 20;
    let block = u32::try_from(block_kib << 10)?;
    let cluster = Cluster::new(env!("CARGO_BIN_EXE_kvrail"))?;
    let registry = cluster.registry("registry", &[])?;
    let address = registry.addresses()?.listen;
    // Four times the blocks: a requester may have half of a pool under leases.
    let pool = format!("{}MiB", mib * 4);
    let start = |name| cluster.start_node(name, address, &["--pool", &pool]);
    let (a, b) = (start("a")?, start("b")?);
    let (a, b) = (a.ready()?, b.ready()?);
    println!("{mib} MiB in blocks of {block_kib} KiB, 2 streams");
    println!("round  iperf3 GB/s  fetch GB/s  ratio  CPU s/GiB of holder, of reader");
    let mut ratios = Vec::new();
    for round in 0..rounds {
        let wire = iperf3()?;
        let cpu = (cpu_seconds(&a)?, cpu_seconds(&b)?);
        let fetched = fetch(&a, &b, round, bytes, block)?;
        let gib = bytes as f64 / f64::from(1 << 30);
        let (holder, reader) = ((cpu_seconds(&a)? - cpu.0) / gib, (cpu_seconds(&b)? - cpu.1) / gib);
        ratios.push(fetched / wire);
        let ratio = fetched / wire;
        println!(
            "{round:>5}  {wire:>11.2}  {fetched:>10.2}  {ratio:>5.2}  {holder:.2}, {reader:.2}"
        );
    }
    ratios.sort_by(f64::total_cmp);
    if let Some(median) = ratios.get(ratios.len() / 2) {
        println!("median ratio {median:.2}");
    }
    Ok(())
}

/// Saves blocks on A, fetches them on B; GB/s from the first request to the last answer.
fn fetch(a: &Process, b: &Process, round: u64, bytes: u64, block: u32) -> Outcome<f64> {
    let namespace: Namespace = format!("bench-{round}").parse()?;
    let count = bytes / u64::from(block);
    let hashes: Vec<BlockHash> =
        (0..count).filter_map(|at| BlockHash::new(&at.to_le_bytes())).collect();
    let holder = a.client()?;
    let filler = vec![u8::try_from(round & 0xff)?; block as usize];
    for batch in hashes.chunks(BATCH) {
        let mut memory = holder.reserve(&vec![block; batch.len()])?;
        for reservation in &mut memory {
            reservation.fill(&filler)?;
        }
        holder.publish(&namespace, batch.iter().copied().zip(memory).collect(), false)?;
    }
    holder.flush(Duration::from_secs(10))?;
    let reader = b.client()?;
    let begun = Instant::now();
    for batch in hashes.chunks(BATCH * 4) {
        take(&reader, &namespace, batch)?;
    }
    Ok(bytes as f64 / begun.elapsed().as_secs_f64() / 1e9)
}

fn take(reader: &Client, namespace: &Namespace, batch: &[BlockHash]) -> Outcome<()> {
    let got = reader.acquire(namespace, batch, Source::Anywhere)?;
    match got.iter().find(|block| !matches!(block, Acquired::Ready(_))) {
        Some(missed) => Err(format!("a block did not come: {missed:?}").into()),
        None => Ok(()),
    }
}

/// GB/s of iperf3 on loopback with two streams.
fn iperf3() -> Outcome<f64> {
    let missing = |error| format!("iperf3 does not run ({error}): apt-get install iperf3");
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let mut server = Command::new("iperf3")
        .args(["-s", "-1", "-p", &port])
        .stdout(Stdio::null())
        .spawn()
        .map_err(missing)?;
    let begun = Instant::now();
    loop {
        let client = Command::new("iperf3")
            .args(["-c", "127.0.0.1", "-p", &port, "-P", "2", "-t", IPERF_SECONDS, "-J"])
            .output()?;
        let report: serde_json::Value = serde_json::from_slice(&client.stdout)?;
        if let Some(bits) = report.pointer("/end/sum_received/bits_per_second") {
            server.wait()?;
            return Ok(bits.as_f64().unwrap_or_default() / 8e9);
        }
        if begun.elapsed() > Duration::from_secs(10) {
            server.kill()?;
            return Err(format!("iperf3 gave no figure: {report}").into());
        }
    }
}

/// Processor time of a process so far, seconds.
fn cpu_seconds(process: &Process) -> Outcome<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id()))?;
    let rest = stat.rsplit(')').next().unwrap_or_default();
    // utime and stime are the 14th and 15th fields, the 12th and 13th after the name; the kernel's
    // clock tick is 1/100 s on every Linux that runs this.
    let ticks: Vec<f64> =
        rest.split_whitespace().skip(11).take(2).filter_map(|it| it.parse().ok()).collect();
    Ok(ticks.iter().sum::<f64>() / 100.0)
}
