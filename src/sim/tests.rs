use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::fabric::{
    Access, CloseReason, CompletionStatus, ConnectionId, EventBatch, Fabric, FabricError,
    FabricEvent, ReadBatch, ReadWork, Region, RegisteredSpan, RemoteSpan, WrId,
};
use crate::limits;
use crate::memory::Mapping;

const A: SimEndpoint = SimEndpoint(0);
const B: SimEndpoint = SimEndpoint(1);

fn memory(len: u64) -> Arc<Mapping> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(len).unwrap();
    Arc::new(Mapping::new(&file, len).unwrap())
}

/// Two nodes, connected and admitted; B lends a region, A reads into one.
struct Pair {
    network: SimNetwork,
    a: SimFabric,
    b: SimFabric,
    on: ConnectionId,
    at_b: ConnectionId,
    here: Region,
    lent: Region,
    local: Arc<Mapping>,
    remote: Arc<Mapping>,
}

impl Pair {
    fn new(seed: u64) -> Self {
        let network = SimNetwork::new(seed, SimConfig::default());
        let (mut a, mut b) = (network.fabric(A), network.fabric(B));
        let (local, remote) = (memory(4096), memory(4096));
        let here = a.register(Arc::clone(&local), Access::Local).unwrap();
        let lent = b.register(Arc::clone(&remote), Access::RemoteRead).unwrap();
        let on = a.connect(&B).unwrap();
        run(&network);
        assert_eq!(events(&mut a), [FabricEvent::Connected { connection: on }]);
        let [FabricEvent::Accepted { connection: at_b }] = events(&mut b)[..] else { panic!() };
        a.admit(on).unwrap();
        b.admit(at_b).unwrap();
        Self { network, a, b, on, at_b, here, lent, local, remote }
    }

    fn read(&mut self, number: u32, remote: RemoteSpan) {
        let local = RegisteredSpan { region: self.here.id, offset: 0, len: remote.len };
        self.a.post(self.on, &batch(number, remote, vec![local])).unwrap();
    }

    fn statuses(&mut self) -> Vec<CompletionStatus> {
        let completed = |event: &FabricEvent| match event {
            FabricEvent::Completed(completion) => Some(completion.status),
            _ => None,
        };
        events(&mut self.a).iter().filter_map(completed).collect()
    }
}

fn batch(number: u32, remote: RemoteSpan, segments: Vec<RegisteredSpan>) -> ReadBatch {
    let wr_id = WrId { slot: number, generation: 0 };
    let work = ReadWork { wr_id, remote, segments: u16::try_from(segments.len()).unwrap() };
    ReadBatch { works: vec![work], segments }
}

fn run(network: &SimNetwork) {
    while network.step().is_some() {}
}

fn events(fabric: &mut SimFabric) -> Vec<FabricEvent> {
    let mut batch = EventBatch::default();
    fabric.poll(&mut batch, Duration::ZERO).unwrap();
    batch.events
}

fn messages(fabric: &mut SimFabric) -> Vec<Vec<u8>> {
    let mut batch = EventBatch::default();
    fabric.poll(&mut batch, Duration::ZERO).unwrap();
    let bytes = |event: &FabricEvent| match *event {
        FabricEvent::Message { start, end, .. } => Some(batch.message(start, end).to_vec()),
        _ => None,
    };
    batch.events.iter().filter_map(bytes).collect()
}

#[test]
fn a_read_moves_bytes_into_scattered_spans_and_completes_once() {
    let mut pair = Pair::new(1);
    let bytes: Vec<u8> = (0..100).collect();
    pair.remote.write(500, &bytes).unwrap();
    let span = |offset, len| RegisteredSpan { region: pair.here.id, offset, len };
    let remote = pair.lent.remote(500, 100).unwrap();
    let scattered = batch(7, remote, vec![span(0, 30), span(1000, 70)]);
    pair.a.post(pair.on, &scattered).unwrap();
    assert_eq!(pair.network.landing(A).len(), 2);
    let exposed = pair.network.exposed();
    assert_eq!((exposed[0].holder, exposed[0].offset, exposed[0].len), (B, 500, 100));
    run(&pair.network);
    assert_eq!(pair.statuses(), [CompletionStatus::Success]);
    let mut got = [0; 100];
    let (head, tail) = got.split_at_mut(30);
    pair.local.read(0, head).unwrap();
    pair.local.read(1000, tail).unwrap();
    assert_eq!(got.to_vec(), bytes);
    assert_eq!((pair.network.landing(A).len(), pair.network.exposed().len()), (0, 0));
    assert_eq!(pair.statuses(), []);
}

#[test]
fn a_read_races_with_the_holder_and_may_be_torn() {
    let torn = (0..200).filter(|seed| {
        let mut pair = Pair::new(*seed);
        pair.remote.write(0, &[1; 64]).unwrap();
        let span = pair.lent.remote(0, 64).unwrap();
        pair.read(1, span);
        pair.network.advance_to(pair.network.now() + Duration::from_micros(300));
        pair.remote.write(0, &[2; 64]).unwrap();
        run(&pair.network);
        let mut got = [0; 64];
        pair.local.read(0, &mut got).unwrap();
        got.contains(&1) && got.contains(&2)
    });
    assert!(torn.count() > 10);
}

#[test]
fn keys_bounds_and_access_are_checked_and_a_failure_breaks_the_connection() {
    type Wrong = fn(&mut Pair) -> RemoteSpan;
    let mut wrong: Vec<(&str, Wrong)> = Vec::new();
    wrong.push(("key", |pair| RemoteSpan {
        rkey: pair.lent.rkey ^ 1,
        ..pair.lent.remote(0, 8).unwrap()
    }));
    wrong.push(("start", |pair| RemoteSpan {
        rkey: pair.lent.rkey,
        address: pair.lent.address - 1,
        len: 8,
    }));
    wrong.push(("end", |pair| RemoteSpan {
        rkey: pair.lent.rkey,
        address: pair.lent.address + 4090,
        len: 8,
    }));
    wrong.push(("access", |pair| {
        let private = pair.b.register(memory(64), Access::Local).unwrap();
        private.remote(0, 8).unwrap()
    }));
    wrong.push(("deregistered", |pair| {
        pair.b.deregister(pair.lent.id);
        pair.lent.remote(0, 8).unwrap()
    }));
    for (what, span) in wrong {
        let mut pair = Pair::new(3);
        let span = span(&mut pair);
        pair.read(1, span);
        for number in 2..5 {
            pair.read(number, span);
        }
        run(&pair.network);
        let all = events(&mut pair.a);
        let status = |event: &FabricEvent| match event {
            FabricEvent::Completed(completion) => Some(completion.status),
            _ => None,
        };
        let statuses: Vec<_> = all.iter().filter_map(status).collect();
        assert_eq!(statuses[0], CompletionStatus::RemoteAccess, "{what}");
        assert_eq!(statuses[1..], [CompletionStatus::Flushed; 3], "{what}");
        let closed = FabricEvent::Closed { connection: pair.on, reason: CloseReason::ReadFailed };
        assert_eq!(all.last(), Some(&closed), "{what}");
        assert!(matches!(pair.a.send(pair.on, b""), Err(FabricError::Closed)));
    }
}

#[test]
fn local_spans_are_checked() {
    let mut pair = Pair::new(4);
    let remote = pair.lent.remote(0, 64).unwrap();
    let local = RegisteredSpan { region: pair.here.id, offset: 4090, len: 64 };
    pair.a.post(pair.on, &batch(1, remote, vec![local])).unwrap();
    run(&pair.network);
    assert_eq!(pair.statuses(), [CompletionStatus::LocalProtection]);
}

#[test]
fn nothing_is_read_before_both_ends_have_admitted_each_other() {
    let network = SimNetwork::new(5, SimConfig::default());
    let (mut a, mut b) = (network.fabric(A), network.fabric(B));
    let here = a.register(memory(64), Access::Local).unwrap();
    let lent = b.register(memory(64), Access::RemoteRead).unwrap();
    let on = a.connect(&B).unwrap();
    run(&network);
    let local = RegisteredSpan { region: here.id, offset: 0, len: 8 };
    let work = batch(1, lent.remote(0, 8).unwrap(), vec![local]);
    assert!(matches!(a.post(on, &work), Err(FabricError::Closed)));
    a.admit(on).unwrap();
    a.post(on, &work).unwrap();
    run(&network);
    let refused = |event: &FabricEvent| match event {
        FabricEvent::Completed(it) => it.status == CompletionStatus::RemoteAccess,
        _ => false,
    };
    assert!(events(&mut a).iter().any(refused));
}

#[test]
fn a_closed_connection_is_read_no_more_whatever_is_on_its_way() {
    let mut read = 0;
    for seed in 0..100 {
        let mut pair = Pair::new(seed);
        pair.remote.write(0, &[1; 64]).unwrap();
        let span = pair.lent.remote(0, 64).unwrap();
        pair.read(1, span);
        pair.network.advance_to(pair.network.now() + Duration::from_micros(300));
        pair.b.close(pair.at_b);
        // The holder may reuse the memory now.
        pair.remote.write(0, &[2; 64]).unwrap();
        assert!(pair.network.exposed().is_empty());
        run(&pair.network);
        let mut got = [0; 64];
        pair.local.read(0, &mut got).unwrap();
        assert!(!got.contains(&2), "seed {seed}: read after the access had ended");
        read += usize::from(got.contains(&1));
        let all = events(&mut pair.a);
        assert!(matches!(all.last(), Some(FabricEvent::Closed { .. })), "seed {seed}: {all:?}");
        assert_eq!(all.len(), 2, "seed {seed}: {all:?}");
    }
    assert!(read > 5 && read < 95);
}

#[test]
fn bytes_may_land_after_the_reader_has_closed_until_the_flush_is_polled() {
    let mut late = 0;
    for seed in 0..100 {
        let mut pair = Pair::new(seed);
        pair.remote.write(0, &[1; 64]).unwrap();
        let span = pair.lent.remote(0, 64).unwrap();
        pair.read(1, span);
        pair.network.advance_to(pair.network.now() + Duration::from_micros(700));
        let mut before = [0; 64];
        pair.local.read(0, &mut before).unwrap();
        pair.a.close(pair.on);
        while pair.network.landing(A).len() == 1 {
            pair.network.step().unwrap();
        }
        let mut at_flush = [0; 64];
        pair.local.read(0, &mut at_flush).unwrap();
        late += usize::from(before != at_flush);
        run(&pair.network);
        let mut after = [0; 64];
        pair.local.read(0, &mut after).unwrap();
        assert_eq!(at_flush, after, "seed {seed}: written after the flush");
    }
    assert!(late > 5, "{late}");
}

#[test]
fn messages_arrive_whole_and_in_order() {
    let mut pair = Pair::new(6);
    let sent: Vec<Vec<u8>> = (0..50_u8).map(|at| vec![at; usize::from(at) * 3]).collect();
    for message in &sent {
        pair.a.send(pair.on, message).unwrap();
    }
    run(&pair.network);
    assert_eq!(messages(&mut pair.b), sent);
    let long = vec![0; limits::MESSAGE_BYTES_MAX + 1];
    assert!(matches!(pair.a.send(pair.on, &long), Err(FabricError::Limit { .. })));
}

#[test]
fn what_was_sent_before_a_close_arrives_before_its_news() {
    let mut pair = Pair::new(7);
    pair.a.send(pair.on, b"goodbye").unwrap();
    pair.a.close(pair.on);
    run(&pair.network);
    let all = events(&mut pair.b);
    assert!(
        matches!(all[..], [FabricEvent::Message { .. }, FabricEvent::Closed { .. }]),
        "{all:?}"
    );
}

#[test]
fn a_partition_holds_messages_back_in_order_and_gives_up_at_the_senders_end_alone() {
    let mut pair = Pair::new(8);
    pair.network.partition(A, B);
    for at in 0..10_u8 {
        pair.a.send(pair.on, &[at]).unwrap();
    }
    let soon = pair.network.now() + Duration::from_millis(10);
    pair.network.advance_to(soon);
    assert_eq!(messages(&mut pair.b).len(), 0);
    pair.network.heal(A, B);
    pair.a.send(pair.on, &[10]).unwrap();
    run(&pair.network);
    let expected: Vec<Vec<u8>> = (0..11).map(|at| vec![at]).collect();
    assert_eq!(messages(&mut pair.b), expected);

    pair.network.partition(A, B);
    pair.a.send(pair.on, b"lost").unwrap();
    run(&pair.network);
    let closed = FabricEvent::Closed { connection: pair.on, reason: CloseReason::Unreachable };
    assert_eq!(events(&mut pair.a), [closed]);
    pair.network.heal(A, B);
    run(&pair.network);
    // B has not heard of it, and learns it when it speaks.
    pair.b.send(pair.at_b, b"anyone?").unwrap();
    run(&pair.network);
    assert!(matches!(events(&mut pair.b).last(), Some(FabricEvent::Closed { .. })));
}

#[test]
fn a_dead_node_is_unreachable_and_its_next_start_knows_nothing_of_it() {
    let mut pair = Pair::new(9);
    let old = pair.b;
    let mut b = pair.network.fabric(B);
    drop(old);
    run(&pair.network);
    assert!(matches!(events(&mut pair.a)[..], [FabricEvent::Closed { .. }]));
    assert_eq!(events(&mut b), []);
    let again = b.register(memory(64), Access::RemoteRead).unwrap();
    assert_ne!((again.rkey, again.address), (pair.lent.rkey, pair.lent.address));
    drop(b);
    let on = pair.a.connect(&B).unwrap();
    run(&pair.network);
    let reason = CloseReason::Unreachable;
    assert_eq!(events(&mut pair.a), [FabricEvent::Closed { connection: on, reason }]);
}

#[test]
fn limits_are_kept() {
    let mut pair = Pair::new(10);
    let work = batch(
        1,
        pair.lent.remote(0, 8).unwrap(),
        vec![RegisteredSpan { region: pair.here.id, offset: 0, len: 8 }],
    );
    let limit = pair.a.capabilities().reads_outstanding;
    for _ in 0..limit {
        pair.a.post(pair.on, &work).unwrap();
    }
    assert!(matches!(pair.a.post(pair.on, &work), Err(FabricError::Full)));
    for _ in 1..limits::REGIONS_MAX {
        pair.a.register(Arc::clone(&pair.local), Access::Local).unwrap();
    }
    let one_more = pair.a.register(Arc::clone(&pair.local), Access::Local);
    assert!(matches!(one_more, Err(FabricError::Limit { .. })));
    pair.network.partition(A, B);
    let refused = (0..10_000).find_map(|_| pair.a.send(pair.on, b"x").err());
    assert!(matches!(refused, Some(FabricError::Full)));
}

#[test]
fn one_seed_is_one_run_and_time_moves_only_when_told() {
    let trace = |seed| {
        let mut pair = Pair::new(seed);
        for number in 0..10 {
            let span = pair.lent.remote(u64::from(number) * 10, 10).unwrap();
            pair.read(number, span);
        }
        let began = pair.network.now();
        assert_eq!(pair.statuses(), []);
        assert_eq!(pair.network.now(), began);
        let mut moments = Vec::new();
        while let Some(at) = pair.network.step() {
            moments.push((at, events(&mut pair.a)));
        }
        moments
    };
    assert_eq!(trace(11), trace(11));
    assert_ne!(trace(11), trace(12));
}
