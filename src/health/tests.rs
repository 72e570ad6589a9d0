use super::*;
use crate::sim::Random;

const NODE: NodeId = NodeId([7; 16]);
const OTHER: NodeId = NodeId([8; 16]);
const MS: Duration = Duration::from_millis(1);

/// A clock and the health of peers, driven by outcomes.
struct Scene {
    health: Health,
    now: Timestamp,
}

impl Scene {
    fn new() -> Self {
        Self { health: Health::new(BreakerConfig::default()), now: Timestamp::ZERO }
    }

    fn pass(&mut self, span: Duration) {
        self.now = self.now + span;
    }

    fn tell(&mut self, node: NodeId, verdict: Verdict) {
        self.health.handle_verdict((node, &Paths::default()), verdict, self.now);
    }

    fn good(&mut self) {
        self.tell(NODE, Verdict::Answered);
    }

    fn bad(&mut self, cause: Cause) {
        self.tell(NODE, Verdict::Failed { cause, waited: Duration::ZERO });
    }

    fn is_used(&mut self) -> bool {
        self.health.ask(NODE, self.now).is_ok()
    }

    fn scope(&mut self) -> Option<Scope> {
        self.health.ask(NODE, self.now).err().map(|suspended| suspended.scope)
    }

    /// Fails until the breaker opens; how long that took.
    fn fail_until_open(&mut self, every: Duration) -> Duration {
        let began = self.now;
        loop {
            self.bad(Cause::Broken);
            if !self.is_used() {
                return self.now.since(began);
            }
            self.pass(every);
        }
    }

    /// Passes the time to the next probe and begins it.
    fn probe(&mut self) -> Duration {
        let began = self.now;
        let at = self.health.poll_timeout().unwrap();
        assert_eq!(self.health.poll_probe(at - MS), None, "too early");
        self.now = at;
        assert_eq!(self.health.poll_probe(at), Some(NODE));
        assert_eq!(self.health.poll_probe(at), None, "one probe at a time");
        assert!(!self.is_used(), "half open is for the probe alone");
        at.since(began)
    }

    fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.health.poll_event()).collect()
    }
}

impl std::ops::Sub<Duration> for Timestamp {
    type Output = Self;

    fn sub(self, span: Duration) -> Self {
        Self::from_nanos(self.as_nanos() - u64::try_from(span.as_nanos()).unwrap())
    }
}

#[test]
fn a_peer_that_fails_one_in_twenty_stays_in_use_at_any_pace() {
    for every in [MS / 10, MS, MS * 30, MS * 70, MS * 500, MS * 5000] {
        let mut scene = Scene::new();
        for at in 0..20_000_u32 {
            if at % 20 == 7 {
                scene.bad(Cause::Broken)
            } else {
                scene.good()
            }
            assert!(scene.is_used(), "out after {at} transfers, one each {every:?}");
            scene.pass(every);
        }
        // The same at random.
        let mut random = Random::new(1);
        for at in 0..20_000_u32 {
            let fails = random.number().is_multiple_of(20);
            if fails {
                scene.bad(Cause::TooSlow)
            } else {
                scene.good()
            }
            assert!(scene.is_used(), "out after {at} random transfers, one each {every:?}");
            scene.pass(every);
        }
    }
}

#[test]
fn a_peer_that_fails_all_is_out_within_a_second_of_evidence_whatever_its_past() {
    for past in [0, 10, 10_000] {
        let mut scene = Scene::new();
        for _ in 0..past {
            scene.good();
            scene.pass(MS);
        }
        let took = scene.fail_until_open(MS);
        assert!(took <= MS * 1000, "{took:?} after {past} good ones");
        assert_eq!(scene.scope(), Some(Scope::Path));
        assert_eq!(scene.events(), [Event::BreakerOpened { scope: Scope::Path }]);
    }
}

#[test]
fn one_incident_is_one_failure_however_much_it_takes_down() {
    let mut scene = Scene::new();
    for _ in 0..1000 {
        scene.bad(Cause::Broken);
    }
    assert!(scene.is_used());
    scene.pass(MS * 100);
    scene.good();
    assert!(scene.is_used());
}

#[test]
fn half_of_all_is_too_much_and_old_failures_do_not_count() {
    let mut scene = Scene::new();
    let mut rounds = 0;
    while scene.is_used() {
        scene.bad(Cause::Broken);
        scene.pass(MS * 60);
        scene.good();
        scene.pass(MS * 60);
        rounds += 1;
        assert!(rounds < 12, "half of all fails and it is still in use");
    }
    let mut scene = Scene::new();
    for _ in 0..50 {
        scene.bad(Cause::Broken);
        scene.pass(Duration::from_secs(25));
        assert!(scene.is_used(), "two or three failures a minute");
    }
}

#[test]
fn a_peer_that_hangs_is_out_after_three_timeouts() {
    let mut scene = Scene::new();
    for at in 0..3 {
        assert!(scene.is_used(), "out after {at} timeouts");
        scene.pass(Duration::from_secs(5));
        let (cause, waited) = (Cause::NoAnswer, Duration::from_secs(5));
        scene.tell(NODE, Verdict::Failed { cause, waited });
    }
    assert!(!scene.is_used());
}

#[test]
fn a_peer_is_back_within_two_probe_intervals_of_its_recovery_and_never_out_for_good() {
    for failed_probes in 0..12 {
        let mut scene = Scene::new();
        scene.fail_until_open(MS * 60);
        let mut interval = Duration::ZERO;
        for _ in 0..failed_probes {
            interval = scene.probe();
            assert!(interval <= BreakerConfig::default().probe_longest);
            scene.pass(MS * 20);
            scene.health.handle_probe(
                (NODE, &Paths::default()),
                Err(Cause::Unreachable),
                scene.now,
            );
        }
        // It recovers at the worst moment: just after a probe has failed.
        let waited = scene.probe();
        assert!(
            waited <= (interval * 2).max(BreakerConfig::default().probe_first),
            "{waited:?} after an interval of {interval:?}"
        );
        scene.health.handle_probe((NODE, &Paths::default()), Ok(()), scene.now);
        assert!(scene.is_used());
        let events = scene.events();
        assert_eq!(events.last(), Some(&Event::BreakerClosed { scope: Scope::Path }));
        let probes = |good| events.iter().filter(|e| **e == Event::Probed { good }).count();
        assert_eq!((probes(false), probes(true)), (failed_probes, 1));
        assert_eq!(scene.health.poll_timeout(), None, "there is nothing left to probe");
    }
}

#[test]
fn the_back_off_grows_while_it_goes_on_and_decays_while_all_is_well() {
    let mut scene = Scene::new();
    let mut intervals = Vec::new();
    for _ in 0..4 {
        scene.fail_until_open(MS * 60);
        intervals.push(scene.probe());
        scene.health.handle_probe((NODE, &Paths::default()), Ok(()), scene.now);
    }
    assert!(intervals.is_sorted() && intervals[3] >= intervals[0] * 4, "{intervals:?}");
    scene.pass(BreakerConfig::default().recovery * 20);
    scene.fail_until_open(MS * 60);
    let interval = scene.probe();
    assert!(interval <= intervals[0], "{interval:?}");
}

#[test]
fn scopes_are_never_mixed() {
    let mut scene = Scene::new();
    for _ in 0..20 {
        scene.bad(Cause::Own);
        scene.pass(MS * 60);
    }
    assert!(scene.is_used(), "our own faults blame no peer");
    let nic = scene.health.report(scene.now).find(|entry| entry.scope == Scope::Local).unwrap();
    assert_eq!((nic.state, nic.cause), (BreakerState::Open, Some(Cause::Own)));
    scene.pass(BreakerConfig::default().probe_longest);
    scene.health.handle_own_success(Nic::default(), scene.now);
    let nic = scene.health.report(scene.now).find(|entry| entry.scope == Scope::Local).unwrap();
    assert_eq!(nic.state, BreakerState::Closed, "its use is its probe");

    for _ in 0..20 {
        scene.bad(Cause::WrongBytes);
        scene.pass(MS * 60);
    }
    assert_eq!(scene.scope(), Some(Scope::Peer));
    let state = |scene: &Scene, scope| {
        let entry = scene.health.report(scene.now).find(|entry| entry.scope == scope);
        entry.map(|entry| entry.state)
    };
    assert_eq!(state(&scene, Scope::Peer), Some(BreakerState::Open));
    assert_eq!(state(&scene, Scope::Path), Some(BreakerState::Closed));
    assert!(scene.health.ask(OTHER, scene.now).is_ok());
}

#[test]
fn one_of_two_paths_is_enough() {
    let mut scene = Scene::new();
    let broken = Verdict::Failed { cause: Cause::Broken, waited: Duration::ZERO };
    scene.over(FIRST, Verdict::Sent { bytes: 1, took: MS });
    (0..20).for_each(|_| scene.over(SECOND, broken));
    assert!(scene.is_used());
    (0..20).for_each(|_| scene.over(FIRST, broken));
    assert!(!scene.is_used());
}

#[test]
fn no_path_of_reads_makes_up_for_messages_that_are_not_answered() {
    let mut scene = Scene::new();
    let sent = Verdict::Sent { bytes: 1, took: MS };
    scene.over(FIRST, sent);
    scene.fail_until_open(MS * 60);
    assert_eq!(scene.scope(), Some(Scope::Path));
    // A READ of the probe was answered for by a message before it.
    scene.pass(BreakerConfig::default().probe_longest);
    assert_eq!(scene.health.poll_probe(scene.now), Some(NODE));
    scene.health.handle_probe((NODE, &SECOND.into()), Err(Cause::Broken), scene.now);
    assert!(scene.is_used());
    // Every READ says the same, so that one failed lend in twenty is none too many.
    for _ in 0..100 {
        scene.bad(Cause::NoAnswer);
        (0..19).for_each(|_| scene.over(FIRST, sent));
        assert!(scene.is_used());
    }
}

#[test]
fn silence_needs_no_second_piece_of_evidence_and_is_forgiven_by_a_probe() {
    for past in [0, 1, 1000] {
        let mut scene = Scene::new();
        for _ in 0..past {
            scene.over(FIRST, Verdict::Sent { bytes: 1, took: MS });
        }
        let waited = limits::SILENCE_MAX;
        scene.tell(NODE, Verdict::Silent { waited });
        assert_eq!(scene.scope(), Some(Scope::Path));
        scene.tell(NODE, Verdict::Silent { waited });
        assert_eq!(
            scene.events(),
            [Event::BreakerOpened { scope: Scope::Path }],
            "it is told once"
        );
        let entry = scene.health.report(scene.now).find(|it| it.path == Path::MESSAGES).unwrap();
        assert_eq!((entry.state, entry.cause), (BreakerState::Open, Some(Cause::NoAnswer)));
        assert!(scene.probe() <= BreakerConfig::default().probe_first);
        scene.health.handle_probe((NODE, &FIRST.into()), Ok(()), scene.now);
        assert!(scene.is_used());
        // One that falls silent again and again is probed ever more seldom.
        let mut intervals = Vec::new();
        for _ in 0..4 {
            scene.tell(NODE, Verdict::Silent { waited });
            intervals.push(scene.probe());
            scene.health.handle_probe((NODE, &FIRST.into()), Ok(()), scene.now);
        }
        assert!(intervals.is_sorted() && intervals[3] >= intervals[0] * 4, "{intervals:?}");
    }
    let mut scene = Scene::new();
    scene.health.handle_leaving(NODE, scene.now);
    scene.tell(NODE, Verdict::Silent { waited: limits::SILENCE_MAX });
    scene.pass(LEAVING);
    assert!(scene.is_used(), "one that leaves says nothing in the end");
}

/// Two pairs of NICs to one peer.
const FIRST: Path = Path { local: Nic(0), remote: Nic(0) };
const SECOND: Path = Path { local: Nic(1), remote: Nic(1) };

impl Scene {
    fn over(&mut self, path: Path, verdict: Verdict) {
        self.health.handle_verdict((NODE, &path.into()), verdict, self.now);
        self.pass(MS * 60);
    }

    /// Where the breakers of the peer, of the first and of the second path stand.
    fn states(&self) -> [BreakerState; 3] {
        let state = |scope, path| {
            let mut entries = self.health.report(self.now);
            entries.find(|it| it.scope == scope && it.path == path).unwrap().state
        };
        [state(Scope::Peer, FIRST), state(Scope::Path, FIRST), state(Scope::Path, SECOND)]
    }
}

#[test]
fn a_fault_of_one_pair_of_nics_marks_that_path_and_not_the_peer_until_it_works_again() {
    use BreakerState::{Closed, Open};
    let mut scene = Scene::new();
    let broken = Verdict::Failed { cause: Cause::Broken, waited: MS };
    let sent = Verdict::Sent { bytes: 1, took: MS };
    for _ in 0..20 {
        scene.over(FIRST, sent);
        scene.over(SECOND, broken);
        assert!(scene.is_used(), "there is another path");
    }
    assert_eq!(scene.states(), [Closed, Closed, Open]);
    assert_eq!(scene.health.poll_timeout(), None, "what goes over it is its probe");
    let mut both = Paths::from(FIRST);
    both.add(SECOND);
    scene.pass(BreakerConfig::default().probe_longest);
    scene.health.handle_verdict((NODE, &both), sent, scene.now);
    assert_eq!(scene.states(), [Closed; 3]);
    let closed = Event::BreakerClosed { scope: Scope::Path };
    assert_eq!(scene.events(), [Event::BreakerOpened { scope: Scope::Path }, closed]);
}

#[test]
fn a_probe_speaks_for_the_path_that_it_took() {
    use BreakerState::{Closed, Open};
    let mut scene = Scene::new();
    let broken = Verdict::Failed { cause: Cause::Broken, waited: MS };
    for _ in 0..20 {
        scene.over(FIRST, broken);
        scene.over(SECOND, broken);
    }
    assert_eq!((scene.states(), scene.scope()), ([Closed, Open, Open], Some(Scope::Path)));
    scene.pass(BreakerConfig::default().probe_longest);
    assert_eq!(scene.health.poll_probe(scene.now), Some(NODE));
    scene.health.handle_probe((NODE, &SECOND.into()), Ok(()), scene.now);
    assert_eq!(scene.states(), [Closed, Open, Closed]);
    assert!(scene.is_used());
    scene.pass(FORGET);
    assert_eq!(scene.health.poll_probe(scene.now), None);
    let paths = scene.health.report(scene.now).filter(|entry| entry.scope == Scope::Path);
    assert_eq!(paths.count(), 0, "nothing has gone over either for long");
}

#[test]
fn stale_keys_blame_a_peer_only_where_fresh_ones_are_refused_too() {
    let mut scene = Scene::new();
    for _ in 0..100 {
        scene.tell(NODE, Verdict::StaleKeys);
        scene.pass(MS * 60);
        scene.tell(NODE, Verdict::Sent { bytes: 1, took: MS });
        scene.pass(MS * 60);
        assert!(scene.is_used());
    }
    for _ in 0..10 {
        scene.tell(NODE, Verdict::StaleKeys);
        scene.pass(MS * 60);
    }
    assert_eq!(scene.scope(), Some(Scope::Peer));
}

#[test]
fn a_peer_that_leaves_is_left_alone_without_blame_until_it_is_back() {
    let mut scene = Scene::new();
    scene.health.handle_leaving(NODE, scene.now);
    assert_eq!(scene.scope(), Some(Scope::Request));
    for _ in 0..20 {
        scene.bad(Cause::Refused);
        scene.pass(MS * 60);
    }
    let blamed = scene.health.report(scene.now).any(|entry| entry.state != BreakerState::Closed);
    assert!(!blamed);
    scene.health.handle_up(NODE);
    assert!(scene.is_used());
    scene.health.handle_leaving(NODE, scene.now);
    scene.pass(LEAVING);
    assert!(scene.is_used(), "not for ever");
}

#[test]
fn a_fault_of_ours_puts_a_probe_off_and_a_reset_ends_it_all() {
    let mut scene = Scene::new();
    scene.fail_until_open(MS * 60);
    let first = scene.probe();
    scene.health.handle_probe((NODE, &Paths::default()), Err(Cause::Own), scene.now);
    assert_eq!(scene.probe(), first, "nothing was found out");
    scene.health.handle_probe((NODE, &Paths::default()), Err(Cause::Unreachable), scene.now);
    assert_eq!(scene.health.reset(Some(OTHER), scene.now), 0);
    assert!(!scene.is_used());
    assert_eq!(scene.health.reset(Some(NODE), scene.now), 1);
    assert!(scene.is_used());
    scene.fail_until_open(MS * 60);
    assert_eq!(scene.health.reset(None, scene.now), 1);
    assert!(scene.is_used());
    assert!(scene.health.report(scene.now).all(|entry| entry.cause.is_none()));
}

#[test]
fn a_peer_that_nobody_wants_is_no_longer_probed() {
    let mut scene = Scene::new();
    scene.fail_until_open(MS * 60);
    scene.pass(FORGET);
    assert_eq!(scene.health.poll_probe(scene.now), None);
    assert_eq!(scene.health.report(scene.now).count(), 0);
}

#[test]
fn a_pause_is_bounded_and_ends() {
    let mut scene = Scene::new();
    let load = |pause_ms| Load { outstanding_bytes: 9, pause_ms };
    scene.health.handle_load(NODE, load(u32::MAX), scene.now);
    assert_eq!(scene.health.paused(NODE, scene.now), Some(scene.now + PAUSE_MAX));
    assert_eq!(scene.health.paused(OTHER, scene.now), None);
    assert_eq!(scene.health.load(NODE).outstanding_bytes, 9);
    scene.pass(PAUSE_MAX);
    assert_eq!(scene.health.paused(NODE, scene.now), None);
    scene.health.handle_load(NODE, load(500), scene.now);
    scene.health.handle_load(NODE, load(0), scene.now);
    assert_eq!(scene.health.paused(NODE, scene.now), None, "it takes it back");
}

#[test]
fn what_is_known_is_bounded() {
    let mut scene = Scene::new();
    for number in 0..u32::try_from(limits::CONNECTIONS_MAX).unwrap() + 10 {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&number.to_le_bytes());
        scene.tell(NodeId(id), Verdict::Answered);
        scene.pass(MS);
    }
    assert_eq!(scene.health.peers.len(), limits::CONNECTIONS_MAX);
}

#[test]
fn a_deadline_grows_with_bytes_at_the_measured_rate_up_to_the_bound() {
    let mut scene = Scene::new();
    let bound = Duration::from_secs(30);
    assert_eq!(scene.health.allowance(NODE, 1 << 30, bound), bound, "nothing is known yet");
    let second = Duration::from_secs(1);
    for _ in 0..50 {
        scene.tell(NODE, Verdict::Sent { bytes: 100 << 20, took: second });
    }
    let allowance = |scene: &Scene, bytes| scene.health.allowance(NODE, bytes, bound);
    assert_eq!(allowance(&scene, 0), Duration::from_secs(2));
    let large = allowance(&scene, 100 << 20);
    assert!((Duration::from_secs(11)..Duration::from_secs(14)).contains(&large), "{large:?}");
    assert_eq!(allowance(&scene, 1 << 30), bound);
    // It gets slower at once, and faster little by little.
    scene.tell(NODE, Verdict::Sent { bytes: 10 << 20, took: second });
    assert!(allowance(&scene, 100 << 20) > Duration::from_secs(18));
    scene.tell(NODE, Verdict::Sent { bytes: 100 << 20, took: second });
    assert!(allowance(&scene, 100 << 20) > Duration::from_secs(16));
    // A few bytes tell of latency, not of rate.
    scene.tell(NODE, Verdict::Sent { bytes: 100, took: second });
    assert!(allowance(&scene, 100 << 20) < Duration::from_secs(20));
}
