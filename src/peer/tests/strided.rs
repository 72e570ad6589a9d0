//! Blocks that lie in pieces at their holder: told once, then named by numbers.

use std::time::Duration;

use super::cluster::{
    Cluster, LAYOUT, STRIDED, Shape, bytes_of, cache_tensor, endpoint, is_failed, is_ready,
};
use super::stranger::Stranger;
use crate::event::{Event, LendRefusal};
use crate::fabric::{CompletionStatus, ConnectionId};
use crate::layout::{BlockId, Layout, Tensor};
use crate::memory::{Pool, checksum_bytes};
use crate::peer::{FetchId, FetchOutcome};
use crate::protocol::{Loan, LoanEntry, Message, Place, RegionEntry, TensorEntry};
use crate::types::{EvictionRank, Extent, Generation, LeaseId, Load, RequestId, Scope};

const A: usize = 0;
const B: usize = 1;

/// The layout that a stranger tells.
const TOLD: u32 = 5;

#[test]
fn blocks_in_pieces_are_read_into_one_and_ranked_as_all_others() {
    let mut cluster = Cluster::new(3, Shape::default());
    let names: Vec<u16> = (STRIDED..STRIDED + 8).collect();
    for (name, block) in names.iter().zip([3, 0, 7, 1, 2, 6, 5, 4]) {
        cluster.node_mut(A).landing.save_in_pieces(*name, block);
    }
    cluster.save(A, &[1, 2]);
    // Some in one piece and some in many, in one lease.
    let mixed = [&names[..3], &[1, 2], &names[3..]].concat();
    let outcomes = cluster.fetch(B, A, &mixed);
    assert!(outcomes.iter().all(is_ready), "{outcomes:?}");
    for name in &mixed {
        assert_eq!((cluster.node(A).rank(*name), cluster.node(B).rank(*name)), (2, 1));
    }
    // From there they are lent in one piece.
    assert!(cluster.fetch(2, B, &mixed).iter().all(is_ready));
    assert!(cluster.fetch(2, A, &mixed).iter().all(is_ready));
    assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(STRIDED)), (0, 0));
}

/// B fetches blocks of A to these blocks of its cache; the outcomes. What is ready stays pinned.
fn fetch_into(cluster: &mut Cluster, named: &[(u16, u32)]) -> Vec<FetchOutcome> {
    let id = begin_fetch_into(cluster, named);
    cluster.finish(B, id).outcomes
}

fn begin_fetch_into(cluster: &mut Cluster, named: &[(u16, u32)]) -> FetchId {
    let names: Vec<u16> = named.iter().map(|(name, _)| *name).collect();
    let now = cluster.now();
    let node = cluster.node_mut(B);
    let places = named.iter().map(|(_, block)| node.landing.place_in_cache(*block)).collect();
    node.fetch_into(A, (&names, places), now)
}

/// Where the block lies that a fetch got.
fn lies_at(outcome: &FetchOutcome) -> Extent {
    match outcome {
        FetchOutcome::Ready { found, .. } => found.payload.extent,
        other => panic!("{other:?}"),
    }
}

#[test]
fn blocks_land_in_pieces_where_their_asker_wants_them() {
    let mut cluster = Cluster::new(3, Shape::default());
    for (name, block) in (STRIDED..STRIDED + 3).zip([3, 0, 7]) {
        cluster.node_mut(A).landing.save_in_pieces(name, block);
    }
    // What lies in pieces here and there, with other pieces here, and what lies in one there.
    cluster.save(A, &[STRIDED + 3, STRIDED + 4]);
    let named: Vec<(u16, u32)> = (STRIDED..STRIDED + 5).zip([5, 6, 1, 4, 0]).collect();
    let outcomes = fetch_into(&mut cluster, &named);
    for ((name, block), outcome) in named.iter().zip(&outcomes) {
        let place = cluster.node_mut(B).landing.place_in_cache(*block);
        assert_eq!(lies_at(outcome), place);
        assert_eq!((cluster.node(A).rank(*name), cluster.node(B).rank(*name)), (2, 1));
        assert_eq!((cluster.node(A).pins(*name), cluster.node(B).pins(*name)), (0, 1));
    }
    let used = cluster.node(B).landing.pool.space().usage().used;
    assert_eq!(used, 8192, "the pool has the cache alone");
    // From there they are lent in pieces.
    let names: Vec<u16> = named.iter().map(|(name, _)| *name).collect();
    assert!(cluster.fetch(2, B, &names).iter().all(is_ready));
    assert_eq!((cluster.node(A).leases(), cluster.node(B).leases()), (0, 0));
}

#[test]
fn a_block_that_does_not_fit_its_place_or_has_none_fails_alone() {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(A, &[STRIDED, 1]);
    let outcomes = fetch_into(&mut cluster, &[(STRIDED, 2), (1, 3), (STRIDED + 1, 4)]);
    assert!(is_ready(&outcomes[0]), "{outcomes:?}");
    assert_eq!(outcomes[1], FetchOutcome::Failed(Scope::Request), "another length");
    assert_eq!(outcomes[2], FetchOutcome::NotFound);
    assert_eq!(cluster.node(A).pins(1), 0);
    // A place in a cache that nothing can land in, as one whose GPU is lost.
    let mut cluster = Cluster::new(2, Shape::default());
    let place = cluster.node_mut(B).landing.place_in_cache(0);
    cluster.node_mut(B).landing.cache = None;
    cluster.save(A, &[STRIDED + 2]);
    let now = cluster.now();
    let id = cluster.node_mut(B).fetch_into(A, (&[STRIDED + 2], vec![place]), now);
    assert_eq!(cluster.finish(B, id).outcomes, [FetchOutcome::Failed(Scope::Local)]);
    cluster.run_until(Duration::from_secs(1), |cluster| cluster.node(A).pins(STRIDED + 2) == 0);
    assert_eq!((cluster.node(A).leases(), cluster.node(A).rank(STRIDED + 2)), (0, 1));
}

#[test]
fn wrong_bytes_in_a_place_are_not_published_and_the_place_can_be_used_again() {
    let mut cluster = Cluster::new(2, Shape::default());
    let (damaged, whole) = (STRIDED, STRIDED + 1);
    cluster.save(A, &[damaged, whole]);
    // From here on the rule that residents hold their true bytes is broken at A, on purpose.
    cluster.node(A).corrupt(damaged);
    begin_fetch_into(&mut cluster, &[(damaged, 2), (whole, 3)]);
    while cluster.node(B).fetched.is_empty() {
        cluster.turn();
        let next = cluster.next().unwrap();
        cluster.network.advance_to(next);
    }
    let outcomes = cluster.node_mut(B).fetched.pop().unwrap().outcomes;
    assert!(is_failed(&outcomes[0], Scope::Peer), "{outcomes:?}");
    assert!(is_ready(&outcomes[1]), "{outcomes:?}");
    assert_eq!((cluster.node(A).rank(damaged), cluster.node(B).rank(damaged)), (1, 0));
    let mismatches = cluster.node(B).log.count(|event| *event == Event::ChecksumMismatch);
    assert_eq!(mismatches, 1);
    // The damaged one goes last, as nobody else has it.
    assert!((0..2).all(|_| cluster.node_mut(A).landing.evict().is_some()));
    cluster.save(A, &[STRIDED + 2]);
    let again = fetch_into(&mut cluster, &[(STRIDED + 2, 2)]);
    assert!(is_ready(&again[0]), "{again:?}");
}

#[test]
fn a_place_belongs_to_its_reads_until_the_last_one_has_ended() {
    // The cluster checks after every step that no READ may land where nobody owns the memory.
    for silence in [3, 30, 100, 300, 1000, 2000].map(Duration::from_micros) {
        let mut cluster = Cluster::new(2, Shape::default());
        let named: Vec<(u16, u32)> = (STRIDED..STRIDED + 8).zip(0..).collect();
        cluster.save(A, &named.iter().map(|(name, _)| *name).collect::<Vec<_>>());
        let id = begin_fetch_into(&mut cluster, &named);
        cluster.run_for(silence);
        cluster.crash(A);
        let outcomes = cluster.finish(B, id).outcomes;
        let whole = outcomes.iter().filter(|outcome| is_ready(outcome)).count();
        let failed = outcomes.iter().filter(|outcome| is_failed(outcome, Scope::Path));
        assert_eq!(whole + failed.count(), 8, "{outcomes:?}");
    }
}

/// A holds blocks in pieces; a stranger is connected to it.
fn holder(shape: Shape) -> (Cluster, Stranger, ConnectionId) {
    let mut cluster = Cluster::new(1, shape);
    for block in 0..4_u16 {
        cluster.node_mut(A).landing.save_in_pieces(STRIDED + block, block.into());
    }
    let mut stranger = Stranger::new(&cluster, B);
    let on = stranger.shake_hands(&mut cluster, A);
    (cluster, stranger, on)
}

#[test]
fn a_layout_is_told_once_before_the_first_lease_that_names_it() {
    let (mut cluster, mut stranger, on) = holder(Shape::default());
    cluster.save(A, &[1]);
    stranger.lend(&mut cluster, on, &[1]);
    let ask = |stranger: &mut Stranger, cluster: &mut Cluster, block: u16| {
        let hashes = [super::cluster::key_of(STRIDED + block).hash.into()];
        let (request, namespace) = (RequestId(9), super::cluster::key_of(0).namespace);
        stranger.say(on, &Message::Lend { request, namespace, hashes: &hashes });
        let told = |m: &Message<'_>| matches!(m, Message::Layout { .. } | Message::Lease { .. });
        stranger.hear_a(cluster, on, told)
    };
    let told = ask(&mut stranger, &mut cluster, 2);
    let Message::Layout { number, blocks, regions, tensors } = told.message() else {
        panic!("{:?}", told.message())
    };
    assert_eq!((number, blocks, regions.len(), tensors.len()), (LAYOUT, 8, 1, 1));
    let tensors: Vec<Tensor> = tensors.iter().map(TensorEntry::tensor).collect();
    let layout = Layout::readable(tensors, blocks, |_| Some(regions[0].len())).unwrap();
    let region = regions[0];
    let lease = stranger.hear_a(&mut cluster, on, |m| matches!(m, Message::Lease { .. }));
    let Message::Lease { loans, .. } = lease.message() else { unreachable!() };
    let Loan::Ready { place: Place::Block { layout: LAYOUT, block, len }, checksum, .. } =
        loans[0].loan()
    else {
        panic!("{loans:?}")
    };
    assert_eq!((block, len), (BlockId(2), layout.block_bytes()));
    assert_eq!(checksum, checksum_bytes(&bytes_of(STRIDED + 2)));
    let mut bytes = Vec::new();
    for segment in layout.segments(block) {
        let (rkey, address, len) = (region.rkey(), region.address() + segment.offset, segment.len);
        let piece = crate::fabric::RemoteSpan { rkey, address, len };
        assert_eq!(stranger.read(&mut cluster, on, piece), CompletionStatus::Success);
        let mut part = vec![0; len as usize];
        stranger.pool.mapping().read(0, &mut part).unwrap();
        bytes.extend(part);
    }
    assert!(bytes == bytes_of(STRIDED + 2));
    let again = ask(&mut stranger, &mut cluster, 3);
    assert!(matches!(again.message(), Message::Lease { .. }), "{:?}", again.message());
}

#[test]
fn where_leases_have_keys_of_their_own_a_block_in_pieces_is_not_lent() {
    let mut shape = Shape::default();
    shape.network.windows = 8;
    let (mut cluster, mut stranger, on) = holder(shape);
    let (lease, loans) = stranger.lend(&mut cluster, on, &[STRIDED]);
    let refused = Loan::Busy(LendRefusal::Windows);
    assert_eq!((lease, loans[0].loan()), (LeaseId::NONE, refused));
    assert_eq!(cluster.node(A).pins(STRIDED), 0);
}

/// What a holder may say of a block in pieces.
struct Says {
    told: u32,
    named: u32,
    block: u32,
    len: u32,
    tensor: Tensor,
}

const HONEST: fn() -> Says =
    || Says { told: TOLD, named: TOLD, block: 6, len: 512, tensor: cache_tensor(256) };

/// B fetches a block of a stranger, which tells a layout and lends a block of it; B's outcome.
fn fetched_from(says: &Says) -> (Cluster, FetchOutcome) {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.crash(A);
    let mut holder = Stranger::new(&cluster, A);
    let honest = Layout::new(vec![cache_tensor(256)], 8, |_| Some(holder.region.len)).unwrap();
    let bytes = bytes_of(STRIDED);
    let mut rest = bytes.as_slice();
    for segment in honest.segments(BlockId(6)) {
        let (now, later) = rest.split_at(segment.len as usize);
        holder.pool.mapping().write(segment.offset, now).unwrap();
        rest = later;
    }
    let id = cluster.begin_fetch(B, A, &[STRIDED]);
    let on = holder.welcome(&mut cluster);
    let said = holder.hear_a(&mut cluster, on, |m| matches!(m, Message::Lend { .. }));
    let Message::Lend { request, .. } = said.message() else { unreachable!() };
    let (regions, tensors) =
        ([RegionEntry::from(&holder.region)], [TensorEntry::from(&says.tensor)]);
    let (number, blocks) = (says.told, 8);
    let layout = Message::Layout { number, blocks, regions: &regions, tensors: &tensors };
    holder.say(on, &layout);
    let loans = [LoanEntry::from(Loan::Ready {
        rank: EvictionRank::FIRST,
        generation: Generation(1),
        place: Place::Block { layout: says.named, block: BlockId(says.block), len: says.len },
        checksum: checksum_bytes(&bytes),
    })];
    let (lease, ttl_ms) = (LeaseId(77), 900);
    holder
        .say(on, &Message::Lease { request, lease, ttl_ms, load: Load::default(), loans: &loans });
    let fetched = cluster.finish(B, id);
    assert!(cluster.network.landing(endpoint(B)).is_empty());
    cluster.node(B).peers.release(&fetched);
    (cluster, fetched.outcomes[0])
}

#[test]
fn a_holder_that_names_what_it_has_not_told_loses_its_connection() {
    let (_, outcome) = fetched_from(&HONEST());
    assert!(is_ready(&outcome), "{outcome:?}");
    let lies = [
        Says { named: TOLD + 1, ..HONEST() },
        Says { block: 8, ..HONEST() },
        Says { len: 511, ..HONEST() },
        Says { tensor: Tensor { layer_stride: 16 << 10, ..cache_tensor(256) }, ..HONEST() },
        Says { tensor: Tensor { layers: 0, ..cache_tensor(256) }, ..HONEST() },
    ];
    for (at, lie) in lies.iter().enumerate() {
        let (cluster, outcome) = fetched_from(lie);
        assert!(is_failed(&outcome, Scope::Peer), "{at}: {outcome:?}");
        let violations = cluster.node(B).log.count(|event| *event == Event::ProtocolViolation);
        assert_eq!(violations, 1, "{at}");
    }
}
