//! A reliable-connected queue pair and its states: RESET, INIT, ready to receive, ready to send, ERR.
#![expect(unsafe_code, reason = "calls libibverbs through function pointers")]

use std::ffi::c_int;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::completion_queue::CompletionQueue;
use super::error::{REMEDY_DEVICE, REMEDY_OBJECTS, VerbsError};
use super::protection_domain::ProtectionDomain;
use super::work::{self, Bind, Segment, SendList};
use crate::limits::RETRIES_MAX;
use crate::sys::ibverbs::constants as c;
use crate::sys::ibverbs::{
    ibv_ah_attr, ibv_gid, ibv_global_route, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr,
    ibv_recv_wr, ibv_send_wr,
};

/// Time until a retransmission: 4.096 µs shifted left by so much, 268 ms. With [`RETRIES_MAX`] a
/// dead peer is noticed after two seconds.
const ACK_TIMEOUT: u8 = 16;

/// Retries where the peer has no receive buffer. Credits see to it that it always has one.
const RECEIVER_RETRIES: u8 = 6;

/// How long a peer without a receive buffer asks us to wait: code 12 is 0.64 ms.
const RECEIVER_TIMER: u8 = 12;

/// Routers that a packet may pass.
const HOP_LIMIT: u8 = 64;

/// Sizes of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSizes {
    /// Work requests of the send queue.
    pub sends: u32,
    /// Work requests of the receive queue.
    pub receives: u32,
    /// Segments of one of the send queue.
    pub segments: u32,
    /// Bytes of a SEND that travel inside its request, so that the device need not fetch them. A wish:
    /// [`QueuePair::inline`] says what came of it.
    pub inline: u32,
}

/// What both ends agree on before a queue pair can receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// Our port.
    pub port: u8,
    /// Our GID's index.
    pub sgid_index: u8,
    /// Whether packets carry GIDs; always on Ethernet.
    pub global: bool,
    /// The peer's GID.
    pub dgid: [u8; 16],
    /// The peer's local identifier.
    pub dlid: u16,
    /// The path's MTU, as `IBV_MTU_*`: the smaller one of both ports.
    pub mtu: i32,
    /// READs that we have on the wire at once, at least 1.
    pub reads_issued: u8,
    /// READs of the peer that we answer at once, at least 1.
    pub reads_served: u8,
    /// Retransmissions before the peer counts as gone; more than [`RETRIES_MAX`] count as that many.
    pub retries: u8,
}

/// A queue pair at the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueuePairAddress {
    /// Its number.
    pub number: u32,
    /// Where its packet sequence numbers begin, 24 bits.
    pub psn: u32,
}

/// A list was posted only in part.
#[derive(Debug)]
pub struct PartlyPosted {
    /// Requests from the list's start that were posted.
    pub posted: usize,
    /// Why the next one was not.
    pub source: io::Error,
}

type SendFn = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
type ReceiveFn =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

/// A queue pair. Destroyed when dropped: the peer can reach nothing through it from then on.
#[derive(Debug)]
pub struct QueuePair {
    raw: NonNull<ibv_qp>,
    number: u32,
    inline: u32,
    send: SendFn,
    receive: ReceiveFn,
    domain: Arc<ProtectionDomain>,
    _cq: Arc<CompletionQueue>,
}

// SAFETY: libibverbs may be called from any thread; the pointer is freed only by `drop`.
unsafe impl Send for QueuePair {}
// SAFETY: libibverbs locks what its calls share; nothing here is written after construction.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// A queue pair in RESET, whose asynchronous events carry `token`.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        cq: &Arc<CompletionQueue>,
        sizes: QueueSizes,
        token: u64,
    ) -> Result<Self, VerbsError> {
        let context = domain.context();
        let failed = |source| {
            let call = format!(
                "ibv_create_qp of {} sends, {} receives and {} segments",
                sizes.sends, sizes.receives, sizes.segments
            );
            context.error(call, source, REMEDY_OBJECTS)
        };
        let token =
            usize::try_from(token).map_err(|_error| failed(io::ErrorKind::InvalidInput.into()))?;
        let ops = context.ops();
        let (send, receive) = ops
            .post_send
            .zip(ops.post_recv)
            .ok_or_else(|| failed(io::ErrorKind::Unsupported.into()))?;
        let attr = |inline| ibv_qp_init_attr {
            qp_context: ptr::without_provenance_mut(token),
            send_cq: cq.raw().as_ptr(),
            recv_cq: cq.raw().as_ptr(),
            srq: ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: sizes.sends,
                max_recv_wr: sizes.receives,
                max_send_sge: sizes.segments,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            qp_type: c::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let make = |inline| {
            let mut attr: ibv_qp_init_attr = attr(inline);
            // SAFETY: domain and completion queue exist and are kept; the library hands the token back
            // and never follows it.
            let raw =
                unsafe { (context.library().create_qp)(domain.raw().as_ptr(), &raw mut attr) };
            // A device answers how much it takes; that may be more than the wish.
            NonNull::new(raw).map(|raw| (raw, attr.cap.max_inline_data.min(inline)))
        };
        // A device that has less room in its requests refuses.
        let made = make(sizes.inline).or_else(|| if sizes.inline > 0 { make(0) } else { None });
        let (raw, inline) = made.ok_or_else(|| failed(io::Error::last_os_error()))?;
        // SAFETY: the library answered a valid queue pair; its number never changes.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        let (domain, cq) = (Arc::clone(domain), Arc::clone(cq));
        Ok(Self { raw, number, inline, send, receive, domain, _cq: cq })
    }

    /// Its number, 24 bits.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Bytes of a SEND that fit into its request.
    #[must_use]
    pub fn inline(&self) -> u32 {
        self.inline
    }

    /// RESET to INIT: from now on receives can be posted. Peers may read nothing yet.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn init(&self, port: u8) -> Result<(), VerbsError> {
        let attr = ibv_qp_attr {
            qp_state: c::IBV_QPS_INIT,
            port_num: port,
            qp_access_flags: 0,
            ..ibv_qp_attr::default()
        };
        let mask = c::IBV_QP_STATE | c::IBV_QP_PKEY_INDEX | c::IBV_QP_PORT | c::IBV_QP_ACCESS_FLAGS;
        self.modify("to INIT", attr, mask, REMEDY_DEVICE)
    }

    /// INIT to ready to receive: from now on packets of `peer` are taken.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn ready_to_receive(&self, path: &Path, peer: QueuePairAddress) -> Result<(), VerbsError> {
        let attr = ibv_qp_attr {
            qp_state: c::IBV_QPS_RTR,
            path_mtu: path.mtu,
            dest_qp_num: peer.number,
            rq_psn: peer.psn,
            max_dest_rd_atomic: path.reads_served,
            min_rnr_timer: RECEIVER_TIMER,
            ah_attr: ibv_ah_attr {
                grh: ibv_global_route {
                    dgid: ibv_gid { raw: path.dgid },
                    sgid_index: path.sgid_index,
                    hop_limit: HOP_LIMIT,
                    ..ibv_global_route::default()
                },
                dlid: path.dlid,
                is_global: path.global.into(),
                port_num: path.port,
                ..ibv_ah_attr::default()
            },
            ..ibv_qp_attr::default()
        };
        let mask = c::IBV_QP_STATE
            | c::IBV_QP_AV
            | c::IBV_QP_PATH_MTU
            | c::IBV_QP_DEST_QPN
            | c::IBV_QP_RQ_PSN
            | c::IBV_QP_MAX_DEST_RD_ATOMIC
            | c::IBV_QP_MIN_RNR_TIMER;
        let remedy = "the GID may have gone or the peer's may not be reachable from it: compare \
                      both ends' kvrail doctor, or set --gid-index";
        self.modify("to ready to receive", attr, mask, remedy)
    }

    /// Ready to receive to ready to send, with our packets numbered from `psn`.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn ready_to_send(&self, path: &Path, psn: u32) -> Result<(), VerbsError> {
        let attr = ibv_qp_attr {
            qp_state: c::IBV_QPS_RTS,
            sq_psn: psn,
            timeout: ACK_TIMEOUT,
            retry_cnt: path.retries.min(RETRIES_MAX),
            rnr_retry: RECEIVER_RETRIES,
            max_rd_atomic: path.reads_issued,
            ..ibv_qp_attr::default()
        };
        let mask = c::IBV_QP_STATE
            | c::IBV_QP_SQ_PSN
            | c::IBV_QP_TIMEOUT
            | c::IBV_QP_RETRY_CNT
            | c::IBV_QP_RNR_RETRY
            | c::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("to ready to send", attr, mask, REMEDY_DEVICE)
    }

    /// Lets the peer READ, in any state but ERR.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn allow_reads(&self) -> Result<(), VerbsError> {
        let attr = ibv_qp_attr {
            qp_access_flags: c::IBV_ACCESS_REMOTE_READ.cast_unsigned(),
            ..ibv_qp_attr::default()
        };
        self.modify("to allow READs", attr, c::IBV_QP_ACCESS_FLAGS, REMEDY_DEVICE)
    }

    /// To ERR: what is outstanding completes as flushed, and the peer reaches nothing more.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn fail(&self) -> Result<(), VerbsError> {
        let attr = ibv_qp_attr { qp_state: c::IBV_QPS_ERR, ..ibv_qp_attr::default() };
        self.modify("to ERR", attr, c::IBV_QP_STATE, REMEDY_DEVICE)
    }

    fn modify(
        &self,
        what: &str,
        mut attr: ibv_qp_attr,
        mask: i32,
        remedy: &'static str,
    ) -> Result<(), VerbsError> {
        let context = self.domain.context();
        // SAFETY: the queue pair exists; `attr` lives during the call, which reads what `mask` names.
        let rc = unsafe { (context.library().modify_qp)(self.raw.as_ptr(), &raw mut attr, mask) };
        if rc == 0 {
            return Ok(());
        }
        let source = io::Error::from_raw_os_error(rc.saturating_abs());
        Err(context.error(format!("ibv_modify_qp {what}"), source, remedy))
    }

    /// Posts the list with one doorbell. What its segments name is kept by their registration: the
    /// device refuses keys that are none.
    ///
    /// # Errors
    /// [`PartlyPosted`]: what precedes the refused request was posted.
    pub fn post_send(&self, list: &mut SendList) -> Result<(), PartlyPosted> {
        if list.is_empty() {
            return Ok(());
        }
        let mut bad = ptr::null_mut();
        let first = list.link();
        // SAFETY: the queue pair exists; `first` heads a chain inside `list`, which is borrowed
        // during the call; the library copies requests and segments.
        let rc = unsafe { (self.send)(self.raw.as_ptr(), first, &raw mut bad) };
        if rc == 0 {
            return Ok(());
        }
        let posted = if bad.is_null() { 0 } else { list.position(bad) };
        Err(PartlyPosted { posted, source: io::Error::from_raw_os_error(rc.saturating_abs()) })
    }

    /// Posts the bind of a window to a part of a region, READ-only, under `key`; see
    /// [`MemoryWindow`] for what the device asks of key and window. The completion says whether it
    /// was bound. One doorbell, so that window and region are borrowed until the device has the
    /// request.
    ///
    /// # Errors
    /// [`VerbsError::Call`]: nothing was posted.
    pub fn post_bind(&self, bind: &Bind<'_>) -> Result<(), VerbsError> {
        let access = c::IBV_ACCESS_REMOTE_READ.cast_unsigned();
        let mut request = work::bind(bind, access);
        self.post_one(&mut request, "ibv_post_send of a window's bind")?;
        bind.window.set_key(bind.key);
        Ok(())
    }

    /// Posts the invalidation of a bound window's key. When it has completed, nobody reads by it.
    ///
    /// # Errors
    /// [`VerbsError::Call`]: nothing was posted.
    pub fn post_invalidate(&self, wr_id: u64, key: u32) -> Result<(), VerbsError> {
        self.post_one(&mut work::invalidate(wr_id, key), "ibv_post_send of an invalidation")
    }

    fn post_one(&self, request: &mut ibv_send_wr, call: &str) -> Result<(), VerbsError> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair exists; the request lives during the call, which copies it; what it
        // points to (a window, a region) is borrowed by the caller.
        let rc = unsafe { (self.send)(self.raw.as_ptr(), request, &raw mut bad) };
        if rc == 0 {
            return Ok(());
        }
        let source = io::Error::from_raw_os_error(rc.saturating_abs());
        Err(self.domain.context().error(call.to_owned(), source, REMEDY_DEVICE))
    }

    /// Posts one receive into a segment.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn post_receive(&self, wr_id: u64, mut segment: Segment) -> Result<(), VerbsError> {
        let mut request =
            ibv_recv_wr { wr_id, next: ptr::null_mut(), sg_list: &raw mut segment, num_sge: 1 };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair exists; request and segment live during the call, which copies them.
        let rc = unsafe { (self.receive)(self.raw.as_ptr(), &raw mut request, &raw mut bad) };
        if rc == 0 {
            return Ok(());
        }
        let source = io::Error::from_raw_os_error(rc.saturating_abs());
        Err(self.domain.context().error("ibv_post_recv".to_owned(), source, REMEDY_DEVICE))
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let context = self.domain.context();
        // SAFETY: the queue pair exists, and its events are acknowledged as they are taken.
        let rc = unsafe { (context.library().destroy_qp)(self.raw.as_ptr()) };
        if rc != 0 {
            let error = io::Error::from_raw_os_error(rc.saturating_abs());
            tracing::warn!(device = context.name(), %error, "a queue pair could not be destroyed");
        }
    }
}
