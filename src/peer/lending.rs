//! Where a peer is to read a resident that is about to be lent to it, and by what.

use super::landing::Landing;
use super::layouts::ToldLayouts;
use super::pressure::Room;
use super::windows::Windows;
use crate::event::LendRefusal;
use crate::fabric::ConnectionId;
use crate::protocol::{Loan, Place};
use crate::store::Found;
use crate::types::RequesterIndex;

/// Where a peer is to read a pinned resident; else what it is told, and the pin is the caller's still.
pub(super) fn place<L: Landing>(
    found: &Found,
    room: Room,
    (covers, reader): ((&mut Windows, &mut ToldLayouts), (ConnectionId, RequesterIndex)),
    landing: &mut L,
) -> Result<Place, Loan> {
    // It has waited for that as long as it may.
    if !landing.prepare(found) {
        return Err(Loan::Busy(LendRefusal::Staging));
    }
    let kind = found.payload.extent.pool.kind();
    match landing.remote(&found.payload.extent) {
        None => Err(Loan::Failed),
        Some(place) if u64::from(place.len()) > room.of(kind) => {
            Err(Loan::Busy(LendRefusal::Pressure))
        }
        Some(place) if !cover(covers, reader, &place) => Err(Loan::Busy(LendRefusal::Windows)),
        Some(place) => Ok(place),
    }
}

/// Whether a loan can be read: by a window, where there are windows, or by the number of its layout.
/// Where leases have keys of their own, a block in pieces has none: one for each piece would be too
/// many, and one for all of them would open what lies between.
fn cover(
    (windows, layouts): (&mut Windows, &mut ToldLayouts),
    reader: (ConnectionId, RequesterIndex),
    place: &Place,
) -> bool {
    match place {
        Place::Span(span) => windows.cover(reader, span),
        Place::Block { layout, .. } => !windows.are_used() && layouts.name(*layout),
    }
}

/// Takes back the latest [`cover`], which was for this loan.
pub(super) fn uncover(windows: &mut Windows, on: ConnectionId, place: &Place) {
    if let Place::Span(span) = place {
        windows.uncover(on, span);
    }
}
