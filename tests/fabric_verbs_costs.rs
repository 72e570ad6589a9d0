//! What RDMA costs: no allocation per block. Alone in its process, whose allocator it replaces.

#[allow(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "only the devices of tests are used here"
)]
mod conformance;
mod leased;
#[allow(dead_code, reason = "these fabrics are no harness's")]
mod rdma;

use kvrail::sys::allocations::Counting;
use kvrail::types::NodeId;
use kvrail::verbs::VerbsFabric;

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_leased_block_costs_no_allocation() {
    let Some(device) = rdma::device() else { return };
    let fabric = || VerbsFabric::new(&rdma::config(device, 2)).unwrap();
    let (holder, requester) = (fabric(), fabric());
    let endpoint = holder.local_addr().unwrap();
    let nodes = (NodeId([1; 16]), NodeId([2; 16]));
    leased::a_leased_block_costs_no_allocation((holder, requester), (nodes, endpoint));
}
