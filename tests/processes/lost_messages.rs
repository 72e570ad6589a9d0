//! Messages that are lost or arrive twice.
//!
//! TCP loses nothing, so these stand for a peer that is in trouble. A lost lend or lease costs time: it
//! is asked again within the same read. A lost completion or answer is said again while the lease
//! lives; after that it costs eviction quality, never data. None moves a rank twice.

use kvrail::protocol::door::Source;

use crate::support::{Blocks, Counts, assert_at_rest, assert_rank, cluster, metric, read, save};

/// Whose fabric has the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Holder,
    Reader,
}

/// What a read over a faulty fabric comes to, beside the data, which always arrives.
#[derive(Debug, Clone, Copy)]
struct Expected {
    /// The holder's rank.
    rank: u8,
    /// Completions that the holder answered from memory, at least.
    replayed: f64,
    /// Completions that came too late, at least: their lease had expired.
    late: f64,
}

const READ: Expected = Expected { rank: 2, replayed: 0.0, late: 0.0 };

/// How long leases live, and how long an answer is waited for.
#[derive(Debug, Clone, Copy)]
struct Times {
    lease: &'static str,
    answer: &'static str,
}

/// Longer than an answer is waited for, so that a lease that nobody knows of does not expire, and its
/// requester is not cut, while the read is tried again.
const LONG: Times = Times { lease: "6s", answer: "1s" };

/// So short that a completion is too late once its answer has been waited for.
const SHORT: Times = Times { lease: "2s", answer: "4s" };

fn read_over(at: At, fault: &str, times: Times, expected: Expected) {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let start = |name, has_fault| {
        let mut arguments = vec!["--metrics-listen", "127.0.0.1:0", "--lease-ttl", times.lease];
        arguments.extend(["--lease-margin", "200ms", "--transfer-timeout", times.answer]);
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
    assert_eq!(counts, Counts::all_ready(count), "{}", reader.said());
    // Leases end, and what is owed is paid, whether or not the two speak to each other again.
    assert_at_rest("the holder", &at_holder);
    assert_at_rest("the reader", &at_reader);
    assert_rank(&at_holder, &blocks, expected.rank);

    // A holder that cut a lost lease has closed the connection; that the reader may find this out
    // only now does not cost it the read.
    assert_eq!(read(&at_reader, &after, Source::Anywhere), Counts::all_ready(count));
    assert_rank(&at_holder, &after, 2);
    assert_eq!(read(&at_reader, &blocks, Source::Anywhere), Counts::all_ready(count));
    assert_rank(&at_reader, &blocks, 1);
    assert_rank(&at_holder, &blocks, expected.rank);
    assert_at_rest("the holder", &at_holder);
    assert_at_rest("the reader", &at_reader);
    let completions = |what: &str| metric(&holder, &format!("kvrail_completions_{what}_total"));
    assert!(completions("replayed") >= expected.replayed);
    assert!(completions("refused") >= expected.late);
}

#[test]
fn a_lost_lend_costs_time() {
    read_over(At::Reader, "lose:send-lend", LONG, READ);
}

#[test]
fn a_lost_lease_costs_time() {
    read_over(At::Holder, "lose:send-lease", LONG, READ);
    read_over(At::Reader, "lose:recv-lease", LONG, READ);
}

/// Its answer is waited for; then it is said again, and the rank moves once.
#[test]
fn a_lost_completion_is_said_again() {
    read_over(At::Reader, "lose:send-complete", LONG, READ);
}

/// The lease expires before the completion is said again, and expiry moves no rank.
#[test]
fn a_lost_completion_of_a_short_lease_costs_the_rank_step() {
    read_over(At::Reader, "lose:send-complete", SHORT, Expected { rank: 1, late: 1.0, ..READ });
}

#[test]
fn a_lost_answer_leaves_the_rank_moved_once() {
    read_over(At::Holder, "lose:send-ranks", LONG, READ);
    read_over(At::Reader, "lose:recv-ranks", LONG, READ);
}

#[test]
fn what_arrives_twice_counts_once() {
    read_over(At::Reader, "repeat:send-lend", LONG, READ);
    read_over(At::Holder, "repeat:send-lease", LONG, READ);
    let replayed = Expected { replayed: 1.0, ..READ };
    read_over(At::Reader, "repeat:send-complete", LONG, replayed);
    read_over(At::Holder, "repeat:send-ranks", LONG, READ);
}
