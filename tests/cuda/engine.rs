//! Memory of a local engine: imported once, copied in strides both ways, and gone with its last copy.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use kvrail::cuda::{
    Context, CudaError, DeviceMemory, Driver, EngineDevices, HostRegistration, OnLoss,
};
use kvrail::memory::{
    Claims, CopyError, Direction, EngineMemory, ImportError, Mapping, Owner, StridedCopy,
};
use kvrail::protocol::door::{DeviceUuid, EngineEvent, MemorySource};

use crate::cuda_standin::StandIn;
use crate::sharing::{Engine, LEN};

const POOL: u64 = 1 << 20;

struct Node {
    devices: EngineDevices,
    device: DeviceUuid,
    pool: Arc<Mapping>,
    claims: Claims,
    owner: Arc<Owner>,
}

impl Node {
    fn new(standin: &StandIn) -> Self {
        let driver = Driver::open(standin.library()).unwrap();
        let device = DeviceUuid(driver.device(0).unwrap().attributes().uuid);
        let pool = Arc::new(Mapping::anonymous("test", POOL).unwrap());
        let devices = EngineDevices::new(driver, &[Arc::clone(&pool)], None).unwrap();
        Self { devices, device, pool, claims: Claims::default(), owner: Arc::default() }
    }

    /// One that uses a GPU itself, and wants to hear of its loss.
    fn sharing(standin: &StandIn, ordinal: u32, on_loss: &Arc<Losses>) -> Self {
        let driver = Driver::open(standin.library()).unwrap();
        let device = DeviceUuid(driver.device(0).unwrap().attributes().uuid);
        let pool = Arc::new(Mapping::anonymous("test", POOL).unwrap());
        let context = Context::primary(&driver.device(ordinal).unwrap()).unwrap();
        let host = HostRegistration::new(&context.bind().unwrap(), &pool).unwrap();
        let on_loss = Arc::clone(on_loss) as Arc<dyn OnLoss>;
        let devices = EngineDevices::sharing(context, [host].into(), Some(on_loss));
        Self { devices, device, pool, claims: Claims::default(), owner: Arc::default() }
    }

    fn import(
        &self,
        device: DeviceUuid,
        handle: [u8; 64],
    ) -> Result<Arc<dyn EngineMemory>, ImportError> {
        let source = MemorySource::CudaIpc { device, handle };
        self.devices.import((&source, LEN), None, (&self.claims, &self.owner))
    }

    fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.pool.read(offset, &mut bytes).unwrap();
        bytes
    }
}

/// The GPUs whose loss was told of.
#[derive(Debug, Default)]
struct Losses(Mutex<BTreeSet<DeviceUuid>>);

impl OnLoss for Losses {
    fn lost(&self, gpu: DeviceUuid, error: &CudaError) {
        assert!(error.is_lost(), "{error}");
        self.0.lock().unwrap().insert(gpu);
    }
}

/// Three rows of 512 bytes, 4 KiB apart in the engine's memory, side by side in the pool.
const COPY: StridedCopy = StridedCopy {
    memory_offset: 8192,
    memory_pitch: 4096,
    pool_offset: 1024,
    pool_pitch: 512,
    width: 512,
    rows: 3,
};

#[test]
fn rows_are_copied_both_ways_on_a_stream_of_the_memorys_own() {
    let Some(standin) = StandIn::new() else { return };
    let (engine, node) = (Engine::start(&standin), Node::new(&standin));
    let memory = node.import(node.device, engine.memory.0).unwrap();
    assert_eq!(memory.bytes(), LEN);
    let mut copier = memory.copier().unwrap();
    copier.wait_for(&EngineEvent(engine.event.0)).unwrap();
    assert_eq!(standin.calls("cuStreamWaitEvent"), 1);
    copier.start(Direction::Save, (&*memory, &[COPY]), &node.pool).unwrap();
    copier.finish().unwrap();
    let want = [vec![0; 1024], vec![7; 1536], vec![0; 1024]].concat();
    assert!(node.bytes(0, want.len()) == want);
    assert_eq!(standin.calls("cuMemcpy2DAsync_v2"), 1, "one copy for all rows");

    // Into the engine's memory, and out again with what lies between the rows.
    node.pool.write(1024, &[9; 1536]).unwrap();
    copier.start(Direction::Load, (&*memory, &[COPY]), &node.pool).unwrap();
    let all =
        StridedCopy { pool_offset: 64 << 10, width: 12288, rows: 1, pool_pitch: 12288, ..COPY };
    copier.start(Direction::Save, (&*memory, &[all]), &node.pool).unwrap();
    copier.finish().unwrap();
    let row = [vec![9; 512], vec![7; 4096 - 512]].concat();
    assert!(node.bytes(64 << 10, 12288) == row.repeat(3));

    let beyond = StridedCopy { memory_offset: LEN - 8192, ..COPY };
    let refused = copier.start(Direction::Save, (&*memory, &[beyond]), &node.pool).unwrap_err();
    assert!(matches!(refused, CopyError::Device { .. }), "{refused}");
    let other = Arc::new(Mapping::anonymous("test", POOL).unwrap());
    assert!(
        copier.start(Direction::Save, (&*memory, &[COPY]), &other).is_err(),
        "no pool of this node"
    );
    // The stream is kept for the next batch.
    let streams = standin.calls("cuStreamCreate");
    drop(copier);
    let mut copier = memory.copier().unwrap();
    assert_eq!(standin.calls("cuStreamCreate"), streams);
    // Any number of batches, without a wait between them.
    for _ in 0..100 {
        copier.start(Direction::Load, (&*memory, &[COPY]), &node.pool).unwrap();
    }
    copier.finish().unwrap();
}

#[test]
fn memory_is_imported_once_and_from_a_gpu_that_is_here() {
    let Some(standin) = StandIn::new() else { return };
    let (engine, node) = (Engine::start(&standin), Node::new(&standin));
    let memory = node.import(node.device, engine.memory.0).unwrap();
    let again = node.import(node.device, engine.memory.0).unwrap_err();
    assert!(matches!(again, ImportError::AlreadyImported), "{again}");
    let elsewhere = node.import(DeviceUuid([0x77; 16]), [1; 64]).unwrap_err();
    assert!(matches!(elsewhere, ImportError::OtherDevice(_)), "{elsewhere}");
    let nonsense = node.import(node.device, [9; 64]).unwrap_err();
    assert!(matches!(nonsense, ImportError::System { .. }), "{nonsense}");
    assert_eq!(node.claims.len(), 2, "the handle and the address of what is imported");
    node.owner.end();
    let leaving = node.import(node.device, engine.memory.0).unwrap_err();
    assert!(matches!(leaving, ImportError::Leaving), "{leaving}");
    drop(memory);
    assert!(node.claims.is_empty());
    node.import(node.device, engine.memory.0).unwrap();
}

#[test]
fn memory_that_is_passed_by_descriptor_twice_is_two_imports_each_with_an_end_of_its_own() {
    let Some(standin) = StandIn::new() else { return };
    let node = Node::new(&standin);
    let context = crate::context(&standin);
    let bound = context.bind().unwrap();
    let memory = DeviceMemory::allocate(&bound, LEN).unwrap();
    let source = MemorySource::CudaShareable { device: node.device };
    let import = || {
        let fd = memory.export(&bound).unwrap();
        let engine = (&node.claims, &node.owner);
        node.devices.import((&source, memory.len()), Some(fd), engine).unwrap()
    };
    let (one, other) = (import(), import());
    let mut copier = one.copier().unwrap();
    node.pool.write(1024, &[5; 1536]).unwrap();
    copier.start(Direction::Load, (&*one, &[COPY]), &node.pool).unwrap();
    copier.finish().unwrap();
    drop(copier);
    drop(one);
    // The same bytes, by the other one's own mapping.
    node.pool.write(1024, &[0; 1536]).unwrap();
    let mut copier = other.copier().unwrap();
    copier.start(Direction::Save, (&*other, &[COPY]), &node.pool).unwrap();
    copier.finish().unwrap();
    assert_eq!(node.bytes(1024, 1536), [5; 1536]);
    drop(copier);
    drop(other);
    assert!(node.claims.is_empty());
}

#[test]
fn memory_of_a_dead_engine_stays_until_its_last_copy_has_ended() {
    let Some(standin) = StandIn::new() else { return };
    let (engine, node) = (Engine::start(&standin), Node::new(&standin));
    let memory = node.import(node.device, engine.memory.0).unwrap();
    standin.control("cuMemcpy2DAsync_v2 late 200");
    let mut copier = memory.copier().unwrap();
    copier.start(Direction::Save, (&*memory, &[COPY]), &node.pool).unwrap();
    engine.kill();
    // Dropped in the middle of a copy: the copy ends first, then the memory is closed.
    drop(copier);
    assert_eq!(node.bytes(1024, 1536), [7; 1536]);
    assert_eq!(standin.calls("cuIpcCloseMemHandle"), 0);
    drop(memory);
    assert_eq!(standin.calls("cuIpcCloseMemHandle"), 1);
}

#[test]
fn a_lost_device_fails_its_copies_and_nothing_hangs() {
    let Some(standin) = StandIn::new() else { return };
    let (engine, node) = (Engine::start(&standin), Node::new(&standin));
    let memory = node.import(node.device, engine.memory.0).unwrap();
    standin.control("cuMemcpy2DAsync_v2 lose 719");
    let mut copier = memory.copier().unwrap();
    let begun = copier.start(Direction::Save, (&*memory, &[COPY]), &node.pool);
    let ended = copier.finish();
    assert!(begun.is_err() || ended.is_err());
    drop(copier);
    drop(memory);
    assert!(node.claims.is_empty());
}

#[test]
fn the_loss_of_a_gpu_is_told_at_once_whoever_uses_it() {
    let Some(standin) = StandIn::new() else { return };
    standin.control("set devices 2");
    // The node's own, and one that only engines have memory on.
    for ordinal in [0, 1] {
        standin.control("set devices 2");
        let losses = Arc::new(Losses::default());
        let engine = Engine::start(&standin);
        // The engine's memory lies on GPU 0.
        let node = Node::sharing(&standin, ordinal, &losses);
        let memory = node.import(node.device, engine.memory.0).unwrap();
        let heard = || losses.0.lock().unwrap().clone();
        standin.control("set devices 2\ncuMemcpy2DAsync_v2 fail 801");
        let mut copier = memory.copier().unwrap();
        copier.start(Direction::Save, (&*memory, &[COPY]), &node.pool).unwrap_err();
        assert!(heard().is_empty(), "what is refused is no loss");
        standin.control("set devices 2\ncuMemcpy2DAsync_v2 fail 719");
        copier.start(Direction::Save, (&*memory, &[COPY]), &node.pool).unwrap_err();
        assert_eq!(heard(), BTreeSet::from([node.device]), "GPU {ordinal}");
    }
}
