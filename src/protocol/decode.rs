//! From bytes that a stranger sent to a value that is within every limit, or the reason why not.

use bytemuck::Pod;

use super::{
    AbortReason, GoodbyeReason, HashEntry, Introduction, Kind, LoanEntry, MAGIC, Message, Outcomes,
    PROTOCOL_VERSION, Proof, RanksStatus, RegionEntry, RejectReason, TensorEntry, wire,
};
use crate::limits;
use crate::types::{LeaseId, Load, NamespaceId, NodeEpoch, NodeId, RequestId, RequesterId, Scope};

/// Why bytes are no message. The sender is at fault: its connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// Shorter than a header, or longer than any message.
    #[error("a message of {got} bytes; {min} to {max} are allowed", min = size_of::<wire::Header>(), max = limits::MESSAGE_BYTES_MAX)]
    Size {
        /// Bytes that arrived.
        got: usize,
    },
    /// Not a kind of message.
    #[error("no message has the kind {got}")]
    Kind {
        /// The first byte.
        got: u8,
    },
    /// A message of another version of the protocol.
    #[error(
        "the peer speaks protocol version {got}, this node {PROTOCOL_VERSION}: run one version"
    )]
    Version {
        /// The peer's.
        got: u8,
    },
    /// The body is shorter or longer than it says, or than its kind is.
    #[error("a {} message whose length is not what it says", kind.name())]
    Length {
        /// Of which kind.
        kind: Kind,
    },
    /// A list is longer than its limit, or empty where that makes no sense.
    #[error("a {} message with a list of {got}", kind.name())]
    Count {
        /// Of which kind.
        kind: Kind,
        /// The list's length.
        got: usize,
    },
    /// A field has a value that no node sends.
    #[error("a {} message whose {field} is not valid", kind.name())]
    Value {
        /// Of which kind.
        kind: Kind,
        /// The field.
        field: &'static str,
    },
}

impl DecodeError {
    /// Whose fault it is: the sender's.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        Scope::Peer
    }
}

impl From<&wire::Load> for Load {
    fn from(load: &wire::Load) -> Self {
        Self { outstanding_bytes: load.outstanding_bytes.get(), pause_ms: load.pause_ms.get() }
    }
}

/// Reads one whole message.
///
/// # Errors
/// [`DecodeError`] for everything that [`Message::encode`] would not have written.
pub fn decode(bytes: &[u8]) -> Result<Message<'_>, DecodeError> {
    let size = || DecodeError::Size { got: bytes.len() };
    if bytes.len() > limits::MESSAGE_BYTES_MAX {
        return Err(size());
    }
    let (header, rest) = split::<wire::Header>(bytes).ok_or_else(size)?;
    let kind = Kind::from_code(header.kind).ok_or(DecodeError::Kind { got: header.kind })?;
    if header.version != PROTOCOL_VERSION {
        return Err(DecodeError::Version { got: header.version });
    }
    let mut body = Body { kind, rest };
    body.zero(&header.reserved)?;
    if usize::try_from(header.body.get()) != Ok(rest.len()) {
        return Err(DecodeError::Length { kind });
    }
    let message = match kind {
        Kind::Hello => body.hello().map(Message::Hello),
        Kind::Beside => body.hello().map(Message::Beside),
        Kind::Widen => Ok(Message::Widen),
        Kind::Welcome => body.welcome(),
        Kind::Confirm => body.confirm(),
        Kind::Reject => body.reject(),
        Kind::Lend => body.lend(),
        Kind::Lease => body.lease(),
        Kind::Renew => body.renew(),
        Kind::Renewed => body.renewed(),
        Kind::Complete => body.complete(),
        Kind::Ranks => body.ranks(),
        Kind::Abort => body.abort(),
        Kind::Ping => body.ping(),
        Kind::Pong => body.pong(),
        Kind::Goodbye => body.goodbye(),
        Kind::Layout => body.layout(),
    }?;
    if body.rest.is_empty() { Ok(message) } else { Err(DecodeError::Length { kind }) }
}

/// The first bytes as a `T`, and the bytes after it; `None` where there are too few.
fn split<T: Pod>(bytes: &[u8]) -> Option<(&T, &[u8])> {
    let (head, rest) = bytes.split_at_checked(size_of::<T>())?;
    // Layouts have alignment 1, so the cast fails for no address.
    Some((bytemuck::try_from_bytes(head).ok()?, rest))
}

/// What is left of a body.
struct Body<'a> {
    kind: Kind,
    rest: &'a [u8],
}

impl<'a> Body<'a> {
    fn take<T: Pod>(&mut self) -> Result<&'a T, DecodeError> {
        let kind = self.kind;
        let (head, rest) = split(self.rest).ok_or(DecodeError::Length { kind })?;
        self.rest = rest;
        Ok(head)
    }

    /// A list that makes up the rest of the message.
    fn list<T: Pod>(&mut self, count: wire::U16) -> Result<&'a [T], DecodeError> {
        let kind = self.kind;
        let bytes = usize::from(count.get()) * size_of::<T>();
        let (head, rest) = self.rest.split_at_checked(bytes).ok_or(DecodeError::Length { kind })?;
        self.rest = rest;
        bytemuck::try_cast_slice(head).map_err(|_misfit| DecodeError::Length { kind })
    }

    const fn value(&self, field: &'static str) -> DecodeError {
        DecodeError::Value { kind: self.kind, field }
    }

    fn check(&self, holds: bool, field: &'static str) -> Result<(), DecodeError> {
        holds.then_some(()).ok_or(self.value(field))
    }

    fn zero(&self, reserved: &[u8]) -> Result<(), DecodeError> {
        self.check(reserved.iter().all(|byte| *byte == 0), "reserved part")
    }

    /// Refuses a list of blocks that is empty or too long.
    fn blocks(&self, count: wire::U16) -> Result<(), DecodeError> {
        let got = usize::from(count.get());
        if (1..=limits::LEND_BLOCKS_MAX).contains(&got) {
            return Ok(());
        }
        let kind = self.kind;
        Err(DecodeError::Count { kind, got })
    }

    fn some_lease(&self, lease: wire::U64) -> Result<LeaseId, DecodeError> {
        let lease = LeaseId(lease.get());
        self.check(lease != LeaseId::NONE, "lease")?;
        Ok(lease)
    }

    fn introduction(&mut self) -> Result<Introduction, DecodeError> {
        let wire = self.take::<wire::Introduction>()?;
        self.zero(&wire.reserved)?;
        let (name, unused) = wire
            .requester
            .split_at_checked(usize::from(wire.requester_len))
            .ok_or(self.value("requester"))?;
        self.zero(unused)?;
        let requester =
            str::from_utf8(name).ok().and_then(RequesterId::new).ok_or(self.value("requester"))?;
        Ok(Introduction {
            node: NodeId(wire.node),
            epoch: NodeEpoch(wire.epoch.get()),
            requester,
            nonce: wire.nonce,
        })
    }

    fn proof_and_regions(&mut self) -> Result<(Proof, &'a [RegionEntry]), DecodeError> {
        let wire = self.take::<wire::Confirm>()?;
        self.zero(&wire.reserved)?;
        let got = usize::from(wire.count.get());
        if got > limits::REGIONS_MAX {
            let kind = self.kind;
            return Err(DecodeError::Count { kind, got });
        }
        let regions: &[RegionEntry] = self.list(wire.count)?;
        self.check(regions.iter().all(RegionEntry::is_valid), "region")?;
        Ok((Proof(wire.proof), regions))
    }

    fn reason(&mut self) -> Result<u8, DecodeError> {
        let wire = self.take::<wire::Reason>()?;
        self.zero(&wire.reserved)?;
        Ok(wire.reason)
    }

    fn hello(&mut self) -> Result<Introduction, DecodeError> {
        let magic = self.take::<[u8; 8]>()?;
        self.check(*magic == MAGIC, "magic")?;
        self.introduction()
    }

    fn welcome(&mut self) -> Result<Message<'a>, DecodeError> {
        let introduction = self.introduction()?;
        let (proof, regions) = self.proof_and_regions()?;
        Ok(Message::Welcome { introduction, proof, regions })
    }

    fn confirm(&mut self) -> Result<Message<'a>, DecodeError> {
        let (proof, regions) = self.proof_and_regions()?;
        Ok(Message::Confirm { proof, regions })
    }

    fn reject(&mut self) -> Result<Message<'a>, DecodeError> {
        let reason = RejectReason::from_code(self.reason()?).ok_or(self.value("reason"))?;
        Ok(Message::Reject { reason })
    }

    fn goodbye(&mut self) -> Result<Message<'a>, DecodeError> {
        let reason = GoodbyeReason::from_code(self.reason()?).ok_or(self.value("reason"))?;
        Ok(Message::Goodbye { reason })
    }

    fn lend(&mut self) -> Result<Message<'a>, DecodeError> {
        let wire = self.take::<wire::Lend>()?;
        self.zero(&wire.reserved)?;
        self.blocks(wire.count)?;
        let hashes: &[HashEntry] = self.list(wire.count)?;
        self.check(hashes.iter().all(HashEntry::is_valid), "hash")?;
        Ok(Message::Lend {
            request: RequestId(wire.request.get()),
            namespace: NamespaceId(wire.namespace.get()),
            hashes,
        })
    }

    fn lease(&mut self) -> Result<Message<'a>, DecodeError> {
        let wire = self.take::<wire::Lease>()?;
        self.zero(&wire.reserved)?;
        self.blocks(wire.count)?;
        let loans: &[LoanEntry] = self.list(wire.count)?;
        self.check(loans.iter().all(LoanEntry::is_valid), "loan")?;
        let lease = LeaseId(wire.lease.get());
        let lent = loans.iter().any(|entry| entry.loan().is_ready());
        self.check((lease != LeaseId::NONE) == lent, "lease")?;
        Ok(Message::Lease {
            request: RequestId(wire.request.get()),
            lease,
            ttl_ms: wire.ttl_ms.get(),
            load: Load::from(&wire.load),
            loans,
        })
    }

    fn renew(&mut self) -> Result<Message<'a>, DecodeError> {
        let lease = *self.take::<wire::U64>()?;
        let lease = self.some_lease(lease)?;
        Ok(Message::Renew { lease })
    }

    fn renewed(&mut self) -> Result<Message<'a>, DecodeError> {
        let wire = self.take::<wire::Renewed>()?;
        Ok(Message::Renewed {
            lease: self.some_lease(wire.lease)?,
            ttl_ms: wire.ttl_ms.get(),
            load: Load::from(&wire.load),
        })
    }

    fn complete(&mut self) -> Result<Message<'a>, DecodeError> {
        let wire = self.take::<wire::Complete>()?;
        self.zero(&wire.reserved)?;
        self.blocks(wire.count)?;
        let count = wire.count.get();
        let bitmap = self.list(count.div_ceil(8).into())?;
        Ok(Message::Complete {
            lease: self.some_lease(wire.lease)?,
            epoch: NodeEpoch(wire.epoch.get()),
            outcomes: Outcomes::new(count, bitmap).ok_or(self.value("bitmap"))?,
        })
    }

    fn ranks(&mut self) -> Result<Message<'a>, DecodeError> {
        let wire = self.take::<wire::Ranks>()?;
        self.zero(&wire.reserved)?;
        let status = RanksStatus::from_code(wire.status).ok_or(self.value("status"))?;
        let got = usize::from(wire.count.get());
        if got > limits::LEND_BLOCKS_MAX || (got == 0) != (status == RanksStatus::Unknown) {
            let kind = self.kind;
            return Err(DecodeError::Count { kind, got });
        }
        let ranks: &[u8] = self.list(wire.count)?;
        self.check(ranks.iter().all(|rank| *rank <= limits::RANK_MAX), "rank")?;
        Ok(Message::Ranks {
            lease: self.some_lease(wire.lease)?,
            status,
            load: Load::from(&wire.load),
            ranks,
        })
    }

    fn abort(&mut self) -> Result<Message<'a>, DecodeError> {
        let wire = self.take::<wire::Abort>()?;
        self.zero(&wire.reserved)?;
        let reason = AbortReason::from_code(wire.reason).ok_or(self.value("reason"))?;
        let lease = LeaseId(wire.lease.get());
        let all = reason == AbortReason::Reconnected;
        self.check((lease == LeaseId::NONE) == all, "lease")?;
        Ok(Message::Abort { lease, reason })
    }

    fn layout(&mut self) -> Result<Message<'a>, DecodeError> {
        let wire = self.take::<wire::Layout>()?;
        self.zero(&wire.reserved)?;
        let counts =
            [(wire.regions, limits::REGIONS_MAX), (wire.tensors, limits::LAYOUT_TENSORS_MAX)];
        for (count, limit) in counts {
            let (kind, got) = (self.kind, usize::from(count.get()));
            if !(1..=limit).contains(&got) {
                return Err(DecodeError::Count { kind, got });
            }
        }
        let regions: &[RegionEntry] = self.list(wire.regions)?;
        self.check(regions.iter().all(RegionEntry::is_valid), "region")?;
        let tensors: &[TensorEntry] = self.list(wire.tensors)?;
        let blocks = wire.blocks.get();
        self.check((1..=limits::LAYOUT_BLOCKS_MAX).contains(&blocks), "blocks")?;
        Ok(Message::Layout { number: wire.number.get(), blocks, regions, tensors })
    }

    fn ping(&mut self) -> Result<Message<'a>, DecodeError> {
        let token = self.take::<wire::U64>()?.get();
        Ok(Message::Ping { token })
    }

    fn pong(&mut self) -> Result<Message<'a>, DecodeError> {
        let wire = self.take::<wire::Pong>()?;
        Ok(Message::Pong { token: wire.token.get(), load: Load::from(&wire.load) })
    }
}
