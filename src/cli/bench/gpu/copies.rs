//! The copies of an engine's memory as a node makes them: imported from another process by its handle,
//! copied to and from a pool that is registered with the driver once.

use std::sync::Arc;

use super::exporter::{Exporter, SEED};
use super::measure::in_turn;
use super::report::{Report, Row};
use super::{Run, pattern, uuid};
use crate::cli::CliError;
use crate::cuda::{DeviceMemory, EngineDevices};
use crate::memory::{Claims, Direction, EngineMemory, HostPool, PoolOptions, StridedCopy};
use crate::protocol::door::MemorySource;
use crate::types::PoolId;

/// Bytes of a row of strided copies: the keys or values of one layer in 16 tokens of 8 heads of 64.
const ROW: u32 = 16 << 10;

/// Memory of the process that is killed: as much as a driver gives away in one piece.
const KILLED_BYTES: usize = 2 << 20;

const SHAPES: [&str; 2] = ["in one piece", "rows of 16 KiB"];

/// What is copied between.
struct Scene {
    memory: Arc<dyn EngineMemory>,
    /// What is in it.
    image: Vec<u8>,
    pool: Arc<HostPool>,
    /// Behind the memory, which is closed before its process ends. `None` for memory of this process.
    exporter: Option<Exporter>,
    /// Why it is of this process.
    refused: Option<CliError>,
}

/// Measures both directions at each size, in one piece and in rows.
pub(super) fn run(run: &mut Run<'_>, report: &mut Report) -> Result<(), CliError> {
    // Rows lie as far apart as they are long.
    let bytes = 2 * run.sizes.copies.iter().copied().max().unwrap_or_default();
    let mut scene = Scene::new(run, bytes)?;
    let way = match &scene.refused {
        None => "imported by its IPC handle".to_owned(),
        Some(error) => format!("unsupported: {error}; copies are of this process's own"),
    };
    report.note("memory of another process", way);
    for shape in SHAPES {
        for direction in [Direction::Save, Direction::Load] {
            for bytes in run.sizes.copies.clone() {
                if run.is_over() {
                    return Ok(());
                }
                let row = scene.row(run, (direction, shape), bytes)?;
                report.rows.push(row);
                run.bench.step();
            }
        }
    }
    Ok(())
}

/// What becomes of imported memory when its process is killed. Last of all: a driver may take it badly.
pub(super) fn killed(run: &mut Run<'_>, report: &mut Report) -> Result<(), CliError> {
    const WHAT: &str = "after kill -9";
    let mut scene = Scene::new(run, KILLED_BYTES)?;
    let Some(mut exporter) = scene.exporter.take() else { return Ok(()) };
    exporter.kill();
    let outcome = match scene.is_whole() {
        Ok(true) => "imported memory is whole".to_owned(),
        Ok(false) => {
            report.wrong = true;
            "WRONG bytes in imported memory".to_owned()
        }
        Err(error) => format!("imported memory cannot be read: {error}"),
    };
    report.note(WHAT, outcome);
    Ok(())
}

impl Scene {
    fn new(run: &mut Run<'_>, bytes: usize) -> Result<Self, CliError> {
        let device = run.bound.context().device();
        let options = PoolOptions {
            id: PoolId(0),
            bytes: bytes as u64,
            huge_pages: None,
            lock: false,
            numa_node: None,
        };
        let pool = HostPool::create(&options).map_err(CliError::failed)?;
        let devices =
            EngineDevices::new(Arc::clone(device.driver()), &[Arc::clone(pool.mapping())], None)
                .map_err(CliError::failed)?;
        let imported = Exporter::start(run, bytes).and_then(|exporter| {
            let source = MemorySource::CudaIpc { device: uuid(device), handle: exporter.handle };
            let memory = devices.import(
                (&source, bytes as u64),
                None,
                (&Claims::default(), &Arc::default()),
            );
            Ok((memory.map_err(CliError::failed)?, exporter))
        });
        let (memory, exporter, refused) = match imported {
            Ok((memory, exporter)) => (memory, Some(exporter), None),
            Err(error) => (Self::own(run, &devices, bytes)?, None, Some(error)),
        };
        Ok(Self { memory, image: pattern(SEED, bytes), pool, exporter, refused })
    }

    /// Memory of this process by a descriptor, where none comes by a handle.
    fn own(
        run: &mut Run<'_>,
        devices: &EngineDevices,
        bytes: usize,
    ) -> Result<Arc<dyn EngineMemory>, CliError> {
        let bound = run.bound;
        let own = DeviceMemory::allocate(bound, bytes as u64).map_err(CliError::failed)?;
        let mut pinned = crate::cuda::PinnedMemory::new(bound, bytes).map_err(CliError::failed)?;
        pinned.write(&pattern(SEED, bytes)).map_err(CliError::failed)?;
        pinned.copy_to(bound, &own, bytes).map_err(CliError::failed)?;
        let fd = own.export(bound).map_err(CliError::failed)?;
        let source = MemorySource::CudaShareable { device: uuid(bound.context().device()) };
        let memory =
            devices.import((&source, own.len()), Some(fd), (&Claims::default(), &Arc::default()));
        memory.map_err(CliError::failed)
    }

    /// `bytes` bytes of the memory at the front of the pool.
    fn shape(&self, shape: &str, bytes: usize) -> StridedCopy {
        let len = u32::try_from(bytes).unwrap_or(u32::MAX);
        if shape == SHAPES[0] {
            return StridedCopy::row(0, 0, len);
        }
        let (pitch, rows) = (u64::from(ROW), len / ROW);
        StridedCopy {
            memory_pitch: 2 * pitch,
            pool_pitch: pitch,
            rows,
            ..StridedCopy::row(0, 0, ROW)
        }
    }

    fn copy(&self, direction: Direction, copy: StridedCopy) -> Result<(), CliError> {
        let copied = || {
            let mut copier = self.memory.copier()?;
            copier.start(direction, (&*self.memory, &[copy]), self.pool.mapping())?;
            copier.finish()
        };
        copied().map_err(CliError::failed)
    }

    /// The front of the pool.
    fn bytes(&self, len: usize) -> Result<Vec<u8>, CliError> {
        let mut bytes = vec![0; len];
        self.pool.mapping().read(0, &mut bytes).map_err(CliError::failed)?;
        Ok(bytes)
    }

    /// What is in the memory where a row of a copy lies.
    fn lies_at(&self, copy: &StridedCopy, row: usize, len: usize) -> Option<&[u8]> {
        self.image.get(place(copy, row, len))
    }

    fn row(
        &mut self,
        run: &mut Run<'_>,
        (direction, shape): (Direction, &'static str),
        bytes: usize,
    ) -> Result<Row, CliError> {
        let copy = self.shape(shape, bytes);
        if direction == Direction::Load {
            // New bytes each time, into the memory and into what is known of it.
            let fresh = pattern(&format!("{shape} {bytes}"), bytes);
            self.pool.mapping().write(0, &fresh).map_err(CliError::failed)?;
            for (row, from) in fresh.chunks(copy.width as usize).enumerate() {
                let range = place(&copy, row, from.len());
                if let Some(to) = self.image.get_mut(range) {
                    to.copy_from_slice(from);
                }
            }
        }
        let medians = {
            let mut driver = |run: &mut Run<'_>| {
                let (bound, beside) = (run.bound, Arc::clone(&run.beside));
                match direction {
                    Direction::Save => run.pinned.copy_from(bound, &beside, bytes),
                    Direction::Load => run.pinned.copy_to(bound, &beside, bytes),
                }
                .map_err(CliError::failed)
                .map(|()| None)
            };
            let mut kvrail = |_: &mut Run<'_>| self.copy(direction, copy).map(|()| None);
            in_turn(run, &mut driver, &mut kvrail)?
        };
        let what = match direction {
            Direction::Save => "copy out",
            Direction::Load => "copy in",
        };
        let arrived = self.bytes(bytes)?;
        let rows = arrived.chunks(copy.width as usize).enumerate();
        let right =
            |(row, bytes): (usize, &[u8])| self.lies_at(&copy, row, bytes.len()) == Some(bytes);
        let wrong = !rows.into_iter().all(right) || !self.is_whole()?;
        Ok(Row::new((what, shape), (bytes as u64, bytes as u64), medians, wrong))
    }

    /// Whether all of the memory is as it has to be: what was copied, and what lies between.
    fn is_whole(&self) -> Result<bool, CliError> {
        let all = u32::try_from(self.image.len()).map_err(CliError::failed)?;
        self.pool.mapping().write(0, &vec![0; self.image.len()]).map_err(CliError::failed)?;
        self.copy(Direction::Save, StridedCopy::row(0, 0, all))?;
        Ok(self.bytes(self.image.len())? == self.image)
    }
}

/// Where a row of a copy lies in the memory, as far as `len` goes.
fn place(copy: &StridedCopy, row: usize, len: usize) -> std::ops::Range<usize> {
    let at = row * usize::try_from(copy.memory_pitch).unwrap_or(usize::MAX);
    at..at + len
}
