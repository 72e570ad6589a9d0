//! What `kvrail serve` lends: settings that need each other.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::ConfigError;
use super::settings::ServeSettings;
use super::values::Percent;
use crate::lease::TTL;

/// What is lent, to whom, for how long. `ttl > 2 * margin`, so that a reader has longer to use a
/// lease than it has to leave unused, and always stops before the holder takes the memory back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseConfig {
    /// How long a lease holds without renewal, on the holder's clock.
    pub ttl: Duration,
    /// How long before that the reader stops, on its own clock.
    pub margin: Duration,
    /// Leases that one requester may hold at once.
    pub leases: u32,
    /// Bytes that one requester may hold under leases at once.
    pub bytes: u64,
    /// Whether half of what engines open to peers comes on top of that: where nobody said how much it is.
    pub bytes_grow: bool,
    /// Nothing more is lent above this share of the memory under leases.
    pub watermark_high: Percent,
    /// Readers are told to pause above this one, which is not above the high one.
    pub watermark_low: Percent,
}

/// Refuses a time span outside its range.
pub(super) fn within(
    setting: &'static str,
    span: Duration,
    range: &RangeInclusive<Duration>,
) -> Result<(), ConfigError> {
    let text = humantime::format_duration;
    if range.contains(&span) {
        return Ok(());
    }
    Err(ConfigError::Value {
        origin: setting.to_owned(),
        reason: format!(
            "it takes {} to {}, got {}",
            text(*range.start()),
            text(*range.end()),
            text(span)
        ),
    })
}

/// Settings of leases; `bytes` is what all pools hold.
pub(super) fn resolve(settings: &ServeSettings, bytes: u64) -> Result<LeaseConfig, ConfigError> {
    let ttl = settings.lease_ttl.unwrap_or(Duration::from_secs(10));
    within("--lease-ttl", ttl, &TTL)?;
    let margin = settings.lease_margin.unwrap_or(Duration::from_secs(1));
    if ttl <= margin.saturating_mul(2) {
        return Err(ConfigError::Contradiction {
            first: "--lease-ttl",
            second: "--lease-margin",
            reason: format!(
                "a lease of {} must be more than twice its margin of {}, or a reader cannot be \
                 sure to stop before the holder ends the lease",
                humantime::format_duration(ttl),
                humantime::format_duration(margin)
            ),
        });
    }
    let watermark_high = settings.lease_watermark_high.unwrap_or(Percent::clamped(90));
    let watermark_low =
        settings.lease_watermark_low.unwrap_or(Percent::clamped(75).min(watermark_high));
    if watermark_low > watermark_high {
        return Err(ConfigError::Contradiction {
            first: "--lease-watermark-low",
            second: "--lease-watermark-high",
            reason: format!(
                "readers pause above {} percent, which must not be above the {} percent at which \
                 nothing more is lent",
                watermark_low.get(),
                watermark_high.get()
            ),
        });
    }
    let bytes = settings.lease_bytes.map_or(bytes / 2, |size| size.0);
    if bytes == 0 {
        return Err(ConfigError::Value {
            origin: "--lease-bytes".to_owned(),
            reason: "nothing could be lent then; give it at least the size of a block".to_owned(),
        });
    }
    Ok(LeaseConfig {
        watermark_high,
        watermark_low,
        ttl,
        margin,
        leases: settings.lease_quota.unwrap_or(64),
        bytes,
        bytes_grow: settings.lease_bytes.is_none(),
    })
}
