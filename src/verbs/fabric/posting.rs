//! How a connection spreads READs over its lanes: by load, or where a window's key says.

use super::connection::{Connection, Surroundings};
use super::lane::Lane;
use super::windows::lane_of;
use crate::fabric::{CompletionStatus, ReadBatch, ReadWork, RegisteredSpan};
use crate::sys::connections::Broken;

/// READs and bytes after which a list goes on to another lane: fewer do not pay for a second
/// doorbell.
const RUN_READS: usize = 32;
const RUN_BYTES: u64 = 1 << 20;

impl Connection {
    /// Posts READs for which there is room, one doorbell per lane. A READ whose local spans are wrong
    /// breaks the connection: it completes as such, all others are flushed.
    pub(super) fn post(
        &mut self,
        batch: &ReadBatch,
        around: &Surroundings<'_>,
    ) -> Result<(), Broken> {
        let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
        let mut spans = batch.segments.as_slice();
        let mut works = batch.works.iter();
        let (mut lane, mut run, mut run_bytes) = (None, 0, 0);
        let mut outcome = Ok(());
        for work in works.by_ref() {
            if run >= RUN_READS || run_bytes >= RUN_BYTES {
                (lane, run, run_bytes) = (None, 0, 0);
            }
            let at = match lane {
                _ if link.by_window => lane_of(work.remote.rkey, link.lanes.len()),
                Some(lane) => lane,
                None => idlest(&link.lanes),
            };
            let part = spans.split_at_checked(usize::from(work.segments));
            let good = part.filter(|(segments, _)| is_valid(work, segments, around));
            let (Some((segments, rest)), Some(to)) = (good, link.lanes.get_mut(at)) else {
                self.stillborn.push((work.wr_id, CompletionStatus::LocalProtection));
                outcome = Err(Broken::READ_FAILED);
                break;
            };
            spans = rest;
            // Devices take a segment of length 0 for one of 2 GiB.
            let filled = segments.iter().filter(|span| span.len > 0);
            to.add(work, filled.filter_map(|span| around.regions.local(span)));
            (lane, run) = (Some(at), run + 1);
            run_bytes += u64::from(work.remote.len);
        }
        let mut refused = Vec::new();
        for lane in &mut link.lanes {
            if let Err(error) = lane.flush(&mut refused) {
                tracing::warn!(%error, "the device refused READs");
                outcome = Err(Broken::READ_FAILED);
            }
        }
        for wr_id in refused.into_iter().chain(works.map(|work| work.wr_id)) {
            // The first one that failed has the fault, whichever way it failed.
            let status = match self.stillborn.is_empty() {
                true => CompletionStatus::LocalProtection,
                false => CompletionStatus::Flushed,
            };
            self.stillborn.push((wr_id, status));
        }
        outcome
    }
}

fn idlest(lanes: &[Lane]) -> usize {
    let load = |(_, lane): &(usize, &Lane)| (lane.bytes(), lane.outstanding());
    lanes.iter().enumerate().min_by_key(load).map_or(0, |(index, _)| index)
}

/// Whether the device can be given this READ.
fn is_valid(work: &ReadWork, segments: &[RegisteredSpan], around: &Surroundings<'_>) -> bool {
    let total: u64 = segments.iter().map(|span| u64::from(span.len)).sum();
    segments.len() <= around.device.segments as usize
        && work.remote.len <= around.device.read_bytes
        && total == u64::from(work.remote.len)
        && segments.iter().all(|span| around.regions.local(span).is_some())
}
