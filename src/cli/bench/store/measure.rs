//! The names of what is measured.

use serde::Serialize;

/// One figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// Per operation of the mix.
    Mix,
    /// Per hit.
    Touch,
    /// Per hit of a batch.
    TouchBatch,
    /// Per block of a batch.
    Commit,
    /// Median of a lend beside a reclaimer.
    LendP50,
    /// Its 99th percentile.
    LendP99,
    /// Its 99.9th percentile.
    LendP999,
    /// The longest.
    LendMax,
    /// Median of one block's look-up and pin beside a reclaimer.
    PinP50,
    /// Its 99th percentile.
    PinP99,
    /// Its 99.9th percentile.
    PinP999,
    /// The longest.
    PinMax,
    /// Per victim of a reclaim.
    Reclaim,
    /// The same where most of the oldest blocks are pinned.
    ReclaimPinned,
    /// Resident memory per entry, just filled.
    BytesFilled,
    /// The same after a mix.
    BytesMixed,
    /// The same after many more touches.
    BytesTouched,
}

impl Measure {
    pub(super) const LEND: [Self; 4] =
        [Self::LendP50, Self::LendP99, Self::LendP999, Self::LendMax];
    pub(super) const PIN: [Self; 4] = [Self::PinP50, Self::PinP99, Self::PinP999, Self::PinMax];
    pub(super) const BYTES: [Self; 3] = [Self::BytesFilled, Self::BytesMixed, Self::BytesTouched];

    pub(super) const fn unit(self) -> &'static str {
        match self {
            Self::BytesFilled | Self::BytesMixed | Self::BytesTouched => "bytes",
            _ => "ns",
        }
    }

    /// For people.
    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Mix => "mix",
            Self::Touch => "touch",
            Self::TouchBatch => "touch by 32",
            Self::Commit => "commit by 64",
            Self::LendP50 => "lend of 64, p50",
            Self::LendP99 => "lend of 64, p99",
            Self::LendP999 => "lend of 64, p99.9",
            Self::LendMax => "lend of 64, max",
            Self::PinP50 => "lend of 1, p50",
            Self::PinP99 => "lend of 1, p99",
            Self::PinP999 => "lend of 1, p99.9",
            Self::PinMax => "lend of 1, max",
            Self::Reclaim => "reclaim",
            Self::ReclaimPinned => "reclaim, 90 % pinned",
            Self::BytesFilled => "bytes per entry, filled",
            Self::BytesMixed => "bytes per entry, after a mix",
            Self::BytesTouched => "bytes per entry, after touches",
        }
    }
}
