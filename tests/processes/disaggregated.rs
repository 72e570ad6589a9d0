//! Prefill and decode on different nodes, with an engine's own transfer between them: the ranks that the
//! hooks give, step by step.

use kvrail::client::Client;
use kvrail::protocol::door::{PublishOutcome, Source};
use kvrail::types::ResidentCause;

use crate::support::{
    Blocks, Counts, PATIENCE, assert_at_rest, assert_rank, cluster, namespace, read, save, until,
};

/// Saves what an engine pulled from another engine, and waits until the registry knows it.
fn save_pulled(client: &Client, blocks: &Blocks) -> Vec<PublishOutcome> {
    let mut outcomes = Vec::new();
    for (hash, bytes) in blocks.hashes.iter().zip(&blocks.bytes) {
        let size = u32::try_from(bytes.len()).unwrap();
        let mut memory = client.reserve(&[size]).unwrap().pop().unwrap();
        memory.fill(bytes).unwrap();
        outcomes.extend(client.publish(&namespace(), vec![(*hash, memory)], true).unwrap());
    }
    assert!(client.flush(PATIENCE).unwrap());
    outcomes
}

#[test]
fn prefill_and_decode_rank_their_copies_by_the_hooks() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let nodes =
        ["prefill", "decode", "third"].map(|name| cluster.node(name, address, &[]).unwrap());
    let [prefill, decode, third] = nodes.each_ref().map(|node| node.client().unwrap());
    let blocks = Blocks::small("a prompt");
    let count = u32::try_from(blocks.len()).unwrap();

    // P computes and saves: the only copy.
    save(&prefill, &blocks);
    assert_rank(&prefill, &blocks, 1);
    // P's engine has sent it to D's: P's copy is the one to spare. Saying so again moves nothing.
    assert_eq!(prefill.finished_sending(&namespace(), &blocks.hashes).unwrap(), count);
    assert_rank(&prefill, &blocks, 2);
    assert_eq!(prefill.finished_sending(&namespace(), &blocks.hashes).unwrap(), 0);
    assert_rank(&prefill, &blocks, 2);
    // D saves what its engine pulled, as the second owner: it keeps its copy longest.
    let stored = vec![PublishOutcome::Stored; blocks.len()];
    assert_eq!(save_pulled(&decode, &blocks), stored);
    assert_rank(&decode, &blocks, 1);
    assert_rank(&prefill, &blocks, 2);
    // A third owner's copy goes before D's. The hint comes with the registry's answer.
    assert_eq!(save_pulled(&third, &blocks), stored);
    until("the hint has arrived", || {
        crate::support::ranks(&third, &blocks) == (blocks.len(), vec![2])
    });
    assert_rank(&decode, &blocks, 1);

    // Recovery: P's engine pulls the blocks once more, finds them here, and they are worth keeping.
    let found = PublishOutcome::AlreadyResident(ResidentCause::PeerFetch);
    assert_eq!(save_pulled(&prefill, &blocks), vec![found; blocks.len()]);
    assert_rank(&prefill, &blocks, 1);
    // The hook counts once for each resident, whatever happened since.
    assert_eq!(prefill.finished_sending(&namespace(), &blocks.hashes).unwrap(), 0);
    assert_rank(&prefill, &blocks, 1);
    for (name, client) in [("prefill", &prefill), ("decode", &decode), ("third", &third)] {
        assert_eq!(read(client, &blocks, Source::Here), Counts::all_ready(blocks.len()));
        assert_at_rest(name, client);
    }
}
