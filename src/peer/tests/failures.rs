//! The requester's side when something breaks: lost answers, dead holders, late grants.

use std::time::Duration;

use super::cluster::{Cluster, Shape, bytes_of, endpoint, is_failed, is_ready, node_id};
use super::stranger::Stranger;
use crate::event::{Discard, Event};
use crate::fabric::{Capabilities, ConnectionId, RemoteSpan};
use crate::health::BreakerState;
use crate::lease::LeaseConfigError;
use crate::memory::checksum_bytes;
use crate::peer::{FetchOutcome, LocalNode, Peers};
use crate::policy::Policy;
use crate::protocol::{AbortReason, Loan, LoanEntry, Message, Place, RanksStatus, SecretKey};
use crate::store::{Store, StoreConfig};
use crate::types::{EvictionRank, Generation, LeaseId, Load, NodeEpoch, RequestId, Scope};

const A: usize = 0;
const B: usize = 1;

/// Whether B leaves nobody alone.
fn all_in_use(cluster: &Cluster) -> bool {
    let health = cluster.node(B).peers.health(cluster.now());
    health.into_iter().all(|entry| entry.state == BreakerState::Closed)
}

fn completing(cluster: &Cluster) -> bool {
    // All READs are over and the lease is not: the completion is on its way.
    cluster.network.landing(endpoint(B)).is_empty()
        && cluster.node(B).log.count(|e| matches!(e, Event::TransferSucceeded { .. })) > 0
}

#[test]
fn a_lost_completion_is_replayed_and_the_holders_rank_moves_once() {
    for seed in 0..40 {
        let mut cluster = Cluster::new(2, Shape { seed, ..Shape::default() });
        cluster.save(A, &[1, 2]);
        let id = cluster.begin_fetch(B, A, &[1, 2]);
        cluster.run_until(Duration::from_secs(1), completing);
        // Somewhere between the completion's departure and the answer's arrival.
        cluster.run_for(Duration::from_micros(seed * 31 % 700));
        cluster.network.reset(endpoint(A), endpoint(B));
        let fetched = cluster.finish(B, id);
        assert!(fetched.outcomes.iter().all(is_ready), "seed {seed}: {fetched:?}");
        cluster.node(B).peers.release(&fetched);
        assert_eq!(cluster.node(B).rank(1), 1, "seed {seed}");
        // The next connection says it again.
        cluster.run_for(Duration::from_millis(20));
        cluster.save(A, &[3]);
        assert!(is_ready(&cluster.fetch(B, A, &[3])[0]));
        assert_eq!((cluster.node(A).rank(1), cluster.node(A).rank(2)), (2, 2), "seed {seed}");
        assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(1)), (0, 0), "seed {seed}");
        cluster.network.reset(endpoint(A), endpoint(B));
        cluster.run_for(Duration::from_millis(20));
        assert!(is_ready(&cluster.fetch(B, A, &[3])[0]));
        assert_eq!(cluster.node(A).rank(1), 2, "seed {seed}: it was said a third time");
    }
}

#[test]
fn a_holder_that_dies_before_its_answer_leaves_the_rank_of_the_loan() {
    let mut cluster = Cluster::new(3, Shape::default());
    cluster.save(A, &[1]);
    assert!(is_ready(&cluster.fetch(2, A, &[1])[0]));
    let id = cluster.begin_fetch(B, A, &[1]);
    cluster.run_until(Duration::from_secs(1), completing);
    cluster.crash(A);
    let fetched = cluster.finish(B, id);
    assert!(is_ready(&fetched.outcomes[0]));
    assert_eq!(cluster.node(B).rank(1), 2);
}

#[test]
fn a_holder_that_does_not_answer_a_completion_does_not_hold_the_blocks_back() {
    let (mut cluster, mut holder) = stranger_holds();
    let id = cluster.begin_fetch(B, A, &[1]);
    let on = holder.welcome(&mut cluster);
    grant(&mut cluster, &mut holder, on, Duration::from_secs(1), 3);
    let said = holder.hear_a(&mut cluster, on, |m| matches!(m, Message::Complete { .. }));
    let Message::Complete { lease, .. } = said.message() else { unreachable!() };
    let began = cluster.now();
    let fetched = cluster.finish(B, id);
    assert!(is_ready(&fetched.outcomes[0]), "{fetched:?}");
    assert_eq!(cluster.node(B).rank(1), 3);
    let waited = cluster.now().since(began);
    assert!(waited <= cluster.shape.peers.requester.answer_timeout, "{waited:?}");
    // A late answer finds nothing to move.
    let status = RanksStatus::Recorded;
    holder.say(on, &Message::Ranks { lease, status, load: Load::default(), ranks: &[7] });
    cluster.run_for(Duration::from_millis(20));
    assert_eq!(cluster.node(B).rank(1), 3);
}

#[test]
fn a_holder_that_dies_in_mid_read_fails_each_block_within_the_deadline() {
    for seed in 0..40 {
        let mut shape = Shape { seed, ..Shape::default() };
        shape.network.drain = Duration::from_millis(1)..=Duration::from_millis(200);
        let mut cluster = Cluster::new(2, shape);
        let blocks: Vec<u16> = (1..=20).collect();
        cluster.save(A, &blocks);
        let id = cluster.begin_fetch(B, A, &blocks);
        let reading = |cluster: &Cluster| !cluster.network.exposed().is_empty();
        cluster.run_until(Duration::from_secs(1), reading);
        let began = cluster.now();
        if seed % 2 == 0 {
            cluster.crash(A);
        } else {
            // Nobody says that it is dead.
            cluster.network.partition(endpoint(A), endpoint(B));
        }
        let used = cluster.node(B).landing.pool.usage().used;
        assert!(used > 0);
        let fetched = cluster.finish(B, id);
        // `Cluster::check` has seen that no destination was let go of before its flush.
        assert!(
            cluster.now().since(began) < cluster.shape.peers.lease.ttl + Duration::from_millis(200)
        );
        assert!(fetched.outcomes.iter().all(|outcome| !is_ready(outcome)), "{fetched:?}");
        assert!(cluster.network.landing(endpoint(B)).is_empty());
        assert_eq!(cluster.node(B).landing.pool.usage().used, 0);
    }
}

/// Node B, and a stranger at the place of A that holds block 1 at the start of its pool.
fn stranger_holds() -> (Cluster, Stranger) {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.crash(A);
    let holder = Stranger::new(&cluster, A);
    holder.pool.mapping().write(0, &bytes_of(1)).unwrap();
    (cluster, holder)
}

/// Answers the next lend, which asks for block 1.
fn grant(
    cluster: &mut Cluster,
    holder: &mut Stranger,
    on: ConnectionId,
    ttl: Duration,
    rank: u32,
) -> RequestId {
    let said = holder.hear_a(cluster, on, |message| matches!(message, Message::Lend { .. }));
    let Message::Lend { request, .. } = said.message() else { unreachable!() };
    let bytes = bytes_of(1);
    let len = u32::try_from(bytes.len()).unwrap();
    let loans = [LoanEntry::from(Loan::Ready {
        rank: EvictionRank::clamped(rank),
        generation: Generation(1),
        place: Place::Span(holder.region.remote(0, len).unwrap()),
        checksum: checksum_bytes(&bytes),
    })];
    let (lease, ttl_ms) = (LeaseId(77), u32::try_from(ttl.as_millis()).unwrap());
    holder
        .say(on, &Message::Lease { request, lease, ttl_ms, load: Load::default(), loans: &loans });
    request
}

#[test]
fn a_grant_that_comes_after_the_requesters_own_deadline_is_given_back_unread() {
    let (mut cluster, mut holder) = stranger_holds();
    let id = cluster.begin_fetch(B, A, &[1]);
    let on = holder.welcome(&mut cluster);
    holder.live_for(&mut cluster, on, Duration::from_millis(950));
    // It counts from before the lend was sent: of one second, less a margin, nothing is left.
    grant(&mut cluster, &mut holder, on, Duration::from_secs(1), 1);
    let said = holder.hear_a(
        &mut cluster,
        on,
        |m| matches!(m, Message::Abort { lease, .. } if *lease != LeaseId::NONE),
    );
    let reason = AbortReason::Late;
    assert_eq!(said.message(), Message::Abort { lease: LeaseId(77), reason });
    let fetched = cluster.finish(B, id);
    assert!(is_failed(&fetched.outcomes[0], Scope::Path), "{fetched:?}");
    assert!(cluster.network.landing(endpoint(B)).is_empty());
}

#[test]
fn reads_that_hang_are_cut_off_at_the_requesters_deadline_and_not_published() {
    let (mut cluster, mut holder) = stranger_holds();
    let id = cluster.begin_fetch(B, A, &[1]);
    let on = holder.welcome(&mut cluster);
    let asked = cluster.now();
    grant(&mut cluster, &mut holder, on, Duration::from_millis(500), 1);
    cluster.run_until(Duration::from_secs(1), |c| !c.network.landing(endpoint(B)).is_empty());
    cluster.network.partition(endpoint(A), endpoint(B));
    let open = |cluster: &Cluster| cluster.node(B).peers.connected().count() == 1;
    cluster.run_until(Duration::from_secs(1), |cluster| !open(cluster));
    let used = cluster.now().since(asked);
    let margin = cluster.shape.peers.requester.lease_margin;
    assert!(used <= Duration::from_millis(500) - margin, "{used:?}");
    let fetched = cluster.finish(B, id);
    assert!(!is_ready(&fetched.outcomes[0]), "{fetched:?}");
    assert!(cluster.node(B).view(1).is_none());
}

#[test]
fn a_completion_polled_after_the_deadline_is_not_accepted() {
    // The reader's thread stalls while its READ succeeds, and wakes up too late.
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(A, &[1]);
    let id = cluster.begin_fetch(B, A, &[1]);
    let reading = |cluster: &Cluster| !cluster.network.exposed().is_empty();
    cluster.run_until(Duration::from_secs(1), reading);
    let late = cluster.now() + Duration::from_millis(950);
    cluster.network.advance_to(late);
    assert!(cluster.network.landing(endpoint(B)).is_empty());
    let fetched = cluster.finish(B, id);
    assert!(is_failed(&fetched.outcomes[0], Scope::Path), "{fetched:?}");
    cluster.run_for(Duration::from_secs(2));
    assert_eq!((cluster.node(A).rank(1), cluster.node(A).pins(1)), (1, 0));
}

/// A network on which a block takes long: a READ of 64 bytes at a time, each three legs.
fn slow(leg: Duration) -> Shape {
    let mut shape = Shape::default();
    shape.network.delay = leg..=leg;
    (shape.network.read_bytes, shape.network.reads_outstanding) = (64, 1);
    shape
}

#[test]
fn a_long_read_asks_for_time_and_goes_on_as_long_as_it_gets_it() {
    let mut cluster = Cluster::new(2, slow(Duration::from_millis(100)));
    cluster.save(A, &[1]);
    let id = cluster.begin_fetch(B, A, &[1]);
    cluster.run_until(Duration::from_secs(2), |cluster| cluster.node(A).leases() == 1);
    let granted = cluster.now();
    let fetched = cluster.finish(B, id);
    assert!(is_ready(&fetched.outcomes[0]), "{fetched:?}");
    assert!(cluster.now().since(granted) > cluster.shape.peers.lease.ttl);
    assert_eq!((cluster.node(A).rank(1), cluster.node(B).rank(1)), (2, 1));
}

#[test]
fn no_renewal_moves_a_read_beyond_its_own_timeout() {
    let mut shape = slow(Duration::from_millis(100));
    shape.peers.requester.transfer_timeout = Duration::from_millis(1200);
    let mut cluster = Cluster::new(2, shape);
    cluster.save(A, &[1]);
    let id = cluster.begin_fetch(B, A, &[1]);
    cluster.run_until(Duration::from_secs(2), |c| !c.network.landing(endpoint(B)).is_empty());
    let began = cluster.now();
    let fetched = cluster.finish(B, id);
    assert!(is_failed(&fetched.outcomes[0], Scope::Path), "{fetched:?}");
    let took = cluster.now().since(began);
    assert!(took >= Duration::from_millis(1200) && took < Duration::from_millis(1300), "{took:?}");
    assert!(cluster.node(B).view(1).is_none());
}

#[test]
fn a_reconnect_gives_back_what_is_read_no_more() {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(A, &[1, 2]);
    let id = cluster.begin_fetch(B, A, &[1]);
    let reading = |cluster: &Cluster| !cluster.network.exposed().is_empty();
    cluster.run_until(Duration::from_secs(1), reading);
    cluster.network.reset(endpoint(A), endpoint(B));
    assert!(!is_ready(&cluster.finish(B, id).outcomes[0]));
    cluster.run_for(Duration::from_millis(20));
    assert_eq!(cluster.node(A).leases(), 1);
    assert!(is_ready(&cluster.fetch(B, A, &[2])[0]));
    assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(1)), (0, 0));
    assert_eq!(cluster.node(A).rank(1), 1);
}

#[test]
fn a_node_that_cannot_reach_its_peer_is_reached_by_it() {
    let mut cluster = Cluster::new(1, Shape::default());
    cluster.network.partition(endpoint(A), endpoint(B));
    cluster.begin_fetch(A, B, &[1]);
    cluster.turn();
    // The peer comes by another way, while A's attempt hangs.
    let mut peer = Stranger::new(&cluster, 2);
    peer.node = node_id(B);
    let on = peer.shake_hands(&mut cluster, A);
    peer.hear_a(&mut cluster, on, |message| matches!(message, Message::Lend { .. }));
    assert!(cluster.network.next_event().is_some(), "the attempt has ended");
    assert!(cluster.now().as_nanos() < 1_000_000_000);
}

#[test]
fn an_unreachable_owner_fails_the_fetch_at_once_and_the_path_is_to_blame() {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.crash(A);
    let began = cluster.now();
    let outcomes = cluster.fetch(B, A, &[1, 2]);
    assert!(outcomes.iter().all(|outcome| is_failed(outcome, Scope::Path)), "{outcomes:?}");
    assert!(cluster.now().since(began) < Duration::from_millis(50));
}

#[test]
fn a_holder_that_does_not_answer_a_lend_fails_the_fetch_at_its_deadline() {
    let (mut cluster, mut holder) = stranger_holds();
    let id = cluster.begin_fetch(B, A, &[1]);
    let on = holder.welcome(&mut cluster);
    let said = holder.hear_a(&mut cluster, on, |m| matches!(m, Message::Lend { .. }));
    let Message::Lend { request, .. } = said.message() else { unreachable!() };
    let fetched = cluster.finish(B, id);
    assert!(is_failed(&fetched.outcomes[0], Scope::Path), "{fetched:?}");
    // The answer to a request that was given up comes back unread, so that no pin waits for it.
    let loan = Loan::Ready {
        rank: EvictionRank::FIRST,
        generation: Generation(1),
        place: Place::Span(holder.region.remote(0, 64).unwrap()),
        checksum: 0,
    };
    let (lease, loans) = (LeaseId(5), [LoanEntry::from(loan)]);
    holder.say(
        on,
        &Message::Lease { request, lease, ttl_ms: 9000, load: Load::default(), loans: &loans },
    );
    let abort = |m: &Message<'_>| matches!(m, Message::Abort { lease: LeaseId(5), .. });
    holder.hear_a(&mut cluster, on, abort);
    assert!(cluster.network.landing(endpoint(B)).is_empty());
}

#[test]
fn a_holder_that_stands_still_costs_its_readers_a_deadline_and_no_more() {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(A, &[1]);
    let still = 3 * cluster.shape.peers.requester.answer_timeout;
    cluster.pause(A, still);
    let (id, began) = (cluster.begin_fetch(B, A, &[1]), cluster.now());
    let fetched = cluster.finish(B, id);
    assert!(!is_ready(&fetched.outcomes[0]), "{fetched:?}");
    assert!(cluster.now().since(began) < still);
    // It goes on where it stopped, and what it promises now is not held against anybody.
    cluster.run_until(Duration::from_secs(30), all_in_use);
    assert!(is_ready(&cluster.fetch(B, A, &[1])[0]));
    assert_eq!((cluster.node(A).leases(), cluster.node(A).rank(1)), (0, 2));
}

#[test]
fn a_loan_outside_of_the_holders_regions_closes_the_connection() {
    let (mut cluster, mut holder) = stranger_holds();
    let id = cluster.begin_fetch(B, A, &[1]);
    let on = holder.welcome(&mut cluster);
    let said = holder.hear_a(&mut cluster, on, |m| matches!(m, Message::Lend { .. }));
    let Message::Lend { request, .. } = said.message() else { unreachable!() };
    let inside = holder.region.remote(0, 64).unwrap();
    let span = RemoteSpan { address: inside.address + holder.region.len, ..inside };
    let (rank, generation) = (EvictionRank::FIRST, Generation(1));
    let place = Place::Span(span);
    let loans = [LoanEntry::from(Loan::Ready { rank, generation, place, checksum: 0 })];
    let lease = LeaseId(5);
    holder.say(
        on,
        &Message::Lease { request, lease, ttl_ms: 900, load: Load::default(), loans: &loans },
    );
    let fetched = cluster.finish(B, id);
    assert!(is_failed(&fetched.outcomes[0], Scope::Peer), "{fetched:?}");
    assert_eq!(cluster.node(B).log.count(|event| *event == Event::ProtocolViolation), 1);
    assert_eq!(cluster.node(B).landing.pool.usage().used, 0);
}

#[test]
fn a_fetch_of_no_block_or_of_too_many_is_the_askers_fault() {
    let mut cluster = Cluster::new(2, Shape::default());
    for count in [0, 513] {
        let outcomes = cluster.fetch(B, A, &vec![1; count]);
        assert!(outcomes.iter().all(|outcome| is_failed(outcome, Scope::Request)));
        assert_eq!(outcomes.len(), count);
    }
}

#[test]
fn an_owner_that_has_nothing_grants_no_lease() {
    let mut cluster = Cluster::new(2, Shape::default());
    assert_eq!(cluster.fetch(B, A, &[1, 2]), [FetchOutcome::NotFound; 2]);
    assert_eq!(cluster.node(A).leases(), 0);
}

#[test]
fn a_margin_that_leaves_no_time_to_read_is_refused() {
    let shape = Shape::default();
    let peers = |ttl: Duration, margin: Duration| {
        let mut config = shape.peers;
        (config.lease.ttl, config.requester.lease_margin) = (ttl, margin);
        let capabilities = Capabilities {
            transport: "none",
            reads_outstanding: 1,
            segments: 1,
            read_bytes: 1,
            windows: 0,
            opening: Duration::ZERO,
        };
        let local = LocalNode {
            node: node_id(0),
            epoch: NodeEpoch(1),
            requester: super::cluster::requester_id(0),
            secret: SecretKey::derive(b""),
            regions: Vec::new(),
            nonce_seed: [0; 32],
        };
        let config_of_store = StoreConfig { capacity: 1, policy: Policy::default() };
        let sink = std::sync::Arc::new(Discard);
        let store = std::sync::Arc::new(Store::new(config_of_store, sink.clone()).unwrap());
        Peers::<super::cluster::TestLanding>::new(local, config, capabilities, store, sink)
    };
    let second = Duration::from_secs(1);
    for margin in [second / 2, second, second * 2] {
        let refused = peers(second, margin).map(|_| ()).unwrap_err();
        assert_eq!(refused, LeaseConfigError::Margin { ttl: second, margin });
    }
    assert!(peers(second, second / 2 - Duration::from_nanos(1)).is_ok());
}
