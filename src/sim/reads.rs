//! READs: posted at one end, served at the other, landing some time after.

use super::state::{Action, End, Phase, Registered, State};
use super::{ExposedSpan, SimEndpoint};
use crate::fabric::{
    Access, CloseReason, CompletionStatus, ConnectionId, FabricError, ReadBatch, RegisteredSpan,
    RemoteSpan, WrId,
};

/// A READ that has not completed.
#[derive(Debug)]
pub(super) struct Read {
    number: u64,
    pub(super) wr_id: WrId,
    remote: RemoteSpan,
    local: Vec<RegisteredSpan>,
    /// What was read of the peer's memory so far.
    bytes: Vec<u8>,
}

impl State {
    pub(super) fn post(
        &mut self,
        at: SimEndpoint,
        on: ConnectionId,
        batch: &ReadBatch,
    ) -> Result<(), FabricError> {
        let index = self.open_end(at, on)?;
        let outstanding = match self.ends.get(index) {
            Some(end) if end.admitted => end.reads.len(),
            _ => return Err(FabricError::Closed),
        };
        if outstanding + batch.works.len() > self.config.reads_outstanding {
            return Err(FabricError::Full);
        }
        let mut segments = batch.segments.as_slice();
        for work in &batch.works {
            let (local, rest) =
                segments.split_at_checked(work.segments.into()).unwrap_or((segments, &[]));
            segments = rest;
            self.counter += 1;
            let read = Read {
                number: self.counter,
                wr_id: work.wr_id,
                remote: work.remote,
                local: local.to_vec(),
                bytes: Vec::new(),
            };
            let fits = self.fits(at, &read);
            let (number, delay) = (read.number, self.delay());
            if let Some(end) = self.ends.get_mut(index) {
                end.reads.push(read);
            }
            if fits {
                self.after(delay, Action::Serve { end: index, read: number, half: 0 });
            } else {
                self.fail(index, number, CompletionStatus::LocalProtection);
            }
        }
        Ok(())
    }

    /// Whether a READ's local spans are registered, as long as the remote one, and few enough.
    fn fits(&self, at: SimEndpoint, read: &Read) -> bool {
        let inside = |span: &RegisteredSpan| {
            let region = self.nodes.get(&at).and_then(|node| {
                node.regions.iter().find(|registered| registered.region.id == span.region)
            });
            region.is_some_and(|found| found.region.remote(span.offset, span.len).is_some())
        };
        let total: u64 = read.local.iter().map(|span| u64::from(span.len)).sum();
        total == u64::from(read.remote.len)
            && read.remote.len <= self.config.read_bytes
            && read.local.len() <= self.config.read_segments
            && read.local.iter().all(inside)
    }

    /// Ends a READ that cannot succeed, and its connection with it.
    fn fail(&mut self, index: usize, number: u64, status: CompletionStatus) {
        let Some(end) = self.ends.get_mut(index).filter(|end| end.phase == Phase::Open) else {
            return;
        };
        let Some(at) = end.reads.iter().position(|read| read.number == number) else {
            return;
        };
        let read = end.reads.remove(at);
        end.told = true;
        self.complete(index, &read, status);
        // A peer that is gone is no fault of the READ that finds it out.
        let reason = match status {
            CompletionStatus::Unreachable => CloseReason::PeerClosed,
            _ => CloseReason::ReadFailed,
        };
        self.break_end(index, reason);
    }

    /// The region of the node at this end that its peer's span names.
    fn served(&self, holder: &End, remote: &RemoteSpan) -> Option<(&Registered, u64)> {
        let regions = &self.nodes.get(&holder.node)?.regions;
        let granted = match self.config.windows {
            0 => None,
            _ => Some(holder.granted(remote)?),
        };
        let found = regions.iter().find(|registered| {
            registered.access == Access::RemoteRead
                && match granted {
                    Some(region) => registered.region.id == region,
                    None => registered.region.rkey == remote.rkey,
                }
        })?;
        let offset = remote.address.checked_sub(found.region.address)?;
        found.region.remote(offset, remote.len).map(|_| (found, offset))
    }

    /// Reads half of a READ's bytes where they are, as they are now.
    pub(super) fn serve(&mut self, index: usize, number: u64, half: u8) {
        let Some(end) = self.ends.get(index) else {
            return;
        };
        let Some(read) = end.reads.iter().find(|read| read.number == number) else {
            return;
        };
        let Some(other) = end.other.and_then(|other| self.ends.get(other)) else {
            return;
        };
        if other.phase != Phase::Open {
            // The holder has cut the connection: nobody answers.
            return self.fail(index, number, CompletionStatus::Unreachable);
        }
        if other.admitted && read.remote.len == 0 {
            // Nothing is looked up where nothing is read, as on a device.
            return self.land(index, number);
        }
        let served = if other.admitted { self.served(other, &read.remote) } else { None };
        let Some((region, offset)) = served else {
            return self.fail(index, number, CompletionStatus::RemoteAccess);
        };
        let middle = u64::from(read.remote.len / 2);
        let (from, to) = if half == 0 { (0, middle) } else { (middle, u64::from(read.remote.len)) };
        let mut bytes = vec![0; usize::try_from(to - from).unwrap_or(0)];
        if region.memory.read(offset + from, &mut bytes).is_err() {
            return self.fail(index, number, CompletionStatus::RemoteAccess);
        }
        let reads = self.ends.get_mut(index).map(|end| end.reads.iter_mut());
        if let Some(read) = reads.and_then(|mut all| all.find(|read| read.number == number)) {
            read.bytes.append(&mut bytes);
        }
        let delay = self.delay() + self.config.reading_time(to - from);
        self.after(
            delay,
            match half {
                0 => Action::Serve { end: index, read: number, half: 1 },
                _ => Action::Land { end: index, read: number },
            },
        );
    }

    /// Writes a READ's bytes where they were wanted, also where the connection is broken by now: its
    /// flush has not been polled.
    pub(super) fn land(&mut self, index: usize, number: u64) {
        let Some(end) = self.ends.get_mut(index) else {
            return;
        };
        let Some(at) = end.reads.iter().position(|read| read.number == number) else {
            return;
        };
        let open = end.phase == Phase::Open;
        let read = end.reads.swap_remove(at);
        let node = end.node;
        self.write(node, &read);
        if open {
            self.complete(index, &read, CompletionStatus::Success);
        } else if let Some(end) = self.ends.get_mut(index) {
            end.reads.push(read);
        }
    }

    fn write(&self, node: SimEndpoint, read: &Read) {
        let Some(node) = self.nodes.get(&node) else {
            return;
        };
        let mut rest = read.bytes.as_slice();
        for span in &read.local {
            let Some((bytes, after)) = rest.split_at_checked(span.len as usize) else {
                return;
            };
            rest = after;
            let mut regions = node.regions.iter().chain(&node.landing);
            if let Some(found) = regions.find(|found| found.region.id == span.region) {
                // Within bounds, as `fits` saw when it was posted; a mapping does not shrink.
                let written = found.memory.write(span.offset, bytes);
                debug_assert!(written.is_ok(), "{written:?}");
            }
        }
    }

    pub(super) fn landing(&self, at: SimEndpoint) -> Vec<RegisteredSpan> {
        let ends = self.ends.iter().filter(|end| end.node == at);
        ends.flat_map(|end| &end.reads).flat_map(|read| read.local.iter().copied()).collect()
    }

    pub(super) fn exposed(&self) -> Vec<ExposedSpan> {
        let mut exposed = Vec::new();
        for end in &self.ends {
            let other = end.other.and_then(|other| self.ends.get(other));
            let Some(other) = other.filter(|end| end.phase == Phase::Open && end.admitted) else {
                continue;
            };
            for read in &end.reads {
                let unread = read.bytes.len() < read.remote.len as usize;
                if let Some((region, offset)) = self.served(other, &read.remote)
                    && unread
                {
                    exposed.push(ExposedSpan {
                        holder: other.node,
                        region: region.region.id,
                        offset,
                        len: read.remote.len,
                    });
                }
            }
        }
        exposed
    }
}
