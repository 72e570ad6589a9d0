//! The holder is killed at each step of a read that it takes part in.
//!
//! Until the reader has the bytes, a dead holder means that its blocks fail, at once, and that the
//! reader's memory comes back; from then on it means nothing to the reader, which publishes with the
//! rank of the loan. Whatever happened, another owner serves the same blocks, and a holder that is
//! started again serves new ones.

use kvrail::protocol::door::Source;

use crate::support::{
    Blocks, Counts, IMPATIENT, OVER_SHM, assert_at_rest, assert_rank, cluster, node_id, read, save,
    until,
};

/// Kills the holder at `point`; `arrived`: whether the reader has all bytes by then.
fn holder_killed_at(point: &str, arrived: bool, over: &[&str]) {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let fault = format!("kill:{point}");
    let arguments = [&IMPATIENT[..], over].concat();
    let with_fault = [&arguments[..], &["--fault", &fault]].concat();
    let mut holder = cluster.node("holder", address, &with_fault).unwrap();
    let other = cluster.node("other", address, &arguments).unwrap();
    let reader = cluster.node("reader", address, &arguments).unwrap();
    let (at_holder, at_other, at_reader) =
        (holder.client().unwrap(), other.client().unwrap(), reader.client().unwrap());
    let blocks = Blocks::small("of two owners");
    save(&at_holder, &blocks);
    save(&at_other, &blocks);

    let counts = read(&at_reader, &blocks, Source::From(node_id(&at_holder)));
    until("the holder dies", || holder.wait(std::time::Duration::ZERO).is_some());
    let count = blocks.len();
    let expected = if arrived { Counts::all_ready(count) } else { Counts::all_failed(count) };
    assert_eq!(counts, expected, "{}", reader.said());
    assert_at_rest("the reader", &at_reader);

    assert_eq!(read(&at_reader, &blocks, Source::Anywhere), Counts::all_ready(count));
    assert_rank(&at_reader, &blocks, 1);
    assert_rank(&at_other, &blocks, if arrived { 1 } else { 2 });
    assert_at_rest("the reader", &at_reader);
    assert_at_rest("the other owner", &at_other);

    drop(at_holder);
    let holder = cluster.node("holder", address, &arguments).unwrap();
    let at_holder = holder.client().unwrap();
    let fresh = Blocks::small("saved after the restart");
    save(&at_holder, &fresh);
    assert_eq!(read(&at_reader, &fresh, Source::Anywhere), Counts::all_ready(count));
    assert_rank(&at_holder, &fresh, 2);
    assert_at_rest("the holder", &at_holder);
}

macro_rules! killed {
    ($over:expr; $($name:ident: $point:literal, arrived: $arrived:literal;)+) => {
        $(
            #[test]
            fn $name() {
                holder_killed_at($point, $arrived, &$over);
            }
        )+
    };
}

killed! { [];
    before_it_reads_the_lend: "recv-lend", arrived: false;
    before_it_grants: "send-lease", arrived: false;
    after_it_granted: "sent-lease", arrived: false;
    before_it_reads_the_completion: "recv-complete", arrived: true;
    before_it_answers_the_completion: "send-ranks", arrived: true;
    after_it_answered_the_completion: "sent-ranks", arrived: true;
}

// A holder that dies after its grant takes nothing away from a reader that has its memory mapped: the
// reader has the bytes or not, as the end of the connection is seen late or soon.
killed! { OVER_SHM;
    over_shm_before_it_reads_the_lend: "recv-lend", arrived: false;
    over_shm_before_it_grants: "send-lease", arrived: false;
    over_shm_before_it_reads_the_completion: "recv-complete", arrived: true;
    over_shm_after_it_answered_the_completion: "sent-ranks", arrived: true;
}
