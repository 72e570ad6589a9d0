//! Peers that fail, hang, leave and come back, over the simulated network and its clock.

use std::time::Duration;

use super::cluster::{Cluster, Shape, endpoint, is_ready, node_id};
use super::stranger::Stranger;
use crate::event::{BusyReason, Event, LendRefusal};
use crate::health::{BreakerConfig, BreakerState};
use crate::limits::PROBE_BYTES;
use crate::peer::{FetchOutcome, Fetched, Pressure};
use crate::protocol::{Kind, Loan, LoanEntry, Message};
use crate::sim::ExposedSpan;
use crate::types::{Load, Scope};

const A: usize = 0;
const B: usize = 1;
const MS: Duration = Duration::from_millis(1);

fn shape() -> Shape {
    let mut shape = Shape::default();
    shape.network.give_up = MS * 300;
    shape.peers.requester.answer_timeout = MS * 300;
    shape.peers.requester.transfer_timeout = MS * 500;
    shape
}

/// A fetch with its end; what it made ready is let go.
fn fetch(cluster: &mut Cluster, blocks: &[u16]) -> Fetched {
    let id = cluster.begin_fetch(B, A, blocks);
    let fetched = cluster.finish(B, id);
    cluster.node(B).peers.release(&fetched);
    // Gone again, so that the next fetch of it reads, too.
    while cluster.node_mut(B).landing.evict().is_some() {}
    fetched
}

fn is_open(cluster: &Cluster) -> bool {
    let now = cluster.now();
    cluster.node(B).peers.health(now).any(|entry| entry.state != BreakerState::Closed)
}

fn events(cluster: &Cluster, which: impl Fn(&Event) -> bool) -> usize {
    cluster.node(B).log.count(which)
}

/// Fetches until the peer is left alone; how long that took.
fn fail_until_open(cluster: &mut Cluster) -> Duration {
    let began = cluster.now();
    while !is_open(cluster) {
        let fetched = fetch(cluster, &[1]);
        assert!(!is_ready(&fetched.outcomes[0]));
        cluster.run_for(MS * 20);
        assert!(cluster.now().since(began) < Duration::from_secs(20));
    }
    cluster.now().since(began)
}

#[test]
fn a_peer_that_died_is_left_alone_and_back_within_two_probe_intervals() {
    for dead_for in [0, 300, 3000, 20_000] {
        let mut cluster = Cluster::new(2, shape());
        cluster.save(A, &[1]);
        assert!(is_ready(&fetch(&mut cluster, &[1]).outcomes[0]));
        cluster.crash(A);
        let took = fail_until_open(&mut cluster);
        assert!(took < Duration::from_secs(2), "{took:?}");
        // While it is open, nobody waits for it.
        let began = cluster.now();
        let fetched = fetch(&mut cluster, &[1]);
        assert_eq!(cluster.now(), began, "a fetch from a peer that is left alone ends at once");
        assert_eq!(fetched.outcomes, [FetchOutcome::Failed(Scope::Path)]);
        let again = fetched.suspended.unwrap().until;
        assert!(again > began && again.since(began) <= BreakerConfig::default().probe_longest);

        cluster.run_for(MS * dead_for);
        cluster.start(A);
        cluster.save(A, &[1]);
        let recovered = cluster.now();
        cluster.run_until(Duration::from_secs(30), |cluster| !is_open(cluster));
        let took = cluster.now().since(recovered);
        let interval = BreakerConfig::default().probe_longest;
        let most = (MS * 2 * (dead_for + 500)).min(interval * 2);
        assert!(took <= most, "{took:?} after {dead_for} ms");
        assert!(is_ready(&fetch(&mut cluster, &[1]).outcomes[0]), "after {dead_for} ms");
        assert!(events(&cluster, |event| *event == Event::Probed { good: true }) == 1);
        assert_eq!(events(&cluster, |e| matches!(e, Event::StaleCompletion)), 0);
        // The probes left nothing behind.
        assert_eq!(cluster.node(B).peers.unfinished(), 0);
        assert_eq!(cluster.node(B).landing.pool.usage().used, 0);
        assert_eq!((cluster.node(A).rank(1), cluster.node(A).pins(1)), (2, 0));
    }
}

#[test]
fn a_peer_behind_a_partition_is_left_alone_and_comes_back_when_it_heals() {
    let mut cluster = Cluster::new(2, shape());
    cluster.save(A, &[1]);
    fetch(&mut cluster, &[1]);
    cluster.network.partition(endpoint(A), endpoint(B));
    fail_until_open(&mut cluster);
    cluster.run_for(Duration::from_secs(3));
    assert!(is_open(&cluster));
    cluster.network.heal(endpoint(A), endpoint(B));
    cluster.run_until(Duration::from_secs(17), |cluster| !is_open(cluster));
    assert!(is_ready(&fetch(&mut cluster, &[1]).outcomes[0]));
}

#[test]
fn a_peer_that_fails_one_transfer_in_twenty_stays_in_use() {
    let mut cluster = Cluster::new(2, shape());
    cluster.save(A, &[1, 2, 3]);
    let mut failed = 0;
    for at in 0..400 {
        let id = cluster.begin_fetch(B, A, &[1, 2, 3]);
        if at % 20 == 7 {
            cluster
                .run_until(Duration::from_secs(1), |cluster| !cluster.network.exposed().is_empty());
            cluster.network.reset(endpoint(A), endpoint(B));
        }
        let fetched = cluster.finish(B, id);
        failed += usize::from(!fetched.outcomes.iter().all(is_ready));
        cluster.node(B).peers.release(&fetched);
        while cluster.node_mut(B).landing.evict().is_some() {}
        cluster.run_for(MS * 60);
        assert!(!is_open(&cluster), "after {at} transfers, {failed} of which failed");
    }
    assert_eq!(failed, 20);
}

#[test]
fn a_peer_that_leaves_says_so_and_is_asked_again_when_it_is_back() {
    let mut cluster = Cluster::new(2, shape());
    cluster.save(A, &[1]);
    fetch(&mut cluster, &[1]);
    cluster.node_mut(A).peers.drain();
    let fetched = fetch(&mut cluster, &[1]);
    assert_eq!(fetched.outcomes, [FetchOutcome::Busy(BusyReason::Owner(LendRefusal::Draining))]);
    assert_eq!(fetched.suspended.unwrap().scope, Scope::Request);
    let began = cluster.now();
    assert_eq!(
        fetch(&mut cluster, &[1]).outcomes,
        [FetchOutcome::Busy(BusyReason::Owner(LendRefusal::Draining))]
    );
    assert_eq!(cluster.now(), began, "it is not even asked");
    cluster.node_mut(A).peers.shut_down();
    cluster.run_for(MS * 10);
    cluster.crash(A);
    assert!(!is_open(&cluster), "nobody is to blame");
    cluster.start(A);
    cluster.save(A, &[1]);
    cluster.run_for(Duration::from_secs(6));
    assert!(is_ready(&fetch(&mut cluster, &[1]).outcomes[0]));
    assert_eq!(events(&cluster, |event| matches!(event, Event::BreakerOpened { .. })), 0);
}

#[test]
fn a_pause_is_obeyed_by_the_next_lend() {
    let mut cluster = Cluster::new(2, shape());
    cluster.save(A, &[1, 2]);
    cluster.node_mut(A).landing.pause_ms = 100;
    assert_eq!(fetch(&mut cluster, &[1]).load.pause_ms, 100);
    let asked = cluster.now();
    cluster.node_mut(A).landing.pause_ms = 0;
    assert!(is_ready(&fetch(&mut cluster, &[2]).outcomes[0]));
    let waited = cluster.now().since(asked);
    assert!(waited >= MS * 90 && waited < MS * 130, "{waited:?}");
    assert_eq!(events(&cluster, |event| *event == Event::PauseObeyed), 1);
    let asked = cluster.now();
    assert!(is_ready(&fetch(&mut cluster, &[1]).outcomes[0]));
    assert!(cluster.now().since(asked) < MS * 30, "it did not ask for another");
}

#[test]
fn above_its_mark_a_holder_lends_no_more_and_says_why() {
    let mut shape = shape();
    // Two blocks of about 300 bytes fit below the high mark, and one below the low one.
    shape.peers.pressure =
        Pressure { high_bytes: 700, low_bytes: 400, low_leases: 100, ..Pressure::default() };
    let mut cluster = Cluster::new(2, shape);
    cluster.save(A, &[1, 2, 3]);
    let mut stranger = Stranger::new(&cluster, B + 1);
    let on = stranger.shake_hands(&mut cluster, A);
    let (first, loans) = stranger.lend(&mut cluster, on, &[1, 2, 3, 9]);
    let loans: Vec<Loan> = loans.iter().map(LoanEntry::loan).collect();
    assert!(loans[0].is_ready());
    assert_eq!(loans[2], Loan::Busy(LendRefusal::Pressure));
    assert_eq!(loans[3], Loan::NotFound);
    let fetched = fetch(&mut cluster, &[3]);
    assert_eq!(fetched.outcomes, [FetchOutcome::Busy(BusyReason::Owner(LendRefusal::Pressure))]);
    assert!(fetched.load.pause_ms > 0 && fetched.load.outstanding_bytes > 0);
    assert_eq!(cluster.node(A).pins(3), 0);
    stranger.complete(
        &mut cluster,
        on,
        first,
        &[loans[0].is_ready(), loans[1].is_ready(), false, false],
    );
    let fetched = fetch(&mut cluster, &[3]);
    assert!(is_ready(&fetched.outcomes[0]));
}

/// Fails until the peer is left alone, then stands in for it: what the probe asks for.
fn probed(page: bool) -> (Cluster, Stranger) {
    let mut cluster = Cluster::new(2, shape());
    cluster.crash(A);
    fail_until_open(&mut cluster);
    let mut stranger =
        if page { Stranger::with_probe_page(&cluster, A) } else { Stranger::new(&cluster, A) };
    let on = stranger.welcome(&mut cluster);
    let asked = |message: &Message<'_>| message.kind() == Kind::Ping;
    let said = stranger.hear_a(&mut cluster, on, asked);
    let Message::Ping { token } = said.message() else { unreachable!() };
    assert!(is_open(&cluster), "it has not answered yet");
    stranger.say(on, &Message::Pong { token, load: Load::default() });
    (cluster, stranger)
}

#[test]
fn a_probe_asks_for_an_answer_and_then_reads_a_page_where_there_is_one() {
    for page in [false, true] {
        let (mut cluster, _stranger) = probed(page);
        if page {
            let reads = |span: &ExposedSpan| span.len == PROBE_BYTES;
            cluster.run_until(Duration::from_secs(1), |it| it.network.exposed().iter().any(reads));
            assert!(is_open(&cluster), "the page is not read yet");
        }
        cluster.run_until(Duration::from_secs(1), |cluster| !is_open(cluster));
        assert_eq!(cluster.node(B).peers.unfinished(), 0);
        assert_eq!(cluster.node(B).landing.pool.usage().used, 0);
    }
}

#[test]
fn a_reset_ends_a_suspension_at_once() {
    let mut cluster = Cluster::new(2, shape());
    cluster.crash(A);
    fail_until_open(&mut cluster);
    let now = cluster.now();
    assert_eq!(cluster.node_mut(B).peers.reset_health(Some(node_id(A)), now), 1);
    assert!(!is_open(&cluster));
}

/// A fabric that has another way to the peer ends its connections: READs that were under way are tried
/// again by whoever asked, what else was asked goes on by itself.
#[test]
fn connections_that_move_cost_their_reads_at_most_and_blame_nobody() {
    let mut cluster = Cluster::new(2, shape());
    cluster.save(A, &[1, 2, 3]);
    let (mut moved, mut ready) = (0, 0);
    for round in 0..200 {
        let id = cluster.begin_fetch(B, A, &[1, 2, 3]);
        // Anywhere between the attempt to connect and the last answer.
        cluster.run_for(Duration::from_micros(round * 37 % 4000));
        cluster.network.move_on(endpoint(A), endpoint(B));
        let reads = !cluster.network.landing(endpoint(B)).is_empty();
        let fetched = cluster.finish(B, id);
        cluster.node(B).peers.release(&fetched);
        while cluster.node_mut(B).landing.evict().is_some() {}
        let failed = |outcome: &FetchOutcome| *outcome == FetchOutcome::Failed(Scope::Local);
        let all_ready = fetched.outcomes.iter().all(is_ready);
        assert!(
            all_ready || (reads && fetched.outcomes.iter().all(|it| is_ready(it) || failed(it)))
        );
        moved += usize::from(!all_ready);
        ready += usize::from(all_ready);
        cluster.run_for(MS * 60);
        for node in [A, B] {
            let blamed: Vec<_> = cluster.node(node).peers.health(cluster.now()).collect();
            assert!(blamed.iter().all(|entry| entry.cause.is_none()), "round {round}: {blamed:?}");
        }
    }
    assert!(moved > 20 && ready > 20, "{moved} {ready}");
    assert!(is_ready(&fetch(&mut cluster, &[1]).outcomes[0]));
    assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(1)), (0, 0));
}
