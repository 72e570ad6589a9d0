//! A holder that is killed or stops answering in the middle of a read of real size.
//!
//! The reader's call ends by its own deadlines, whether or not the holder ever answers again: with
//! the blocks where another owner has them, else with a clear failure for each block that is missing.

use std::thread;
use std::time::Duration;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::Client;
use kvrail::protocol::door::Source;
use rustix::process::Signal;

use crate::support::{
    Blocks, Counts, IMPATIENT, assert_at_rest, assert_rank, cluster, is_lending, metric, node_id,
    ranks, read, save, stop, try_read, until, until_stopped,
};

const SIZE: usize = 1 << 20;
const COUNT: u32 = 96;

struct Trio {
    holder: Process,
    other: Process,
    reader: Process,
    _registry: Process,
    _cluster: Cluster,
}

impl Trio {
    fn start(waits: &[&str], fault_of_holder: Option<&str>) -> Self {
        let cluster = cluster();
        let registry = cluster.registry("registry", &[]).unwrap();
        let address = registry.addresses().unwrap().listen;
        let arguments = [waits, &["--pool", "160MiB", "--lease-bytes", "160MiB"]].concat();
        let mut with_fault = arguments.clone();
        if let Some(fault) = fault_of_holder {
            with_fault.extend(["--fault", fault]);
        }
        let holder = cluster.node("holder", address, &with_fault).unwrap();
        let other = cluster.node("other", address, &arguments).unwrap();
        let reader = cluster.node("reader", address, &arguments).unwrap();
        Self { holder, other, reader, _registry: registry, _cluster: cluster }
    }
}

/// Reads from `holder`, and meanwhile, as soon as it has lent something, does `meanwhile`.
fn read_while(
    at_reader: &Client,
    at_holder: &Client,
    blocks: &Blocks,
    meanwhile: impl FnOnce(),
) -> Counts {
    let from = Source::From(node_id(at_holder));
    thread::scope(|scope| {
        let reading = scope.spawn(|| try_read(at_reader, blocks, from));
        until("the holder lends", || is_lending(at_holder) || reading.is_finished());
        meanwhile();
        reading.join().unwrap().unwrap()
    })
}

fn assert_ended(counts: Counts, blocks: &Blocks) {
    assert_eq!(counts.ready + counts.failed, blocks.len(), "{counts:?}");
}

#[test]
fn a_holder_killed_in_mid_read_is_replaced_by_another_owner() {
    // What is killed is known to be gone at once.
    let mut trio = Trio::start(&[], None);
    let (at_holder, at_other, at_reader) = (
        trio.holder.client().unwrap(),
        trio.other.client().unwrap(),
        trio.reader.client().unwrap(),
    );
    let blocks = Blocks::new("large", COUNT, SIZE);
    save(&at_holder, &blocks);
    let counts = read_while(&at_reader, &at_holder, &blocks, || trio.holder.kill());
    assert_ended(counts, &blocks);
    assert_at_rest("the reader", &at_reader);
    save(&at_other, &blocks);
    assert_eq!(read(&at_reader, &blocks, Source::Anywhere), Counts::all_ready(blocks.len()));
    assert_at_rest("the other owner", &at_other);
}

#[test]
fn a_holder_stopped_in_mid_read_is_harmless_when_it_goes_on() {
    let trio = Trio::start(&IMPATIENT, None);
    let (at_holder, at_reader) = (trio.holder.client().unwrap(), trio.reader.client().unwrap());
    let blocks = Blocks::new("large", COUNT, SIZE);
    save(&at_holder, &blocks);
    let stop = || stop(&trio.holder);
    assert_ended(read_while(&at_reader, &at_holder, &blocks, stop), &blocks);
    assert_at_rest("the reader", &at_reader);
    trio.holder.signal(Signal::CONT);
    assert_at_rest("the holder", &at_holder);
    until("the holder serves again", || {
        read(&at_reader, &blocks, Source::Anywhere) == Counts::all_ready(blocks.len())
    });
    assert_at_rest("the holder", &at_holder);
    assert_at_rest("the reader", &at_reader);
}

/// The first owner grants and falls silent before it serves a byte, so that the outcome is certain:
/// within one call the reader gives it up and gets every block from the other one.
#[test]
fn within_one_call_a_silent_owner_is_replaced() {
    let trio = Trio::start(&IMPATIENT, Some("stop:sent-lease"));
    let (at_holder, at_other, at_reader) = (
        trio.holder.client().unwrap(),
        trio.other.client().unwrap(),
        trio.reader.client().unwrap(),
    );
    let silent = Blocks::small("only the silent one has these");
    save(&at_holder, &silent);
    let from = Source::From(node_id(&at_holder));
    assert_eq!(read(&at_reader, &silent, from), Counts::all_failed(silent.len()));
    assert_at_rest("the reader", &at_reader);

    until_stopped(&trio.holder);
    trio.holder.signal(Signal::CONT);
    let both = Blocks::small("both have these");
    save(&at_holder, &both);
    save(&at_other, &both);
    stop(&trio.holder);
    assert_eq!(read(&at_reader, &both, Source::Anywhere), Counts::all_ready(both.len()));
    assert_rank(&at_other, &both, 2);
    trio.holder.signal(Signal::CONT);
    assert_at_rest("the holder", &at_holder);
    assert_rank(&at_holder, &both, 1);
    assert_at_rest("the other owner", &at_other);
    assert_at_rest("the reader", &at_reader);
}

/// Its silence is enough, whatever the deadlines of answers and transfers are: nobody has to wait for a
/// second one. Nothing is lost by that where it goes on.
#[test]
fn one_read_that_is_not_answered_is_enough_to_leave_its_holder_alone() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let holder = cluster.node("holder", address, &["--transport", "tcp", "--no-shm"]).unwrap();
    let reader = cluster.node("reader", address, &["--transport", "tcp", "--no-shm"]).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let (first, second) = (Blocks::small("before it hangs"), Blocks::small("while it hangs"));
    save(&at_holder, &first);
    save(&at_holder, &second);
    let from = Source::From(node_id(&at_holder));
    assert_eq!(read(&at_reader, &first, from), Counts::all_ready(first.len()));
    stop(&holder);
    assert_eq!(read(&at_reader, &second, from), Counts::all_failed(second.len()));
    let health = at_reader.stat().unwrap().health;
    let silent = |of: &kvrail::protocol::door::stat::HealthStat| {
        of.state != "closed" && of.reason == "no answer in time"
    };
    assert!(health.iter().any(silent), "{health:?}");
    assert_at_rest("the reader", &at_reader);
    holder.signal(Signal::CONT);
    until("the holder is used again", || read(&at_reader, &second, from).ready == second.len());
    assert_at_rest("the holder", &at_holder);
    assert_at_rest("the reader", &at_reader);
}

/// Two owners, one of which dies in some read: no read lacks a block.
fn no_read_fails_where_an_owner_dies_at(point: &str) {
    let mut trio = Trio::start(&[], Some(&format!("kill:{point}:2")));
    let (at_holder, at_other, at_reader) = (
        trio.holder.client().unwrap(),
        trio.other.client().unwrap(),
        trio.reader.client().unwrap(),
    );
    let sets: Vec<_> = (0..16).map(|at| Blocks::small(&format!("set {at}"))).collect();
    for blocks in &sets {
        save(&at_holder, blocks);
        save(&at_other, blocks);
    }
    for blocks in &sets {
        let counts = read(&at_reader, blocks, Source::Anywhere);
        assert_eq!(counts, Counts::all_ready(blocks.len()), "{}", trio.reader.said());
    }
    until("the first owner dies", || trio.holder.wait(Duration::ZERO).is_some());
    assert_at_rest("the other owner", &at_other);
    assert_at_rest("the reader", &at_reader);
}

#[test]
fn no_read_fails_while_another_owner_lives() {
    for point in ["recv-lend", "send-lease", "sent-lease", "recv-complete", "send-ranks"] {
        no_read_fails_where_an_owner_dies_at(point);
    }
}

#[test]
fn a_reader_killed_in_mid_read_leaves_nothing_pinned() {
    let mut trio = Trio::start(&IMPATIENT, None);
    let (at_holder, at_reader) = (trio.holder.client().unwrap(), trio.reader.client().unwrap());
    let blocks = Blocks::new("large", COUNT, SIZE);
    save(&at_holder, &blocks);
    thread::scope(|scope| {
        let reading = scope.spawn(|| try_read(&at_reader, &blocks, Source::Anywhere));
        until("the holder lends", || is_lending(&at_holder) || reading.is_finished());
        trio.reader.kill();
        // It may have been done already; what counts is what is left at the holder.
        let _ended = reading.join().unwrap();
    });
    assert_at_rest("the holder", &at_holder);
    let (count, ranks) = ranks(&at_holder, &blocks);
    assert_eq!(count, blocks.len());
    assert!(ranks.iter().all(|rank| [1, 2].contains(rank)), "{ranks:?}");
}

/// A reader that hangs loses its lease, not the holder its memory; when it goes on, its call ends
/// and it reads again, as the same reader.
#[test]
fn a_reader_that_hangs_loses_its_lease() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let scraped = [&IMPATIENT[..], &["--metrics-listen", "127.0.0.1:0"]].concat();
    let holder = cluster.node("holder", address, &scraped).unwrap();
    let with_fault = [&IMPATIENT[..], &["--fault", "stop:completion:3"]].concat();
    let reader = cluster.node("reader", address, &with_fault).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let blocks = Blocks::small("read by one that hangs");
    save(&at_holder, &blocks.apart());
    thread::scope(|scope| {
        let reading = scope.spawn(|| read(&at_reader, &blocks, Source::Anywhere));
        let expired = "kvrail_leases_ended_total{end=\"expired\"}";
        until("the lease expires", || metric(&holder, expired) > 0.0);
        assert_at_rest("the holder", &at_holder);
        assert_rank(&at_holder, &blocks, 1);
        until_stopped(&reader);
        reader.signal(Signal::CONT);
        assert_ended(reading.join().unwrap(), &blocks);
    });
    assert_at_rest("the reader", &at_reader);
    until("it reads again", || read(&at_reader, &blocks, Source::Anywhere).ready == blocks.len());
    assert_at_rest("the holder", &at_holder);
    assert_at_rest("the reader", &at_reader);
    let (_, ranks) = ranks(&at_holder, &blocks);
    assert!(ranks.iter().all(|rank| [1, 2].contains(rank)), "{ranks:?}");
}
