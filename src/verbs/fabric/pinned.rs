//! Memory that a fabric's NICs have pinned: the slow half of a registration, on any thread.

use std::sync::Arc;

use super::chunks::{Layout, register_all};
use super::near::NicSet;
use super::nics::Nics;
use crate::fabric::FabricError;
use crate::memory::{Climb, ForeignMemory, Mapping, Rung, RungRefused};
use crate::sys::pci::{self, Nearness};
use crate::sys::root::HostRoot;
use crate::verbs::memory_region::Kept;
use crate::verbs::{MemoryRegion, ProtectionDomain, Served};

/// The NICs of a fabric, as far as memory is pinned with them.
#[derive(Debug)]
pub(super) struct Cards {
    /// `None` for one that is gone.
    pub(super) domains: Vec<Option<Arc<ProtectionDomain>>>,
    /// Longest registration, bytes.
    chunk_bytes: u64,
    names: Vec<String>,
    /// The names of those that GPU memory is to go over; empty for the nearest ones.
    gpu: Vec<String>,
}

impl Cards {
    pub(super) fn new(nics: &Nics) -> Self {
        let devices = || nics.devices.iter();
        let domain =
            |device: &super::device::Device| (!device.gone).then(|| Arc::clone(&device.domain));
        Self {
            domains: devices().map(domain).collect(),
            chunk_bytes: nics.chunk_bytes,
            names: devices().map(|device| device.name().to_owned()).collect(),
            gpu: nics.gpu.clone(),
        }
    }

    fn layout(&self, len: u64, served: Served) -> Result<Layout, FabricError> {
        Ok(match served {
            Served::ByWindows => Layout::whole(len, self.chunk_bytes)?,
            Served::No | Served::Whole => Layout::new(len, self.chunk_bytes)?,
        })
    }

    /// The NICs over which memory of the PCI device at this address goes: those that the configuration
    /// names, else the nearest ones by sysfs. And for each one, by name, whether it is and why.
    fn near(&self, pci: Option<&str>) -> (NicSet, Vec<(String, Nearness)>) {
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        let all = |near, why: &str| Nearness { near, why: why.to_owned() };
        let near: Vec<Nearness> = match pci {
            _ if !self.gpu.is_empty() => {
                let is_named = |name: &&str| self.gpu.iter().any(|it| it == name);
                let why = |named| if named { "--gpu-nics" } else { "--gpu-nics names others" };
                names.iter().map(is_named).map(|named| all(named, why(named))).collect()
            }
            Some(address) => pci::nearest(&HostRoot::host(), address, &names),
            None => vec![all(true, "the GPU has no place on the PCI bus"); names.len()],
        };
        let set = NicSet::of(near.iter().map(|it| it.near));
        let set = if near.iter().all(|it| it.near) { NicSet::ALL } else { set };
        (set, self.names.iter().cloned().zip(near).collect())
    }
}

/// Memory that is registered with every NIC and that the fabric does not know yet, or no more.
#[derive(Debug)]
pub struct Pinned {
    pub(super) served: Served,
    pub(super) layout: Layout,
    /// The registrations: of all chunks with one NIC after the other, `None` for a NIC that is gone.
    pub(super) parts: Vec<Option<MemoryRegion>>,
    /// The NICs that its memory is nearest to.
    pub(super) near: NicSet,
    pub(super) memory: Kept,
    pub(super) len: u64,
}

impl Pinned {
    /// Pins host memory.
    pub(super) fn host(
        cards: &Cards,
        memory: Arc<Mapping>,
        served: Served,
    ) -> Result<Self, FabricError> {
        let len = memory.len();
        let layout = cards.layout(len, served)?;
        let parts = register_all(cards, layout, &memory, served)?;
        let (near, memory) = (NicSet::ALL, Kept::Mapping(memory));
        Ok(Self { served, layout, parts, near, memory, len })
    }

    /// Pins a device's memory by the first of these rungs that each NIC takes. Nothing is where one of
    /// them takes none: its memory goes by staging then.
    pub(super) fn foreign(
        cards: &Cards,
        memory: &Arc<dyn ForeignMemory>,
        served: Served,
        rungs: &[Rung],
    ) -> Result<(Option<Self>, Climb), FabricError> {
        let len = memory.bytes();
        let layout = cards.layout(len, served)?;
        let mut climb = Climb::default();
        let mut parts = Vec::with_capacity(cards.domains.len() * layout.chunks);
        for (domain, name) in cards.domains.iter().zip(&cards.names) {
            let Some(domain) = domain else {
                parts.extend((0..layout.chunks).map(|_chunk| None));
                continue;
            };
            let register = |rung| -> Result<Vec<Option<MemoryRegion>>, RungRefused> {
                let part = |chunk| {
                    let place = layout.place(chunk, len);
                    MemoryRegion::foreign(domain, memory, place, served, rung).map(Some)
                };
                (0..layout.chunks).map(part).collect()
            };
            let mut taken = Rung::Staging;
            for rung in rungs {
                match register(*rung) {
                    Ok(made) => {
                        parts.extend(made);
                        taken = *rung;
                        break;
                    }
                    Err(refused) => climb.refused.push(refused),
                }
            }
            climb.rungs.push((name.clone(), taken));
        }
        let (near, of_each) = cards.near(memory.pci().as_deref());
        climb.near = of_each;
        if !climb.is_direct() {
            return Ok((None, climb));
        }
        let memory = Kept::Foreign(Arc::clone(memory));
        Ok((Some(Self { served, layout, parts, near, memory, len }), climb))
    }

    /// What peers may do with it.
    pub(super) fn served(&self) -> Served {
        self.served
    }
}
