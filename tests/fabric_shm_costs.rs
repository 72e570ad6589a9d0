//! What shared memory costs: no allocation per block, and nothing that stays.
//!
//! Alone in its process, since it counts all descriptors and mappings of the process; its tests take
//! turns for the same reason.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

mod leased;

use std::fs;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvrail::fabric::{
    Access, CompletionStatus, ConnectionId, EventBatch, Fabric, FabricEvent, ReadBatch, ReadWork,
    Region, RegisteredSpan, WrId,
};
use kvrail::memory::Mapping;
use kvrail::shm::{PeerEndpoint, ShmConfig, ShmFabric, ShmName, WithShm};
use kvrail::sys::allocations::{Counting, of_thread};
use kvrail::tcp::{TcpConfig, TcpFabric};
use kvrail::types::NodeId;

#[global_allocator]
static COUNTING: Counting = Counting;

fn in_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

type Fabrics = WithShm<TcpFabric>;

fn node(which: u8) -> NodeId {
    let mut id = [which; 16];
    id.iter_mut().zip(std::process::id().to_le_bytes()).for_each(|(to, from)| *to = from);
    NodeId(id)
}

fn fabric(which: u8) -> Fabrics {
    let listen = Some(ShmName::of_node(node(which)));
    let near = ShmFabric::new(&ShmConfig { listen, ..ShmConfig::default() }).unwrap();
    let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let far = TcpFabric::new(TcpConfig { listen, ..TcpConfig::default() }).unwrap();
    WithShm::new(far, Ok(near), false).unwrap()
}

fn to(fabric: &Fabrics, which: u8) -> PeerEndpoint<SocketAddr> {
    PeerEndpoint { node: node(which), address: fabric.far().local_addr().unwrap() }
}

fn poll(fabric: &mut Fabrics, batch: &mut EventBatch) {
    batch.clear();
    fabric.poll(batch, Duration::from_millis(1)).unwrap();
}

/// A holder's fabric and a reader's, connected and admitted.
struct Ends {
    holder: Fabrics,
    reader: Fabrics,
    at_holder: ConnectionId,
    at_reader: ConnectionId,
}

fn connect(mut holder: Fabrics, mut reader: Fabrics) -> Ends {
    let endpoint = to(&holder, 1);
    let at_reader = reader.connect(&endpoint).unwrap();
    let mut batch = EventBatch::default();
    let (mut at_holder, mut is_up) = (None, false);
    while at_holder.is_none() || !is_up {
        poll(&mut holder, &mut batch);
        for event in &batch.events {
            if let FabricEvent::Accepted { connection } = *event {
                at_holder = Some(connection);
            }
        }
        poll(&mut reader, &mut batch);
        let up = FabricEvent::Connected { connection: at_reader };
        is_up |= batch.events.contains(&up);
    }
    let at_holder = at_holder.unwrap();
    assert_eq!(reader.transport(at_reader), "shm");
    holder.admit(at_holder).unwrap();
    reader.admit(at_reader).unwrap();
    Ends { holder, reader, at_holder, at_reader }
}

fn memory(len: u64) -> Arc<Mapping> {
    Arc::new(Mapping::anonymous("kvrail-test-costs", len).unwrap())
}

const BLOCK: u32 = 64 << 10;
const BLOCKS: u32 = 64;

/// One batch, as a lease of 64 blocks makes one: posted, and polled until all have completed; then a
/// message each way.
fn round(ends: &mut Ends, (remote, local): (&Region, &Region), keep: &mut (ReadBatch, EventBatch)) {
    let (reads, events) = keep;
    reads.clear();
    for block in 0..BLOCKS {
        let offset = u64::from(block * BLOCK);
        reads.works.push(ReadWork {
            wr_id: WrId { slot: block, generation: 1 },
            remote: remote.remote(offset, BLOCK).unwrap(),
            segments: 2,
        });
        for half in [0, BLOCK / 2] {
            let (region, offset, len) = (local.id, offset + u64::from(half), BLOCK / 2);
            reads.segments.push(RegisteredSpan { region, offset, len });
        }
    }
    ends.reader.post(ends.at_reader, reads).unwrap();
    let mut done = 0;
    while done < BLOCKS {
        poll(&mut ends.reader, events);
        for event in &events.events {
            let FabricEvent::Completed(completion) = event else { panic!("{event:?}") };
            assert_eq!(completion.status, CompletionStatus::Success);
            done += 1;
        }
    }
    ends.reader.send(ends.at_reader, &[7; 600]).unwrap();
    poll(&mut ends.holder, events);
    assert_eq!(events.bytes, [7; 600]);
    ends.holder.send(ends.at_holder, &[8; 600]).unwrap();
    poll(&mut ends.reader, events);
    assert_eq!(events.bytes, [8; 600]);
}

#[test]
fn a_block_costs_no_allocation() {
    let _turn = in_turn();
    let mut ends = connect(fabric(1), fabric(2));
    let bytes = u64::from(BLOCK * BLOCKS);
    let remote = ends.holder.register(memory(bytes), Access::RemoteRead).unwrap();
    let local = ends.reader.register(memory(bytes), Access::Local).unwrap();
    let mut keep = (ReadBatch::default(), EventBatch::default());
    // Queues and buffers grow to what they need.
    for _round in 0..4 {
        round(&mut ends, (&remote, &local), &mut keep);
    }
    let before = of_thread();
    for _round in 0..50 {
        round(&mut ends, (&remote, &local), &mut keep);
    }
    let made = of_thread() - before;
    assert_eq!(made, 0, "allocations in 50 batches of {BLOCKS} blocks and 100 messages");
    // The count counts.
    drop(Box::new(7_u64));
    assert!(of_thread() > before);
}

#[test]
fn a_leased_block_costs_no_allocation() {
    let _turn = in_turn();
    let (holder, requester) = (fabric(3), fabric(4));
    let endpoint = to(&holder, 3);
    leased::a_leased_block_costs_no_allocation((holder, requester), ((node(3), node(4)), endpoint));
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Mappings of memory files of ours.
fn mappings() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("/memfd:kvrail-")).count()
}

#[test]
fn connections_that_end_leave_no_descriptor_and_no_mapping() {
    let _turn = in_turn();
    let (mut holder, mut reader) = (fabric(1), fabric(2));
    for _region in 0..3 {
        holder.register(memory(8192), Access::RemoteRead).unwrap();
    }
    let before = (descriptors(), mappings());
    let mut batch = EventBatch::default();
    for which in 0..60 {
        let mut ends = connect(holder, reader);
        // The grants arrive, and are mapped.
        while mappings() < before.1 + 7 {
            poll(&mut ends.reader, &mut batch);
        }
        // Two sockets; three regions, and a page each way, mapped at both ends.
        assert_eq!((descriptors(), mappings()), (before.0 + 2, before.1 + 7));
        let (ender, other) = if which % 2 == 0 {
            ends.holder.close(ends.at_holder);
            (&mut ends.holder, &mut ends.reader)
        } else {
            ends.reader.close(ends.at_reader);
            (&mut ends.reader, &mut ends.holder)
        };
        for fabric in [ender, other] {
            let mut is_over = false;
            while !is_over {
                poll(fabric, &mut batch);
                is_over =
                    batch.events.iter().any(|event| matches!(event, FabricEvent::Closed { .. }));
            }
        }
        assert_eq!((descriptors(), mappings()), before, "after connection {which}");
        (holder, reader) = (ends.holder, ends.reader);
    }
}

#[test]
fn a_region_that_is_withdrawn_is_unmapped_by_its_readers() {
    let _turn = in_turn();
    let mut ends = connect(fabric(1), fabric(2));
    let mut batch = EventBatch::default();
    let before = (descriptors(), mappings());
    for _again in 0..100 {
        let held = memory(8192);
        let region = ends.holder.register(Arc::clone(&held), Access::RemoteRead).unwrap();
        while mappings() < before.1 + 2 {
            poll(&mut ends.reader, &mut batch);
        }
        ends.holder.deregister(region.id);
        assert_eq!(Arc::strong_count(&held), 1, "the fabric lets go of it");
        drop(held);
        while mappings() > before.1 {
            poll(&mut ends.reader, &mut batch);
        }
        assert_eq!((descriptors(), mappings()), before);
    }
}
