//! Device memory of local engines: imported by handle or descriptor, copied from and to by the GPU's
//! copy engines.
//!
//! Whoever copies has a stream of a GPU to itself ([`CopyQueue`]), for all allocations on that GPU: an
//! engine has one for each layer, and a wait for each of them would take longer than their copies. The
//! stream is kept for the next one. A save waits, on that stream, for the event that the engine recorded
//! behind the work that wrote the blocks; what it has copied is published only after the stream has come
//! to its end, and so after the engine's event. An allocation stays open here until the last copy has
//! ended, whatever became of the engine: the queue holds it.
//!
//! A handle names its allocation, so that one which is imported already is refused. A descriptor says
//! nothing of whose memory it is: passed twice, it is imported twice, each time at addresses of its own
//! and until its own end, and what two layouts write to the same bytes is their engines' affair.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{
    Bound, Context, CopyQueue, CudaError, Device, DeviceMemory, Driver, End, Event,
    HostRegistration, IpcEventHandle, IpcMemoryHandle, Piece,
};
use crate::layout::{BlockId, Layout};
use crate::memory::{
    Claim, Claims, Copier, CopyError, Direction, EngineMemory, ExportRefused, ExportedRange,
    ForeignMemory, Identity, ImportError, Mapping, Owner, Registrable, StridedCopy,
};
use crate::protocol::door::{DeviceUuid, EngineEvent, MemorySource};
use crate::sync::{Mutex, lock};

/// Longest distance of rows that a two-dimensional copy takes: `CU_DEVICE_ATTRIBUTE_MAX_PITCH` of every
/// GPU. Rows that lie farther apart are copied one by one.
const PITCH_MAX: u64 = (1 << 31) - 1;

/// Who is told that a GPU is lost ([`CudaError::is_lost`]), by the thread that notices it and before that
/// thread tells anybody else. It may be told more than once.
pub trait OnLoss: std::fmt::Debug + Send + Sync {
    /// This GPU is lost, which showed by this error.
    fn lost(&self, gpu: DeviceUuid, error: &CudaError);
}

/// This host's GPUs, for memory of engines. The pools are registered with the driver once.
#[derive(Debug)]
pub struct EngineDevices {
    driver: Arc<Driver>,
    gpus: Mutex<Vec<Arc<Gpu>>>,
    pools: Arc<[Arc<HostRegistration>]>,
    on_loss: Option<Arc<dyn OnLoss>>,
}

/// A GPU that engines have memory on.
#[derive(Debug)]
struct Gpu {
    uuid: DeviceUuid,
    /// Queues that nobody uses now: as many as have been used at once.
    idle: Mutex<Vec<CopyQueue>>,
    pools: Arc<[Arc<HostRegistration>]>,
    context: Arc<Context>,
    /// Who is to hear of its loss.
    on_loss: Option<Arc<dyn OnLoss>>,
}

impl Gpu {
    fn new(
        context: Arc<Context>,
        pools: &Arc<[Arc<HostRegistration>]>,
        on_loss: Option<Arc<dyn OnLoss>>,
    ) -> Arc<Self> {
        let uuid = uuid(context.device());
        Arc::new(Self { uuid, idle: Mutex::default(), pools: Arc::clone(pools), context, on_loss })
    }

    /// Tells of the GPU's loss, if that is what an error means.
    fn note(&self, error: &CudaError) {
        if error.is_lost()
            && let Some(on_loss) = &self.on_loss
        {
            on_loss.lost(self.uuid, error);
        }
    }

    fn failed(&self, error: &CudaError) -> CopyError {
        self.note(error);
        CopyError::Device { call: "copying between the GPU and a pool", error: error.to_string() }
    }
}

impl EngineDevices {
    /// Registers the pools with the driver, which pins them. `on_loss` hears of the loss of each GPU that
    /// memory is imported from.
    ///
    /// # Errors
    /// [`CudaError`] where there is no device, or it refuses the pools.
    pub fn new(
        driver: Arc<Driver>,
        pools: &[Arc<Mapping>],
        on_loss: Option<Arc<dyn OnLoss>>,
    ) -> Result<Self, CudaError> {
        let first = driver.device(0)?;
        let context = Context::primary(&first)?;
        let bound = context.bind()?;
        let register = |pool| HostRegistration::new(&bound, pool);
        let pools: Arc<[_]> = pools.iter().map(register).collect::<Result<_, _>>()?;
        drop(bound);
        Ok(Self::sharing(context, pools, on_loss))
    }

    /// As [`Self::new`], with pools that are registered already, and a GPU that somebody else uses too.
    /// Other GPUs have contexts of their own, and losses of their own.
    #[must_use]
    pub fn sharing(
        context: Arc<Context>,
        pools: Arc<[Arc<HostRegistration>]>,
        on_loss: Option<Arc<dyn OnLoss>>,
    ) -> Self {
        let driver = Arc::clone(context.device().driver());
        let gpus = Mutex::new(vec![Gpu::new(context, &pools, on_loss.clone())]);
        Self { driver, gpus, pools, on_loss }
    }

    /// Opens an allocation of this owner. `file` is the descriptor of a shareable one.
    ///
    /// # Errors
    /// [`ImportError`].
    pub fn import(
        &self,
        (source, bytes): (&MemorySource, u64),
        file: Option<OwnedFd>,
        (claims, owner): (&Claims, &Arc<Owner>),
    ) -> Result<Arc<dyn EngineMemory>, ImportError> {
        let device = match source {
            MemorySource::Memfd => return Err(ImportError::NotMemory),
            MemorySource::CudaIpc { device, .. } | MemorySource::CudaShareable { device } => device,
        };
        let mut held = Vec::new();
        if let MemorySource::CudaIpc { handle, .. } = source {
            held.push(claims.claim(Identity::Handle(*handle), owner)?);
        }
        let gpu = self.gpu(*device)?;
        let refused = |error| {
            gpu.note(&error);
            not_opened(&error)
        };
        let bound = gpu.context.bind().map_err(refused)?;
        let memory = match source {
            MemorySource::CudaIpc { handle, .. } => {
                DeviceMemory::open(&bound, IpcMemoryHandle(*handle)).map_err(refused)?
            }
            MemorySource::CudaShareable { .. } => {
                let file = file.ok_or(ImportError::NotMemory)?;
                DeviceMemory::import(&bound, &file, bytes).map_err(refused)?
            }
            MemorySource::Memfd => return Err(ImportError::NotMemory),
        };
        if memory.len() < bytes {
            return Err(ImportError::TooShort { got: memory.len(), said: bytes });
        }
        let identity = Identity::Cuda { device: device.0, address: memory.address() };
        // Drivers give one handle one address, however often it is opened.
        held.push(claims.claim(identity, owner)?);
        drop(bound);
        let given = Arc::new(Given { memory: Arc::clone(&memory), bytes });
        Ok(Arc::new(ImportedMemory { memory: End::Device(memory), given, gpu, _claims: held }))
    }

    /// The GPU of this identity.
    fn gpu(&self, wanted: DeviceUuid) -> Result<Arc<Gpu>, ImportError> {
        let mut gpus = lock(&self.gpus);
        if let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == wanted) {
            return Ok(Arc::clone(gpu));
        }
        let failed = |error: CudaError| ImportError::System {
            call: "looking for the GPU",
            error: error.to_string(),
        };
        let count = self.driver.device_count().map_err(failed)?;
        let mut seen = Vec::new();
        for ordinal in 0..count {
            let device = self.driver.device(ordinal).map_err(failed)?;
            if uuid(&device) == wanted {
                let context = Context::primary(&device).map_err(failed)?;
                let gpu = Gpu::new(context, &self.pools, self.on_loss.clone());
                gpus.push(Arc::clone(&gpu));
                return Ok(gpu);
            }
            seen.push(hex(uuid(&device)));
        }
        Err(ImportError::OtherDevice(format!(
            "the memory lies on GPU {}, and this node sees {}: start the node with the engine's \
             CUDA_VISIBLE_DEVICES, or without",
            hex(wanted),
            seen.join(", ")
        )))
    }
}

fn uuid(device: &Device) -> DeviceUuid {
    DeviceUuid(device.attributes().uuid)
}

fn hex(DeviceUuid(bytes): DeviceUuid) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Why memory could not be opened.
fn not_opened(error: &CudaError) -> ImportError {
    let said = error.to_string();
    match error {
        CudaError::WrongDevice { .. } => ImportError::OtherDevice(said),
        _ => ImportError::System { call: "opening the engine's memory", error: said },
    }
}

/// What an engine gave of an allocation: cards reach no byte beyond it.
#[derive(Debug)]
struct Given {
    memory: Arc<DeviceMemory>,
    bytes: u64,
}

impl ForeignMemory for Given {
    fn address(&self) -> u64 {
        self.memory.address()
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn pci(&self) -> Option<String> {
        ForeignMemory::pci(&*self.memory)
    }

    fn writable(&self) -> Result<(), ExportRefused> {
        ForeignMemory::writable(&*self.memory)
    }

    fn dma_buf(&self, offset: u64, len: u64) -> Result<ExportedRange, ExportRefused> {
        ForeignMemory::dma_buf(&*self.memory, offset, len)
    }
}

/// An engine's allocation, open here.
#[derive(Debug)]
struct ImportedMemory {
    memory: End,
    given: Arc<Given>,
    gpu: Arc<Gpu>,
    _claims: Vec<Claim>,
}

impl EngineMemory for ImportedMemory {
    fn bytes(&self) -> u64 {
        self.given.bytes
    }

    fn device(&self) -> Option<DeviceUuid> {
        Some(self.gpu.uuid)
    }

    fn copier(&self) -> Result<Box<dyn Copier + '_>, CopyError> {
        let gpu = &*self.gpu;
        let idle = lock(&gpu.idle).pop();
        let queue = match idle {
            Some(queue) => queue,
            None => {
                let made = gpu.context.bind().and_then(|bound| CopyQueue::new(&bound, 1));
                made.map_err(|error| gpu.failed(&error))?
            }
        };
        Ok(Box::new(DeviceCopier { gpu, queue: Some(queue) }))
    }

    fn registrable(&self) -> Registrable {
        Registrable::Foreign(Arc::clone(&self.given) as Arc<dyn ForeignMemory>)
    }
}

/// Copies by the GPU. A queue whose copies have all ended well is kept; any other one is dropped, which
/// waits for what is in flight.
#[derive(Debug)]
struct DeviceCopier<'a> {
    gpu: &'a Gpu,
    /// Until the end.
    queue: Option<CopyQueue>,
}

impl Drop for DeviceCopier<'_> {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.take_if(|queue| queue.is_idle()) {
            lock(&self.gpu.idle).push(queue);
        }
    }
}

impl DeviceCopier<'_> {
    fn with<R>(
        &mut self,
        work: impl FnOnce(&mut CopyQueue, &Bound<'_>) -> Result<R, CudaError>,
    ) -> Result<R, CopyError> {
        let Some(queue) = &mut self.queue else { return Err(CopyError::NoEvents) };
        let worked = self.gpu.context.bind().and_then(|bound| work(queue, &bound));
        worked.map_err(|error| self.gpu.failed(&error))
    }
}

impl Copier for DeviceCopier<'_> {
    fn wait_for(&mut self, event: &EngineEvent) -> Result<(), CopyError> {
        self.with(|queue, bound| {
            let event = Event::open(bound, IpcEventHandle(event.0))?;
            queue.wait_for(bound, &event)
        })
    }

    fn start(
        &mut self,
        direction: Direction,
        (memory, copies): (&dyn EngineMemory, &[StridedCopy]),
        pool: &Arc<Mapping>,
    ) -> Result<(), CopyError> {
        let memory: &dyn Any = memory;
        let memory = memory.downcast_ref::<ImportedMemory>();
        let memory = memory.filter(|memory| memory.gpu.uuid == self.gpu.uuid);
        let ImportedMemory { memory, .. } = memory.ok_or(CopyError::Elsewhere)?;
        let mut pools = self.gpu.pools.iter();
        let pool = pools.find(|registered| Arc::ptr_eq(registered.mapping(), pool));
        let pool = pool.cloned().ok_or_else(|| CopyError::Device {
            call: "copying",
            error: "the pool is not registered with the driver".to_owned(),
        })?;
        let host = End::Host(pool);
        let pieces: Vec<Piece> = copies.iter().flat_map(|copy| pieces(direction, copy)).collect();
        let ends = match direction {
            Direction::Save => (memory, &host),
            Direction::Load => (&host, memory),
        };
        self.with(|queue, bound| queue.begin(bound, ends, &pieces))
    }

    fn finish(&mut self) -> Result<(), CopyError> {
        self.with(|queue, bound| queue.drain(bound, &mut Vec::new()))
    }
}

/// One copy, or one for each row where rows lie too far apart.
fn pieces(direction: Direction, copy: &StridedCopy) -> impl Iterator<Item = Piece> + use<> {
    let copy = *copy;
    let far = copy.memory_pitch.max(copy.pool_pitch) > PITCH_MAX && copy.rows > 1;
    let (count, rows) = if far { (copy.rows, 1) } else { (1, copy.rows) };
    (0..u64::from(count)).map(move |row| {
        // Bounds are checked by the queue, for which a place beyond 64 bits is as wrong as any.
        let memory = copy.memory_offset.saturating_add(row.saturating_mul(copy.memory_pitch));
        let pool = copy.pool_offset.saturating_add(row.saturating_mul(copy.pool_pitch));
        let (memory, pool) = ((memory, copy.memory_pitch), (pool, copy.pool_pitch));
        let ((from, from_pitch), (to, to_pitch)) = match direction {
            Direction::Save => (memory, pool),
            Direction::Load => (pool, memory),
        };
        let (width, rows) = (copy.width.into(), rows.into());
        Piece { from, from_pitch, to, to_pitch, width, rows }
    })
}

/// The copies that bring a block of a layout together, in the order of its logical bytes: each with the
/// allocation that it comes from. Allocations that are no GPU's are left out.
pub fn rows<'a>(
    (layout, memory): (&'a Layout, &'a [Arc<dyn EngineMemory>]),
    block: BlockId,
) -> impl Iterator<Item = (Arc<DeviceMemory>, Piece)> + 'a {
    layout
        .rows(block)
        .filter_map(move |rows| {
            let memory = memory.get(usize::from(rows.allocation.0))?;
            let memory: &dyn Any = &**memory;
            let End::Device(memory) = &memory.downcast_ref::<ImportedMemory>()?.memory else {
                return None;
            };
            let copy = StridedCopy {
                memory_offset: rows.offset,
                memory_pitch: rows.pitch,
                pool_offset: rows.logical,
                pool_pitch: rows.logical_pitch,
                width: rows.width,
                rows: rows.count,
            };
            let memory = Arc::clone(memory);
            Some(pieces(Direction::Save, &copy).map(move |piece| (Arc::clone(&memory), piece)))
        })
        .flatten()
}
