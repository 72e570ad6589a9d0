//! The peer core over the simulated fabric, on virtual time.

mod krate {
    pub(super) use crate::{
        event, fabric, health, layout, lease, limits, memory, peer, policy, protocol, registry,
        sim, store, types,
    };
}

mod cluster;
mod failures;
mod handshake;
mod health;
mod leases;
mod reads;
mod silence;
mod staged;
mod stalls;
mod stranger;
mod strided;
mod widening;
mod windows;
mod withdrawals;
