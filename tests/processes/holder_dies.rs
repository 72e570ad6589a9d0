//! The holder is killed at each step of a read that it takes part in.
//!
//! Until the reader has the bytes, a dead holder means that its blocks fail, at once, and that the
//! reader's memory comes back; from then on it means nothing to the reader, which publishes with the
//! rank of the loan. A holder that has lent is needed no more where a device serves its memory: until
//! the kernel has buried the process, blocks may still arrive. Whatever happened, another owner serves
//! the same blocks, and a holder that is started again serves new ones.

use kvrail::protocol::door::Source;

use crate::support::{
    Blocks, Counts, OVER_SHM, assert_at_rest_over, assert_rank, cluster, node_id, read, save,
    transport, until, with_rank,
};

/// Which blocks the reader has when the holder dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arrived {
    /// None.
    Nothing,
    /// None over TCP; over RDMA those that the device serves until the process is buried, over shared
    /// memory those that the reader copies before it sees the end.
    WhatNeedsNoHolder,
    /// All.
    Everything,
}

/// Kills the holder at `point`, when the reader has what `arrived` says.
fn holder_killed_at(point: &str, arrived: Arrived, over: &[&str]) {
    let transport = if over.is_empty() { transport() } else { "shm" };
    let assert_at_rest = |name, client| assert_at_rest_over(transport, name, client);
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let fault = format!("kill:{point}");
    let with_fault = [over, &["--fault", &fault]].concat();
    let mut holder = cluster.node("holder", address, &with_fault).unwrap();
    let other = cluster.node("other", address, over).unwrap();
    let reader = cluster.node("reader", address, over).unwrap();
    let (at_holder, at_other, at_reader) =
        (holder.client().unwrap(), other.client().unwrap(), reader.client().unwrap());
    let blocks = Blocks::small("of two owners");
    save(&at_holder, &blocks);
    save(&at_other, &blocks);

    let counts = read(&at_reader, &blocks, Source::From(node_id(&at_holder)));
    until("the holder dies", || holder.wait(std::time::Duration::ZERO).is_some());
    let count = blocks.len();
    let failed = match arrived {
        Arrived::Everything => 0,
        Arrived::WhatNeedsNoHolder if transport != "tcp" => counts.failed,
        Arrived::Nothing | Arrived::WhatNeedsNoHolder => count,
    };
    let expected = Counts { ready: count - failed, failed, ..Counts::default() };
    assert_eq!(counts, expected, "{}", reader.said());
    assert_at_rest("the reader", &at_reader);

    assert_eq!(read(&at_reader, &blocks, Source::Anywhere), Counts::all_ready(count));
    assert_rank(&at_reader, &blocks, 1);
    assert_eq!(with_rank(&at_other, &blocks, 2), failed, "what failed was read from the other");
    assert_eq!(with_rank(&at_other, &blocks, 1), count - failed);
    assert_at_rest("the reader", &at_reader);
    assert_at_rest("the other owner", &at_other);

    drop(at_holder);
    let holder = cluster.node("holder", address, over).unwrap();
    let at_holder = holder.client().unwrap();
    let fresh = Blocks::small("saved after the restart");
    save(&at_holder, &fresh);
    assert_eq!(read(&at_reader, &fresh, Source::Anywhere), Counts::all_ready(count));
    assert_rank(&at_holder, &fresh, 2);
    assert_at_rest("the holder", &at_holder);
}

macro_rules! killed {
    ($over:expr; $($name:ident: $point:literal, arrived: $arrived:ident;)+) => {
        $(
            #[test]
            fn $name() {
                holder_killed_at($point, Arrived::$arrived, &$over);
            }
        )+
    };
}

killed! { [];
    before_it_reads_the_lend: "recv-lend", arrived: Nothing;
    before_it_grants: "send-lease", arrived: Nothing;
    after_it_granted: "sent-lease", arrived: WhatNeedsNoHolder;
    before_it_reads_the_completion: "recv-complete", arrived: Everything;
    before_it_answers_the_completion: "send-ranks", arrived: Everything;
    after_it_answered_the_completion: "sent-ranks", arrived: Everything;
}

killed! { OVER_SHM;
    over_shm_before_it_reads_the_lend: "recv-lend", arrived: Nothing;
    over_shm_before_it_grants: "send-lease", arrived: Nothing;
    over_shm_after_it_granted: "sent-lease", arrived: WhatNeedsNoHolder;
    over_shm_before_it_reads_the_completion: "recv-complete", arrived: Everything;
    over_shm_after_it_answered_the_completion: "sent-ranks", arrived: Everything;
}
