//! What the status of a work request means, for it and for its connection.

use crate::fabric::CompletionStatus;
use crate::sys::connections::Broken;
use crate::sys::ibverbs::constants as c;

impl Broken {
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
