//! Memory of another driver's device beside shared memory: as long as it is there, peers on this host
//! are reached as all others are.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use kvrail::fabric::{
    Access, Capabilities, CloseReason, CompletionStatus, ConnectionId, EventBatch, Fabric,
    FabricError, ReadBatch, Region, RegionId, Wake,
};
use kvrail::memory::{
    ExportRefused, ExportedRange, ForeignFabric, ForeignMemory, Mapping, Pinner, Registrable, Rung,
};
use kvrail::shm::{PeerEndpoint, ShmConfig, ShmFabric, WithShm};
use kvrail::sys::watch::Watch;
use kvrail::tcp::TcpFabric;

use super::super::conformance::{End, Harness, Pair, Read, batch, connect, memory_of, pump};
use super::{Beside, node, shm, tcp};

/// What lies in a device's memory.
const ON_DEVICE: u8 = 9;
const LEN: usize = 1 << 20;

/// The memory of a device, as far as anyone asks here.
#[derive(Debug)]
struct Device;

impl ForeignMemory for Device {
    fn address(&self) -> u64 {
        0
    }

    fn bytes(&self) -> u64 {
        LEN as u64
    }

    fn pci(&self) -> Option<String> {
        None
    }

    fn writable(&self) -> Result<(), ExportRefused> {
        Ok(())
    }

    fn dma_buf(&self, _offset: u64, _len: u64) -> Result<ExportedRange, ExportRefused> {
        Err(ExportRefused { call: "export".to_owned(), why: "there is none".to_owned() })
    }
}

/// TCP, and a way into devices' memory, which host memory stands in for.
struct Reaching {
    tcp: TcpFabric,
    device: Arc<Mapping>,
}

impl ForeignFabric for Reaching {
    type Pinned = <TcpFabric as ForeignFabric>::Pinned;

    fn pinner(&self, access: Access) -> Pinner<Self::Pinned> {
        let (pin, device) = (self.tcp.pinner(access), Registrable::Host(Arc::clone(&self.device)));
        Box::new(move |memory, rungs| match memory {
            Registrable::Host(_) => pin(memory, rungs),
            Registrable::Foreign(_) => pin(&device, rungs),
        })
    }

    fn adopt(&mut self, pinned: Self::Pinned) -> Result<Region, FabricError> {
        self.tcp.adopt(pinned)
    }

    fn disown(&mut self, region: RegionId) -> Option<Self::Pinned> {
        self.tcp.disown(region)
    }
}

impl Watch for Reaching {
    fn watch(&mut self, fd: BorrowedFd<'_>) -> Result<(), FabricError> {
        self.tcp.watch(fd)
    }

    fn take_watched(&mut self) -> bool {
        self.tcp.take_watched()
    }
}

impl Fabric for Reaching {
    type Endpoint = SocketAddr;
    type Memory = Mapping;

    fn capabilities(&self) -> Capabilities {
        self.tcp.capabilities()
    }

    fn register(&mut self, memory: Arc<Mapping>, access: Access) -> Result<Region, FabricError> {
        self.tcp.register(memory, access)
    }

    fn deregister(&mut self, region: RegionId) {
        self.tcp.deregister(region);
    }

    fn connect(&mut self, to: &SocketAddr) -> Result<ConnectionId, FabricError> {
        self.tcp.connect(to)
    }

    fn admit(&mut self, connection: ConnectionId) -> Result<(), FabricError> {
        self.tcp.admit(connection)
    }

    fn send(&mut self, connection: ConnectionId, message: &[u8]) -> Result<(), FabricError> {
        self.tcp.send(connection, message)
    }

    fn post(&mut self, connection: ConnectionId, batch: &ReadBatch) -> Result<(), FabricError> {
        self.tcp.post(connection, batch)
    }

    fn close(&mut self, connection: ConnectionId) {
        self.tcp.close(connection);
    }

    fn poll(&mut self, batch: &mut EventBatch, timeout: Duration) -> Result<(), FabricError> {
        self.tcp.poll(batch, timeout)
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.tcp.waker()
    }
}

/// A node whose cards reach devices' memory.
struct Cards;

type Node = End<Cards>;

fn fabric(near_only: bool) -> WithShm<Reaching> {
    let far = Reaching { tcp: tcp(), device: memory_of(&[ON_DEVICE; LEN]) };
    WithShm::new(far, Ok(shm(node())), near_only).unwrap()
}

impl Harness for Cards {
    type Fabric = WithShm<Reaching>;

    fn fabric() -> Self::Fabric {
        fabric(false)
    }

    fn endpoint(fabric: &Self::Fabric) -> PeerEndpoint<SocketAddr> {
        let name = fabric.near().unwrap().name().unwrap();
        let node = name.as_str().rsplit('/').next().unwrap().parse().unwrap();
        PeerEndpoint { node, address: fabric.far().tcp.local_addr().unwrap() }
    }

    fn nowhere() -> PeerEndpoint<SocketAddr> {
        Beside::nowhere()
    }
}

/// Registers memory of a device.
fn import(node: &mut Node) -> Region {
    let device: Arc<dyn ForeignMemory> = Arc::new(Device);
    let rungs = &[Rung::Peermem];
    let made = node.fabric.register_foreign(&device, Access::RemoteRead, rungs).unwrap();
    made.0.unwrap()
}

/// A READ of a whole region.
fn whole(slot: u32, from: &Region, into: &Region) -> Read {
    Read::same(slot, from, into, 0, u32::try_from(LEN).unwrap())
}

/// Connects one to the other: over what, and the connection at either end, both of which are admitted.
fn meet(a: &mut Node, b: &mut Node) -> (&'static str, ConnectionId, ConnectionId) {
    let (at_a, at_b) = connect(a, b);
    a.fabric.admit(at_a).unwrap();
    b.fabric.admit(at_b).unwrap();
    let way = a.fabric.transport(at_a);
    assert_eq!(b.fabric.transport(at_b), way);
    (way, at_a, at_b)
}

/// Reads a whole region of `b` at `a`.
fn bytes_of(a: &mut Node, b: &mut Node, at_a: ConnectionId, remote: &Region) -> Vec<u8> {
    let (local, memory) = a.region(&[0; LEN], Access::Local);
    let before = a.completions(at_a).len();
    a.fabric.post(at_a, &batch(&[whole(1, remote, &local)])).unwrap();
    pump(a, b, |a, _| a.completions(at_a).len() > before);
    let last = a.completions(at_a).last().map(|(_, status)| *status);
    assert_eq!(last, Some(CompletionStatus::Success));
    let bytes = Pair::<Cards>::bytes(&memory, 0, LEN);
    a.fabric.deregister(local.id);
    bytes
}

/// READs that ended well before the others were flushed: that no other end blames anybody.
fn blames_nobody(node: &Node, on: ConnectionId, posted: usize) {
    let done = node.completions(on);
    assert_eq!(done.len(), posted);
    let flushed = done.iter().skip_while(|(_, status)| *status == CompletionStatus::Success);
    let others = flushed.filter(|(_, status)| *status != CompletionStatus::Flushed).count();
    assert_eq!(others, 0, "{done:?}");
    assert!(done.last().is_some_and(|(_, status)| *status == CompletionStatus::Flushed));
    assert_eq!(node.closed(on), Some(CloseReason::Moved));
}

#[test]
fn shared_memory_makes_way_for_memory_that_cannot_be_mapped_and_comes_back() {
    const READS: u32 = 32;
    let Pair::<Cards> { mut a, mut b, at_a, at_b } = Pair::new();
    assert_eq!((a.fabric.transport(at_a), a.fabric.shared_memory()), ("shm", Ok(())));
    let (held, _) = b.region(&[7; LEN], Access::RemoteRead);
    let (own, _) = a.region(&[6; LEN], Access::RemoteRead);
    let ((to_a, _), (to_b, _)) =
        (a.region(&[0; LEN], Access::Local), b.region(&[0; LEN], Access::Local));
    // More in both directions than some polls copy.
    let reads = |from: &Region, into: &Region| {
        batch(&(0..READS).map(|slot| whole(slot, from, into)).collect::<Vec<_>>())
    };
    a.fabric.post(at_a, &reads(&held, &to_a)).unwrap();
    b.fabric.post(at_b, &reads(&own, &to_b)).unwrap();
    pump(&mut a, &mut b, |a, b| !a.completions(at_a).is_empty() && !b.completions(at_b).is_empty());

    let device = import(&mut b);
    // At once: nothing can be said on it any more, and so of the device's memory neither.
    assert!(matches!(b.fabric.send(at_b, b"of the device"), Err(FabricError::Closed)));
    assert!(b.fabric.shared_memory().unwrap_err().contains("GPU memory"));
    pump(&mut a, &mut b, |a, b| a.closed(at_a).is_some() && b.closed(at_b).is_some());
    blames_nobody(&a, at_a, READS as usize);
    blames_nobody(&b, at_b, READS as usize);
    assert_eq!((a.messages(at_a).len(), a.fabric.shared_memory()), (0, Ok(())));
    // What a number was that means nothing any more.
    assert_eq!((a.fabric.transport(at_a), a.fabric.rails(at_a).len()), ("shm", 0));

    // Whoever connects, it is the far fabric, which reads both kinds of memory.
    let (later, _) = b.region(&[8; LEN], Access::RemoteRead);
    let (way, by_far, _) = meet(&mut a, &mut b);
    assert_eq!(way, "tcp");
    for (region, byte) in [(&held, 7), (&device, ON_DEVICE), (&later, 8)] {
        assert!(bytes_of(&mut a, &mut b, by_far, region) == [byte; LEN]);
    }
    assert_eq!(meet(&mut b, &mut a).0, "tcp");

    b.fabric.disown(device.id);
    assert_eq!(b.fabric.shared_memory(), Ok(()));
    // What is there stays; what is new is near again, with all that can be mapped.
    assert!(bytes_of(&mut a, &mut b, by_far, &held) == [7; LEN]);
    let (way, by_near, _) = meet(&mut a, &mut b);
    assert_eq!(way, "shm");
    for (region, byte) in [(&held, 7), (&later, 8)] {
        assert!(bytes_of(&mut a, &mut b, by_near, region) == [byte; LEN]);
    }
    assert_eq!(meet(&mut b, &mut a).0, "shm");
}

/// However far the peer's attempt has come.
#[test]
fn a_connection_in_the_making_goes_the_other_way() {
    for polls in 0..6 {
        let (mut a, mut b) = (Node::new(), Node::new());
        let at_a = a.fabric.connect(&Cards::endpoint(&b.fabric)).unwrap();
        assert_eq!(a.fabric.transport(at_a), "shm");
        for _poll in 0..polls {
            b.poll();
        }
        import(&mut b);
        pump(&mut a, &mut b, |a, _| a.closed(at_a).is_some());
        assert_eq!(a.closed(at_a), Some(CloseReason::Moved), "after {polls} polls");
        assert_eq!(meet(&mut a, &mut b).0, "tcp");
    }
}

#[test]
fn the_last_of_several_regions_brings_shared_memory_back() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let regions = [import(&mut b), import(&mut b), import(&mut b)];
    for region in regions {
        assert_eq!(meet(&mut a, &mut b).0, "tcp");
        b.fabric.deregister(region.id);
    }
    assert_eq!(meet(&mut a, &mut b).0, "shm");
    // A region that never was changes nothing.
    b.fabric.deregister(regions[0].id);
    assert_eq!(meet(&mut a, &mut b).0, "shm");
}

#[test]
fn a_name_that_somebody_took_meanwhile_leaves_the_far_fabric() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let region = import(&mut b);
    let listen = b.fabric.near().unwrap().name().cloned();
    let taken = ShmFabric::new(&ShmConfig { listen, ..ShmConfig::default() }).unwrap();
    b.fabric.deregister(region.id);
    let why = b.fabric.shared_memory().unwrap_err();
    assert!(why.contains("listening as"), "{why}");
    drop(taken);
    assert_eq!(meet(&mut a, &mut b).0, "tcp");
    // The next one to come and go finds it free.
    let region = import(&mut b);
    assert!(b.fabric.shared_memory().unwrap_err().contains("GPU memory"));
    b.fabric.deregister(region.id);
    assert_eq!(meet(&mut a, &mut b).0, "shm");
}

#[test]
fn where_nothing_else_is_wanted_a_device_is_out_of_reach() {
    let mut only = fabric(true);
    let device: Arc<dyn ForeignMemory> = Arc::new(Device);
    let rungs = &[Rung::DmaBuf, Rung::Peermem];
    let (region, climb) = only.register_foreign(&device, Access::RemoteRead, rungs).unwrap();
    assert_eq!((region, climb.refused.len()), (None, 2));
    let why = climb.why_not();
    assert!(why.contains("over shared memory alone"), "{why}");
    assert_eq!(only.shared_memory(), Ok(()));
}
