//! The promises, one by one.

use std::collections::BTreeSet;
use std::time::Duration;

use kvrail::limits;
use kvrail::registry::{
    Batch, Fingerprint, Heartbeat, Load, Missing, Partition, PartitionDigest, PlanQuery, Presence,
    RegistryError,
};
use kvrail::types::{BlockKey, NodeEpoch};

use crate::forms::{Form, Node, runs};

pub(crate) async fn all(form: &Form) {
    counts_are_positional_and_withdraws_name_what_has_one_owner_left(form).await;
    batches_under_way_come_in_any_order_and_a_settled_one_changes_nothing(form).await;
    earlier_starts_and_registrations_change_nothing(form).await;
    a_node_that_leaves_or_begins_afresh_owns_nothing(form).await;
    a_prefix_spread_over_nodes_is_read_whole(form).await;
    plans_leave_out_whom_they_are_told_and_spare_the_busy(form).await;
    digests_say_what_differs_and_a_forgotten_partition_is_announced_again(form).await;
    whoever_becomes_the_only_owner_hears_so_once(form).await;
    a_report_removes_one_owner_of_one_start(form).await;
    a_full_batch_works_and_a_larger_one_is_refused(form).await;
}

async fn counts_are_positional_and_withdraws_name_what_has_one_owner_left(form: &Form) {
    let space = form.keyspace();
    let (mut a, mut b) = (form.node().await, form.node().await);
    assert_eq!(a.announce(&space.keys([1, 3])).await.unwrap(), [1, 1]);
    let asked = space.keys([1, 2, 3, 1]);
    assert_eq!(b.announce(&asked).await.unwrap(), [2, 1, 2, 2]);
    assert_eq!(b.announce(&asked).await.unwrap(), [2, 1, 2, 2], "idempotent");
    assert_eq!(a.withdraw(&asked).await.unwrap(), [0, 1, 2, 3]);
    assert_eq!(b.withdraw(&asked).await.unwrap(), [0_u32; 0]);
    assert_eq!(b.plan(&asked, 0).await.missing, 4);
}

async fn batches_under_way_come_in_any_order_and_a_settled_one_changes_nothing(form: &Form) {
    let space = form.keyspace();
    let mut a = form.node().await;
    let (one, two) = (space.keys([1]), space.keys([2]));
    let mut first = Batch { stamp: a.stamp(), keys: &one };
    let mut second = Batch { stamp: a.stamp(), keys: &two };
    (first.stamp.settled, second.stamp.settled) = (0, 0);
    let registry = &form.registry;
    assert_eq!(registry.announce(second).await.unwrap().owners, [1]);
    assert_eq!(registry.announce(first).await.unwrap().owners, [1], "an earlier one is not late");
    assert_eq!(registry.announce(first).await.unwrap().owners, [1], "a repeat");
    a.withdraw(&one).await.unwrap();
    assert_eq!(registry.announce(first).await, Err(RegistryError::Late));
    let asker = form.stranger();
    assert_eq!(asker.plan(&one, 0).await.missing, 1);
    assert_eq!(asker.plan(&two, 0).await.missing, 0);
}

async fn earlier_starts_and_registrations_change_nothing(form: &Form) {
    let space = form.keyspace();
    let keys = space.keys([1, 2]);
    let mut old = form.node().await;
    old.announce(&keys).await.unwrap();
    let late = Batch { stamp: old.stamp(), keys: &keys };
    let mut new = form.stranger();
    new.identity = old.identity.clone();
    new.identity.epoch = NodeEpoch(2);
    new.join(Presence::Here).await;
    assert_ne!(new.number, old.number);
    assert_eq!(form.registry.announce(late).await, Err(RegistryError::Superseded));
    assert_eq!(form.registry.withdraw(late).await, Err(RegistryError::Superseded));
    let beat = form.registry.heartbeat(&old.identity, Heartbeat::default()).await;
    assert_eq!(beat, Err(RegistryError::Superseded));
    let asker = form.stranger();
    assert_eq!(asker.plan(&keys, 0).await.missing, 2, "what the earlier start held is void");
    let late = Batch { stamp: new.stamp(), keys: &keys };
    let number = new.number;
    new.join(Presence::Afresh).await;
    assert_ne!(new.number, number);
    assert_eq!(form.registry.announce(late).await, Err(RegistryError::UnknownNode));
    assert_eq!(asker.plan(&keys, 0).await.missing, 2);
    assert_eq!(new.announce(&keys).await.unwrap(), [1, 1]);
    let mut stranger = form.stranger();
    stranger.number = 4096;
    assert_eq!(stranger.announce(&keys).await, Err(RegistryError::UnknownNode));
}

async fn a_node_that_leaves_or_begins_afresh_owns_nothing(form: &Form) {
    let space = form.keyspace();
    let keys = space.keys(0..10);
    let (mut a, mut b) = (form.node().await, form.node().await);
    a.announce(&keys).await.unwrap();
    b.announce(&keys).await.unwrap();
    let leaving = Heartbeat { presence: Presence::Leaving, ..Heartbeat::default() };
    let left = form.registry.heartbeat(&a.identity, leaving).await.unwrap();
    assert_eq!(left.registration.number, 0);
    assert_eq!(b.announce(&keys).await.unwrap(), [1; 10]);
    assert_eq!(a.announce(&keys).await, Err(RegistryError::UnknownNode));
    b.join(Presence::Afresh).await;
    assert_eq!(form.stranger().plan(&keys, 0).await.missing, 10);
    let number = b.number;
    b.join(Presence::Here).await;
    assert_eq!(b.number, number, "a heartbeat renews");
}

async fn a_prefix_spread_over_nodes_is_read_whole(form: &Form) {
    let space = form.keyspace();
    let mut nodes = Vec::new();
    for numbers in [0..10, 10..30, 31..32] {
        let mut node = form.node().await;
        node.announce(&space.keys(numbers)).await.unwrap();
        nodes.push(node);
    }
    nodes[2].announce(&space.keys([5, 12])).await.unwrap();
    let asker = form.stranger();
    for choice in 0..5 {
        let plan = asker.plan(&space.keys(0..33), choice).await;
        let ids = [nodes[0].id(), nodes[1].id(), nodes[2].id()];
        assert_eq!(runs(&plan), [(ids[0], 0, 10), (ids[1], 10, 20), (ids[2], 31, 1)]);
        assert_eq!(plan.missing, 2);
        assert_eq!(plan.owners[0], nodes[0].identity);
    }
}

async fn plans_leave_out_whom_they_are_told_and_spare_the_busy(form: &Form) {
    let space = form.keyspace();
    let keys = space.keys(0..8);
    let mut nodes = Vec::new();
    for pause_ms in [0, 0, 5, 0] {
        let mut node = form.node().await;
        let load = Load { outstanding_bytes: 0, pause_ms };
        let heartbeat = Heartbeat { load, ..Heartbeat::default() };
        form.registry.heartbeat(&node.identity, heartbeat).await.unwrap();
        node.announce(&keys).await.unwrap();
        nodes.push(node);
    }
    let avoid = [nodes[1].id()];
    let query = PlanQuery { avoid: &avoid, ..PlanQuery::new(nodes[0].id(), &keys) };
    for choice in 0..20 {
        let plan = form.registry.plan(PlanQuery { choice, ..query }).await.unwrap();
        assert_eq!(runs(&plan), [(nodes[3].id(), 0, 8)]);
    }
    // Who is near comes first, unless it asked to be spared.
    let (host, rail, paused) = ([nodes[3].id()], [nodes[1].id()], [nodes[2].id()]);
    let near =
        PlanQuery { same_host: &host, same_rail: &rail, ..PlanQuery::new(nodes[0].id(), &keys) };
    for (near, first) in [
        (near, nodes[3].id()),
        (PlanQuery { avoid: &host, ..near }, nodes[1].id()),
        (PlanQuery { same_host: &paused, ..near }, nodes[1].id()),
    ] {
        for choice in 0..20 {
            let plan = form.registry.plan(PlanQuery { choice, ..near }).await.unwrap();
            assert_eq!(runs(&plan), [(first, 0, 8)]);
        }
    }
    let asker = form.stranger();
    let mut chosen = BTreeSet::new();
    for choice in 0..40 {
        chosen.extend(runs(&asker.plan(&keys, choice).await).iter().map(|run| run.0));
    }
    assert_eq!(chosen, [0, 1, 3].map(|at| nodes[at].id()).into(), "equals share");
}

/// The digests of what a node holds.
pub(crate) fn digests(keys: &[BlockKey]) -> Vec<PartitionDigest> {
    let mut digests = vec![0; usize::from(limits::REGISTRY_PARTITIONS)];
    for print in keys.iter().map(Fingerprint::of) {
        digests[print.partition().index()] ^= print.digest();
    }
    let told = |(partition, digest)| PartitionDigest { partition, digest };
    Partition::all().zip(digests).map(told).collect()
}

async fn digests_say_what_differs_and_a_forgotten_partition_is_announced_again(form: &Form) {
    let space = form.keyspace();
    let (mut a, mut b) = (form.node().await, form.node().await);
    let all = space.keys(0..2000);
    a.announce(&all).await.unwrap();
    a.announce(&all).await.unwrap();
    b.announce(&all).await.unwrap();
    a.withdraw(&all[..500]).await.unwrap();
    a.withdraw(&all[..500]).await.unwrap();
    let held = &all[500..];
    assert_eq!(a.beat(&digests(held)).await.drifted, []);
    assert_eq!(b.beat(&digests(&all)).await.drifted, []);
    let differs = Fingerprint::of(&held[7]).partition();
    let wrong = [&held[..7], &held[8..]].concat();
    assert_eq!(a.beat(&digests(&wrong)).await.drifted, [differs]);
    let stamp = a.stamp();
    form.registry.forget(stamp, differs).await.unwrap();
    assert_eq!(form.registry.forget(stamp, differs).await, Ok(()), "a repeat");
    assert_eq!(a.beat(&digests(held)).await.drifted, [differs]);
    assert_eq!(b.beat(&digests(&all)).await.drifted, [], "others keep theirs");
    let there = |key: &&BlockKey| Fingerprint::of(key).partition() == differs;
    let again: Vec<BlockKey> = held.iter().filter(there).copied().collect();
    let asker = form.stranger();
    let query = PlanQuery { avoid: &[b.id()], ..PlanQuery::new(asker.id(), &again) };
    let missing = form.registry.plan(query).await.unwrap().missing;
    assert_eq!(usize::try_from(missing).unwrap(), again.len());
    a.announce(&again).await.unwrap();
    assert_eq!(a.beat(&digests(held)).await.drifted, []);
}

async fn whoever_becomes_the_only_owner_hears_so_once(form: &Form) {
    let space = form.keyspace();
    let (mut a, mut b) = (form.node().await, form.node().await);
    a.announce(&space.keys(0..4)).await.unwrap();
    b.announce(&space.keys(1..6)).await.unwrap();
    assert_eq!(a.beat(&[]).await.sole, []);
    assert_eq!(b.withdraw(&space.keys([1, 5])).await.unwrap(), [0]);
    assert_eq!(b.withdraw(&space.keys([1, 5])).await.unwrap(), [0], "said again, not told again");
    assert_eq!(a.beat(&[]).await.sole, space.keys([1]));
    assert_eq!(a.beat(&[]).await.sole, []);
    assert_eq!(b.beat(&[]).await.sole, []);
}

async fn a_report_removes_one_owner_of_one_start(form: &Form) {
    let space = form.keyspace();
    let (mut a, mut b) = (form.node().await, form.node().await);
    let held = space.keys(0..4);
    a.announce(&held).await.unwrap();
    b.announce(&held).await.unwrap();
    let keys = space.keys([2, 9]);
    let report = |epoch| Missing { owner: a.id(), epoch: NodeEpoch(epoch), keys: &keys };
    assert_eq!(form.registry.report_missing(report(9)).await, Ok(0), "another start of it");
    assert_eq!(form.registry.report_missing(report(1)).await, Ok(1));
    assert_eq!(form.registry.report_missing(report(1)).await, Ok(0), "a repeat");
    let plan = form.stranger().plan(&space.keys([2]), 0).await;
    assert_eq!(runs(&plan), [(b.id(), 0, 1)]);
    assert_eq!(b.beat(&[]).await.sole, space.keys([2]));
    let differs = Fingerprint::of(&space.key(2)).partition();
    assert_eq!(a.beat(&digests(&held)).await.drifted, [differs], "the owner can object");
    assert_eq!(a.announce(&space.keys([2])).await.unwrap(), [2]);
    assert_eq!(a.beat(&digests(&held)).await.drifted, []);
}

async fn a_full_batch_works_and_a_larger_one_is_refused(form: &Form) {
    let space = form.keyspace();
    let mut a = form.node().await;
    let most = u32::try_from(limits::REGISTRY_BATCH_MAX).unwrap();
    let full = space.keys(0..most);
    assert_eq!(a.announce(&full).await.unwrap(), vec![1; full.len()]);
    let plan = form.stranger().plan(&full, 0).await;
    assert_eq!(runs(&plan), [(a.id(), 0, most)]);
    let many = space.keys(0..=most);
    let refused = |error| matches!(error, Some(RegistryError::Refused { .. }));
    assert!(refused(a.announce(&many).await.err()));
    let query = PlanQuery::new(a.id(), &many);
    assert!(refused(form.registry.plan(query).await.err()));
    assert_eq!(a.withdraw(&full).await.unwrap(), [0_u32; 0]);
}

/// Announces as a node that is known: where this thread stood still for a lease, it joins again.
async fn announced(node: &mut Node, keys: &[BlockKey]) -> Vec<u32> {
    loop {
        match node.announce(keys).await {
            Err(RegistryError::UnknownNode) => node.join(Presence::Here).await,
            answer => return answer.unwrap(),
        }
    }
}

/// On a registry whose leases are short.
pub(crate) async fn a_silent_node_owns_nothing(form: &Form) {
    let space = form.keyspace();
    let keys = space.keys(0..5);
    let mut silent = form.node().await;
    announced(&mut silent, &keys).await;
    let asker = form.stranger();
    let gone = async {
        while asker.plan(&keys, 0).await.missing < 5 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let gone = tokio::time::timeout(Duration::from_secs(60), gone).await;
    assert!(gone.is_ok(), "it is listed for ever");
    assert_eq!(silent.announce(&keys).await, Err(RegistryError::UnknownNode));
    let number = silent.number;
    silent.join(Presence::Here).await;
    assert_ne!(silent.number, number, "its next heartbeat registers it anew");
    assert_eq!(announced(&mut silent, &keys).await, [1; 5]);
}
