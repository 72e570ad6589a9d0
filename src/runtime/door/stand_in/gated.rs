//! Memory of clients whose copies wait until a test lets them end.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex};

use crate::memory::{
    Copier, CopyError, Direction, EngineMemory, Mapping, Registrable, SharedMemory, StridedCopy,
};
use crate::protocol::door::{DeviceUuid, EngineEvent};

/// What copies of imported memory wait for before they end.
#[derive(Debug)]
pub(crate) struct Gate(Mutex<bool>, Condvar);

impl Default for Gate {
    fn default() -> Self {
        Self(Mutex::new(true), Condvar::new())
    }
}

impl Gate {
    pub(crate) fn set(&self, open: bool) {
        *self.0.lock().unwrap() = open;
        self.1.notify_all();
    }
}

#[derive(Debug)]
pub(super) struct Gated(SharedMemory, Arc<Gate>);

impl Gated {
    pub(super) fn new(memory: SharedMemory, gate: &Arc<Gate>) -> Self {
        Self(memory, Arc::clone(gate))
    }
}

impl EngineMemory for Gated {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn device(&self) -> Option<DeviceUuid> {
        self.0.device()
    }

    fn copier(&self) -> Result<Box<dyn Copier + '_>, CopyError> {
        Ok(Box::new(GatedCopier(self.0.copier()?, Arc::clone(&self.1))))
    }

    fn host(&self) -> Option<&Arc<Mapping>> {
        self.0.host()
    }

    fn registrable(&self) -> Registrable {
        self.0.registrable()
    }
}

#[derive(Debug)]
struct GatedCopier<'a>(Box<dyn Copier + 'a>, Arc<Gate>);

impl Copier for GatedCopier<'_> {
    fn wait_for(&mut self, event: &EngineEvent) -> Result<(), CopyError> {
        self.0.wait_for(event)
    }

    fn start(
        &mut self,
        direction: Direction,
        (memory, copies): (&dyn EngineMemory, &[StridedCopy]),
        pool: &Arc<Mapping>,
    ) -> Result<(), CopyError> {
        let memory: &dyn Any = memory;
        let Gated(inside, _gate) = memory.downcast_ref().unwrap();
        self.0.start(direction, (inside, copies), pool)
    }

    fn finish(&mut self) -> Result<(), CopyError> {
        let shut = self.1.0.lock().unwrap();
        drop(self.1.1.wait_while(shut, |open| !*open).unwrap());
        self.0.finish()
    }
}
