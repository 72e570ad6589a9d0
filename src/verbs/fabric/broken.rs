//! How a connection breaks, and what a work request's status means.

use crate::fabric::{CloseReason, CompletionStatus};
use crate::sys::ibverbs::constants as c;

/// Why a connection breaks, and how the first READ that this flushes ends; the others are flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Broken {
    pub(super) reason: CloseReason,
    pub(super) first: CompletionStatus,
}

impl Broken {
    /// The peer sent what no fabric sends, or not in time.
    pub(super) const VIOLATION: Self =
        Self { reason: CloseReason::Violation, first: CompletionStatus::Unreachable };
    /// The peer closed the connection, or died in order.
    pub(super) const PEER_CLOSED: Self =
        Self { reason: CloseReason::PeerClosed, first: CompletionStatus::Unreachable };
    /// The way to the peer failed.
    pub(super) const UNREACHABLE: Self =
        Self { reason: CloseReason::Unreachable, first: CompletionStatus::Unreachable };
    /// One of our READs failed and has completed.
    pub(super) const READ_FAILED: Self =
        Self { reason: CloseReason::ReadFailed, first: CompletionStatus::Flushed };
    /// This side broke it.
    pub(super) const REQUESTED: Self =
        Self { reason: CloseReason::Requested, first: CompletionStatus::Flushed };
    /// This side has no objects or memory for it.
    pub(super) const EXHAUSTED: Self =
        Self { reason: CloseReason::Exhausted, first: CompletionStatus::Flushed };

    /// What a failed READ says about its connection, where nothing else has broken it. A flush that
    /// we did not cause follows an error that the peer caused.
    pub(super) const fn by_read(status: CompletionStatus) -> Self {
        match status {
            CompletionStatus::RemoteAccess | CompletionStatus::LocalProtection => Self::READ_FAILED,
            CompletionStatus::Unreachable => Self::UNREACHABLE,
            CompletionStatus::Flushed | CompletionStatus::Success => Self::PEER_CLOSED,
        }
    }
}

/// The meaning of a work completion's status, `IBV_WC_*`. Nothing else of a failed completion but
/// its `wr_id` is valid.
pub(super) const fn status(wc: i32) -> CompletionStatus {
    match wc {
        c::IBV_WC_SUCCESS => CompletionStatus::Success,
        c::IBV_WC_REM_INV_REQ_ERR | c::IBV_WC_REM_ACCESS_ERR | c::IBV_WC_REM_OP_ERR => {
            CompletionStatus::RemoteAccess
        }
        c::IBV_WC_LOC_LEN_ERR
        | c::IBV_WC_LOC_QP_OP_ERR
        | c::IBV_WC_LOC_PROT_ERR
        | c::IBV_WC_LOC_ACCESS_ERR
        | c::IBV_WC_MW_BIND_ERR => CompletionStatus::LocalProtection,
        c::IBV_WC_RETRY_EXC_ERR
        | c::IBV_WC_RNR_RETRY_EXC_ERR
        | c::IBV_WC_RESP_TIMEOUT_ERR
        | c::IBV_WC_BAD_RESP_ERR
        | c::IBV_WC_REM_ABORT_ERR => CompletionStatus::Unreachable,
        _ => CompletionStatus::Flushed,
    }
}
