//! Connections that take a lost NIC back: by a second one beside the first, which no fetch notices.

use std::num::NonZeroU64;
use std::time::Duration;

use super::cluster::{Cluster, Shape, bytes_of, endpoint, is_ready, node_id};
use crate::event::{Event, Widening};
use crate::fabric::{ConnectionId, Fabric};
use crate::limits;
use crate::peer::FetchId;

const A: usize = 0;
const B: usize = 1;

/// Two nodes with blocks, connected by A.
fn connected(shape: Shape) -> Cluster {
    let mut cluster = Cluster::new(2, shape);
    cluster.save(A, &[1, 2, 3]);
    cluster.save(B, &[4, 5, 6]);
    assert!(is_ready(&cluster.fetch(A, B, &[4])[0]));
    cluster
}

fn connection(cluster: &Cluster, at: usize) -> ConnectionId {
    cluster.node(at).peers.up_to(node_id(A + B - at)).unwrap()
}

/// Pairs of NICs that the connection of a node goes over.
fn rails(cluster: &Cluster, at: usize) -> usize {
    let node = cluster.node(at);
    node.peers.up_to(node_id(A + B - at)).map_or(0, |on| node.fabric.rails(on).len())
}

fn count(cluster: &Cluster, at: usize, outcome: Widening) -> usize {
    cluster.node(at).log.count(|event| *event == Event::ConnectionWidened { outcome })
}

/// Both nodes read from each other all the time, some fetches at once, until `done`; no block may fail.
fn read_until(cluster: &mut Cluster, within: Duration, done: impl Fn(&Cluster) -> bool) {
    let limit = cluster.now() + within;
    let mut running: Vec<(usize, FetchId)> = Vec::new();
    let mut number = 0;
    while !done(cluster) || !running.is_empty() {
        assert!(cluster.now() < limit, "not done within {within:?}");
        while running.len() < 6 && !done(cluster) {
            let at = number % 2;
            let first = if at == A { 4 } else { 1 };
            let blocks: Vec<u16> = (first..first + 3).collect();
            running.push((at, cluster.begin_fetch(at, A + B - at, &blocks)));
            number += 1;
        }
        let (at, id) = running.remove(0);
        let fetched = cluster.finish(at, id);
        assert!(fetched.outcomes.iter().all(is_ready), "{at}: {fetched:?}");
        cluster.node(at).peers.release(&fetched);
    }
}

/// Longer than any first attempt waits.
const FIRST: Duration = Duration::from_secs(8);

#[test]
fn a_nic_is_taken_back_while_both_ends_read_and_no_block_fails() {
    for seed in 0..40 {
        let mut shape = Shape { seed, ..Shape::default() };
        // Some 200 ms a fetch, so that many are under way at any time.
        shape.network.delay = Duration::from_micros(1)..=Duration::from_millis(60);
        let mut cluster = connected(shape);
        let before = connection(&cluster, A);
        cluster.network.set_rails(2);
        read_until(&mut cluster, FIRST, |cluster| rails(cluster, A) == 2 && rails(cluster, B) == 2);
        assert_ne!(connection(&cluster, A), before, "seed {seed}");
        assert_eq!(count(&cluster, A, Widening::Wider), 1, "seed {seed}");
        let failed = |event: &Event| matches!(event, Event::TransferFailed { .. });
        for at in [A, B] {
            assert_eq!(cluster.node(at).log.count(failed), 0, "seed {seed}");
            assert_eq!(count(&cluster, at, Widening::Failed), 0, "seed {seed}");
        }
        cluster.run_for(Duration::from_secs(1));
        assert_eq!(cluster.network.connections(endpoint(A), endpoint(B)), 1, "seed {seed}");
        let leases = [A, B].map(|at| cluster.node(at).leases());
        assert_eq!(leases, [0, 0], "seed {seed}");
        // Each holder has counted each reader once, whatever happened in between.
        assert_eq!((cluster.node(B).rank(4), cluster.node(A).rank(1)), (2, 2), "seed {seed}");
    }
}

#[test]
fn who_did_not_open_the_connection_asks_for_it() {
    let mut cluster = connected(Shape::default());
    cluster.node_mut(A).sees_lacks = false;
    cluster.network.set_rails(2);
    read_until(&mut cluster, 2 * FIRST, |cluster| rails(cluster, B) == 2);
    assert_eq!((count(&cluster, A, Widening::Wider), count(&cluster, B, Widening::Wider)), (1, 0));
    // And without that nobody does.
    cluster.node_mut(B).sees_lacks = false;
    cluster.network.set_rails(3);
    cluster.run_for(2 * FIRST);
    assert_eq!(rails(&cluster, A), 2);
}

#[test]
fn attempts_in_vain_become_rare_and_cost_no_fetch() {
    let mut cluster = connected(Shape::default());
    let before = connection(&cluster, A);
    cluster.node_mut(A).hopes = true;
    read_until(&mut cluster, FIRST, |cluster| count(cluster, A, Widening::InVain) == 1);
    cluster.run_for(Duration::from_secs(3600));
    let tried = count(&cluster, A, Widening::InVain);
    assert!((6..16).contains(&tried), "{tried} attempts in an hour");
    assert_eq!(connection(&cluster, A), before);
    assert_eq!(cluster.network.connections(endpoint(A), endpoint(B)), 1);
    // It is not given up: what helps in the end is found.
    cluster.network.set_rails(2);
    cluster.run_for(2 * limits::WIDEN_PAUSE_MAX);
    assert_eq!(rails(&cluster, A), 2);
}

#[test]
fn a_transfer_that_takes_longer_than_the_rest_is_not_cut_short_and_keeps_no_one_waiting() {
    let mut shape = Shape::default();
    // A READ of the block takes twice as long as the others wait for it.
    let rate = bytes_of(4).len() as u128 * 500 / limits::WIDEN_REST.as_millis();
    shape.network.read_rate = NonZeroU64::new(u64::try_from(rate).unwrap());
    shape.peers.lease.ttl = Duration::from_secs(10);
    let mut cluster = Cluster::new(2, shape);
    cluster.save(B, &[4]);
    assert!(is_ready(&cluster.fetch(A, B, &[4])[0]));
    let before = connection(&cluster, A);
    cluster.network.set_rails(2);
    // Until it is tried there is always a READ under way.
    let mut long = cluster.begin_fetch(A, B, &[4]);
    while count(&cluster, A, Widening::Failed) == 0 {
        let next = cluster.begin_fetch(A, B, &[4]);
        let fetched = cluster.finish(A, std::mem::replace(&mut long, next));
        assert!(fetched.outcomes.iter().all(is_ready), "{fetched:?}");
        cluster.node(A).peers.release(&fetched);
        assert!(cluster.now().as_nanos() < 60_000_000_000, "it is never tried");
    }
    assert_eq!(connection(&cluster, A), before);
    let fetched = cluster.finish(A, long);
    assert!(fetched.outcomes.iter().all(is_ready), "{fetched:?}");
    cluster.node(A).peers.release(&fetched);
    // With nothing under way it is done.
    cluster.run_for(10 * FIRST);
    assert_eq!(rails(&cluster, A), 2);
}

/// Whatever breaks in between, the nodes find each other again, over all there is.
#[test]
fn connections_that_break_during_the_switch_leave_one_that_works() {
    for seed in 0..99 {
        let mut shape = Shape { seed, ..Shape::default() };
        shape.network.delay = Duration::from_micros(1)..=Duration::from_millis(20);
        let mut cluster = connected(shape);
        cluster.network.set_rails(2);
        // Up to an attempt, and then somewhere within it.
        let tried = |cluster: &Cluster| cluster.network.connections(endpoint(A), endpoint(B)) == 2;
        cluster.run_until(FIRST, tried);
        let reads = [cluster.begin_fetch(A, B, &[5]), cluster.begin_fetch(A, B, &[6])];
        cluster.run_for(Duration::from_micros(seed * 997 % 100_000));
        let (a, b) = (endpoint(A), endpoint(B));
        match seed % 3 {
            0 => cluster.network.reset(a, b),
            1 => {
                cluster.network.partition(a, b);
                cluster.run_for(Duration::from_millis(seed * 17 % 3000));
                cluster.network.heal(a, b);
            }
            _ => cluster.crash(B),
        }
        for id in reads {
            let fetched = cluster.finish(A, id);
            cluster.node(A).peers.release(&fetched);
        }
        if seed % 3 == 2 {
            cluster.start(B);
            cluster.save(B, &[4]);
        }
        let back = |cluster: &mut Cluster| is_ready(&cluster.fetch(A, B, &[4])[0]);
        while !back(&mut cluster) {
            assert!(cluster.now().as_nanos() < 120_000_000_000, "seed {seed}: it stays away");
            cluster.run_for(Duration::from_millis(500));
        }
        cluster.run_for(Duration::from_secs(60));
        assert_eq!(cluster.network.connections(a, b), 1, "seed {seed}");
        assert_eq!(rails(&cluster, A), 2, "seed {seed}");
        let leases = [A, B].map(|at| cluster.node(at).leases());
        assert_eq!(leases, [0, 0], "seed {seed}");
    }
}
