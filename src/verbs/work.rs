//! Lists of work requests that one doorbell posts. Their memory is kept and reused, so that posting
//! allocates nothing once the longest list has been seen.
#![expect(unsafe_code, reason = "links work requests by pointers, as the C interface wants them")]

use std::fmt;
use std::ptr;

use super::memory_region::MemoryRegion;
use super::memory_window::MemoryWindow;
use crate::fabric::RemoteSpan;
use crate::sys::ibverbs::constants as c;
use crate::sys::ibverbs::{
    ibv_mw_bind_info, ibv_send_wr, ibv_sge, ibv_wr, ibv_wr_atomic, ibv_wr_bind_mw, ibv_wr_rdma,
};

/// A local segment: address, bytes and key.
pub type Segment = ibv_sge;

/// A window to bind.
#[derive(Debug)]
pub struct Bind<'a> {
    /// What its completion carries.
    pub wr_id: u64,
    /// The window, which is not bound.
    pub window: &'a MemoryWindow,
    /// The region, which was registered to be read by windows.
    pub region: &'a MemoryRegion,
    /// The key that reads it from then on: one of the window's.
    pub key: u32,
    /// First byte.
    pub address: u64,
    /// Length in bytes, at least 1.
    pub len: u64,
}

/// The request that binds a window. It points to window and region.
pub(super) fn bind(bind: &Bind<'_>, access: u32) -> ibv_send_wr {
    ibv_send_wr {
        wr_id: bind.wr_id,
        opcode: c::IBV_WR_BIND_MW,
        send_flags: c::IBV_SEND_SIGNALED,
        bind_mw: ibv_wr_bind_mw {
            mw: bind.window.raw().as_ptr(),
            rkey: bind.key,
            bind_info: ibv_mw_bind_info {
                mr: bind.region.raw().as_ptr(),
                addr: bind.address,
                length: bind.len,
                mw_access_flags: access,
            },
        },
        ..EMPTY
    }
}

/// The request that invalidates a key. The key lies where another request has its immediate data.
pub(super) fn invalidate(wr_id: u64, key: u32) -> ibv_send_wr {
    ibv_send_wr {
        wr_id,
        opcode: c::IBV_WR_LOCAL_INV,
        send_flags: c::IBV_SEND_SIGNALED,
        imm_data: key,
        ..EMPTY
    }
}

/// A list of work requests for a send queue.
#[derive(Default)]
pub struct SendList {
    requests: Vec<ibv_send_wr>,
    segments: Vec<ibv_sge>,
}

// SAFETY: the pointers inside the requests are written by `link` and followed by the one call that
// posts right after it; between those calls they are never followed.
unsafe impl Send for SendList {}

impl SendList {
    /// Forgets the requests, keeps the memory.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.segments.clear();
    }

    /// Whether there is no request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The number of requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Appends a READ of `remote` into the segments.
    pub fn read(
        &mut self,
        wr_id: u64,
        remote: &RemoteSpan,
        segments: impl Iterator<Item = Segment>,
        signaled: bool,
    ) {
        let rdma = ibv_wr_rdma { remote_addr: remote.address, rkey: remote.rkey };
        self.push(wr_id, c::IBV_WR_RDMA_READ, segments, signaled);
        if let Some(request) = self.requests.last_mut() {
            request.wr.rdma = rdma;
        }
    }

    /// Appends a SEND of the segments; `inline` where they fit into the request
    /// ([`super::QueuePair::inline`]): then they are copied when it is posted, and their keys are not
    /// looked at.
    pub fn send(&mut self, wr_id: u64, segments: impl Iterator<Item = Segment>, inline: bool) {
        self.push(wr_id, c::IBV_WR_SEND, segments, true);
        if let Some(request) = self.requests.last_mut().filter(|_| inline) {
            request.send_flags |= c::IBV_SEND_INLINE;
        }
    }

    fn push(
        &mut self,
        wr_id: u64,
        opcode: i32,
        segments: impl Iterator<Item = Segment>,
        signaled: bool,
    ) {
        let before = self.segments.len();
        self.segments.extend(segments);
        let count = self.segments.len() - before;
        self.requests.push(ibv_send_wr {
            wr_id,
            opcode,
            num_sge: i32::try_from(count).unwrap_or(i32::MAX),
            send_flags: if signaled { c::IBV_SEND_SIGNALED } else { 0 },
            ..EMPTY
        });
    }

    /// Makes the last request report its success.
    pub fn signal_last(&mut self) {
        if let Some(last) = self.requests.last_mut() {
            last.send_flags |= c::IBV_SEND_SIGNALED;
        }
    }

    /// Points every request at its segments and at its successor; answers the first one. The
    /// pointers hold until the list is next touched.
    pub(super) fn link(&mut self) -> *mut ibv_send_wr {
        let (first, mut segment) = (self.requests.as_mut_ptr(), self.segments.as_mut_ptr());
        let count = self.requests.len();
        for at in 0..count {
            let request = first.wrapping_add(at);
            // SAFETY: `at` is below the number of requests, so the pointer is inside the vector,
            // which nothing else borrows.
            let request = unsafe { &mut *request };
            request.sg_list = segment;
            segment = segment.wrapping_add(usize::try_from(request.num_sge).unwrap_or(0));
            request.next =
                if at + 1 < count { first.wrapping_add(at + 1) } else { ptr::null_mut() };
        }
        first
    }

    /// How many requests precede the one at `address`, which a failed post answers.
    pub(super) fn position(&self, address: *const ibv_send_wr) -> usize {
        let offset = address.addr().saturating_sub(self.requests.as_ptr().addr());
        (offset / size_of::<ibv_send_wr>()).min(self.requests.len())
    }
}

impl fmt::Debug for SendList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendList").field("requests", &self.requests.len()).finish_non_exhaustive()
    }
}

/// A request of nothing.
const EMPTY: ibv_send_wr = ibv_send_wr {
    wr_id: 0,
    next: ptr::null_mut(),
    sg_list: ptr::null_mut(),
    num_sge: 0,
    opcode: 0,
    send_flags: 0,
    imm_data: 0,
    wr: ibv_wr { atomic: ibv_wr_atomic { remote_addr: 0, compare_add: 0, swap: 0, rkey: 0 } },
    remote_srqn: 0,
    bind_mw: ibv_wr_bind_mw {
        mw: ptr::null_mut(),
        rkey: 0,
        bind_info: ibv_mw_bind_info { mr: ptr::null_mut(), addr: 0, length: 0, mw_access_flags: 0 },
    },
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_chained_and_keep_their_own_segments() {
        let mut list = SendList::default();
        let segment = |addr| Segment { addr, length: 8, lkey: 3 };
        for round in 0..3_u64 {
            list.clear();
            for id in 0..5 {
                let remote = RemoteSpan { rkey: 1, address: id, len: 8 };
                let count = usize::try_from(id % 3).unwrap();
                list.read(id, &remote, (0..3).take(count).map(|it| segment(100 * id + it)), false);
            }
            list.signal_last();
            let mut at = list.link().cast_const();
            let mut seen = 0;
            while !at.is_null() {
                assert_eq!(list.position(at), usize::try_from(seen).unwrap());
                // SAFETY: `at` is a link of the list, which is not touched meanwhile.
                let request = unsafe { &*at };
                assert_eq!((request.wr_id, request.opcode), (seen, c::IBV_WR_RDMA_READ), "{round}");
                assert_eq!(request.send_flags != 0, seen == 4);
                for part in 0..seen % 3 {
                    let part_at = request.sg_list.wrapping_add(usize::try_from(part).unwrap());
                    // SAFETY: the request has more than `part` segments.
                    assert_eq!(unsafe { (*part_at).addr }, 100 * seen + part);
                }
                at = request.next;
                seen += 1;
            }
            assert_eq!(seen, 5);
        }
    }
}
