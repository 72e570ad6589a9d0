//! The constants of `infiniband/verbs.h` that kvrail uses, under the header's names.
#![expect(missing_docs, reason = "names and meanings are those of infiniband/verbs.h")]

use std::ffi::{c_int, c_uint};

/// Declares constants, and lists them by name for whoever compares them with the header.
macro_rules! constants {
    ($($name:ident: $kind:ty = $value:expr;)+) => {
        $(pub const $name: $kind = $value;)+

        /// Every constant of this file, by name.
        pub const ALL: &[(&str, i64)] = &[$((stringify!($name), $name as i64)),+];
    };
}

constants! {
    IBV_NODE_CA: c_int = 1;
    IBV_TRANSPORT_IB: c_int = 0;

    IBV_MTU_256: c_int = 1;
    IBV_MTU_512: c_int = 2;
    IBV_MTU_1024: c_int = 3;
    IBV_MTU_2048: c_int = 4;
    IBV_MTU_4096: c_int = 5;

    IBV_PORT_NOP: c_int = 0;
    IBV_PORT_DOWN: c_int = 1;
    IBV_PORT_INIT: c_int = 2;
    IBV_PORT_ARMED: c_int = 3;
    IBV_PORT_ACTIVE: c_int = 4;
    IBV_PORT_ACTIVE_DEFER: c_int = 5;

    IBV_LINK_LAYER_UNSPECIFIED: u8 = 0;
    IBV_LINK_LAYER_INFINIBAND: u8 = 1;
    IBV_LINK_LAYER_ETHERNET: u8 = 2;

    IBV_GID_TYPE_IB: u32 = 0;
    IBV_GID_TYPE_ROCE_V1: u32 = 1;
    IBV_GID_TYPE_ROCE_V2: u32 = 2;

    IBV_EVENT_CQ_ERR: c_int = 0;
    IBV_EVENT_QP_FATAL: c_int = 1;
    IBV_EVENT_QP_REQ_ERR: c_int = 2;
    IBV_EVENT_QP_ACCESS_ERR: c_int = 3;
    IBV_EVENT_COMM_EST: c_int = 4;
    IBV_EVENT_SQ_DRAINED: c_int = 5;
    IBV_EVENT_PATH_MIG: c_int = 6;
    IBV_EVENT_PATH_MIG_ERR: c_int = 7;
    IBV_EVENT_DEVICE_FATAL: c_int = 8;
    IBV_EVENT_PORT_ACTIVE: c_int = 9;
    IBV_EVENT_PORT_ERR: c_int = 10;
    IBV_EVENT_LID_CHANGE: c_int = 11;
    IBV_EVENT_PKEY_CHANGE: c_int = 12;
    IBV_EVENT_SM_CHANGE: c_int = 13;
    IBV_EVENT_SRQ_ERR: c_int = 14;
    IBV_EVENT_SRQ_LIMIT_REACHED: c_int = 15;
    IBV_EVENT_QP_LAST_WQE_REACHED: c_int = 16;
    IBV_EVENT_CLIENT_REREGISTER: c_int = 17;
    IBV_EVENT_GID_CHANGE: c_int = 18;
    IBV_EVENT_WQ_FATAL: c_int = 19;

    IBV_WC_SUCCESS: c_int = 0;
    IBV_WC_LOC_LEN_ERR: c_int = 1;
    IBV_WC_LOC_QP_OP_ERR: c_int = 2;
    IBV_WC_LOC_EEC_OP_ERR: c_int = 3;
    IBV_WC_LOC_PROT_ERR: c_int = 4;
    IBV_WC_WR_FLUSH_ERR: c_int = 5;
    IBV_WC_MW_BIND_ERR: c_int = 6;
    IBV_WC_BAD_RESP_ERR: c_int = 7;
    IBV_WC_LOC_ACCESS_ERR: c_int = 8;
    IBV_WC_REM_INV_REQ_ERR: c_int = 9;
    IBV_WC_REM_ACCESS_ERR: c_int = 10;
    IBV_WC_REM_OP_ERR: c_int = 11;
    IBV_WC_RETRY_EXC_ERR: c_int = 12;
    IBV_WC_RNR_RETRY_EXC_ERR: c_int = 13;
    IBV_WC_REM_ABORT_ERR: c_int = 16;
    IBV_WC_FATAL_ERR: c_int = 19;
    IBV_WC_RESP_TIMEOUT_ERR: c_int = 20;
    IBV_WC_GENERAL_ERR: c_int = 21;

    IBV_QPT_RC: c_int = 2;

    IBV_QPS_RESET: c_int = 0;
    IBV_QPS_INIT: c_int = 1;
    IBV_QPS_RTR: c_int = 2;
    IBV_QPS_RTS: c_int = 3;
    IBV_QPS_SQD: c_int = 4;
    IBV_QPS_SQE: c_int = 5;
    IBV_QPS_ERR: c_int = 6;

    IBV_QP_STATE: c_int = 1;
    IBV_QP_ACCESS_FLAGS: c_int = 1 << 3;
    IBV_QP_PKEY_INDEX: c_int = 1 << 4;
    IBV_QP_PORT: c_int = 1 << 5;
    IBV_QP_AV: c_int = 1 << 7;
    IBV_QP_PATH_MTU: c_int = 1 << 8;
    IBV_QP_TIMEOUT: c_int = 1 << 9;
    IBV_QP_RETRY_CNT: c_int = 1 << 10;
    IBV_QP_RNR_RETRY: c_int = 1 << 11;
    IBV_QP_RQ_PSN: c_int = 1 << 12;
    IBV_QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    IBV_QP_MIN_RNR_TIMER: c_int = 1 << 15;
    IBV_QP_SQ_PSN: c_int = 1 << 16;
    IBV_QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    IBV_QP_CAP: c_int = 1 << 19;
    IBV_QP_DEST_QPN: c_int = 1 << 20;

    IBV_WR_RDMA_WRITE: c_int = 0;
    IBV_WR_SEND: c_int = 2;
    IBV_WR_RDMA_READ: c_int = 4;
    IBV_WR_LOCAL_INV: c_int = 7;
    IBV_WR_BIND_MW: c_int = 8;

    IBV_SEND_FENCE: c_uint = 1;
    IBV_SEND_SIGNALED: c_uint = 1 << 1;
    IBV_SEND_SOLICITED: c_uint = 1 << 2;
    IBV_SEND_INLINE: c_uint = 1 << 3;

    IBV_DEVICE_MEM_WINDOW_TYPE_2A: c_uint = 1 << 23;
    IBV_DEVICE_MEM_WINDOW_TYPE_2B: c_uint = 1 << 24;
    IBV_MW_TYPE_2: c_int = 2;

    IBV_ACCESS_LOCAL_WRITE: c_int = 1;
    IBV_ACCESS_REMOTE_WRITE: c_int = 1 << 1;
    IBV_ACCESS_REMOTE_READ: c_int = 1 << 2;
    IBV_ACCESS_REMOTE_ATOMIC: c_int = 1 << 3;
    IBV_ACCESS_MW_BIND: c_int = 1 << 4;
    IBV_ACCESS_RELAXED_ORDERING: c_int = 1 << 20;
}
