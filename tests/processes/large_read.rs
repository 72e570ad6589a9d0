//! One GiB from one process to another, every byte compared.

use std::time::Instant;

use kvrail::protocol::door::Source;
use kvrail::runtime::deadline::Deadline;

use crate::support::{
    Blocks, PATIENCE, assert_at_rest, assert_rank, cluster, metric, node_id, save, try_read,
};

const BLOCK: usize = 2 << 20;

/// Blocks of one round: half a GiB.
const ROUND: u32 = 256;

/// Two rounds of half a GiB, so that the second one lands in memory that evictions of the first one
/// gave back, at both ends.
#[test]
#[expect(clippy::disallowed_methods, reason = "the throughput is printed, not asserted")]
fn a_gibibyte_arrives_whole() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let arguments = ["--pool", "640MiB", "--metrics-listen", "127.0.0.1:0"];
    let holder = cluster.node("holder", address, &arguments).unwrap();
    let reader = cluster.node("reader", address, &arguments).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let from = Source::From(node_id(&at_holder));
    let mut seconds = 0.0;
    for round in 0..2 {
        let blocks = Blocks::new(&format!("round {round}"), ROUND, BLOCK);
        save(&at_holder, &blocks);
        // The holder lends half of its pool to one reader at a time, and says busy beyond that.
        for part in blocks.split(64) {
            let deadline = Deadline::after(PATIENCE);
            loop {
                let started = Instant::now();
                at_reader.acquire(&crate::support::namespace(), &part.hashes, from).unwrap();
                seconds += started.elapsed().as_secs_f64();
                let counts = try_read(&at_reader, &part, Source::Here).unwrap();
                if counts.ready == part.len() {
                    break;
                }
                assert!(deadline.remaining().is_some(), "{counts:?}\n{}", reader.said());
            }
            assert_rank(&at_holder, &part, 2);
            assert_rank(&at_reader, &part, 1);
        }
    }
    let bytes = metric(&reader, "kvrail_transferred_bytes_total");
    assert!(bytes >= 1_073_741_824.0, "only {bytes} bytes were transferred");
    assert!(metric(&holder, "kvrail_evicted_bytes_total") > 0.0);
    assert!(metric(&reader, "kvrail_evicted_bytes_total") > 0.0);
    println!("1 GiB over TCP in {seconds:.2} s: {:.2} GB/s", bytes / seconds / 1e9);
    assert_at_rest("the holder", &at_holder);
    assert_at_rest("the reader", &at_reader);
}
