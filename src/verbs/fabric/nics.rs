//! The NICs of a fabric: which of the host's devices it uses, and what they can do together.
//!
//! Where the configuration names none, all that work and are as fast as the fastest one are used: that
//! is what the hosts with several are built for, and a slow one among them, which is usually there for
//! management, would hold the others up. What is left out is logged with the reason.

use std::sync::Arc;

use super::VerbsConfig;
use super::device::Device;
use crate::fabric::FabricError;
use crate::limits::{NICS_MAX, READ_BYTES_MAX, STREAMS_MAX};
use crate::sys::ibverbs::Library;
use crate::sys::rdma_sysfs;
use crate::sys::root::HostRoot;
use crate::verbs::{Context, VerbsError};

/// Longest READ where there are several NICs: a span must be cut to be read by more than one, and a
/// READ of this length fills any NIC.
const STRIPE_BYTES: u32 = 1 << 20;

/// The NICs, numbered by their place.
#[derive(Debug)]
pub(super) struct Nics {
    /// At least one.
    pub(super) devices: Vec<Device>,
    /// Data queue pairs per connection.
    pub(super) lanes: usize,
    /// READs of one connection that may be outstanding.
    pub(super) reads: u32,
    /// Segments of one READ.
    pub(super) segments: u32,
    /// Windows of one connection; 0 where peers read by the regions' keys.
    pub(super) windows: u16,
    /// Longest READ, bytes.
    pub(super) read_bytes: u32,
    /// Longest registration, bytes.
    pub(super) chunk_bytes: u64,
    /// The names of those that GPU memory is to go over; empty for the nearest ones.
    pub(super) gpu: Vec<String>,
}

impl Nics {
    /// Opens the devices that the configuration names, else all that serve.
    pub(super) fn open(config: &VerbsConfig) -> Result<Self, VerbsError> {
        let library = Arc::new(Library::open()?);
        let present = Context::names(&library)?;
        let shown = rdma_sysfs::devices(&HostRoot::host());
        let (mut devices, mut refused) = (Vec::new(), Vec::new());
        let wanted = if config.devices.is_empty() { &present } else { &config.devices };
        if config.devices.len() > NICS_MAX {
            return Err(FabricError::Limit { what: "RDMA devices", limit: NICS_MAX }.into());
        }
        for name in wanted {
            match Device::open(&library, name, config) {
                Ok(mut device) => {
                    let shown = shown.iter().find(|shown| shown.name == *name);
                    device.numa = shown.and_then(|shown| shown.numa_node);
                    let port = u32::from(device.port.number);
                    let ports = shown.map_or(&[][..], |shown| &shown.ports);
                    let rate = ports.iter().find(|it| it.number == port).map(|it| it.rate.as_str());
                    let rate = gigabits(rate.unwrap_or_default());
                    devices.push((rate, device));
                }
                // A name that is none is a mistake to correct, whatever the other devices do.
                Err(error @ VerbsError::NoSuchDevice { .. }) => return Err(error),
                Err(error) => {
                    tracing::warn!(device = name, %error, "this RDMA device is not used");
                    refused.push(error);
                }
            }
        }
        if config.devices.is_empty() {
            keep_fastest(&mut devices);
        }
        let devices: Vec<Device> = devices.into_iter().map(|(_rate, device)| device).collect();
        let none = || refused.into_iter().next().unwrap_or(VerbsError::NoDevices);
        Self::of(devices, config).ok_or_else(none)
    }

    fn of(devices: Vec<Device>, config: &VerbsConfig) -> Option<Self> {
        let least = |of: fn(&Device) -> u32| devices.iter().map(of).min();
        let mr_bytes = devices.iter().map(|device| device.limits.mr_bytes).min()?;
        let longest = if devices.len() > 1 { STRIPE_BYTES } else { READ_BYTES_MAX };
        for device in &devices {
            tracing::info!(
                device = device.name(),
                port = device.port.number,
                gid = device.choice.reason,
                numa_node = ?device.numa,
                "RDMA device chosen"
            );
        }
        Some(Self {
            lanes: config.lanes.max(devices.len()).min(STREAMS_MAX),
            reads: least(|device| device.reads)?,
            segments: least(|device| device.segments)?,
            windows: devices.first()?.windows,
            read_bytes: longest.min(least(|device| device.port.message_bytes)?),
            chunk_bytes: mr_bytes.min(config.chunk_bytes),
            gpu: config.gpu_nics.clone(),
            devices,
        })
    }

    pub(super) fn get(&self, nic: u8) -> Option<&Device> {
        self.devices.get(usize::from(nic))
    }

    /// The NICs that a connection begun here spreads its lanes over: those that are up or, where none
    /// is, all that are there.
    pub(super) fn usable(&self) -> Vec<u8> {
        let numbered = || (0..).zip(&self.devices);
        let up = numbered().filter(|(_, device)| device.is_usable());
        let up: Vec<u8> = up.map(|(nic, _)| nic).collect();
        if !up.is_empty() {
            return up;
        }
        numbered().filter(|(_, device)| !device.gone).map(|(nic, _)| nic).collect()
    }

    /// Whether a NIC is gone, or cannot carry data where another one can.
    pub(super) fn is_lost(&self, nic: u8) -> bool {
        let is = |what: fn(&Device) -> bool| self.get(nic).is_some_and(what);
        is(|device| device.gone) || self.has_other(nic) && !is(Device::is_usable)
    }

    /// Whether another NIC than this one can carry data.
    pub(super) fn has_other(&self, nic: u8) -> bool {
        (0..).zip(&self.devices).any(|(at, device)| at != nic && device.is_usable())
    }
}

/// Leaves the devices of the highest rate, at most [`NICS_MAX`].
fn keep_fastest(devices: &mut Vec<(f64, Device)>) {
    let fastest = devices.iter().map(|(rate, _)| *rate).fold(0.0, f64::max);
    let mut kept = 0;
    devices.retain(|(rate, device)| {
        let slow = *rate < fastest;
        let keep = !slow && kept < NICS_MAX;
        kept += usize::from(keep);
        if !keep {
            let why = if slow { "another one is faster" } else { "there are enough" };
            tracing::warn!(
                device = device.name(),
                gigabits = rate,
                why,
                "this RDMA device is not used unless --rdma-device names it"
            );
        }
        keep
    });
}

/// The number in a rate as the kernel writes it, such as `100 Gb/sec (4X EDR)`; 0 for none.
fn gigabits(rate: &str) -> f64 {
    rate.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_the_kernel_writes_them() {
        for (text, rate) in
            [("100 Gb/sec (4X EDR)", 100.0), ("2.5 Gb/sec (1X SDR)", 2.5), ("", 0.0), ("x", 0.0)]
        {
            assert!((gigabits(text) - rate).abs() < f64::EPSILON, "{text}");
        }
    }
}
