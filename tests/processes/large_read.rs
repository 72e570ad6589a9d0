//! One GiB from one process to another, every byte compared.

use std::time::Instant;

use kvrail::protocol::door::Source;
use kvrail::runtime::deadline::Deadline;

use crate::support::{
    Blocks, PATIENCE, assert_at_rest, assert_rank, cluster, metric, node_id, read, save,
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
        // All at once, which is more than the holder lends to one reader at a time.
        let deadline = Deadline::after(PATIENCE);
        loop {
            let started = Instant::now();
            let counts = read(&at_reader, &blocks, from);
            seconds += started.elapsed().as_secs_f64();
            if counts.ready == blocks.len() {
                break;
            }
            // Only memory that is still being reclaimed may be lacking.
            assert!(round > 0 && counts.failed == 0, "{counts:?}\n{}", reader.said());
            assert!(deadline.remaining().is_some(), "{counts:?}\n{}", reader.said());
        }
        assert_rank(&at_holder, &blocks, 2);
        assert_rank(&at_reader, &blocks, 1);
    }
    let bytes = metric(&reader, "kvrail_transferred_bytes_total");
    assert!(bytes >= 1_073_741_824.0, "only {bytes} bytes were transferred");
    assert!(metric(&holder, "kvrail_evicted_bytes_total") > 0.0);
    assert!(metric(&reader, "kvrail_evicted_bytes_total") > 0.0);
    println!(
        "{bytes} bytes over TCP, compared, in {seconds:.2} s: {:.2} GB/s",
        bytes / seconds / 1e9
    );
    assert_at_rest("the holder", &at_holder);
    assert_at_rest("the reader", &at_reader);
}
