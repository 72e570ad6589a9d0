//! From values to bytes. Appends to the caller's buffer, which it keeps for the next message.

use bytemuck::{Pod, Zeroable, bytes_of, cast_slice};

use super::{
    AbortReason, HashEntry, Introduction, LoanEntry, MAGIC, Message, Outcomes, PROTOCOL_VERSION,
    Proof, RanksStatus, RegionEntry, TensorEntry, decode, wire,
};
use crate::fabric::RemoteSpan;
use crate::limits;
use crate::types::{LeaseId, Load, NamespaceId, NodeEpoch, RequestId};

impl Introduction {
    pub(super) fn to_wire(self) -> wire::Introduction {
        let name = self.requester.as_str().as_bytes();
        let mut requester = [0; limits::NAME_BYTES_MAX];
        requester.iter_mut().zip(name).for_each(|(to, from)| *to = *from);
        wire::Introduction {
            node: self.node.0,
            epoch: self.epoch.0.into(),
            nonce: self.nonce,
            // A name has 1 to 64 bytes.
            requester_len: u8::try_from(name.len()).unwrap_or(u8::MAX),
            reserved: [0; 7],
            requester,
        }
    }
}

impl Load {
    fn to_wire(self) -> wire::Load {
        wire::Load {
            outstanding_bytes: self.outstanding_bytes.into(),
            pause_ms: self.pause_ms.into(),
        }
    }
}

impl Message<'_> {
    /// Appends the message to `out`.
    ///
    /// A list outside its limits, a lease number 0 where a lease is meant, and the like are bugs of
    /// the caller: debug builds assert that the peer will understand, and a peer refuses the rest.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        append(out, &wire::Header::zeroed());
        self.encode_body(out);
        let body = out.len() - start - size_of::<wire::Header>();
        let header = wire::Header {
            kind: self.kind().code(),
            version: PROTOCOL_VERSION,
            reserved: [0; 2],
            body: u32::try_from(body).unwrap_or(u32::MAX).into(),
        };
        out.iter_mut().skip(start).zip(bytes_of(&header)).for_each(|(to, from)| *to = *from);
        debug_assert_eq!(
            out.get(start..).map(decode),
            Some(Ok(*self)),
            "a message that no peer would take"
        );
    }

    fn encode_body(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Widen => {}
            Self::Hello(introduction) | Self::Beside(introduction) => {
                append(out, &MAGIC);
                append(out, &introduction.to_wire());
            }
            Self::Welcome { introduction, proof, regions } => {
                append(out, &introduction.to_wire());
                append_proof_and_regions(out, proof, regions);
            }
            Self::Confirm { proof, regions } => append_proof_and_regions(out, proof, regions),
            Self::Reject { reason } => append_reason(out, reason.code()),
            Self::Lend { request, namespace, hashes } => {
                append_lend(out, request, namespace, hashes)
            }
            Self::Lease { request, lease, ttl_ms, load, loans } => {
                let body = wire::Lease {
                    request: request.0.into(),
                    lease: lease.0.into(),
                    ttl_ms: ttl_ms.into(),
                    load: load.to_wire(),
                    count: count(loans),
                    reserved: [0; 6],
                };
                append(out, &body);
                out.extend_from_slice(cast_slice(loans));
            }
            Self::Renew { lease } => append(out, &wire::U64::from(lease.0)),
            Self::Renewed { lease, ttl_ms, load } => append_renewed(out, lease, ttl_ms, load),
            Self::Complete { lease, epoch, outcomes } => {
                append_complete(out, lease, epoch, outcomes)
            }
            Self::Ranks { lease, status, load, ranks } => {
                append_ranks(out, lease, status, load, ranks)
            }
            Self::Abort { lease, reason } => append_abort(out, lease, reason),
            Self::Ping { token } => append(out, &wire::U64::from(token)),
            Self::Pong { token, load } => {
                append(out, &wire::Pong { token: token.into(), load: load.to_wire() });
            }
            Self::Goodbye { reason } => append_reason(out, reason.code()),
            Self::Layout { number, blocks, regions, tensors } => {
                append_layout(out, (number, blocks), regions, tensors);
            }
        }
    }
}

/// Writes `key` into those loans of an encoded lease that lie within `span`.
pub fn set_loan_keys(lease: &mut [u8], span: &RemoteSpan, key: u32) {
    let loans = size_of::<wire::Header>() + size_of::<wire::Lease>();
    let Some(Ok(loans)) = lease.get_mut(loans..).map(bytemuck::try_cast_slice_mut) else { return };
    for loan in loans {
        let loan: &mut LoanEntry = loan;
        loan.set_key(span, key);
    }
}

fn append(out: &mut Vec<u8>, part: &impl Pod) {
    out.extend_from_slice(bytes_of(part));
}

fn append_reason(out: &mut Vec<u8>, reason: u8) {
    append(out, &wire::Reason { reason, reserved: [0; 7] });
}

fn append_proof_and_regions(out: &mut Vec<u8>, proof: Proof, regions: &[RegionEntry]) {
    append(out, &wire::Confirm { proof: proof.0, count: count(regions), reserved: [0; 6] });
    out.extend_from_slice(cast_slice(regions));
}

fn count<T>(list: &[T]) -> wire::U16 {
    u16::try_from(list.len()).unwrap_or(u16::MAX).into()
}

fn append_lend(
    out: &mut Vec<u8>,
    request: RequestId,
    namespace: NamespaceId,
    hashes: &[HashEntry],
) {
    let body = wire::Lend {
        request: request.0.into(),
        namespace: namespace.0.into(),
        count: count(hashes),
        reserved: [0; 6],
    };
    append(out, &body);
    out.extend_from_slice(cast_slice(hashes));
}

fn append_renewed(out: &mut Vec<u8>, lease: LeaseId, ttl_ms: u32, load: Load) {
    let body = wire::Renewed { lease: lease.0.into(), ttl_ms: ttl_ms.into(), load: load.to_wire() };
    append(out, &body);
}

fn append_complete(out: &mut Vec<u8>, lease: LeaseId, epoch: NodeEpoch, outcomes: Outcomes<'_>) {
    let body = wire::Complete {
        lease: lease.0.into(),
        epoch: epoch.0.into(),
        count: outcomes.count().into(),
        reserved: [0; 6],
    };
    append(out, &body);
    out.extend_from_slice(outcomes.bitmap());
}

fn append_ranks(out: &mut Vec<u8>, lease: LeaseId, status: RanksStatus, load: Load, ranks: &[u8]) {
    let body = wire::Ranks {
        lease: lease.0.into(),
        load: load.to_wire(),
        count: count(ranks),
        status: status.code(),
        reserved: [0; 1],
    };
    append(out, &body);
    out.extend_from_slice(ranks);
}

fn append_layout(
    out: &mut Vec<u8>,
    (number, blocks): (u32, u32),
    regions: &[RegionEntry],
    tensors: &[TensorEntry],
) {
    let body = wire::Layout {
        number: number.into(),
        blocks: blocks.into(),
        regions: count(regions),
        tensors: count(tensors),
        reserved: [0; 4],
    };
    append(out, &body);
    out.extend_from_slice(cast_slice(regions));
    out.extend_from_slice(cast_slice(tensors));
}

fn append_abort(out: &mut Vec<u8>, lease: LeaseId, reason: AbortReason) {
    let body = wire::Abort { lease: lease.0.into(), reason: reason.code(), reserved: [0; 7] };
    append(out, &body);
}
