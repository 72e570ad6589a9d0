//! A holder that is killed or stops answering in the middle of a read of real size.
//!
//! The reader's call ends by its own deadlines, whether or not the holder ever answers again: with
//! the blocks where another owner has them, else with a clear failure for each block that is missing.

use std::thread;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::Client;
use kvrail::protocol::door::Source;
use rustix::process::Signal;

use crate::support::{
    Blocks, Counts, IMPATIENT, assert_at_rest, assert_rank, cluster, is_lending, node_id, read,
    save, try_read, until,
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
    fn start(fault_of_holder: Option<&str>) -> Self {
        let cluster = cluster();
        let registry = cluster.registry("registry", &[]).unwrap();
        let address = registry.addresses().unwrap().listen;
        let arguments = [&IMPATIENT[..], &["--pool", "160MiB", "--lease-bytes", "160MiB"]].concat();
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
    let mut trio = Trio::start(None);
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
    let trio = Trio::start(None);
    let (at_holder, at_reader) = (trio.holder.client().unwrap(), trio.reader.client().unwrap());
    let blocks = Blocks::new("large", COUNT, SIZE);
    save(&at_holder, &blocks);
    let stop = || trio.holder.signal(Signal::STOP);
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
    let trio = Trio::start(Some("stop:sent-lease"));
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

    trio.holder.signal(Signal::CONT);
    let both = Blocks::small("both have these");
    save(&at_holder, &both);
    save(&at_other, &both);
    trio.holder.signal(Signal::STOP);
    assert_eq!(read(&at_reader, &both, Source::Anywhere), Counts::all_ready(both.len()));
    assert_rank(&at_other, &both, 2);
    trio.holder.signal(Signal::CONT);
    assert_at_rest("the holder", &at_holder);
    assert_rank(&at_holder, &both, 1);
    assert_at_rest("the other owner", &at_other);
    assert_at_rest("the reader", &at_reader);
}

/// Two owners, one of which dies in some read: no read lacks a block.
#[test]
fn no_read_fails_while_another_owner_lives() {
    let mut trio = Trio::start(Some("kill:sent-lease:2"));
    let (at_holder, at_other, at_reader) = (
        trio.holder.client().unwrap(),
        trio.other.client().unwrap(),
        trio.reader.client().unwrap(),
    );
    let sets: Vec<_> = (0..12).map(|at| Blocks::small(&format!("set {at}"))).collect();
    for blocks in &sets {
        save(&at_holder, blocks);
        save(&at_other, blocks);
    }
    for blocks in &sets {
        let counts = read(&at_reader, blocks, Source::Anywhere);
        assert_eq!(counts, Counts::all_ready(blocks.len()), "{}", trio.reader.said());
    }
    assert!(trio.holder.wait(std::time::Duration::ZERO).is_some(), "nobody asked the first owner");
    assert_at_rest("the other owner", &at_other);
    assert_at_rest("the reader", &at_reader);
}
