//! The requester is killed at each step of a read that it takes part in.
//!
//! What it held under a lease is pinned at the holder until the lease expires, and no longer. The
//! holder's rank moves if the completion was sent, and once: a requester that comes back under its
//! name and reads again is the same reader.

use kvrail::protocol::door::Source;

use crate::support::{
    Blocks, Counts, IMPATIENT, OVER_SHM, assert_at_rest_over, assert_rank, cluster, metric, read,
    save, transport, try_read, until,
};

/// What the holder has seen of a requester that was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// No lend.
    Nothing,
    /// A lend, and no completion.
    Lend,
    /// The completion.
    Completion,
}

fn requester_killed_at(point: &str, seen: Seen, over: &[&str]) {
    let transport = if over.is_empty() { transport() } else { "shm" };
    let assert_at_rest = |name, client| assert_at_rest_over(transport, name, client);
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let arguments = [&IMPATIENT[..], over].concat();
    let metrics = [&arguments[..], &["--metrics-listen", "127.0.0.1:0"]].concat();
    let holder = cluster.node("holder", address, &metrics).unwrap();
    let fault = format!("kill:{point}");
    let with_fault = [&arguments[..], &["--fault", &fault]].concat();
    let mut reader = cluster.node("reader", address, &with_fault).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let blocks = Blocks::small("read by one that dies");
    save(&at_holder, &blocks.apart());

    let error = try_read(&at_reader, &blocks, Source::Anywhere).unwrap_err();
    assert!(error.to_string().contains("the node closed the connection"), "{error}");
    until("the reader dies", || reader.wait(std::time::Duration::ZERO).is_some());

    let series = |end: &str| format!("kvrail_leases_ended_total{{end=\"{end}\"}}");
    let ended = |end: &str| metric(&holder, &series(end));
    let granted = || metric(&holder, "kvrail_leases_granted_total");
    let mut seen = seen;
    let stat = || at_holder.stat().unwrap();
    if point.starts_with("sent-") && stat().node.transport == "verbs" {
        // Sent is handed to the device here: what it had not put on the wire dies with the process.
        let arrived = || match seen {
            Seen::Nothing => true,
            Seen::Lend => granted() > 0.0,
            Seen::Completion => ended("completed") > 0.0,
        };
        until("it arrives or its sender is gone", || arrived() || stat().peers.is_empty());
        if !arrived() {
            seen = if seen == Seen::Completion { Seen::Lend } else { Seen::Nothing };
        }
    }
    match seen {
        Seen::Nothing => assert!(granted() < 1.0),
        Seen::Lend => until("the lease expires", || ended("expired") > 0.0),
        Seen::Completion => until("the lease is completed", || ended("completed") > 0.0),
    }
    assert_at_rest("the holder", &at_holder);
    assert_rank(&at_holder, &blocks, if seen == Seen::Completion { 2 } else { 1 });

    drop(at_reader);
    let reader = cluster.node("reader", address, &arguments).unwrap();
    let at_reader = reader.client().unwrap();
    let counts = read(&at_reader, &blocks, Source::Anywhere);
    assert_eq!(counts, Counts::all_ready(blocks.len()), "{}", reader.said());
    assert_rank(&at_holder, &blocks, 2);
    assert_rank(&at_reader, &blocks, 1);
    assert_at_rest("the holder", &at_holder);
    assert_at_rest("the reader", &at_reader);
}

macro_rules! killed {
    ($over:expr; $($name:ident: $point:literal, $seen:ident;)+) => {
        $(
            #[test]
            fn $name() {
                requester_killed_at($point, Seen::$seen, &$over);
            }
        )+
    };
}

killed! { [];
    before_it_asks: "send-lend", Nothing;
    after_it_asked: "sent-lend", Lend;
    before_it_reads_the_lease: "recv-lease", Lend;
    before_it_posts: "post", Lend;
    after_it_posted: "posted", Lend;
    at_the_first_completed_read: "completion", Lend;
    in_the_middle_of_its_reads: "completion:7", Lend;
    before_it_completes: "send-complete", Lend;
    after_it_completed: "sent-complete", Completion;
    before_it_reads_the_ranks: "recv-ranks", Completion;
}

killed! { OVER_SHM;
    over_shm_before_it_reads_the_lease: "recv-lease", Lend;
    over_shm_after_it_posted: "posted", Lend;
    over_shm_in_the_middle_of_its_reads: "completion:7", Lend;
    over_shm_before_it_completes: "send-complete", Lend;
    over_shm_after_it_completed: "sent-complete", Completion;
}
