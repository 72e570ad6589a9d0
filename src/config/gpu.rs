//! The GPU of `kvrail serve`: settings that need each other.

use super::ConfigError;
use super::settings::ServeSettings;
use super::values::{PoolSpec, Size};
use crate::memory::GpuDirect;
use crate::node::TransportChoice;

/// A GPU and what is taken of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuConfig {
    /// Its number, as the driver gives it.
    pub ordinal: u32,
    /// Bytes of its memory.
    pub pool: u64,
    /// The ways for RDMA devices into it that may be taken.
    pub direct: GpuDirect,
    /// Bytes of host memory for blocks that go there, and as many for those that leave.
    pub staging: u64,
}

/// Settings of a GPU's memory need a GPU, and a GPU needs a size.
pub(super) fn resolve(settings: &ServeSettings) -> Result<Option<GpuConfig>, ConfigError> {
    let Some(ordinal) = settings.gpu else {
        let given = [
            ("--gpu-pool", settings.gpu_pool.is_some()),
            ("--gpu-direct", settings.gpu_direct.is_some()),
            ("--gpu-nics", !settings.gpu_nics.is_empty()),
            ("--gpu-staging", settings.gpu_staging.is_some()),
        ];
        return match given.into_iter().find(|(_, given)| *given) {
            Some(_) => Err(ConfigError::Missing {
                setting: "--gpu",
                reason: "the other settings of GPU memory need the GPU's number, such as --gpu 0",
            }),
            None => Ok(None),
        };
    };
    let Some(Size(pool)) = settings.gpu_pool else {
        return Err(ConfigError::Missing {
            setting: "--gpu-pool",
            reason: "with --gpu it says how much of its memory is taken, such as 8GiB",
        });
    };
    let least = |setting: &str, bytes: u64| {
        (bytes >= PoolSpec::BYTES_MIN).then_some(()).ok_or_else(|| ConfigError::Value {
            origin: setting.to_owned(),
            reason: format!("it takes at least {}, got {}", Size(PoolSpec::BYTES_MIN), Size(bytes)),
        })
    };
    least("--gpu-pool", pool)?;
    let direct = settings.gpu_direct.unwrap_or_default();
    let transport = settings.transport.unwrap_or_default();
    if direct == GpuDirect::Require
        && matches!(transport, TransportChoice::Tcp | TransportChoice::Shm)
    {
        return Err(ConfigError::Contradiction {
            first: "--gpu-direct",
            second: "--transport",
            reason: format!(
                "the first is require, and with {transport} no RDMA device reaches GPU memory; leave \
                 one out"
            ),
        });
    }
    let staging = settings.gpu_staging.map_or(64 << 20, |size| size.0);
    least("--gpu-staging", staging)?;
    Ok(Some(GpuConfig { ordinal, pool, direct, staging }))
}
