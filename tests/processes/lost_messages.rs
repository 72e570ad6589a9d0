//! Messages that are lost or arrive twice.
//!
//! TCP loses nothing, so these stand for a peer that is in trouble. A lost lend or lease costs the
//! read; a lost completion or answer costs eviction quality, never data; and none moves a rank twice.

use kvrail::protocol::door::Source;

use crate::support::{
    Blocks, Counts, IMPATIENT, assert_at_rest, assert_rank, cluster, metric, read, save, until,
};

/// Whose fabric has the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Holder,
    Reader,
}

/// What a read over a faulty fabric comes to: the holder's rank where the data arrived, else `None`.
#[derive(Debug, Clone, Copy)]
struct Expected {
    rank: Option<u8>,
    /// Completions that the holder answered from memory.
    replayed: f64,
    /// Completions that came too late: their lease had expired.
    late: f64,
}

const READ: Expected = Expected { rank: Some(2), replayed: 0.0, late: 0.0 };
const FAILED: Expected = Expected { rank: None, ..READ };

fn read_over(at: At, fault: &str, expected: Expected) {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let start = |name, has_fault| {
        let mut arguments = [&IMPATIENT[..], &["--metrics-listen", "127.0.0.1:0"]].concat();
        if has_fault {
            arguments.extend(["--fault", fault]);
        }
        cluster.node(name, address, &arguments).unwrap()
    };
    let holder = start("holder", at == At::Holder);
    let reader = start("reader", at == At::Reader);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let (blocks, after) = (Blocks::small("read first"), Blocks::small("read afterwards"));
    save(&at_holder, &blocks);
    save(&at_holder, &after);

    let count = blocks.len();
    let counts = read(&at_reader, &blocks, Source::Anywhere);
    match expected.rank {
        Some(_) => assert_eq!(counts, Counts::all_ready(count), "{}", reader.said()),
        None => assert_eq!(counts, Counts::all_failed(count), "{}", reader.said()),
    }
    // Leases end, and what is owed is paid, whether or not the two speak to each other again.
    assert_at_rest("the holder", &at_holder);
    assert_at_rest("the reader", &at_reader);
    assert_rank(&at_holder, &blocks, expected.rank.unwrap_or(1));

    // A holder that cut a lost lease has closed the connection; the reader may find that out now.
    until("the next read", || {
        read(&at_reader, &after, Source::Anywhere) == Counts::all_ready(count)
    });
    assert_rank(&at_holder, &after, 2);
    assert_eq!(read(&at_reader, &blocks, Source::Anywhere), Counts::all_ready(count));
    assert_rank(&at_reader, &blocks, 1);
    assert_rank(&at_holder, &blocks, expected.rank.unwrap_or(2));
    assert_at_rest("the holder", &at_holder);
    assert_at_rest("the reader", &at_reader);
    let completions = |what: &str| metric(&holder, &format!("kvrail_completions_{what}_total"));
    assert_eq!(completions("replayed").to_bits(), expected.replayed.to_bits());
    assert_eq!(completions("refused").to_bits(), expected.late.to_bits());
}

#[test]
fn a_lost_lend_costs_the_read() {
    read_over(At::Reader, "lose:send-lend", FAILED);
}

#[test]
fn a_lost_lease_costs_the_read() {
    read_over(At::Holder, "lose:send-lease", FAILED);
    read_over(At::Reader, "lose:recv-lease", FAILED);
}

/// The lease expires while nobody completes it, and expiry moves no rank; the completion that comes
/// with the next connection is too late.
#[test]
fn a_lost_completion_costs_the_rank_step() {
    read_over(At::Reader, "lose:send-complete", Expected { rank: Some(1), late: 1.0, ..READ });
}

#[test]
fn a_lost_answer_leaves_the_rank_moved_once() {
    read_over(At::Holder, "lose:send-ranks", READ);
    read_over(At::Reader, "lose:recv-ranks", READ);
}

#[test]
fn what_arrives_twice_counts_once() {
    read_over(At::Reader, "repeat:send-lend", READ);
    read_over(At::Holder, "repeat:send-lease", READ);
    read_over(At::Reader, "repeat:send-complete", Expected { replayed: 1.0, ..READ });
    read_over(At::Holder, "repeat:send-ranks", READ);
}
