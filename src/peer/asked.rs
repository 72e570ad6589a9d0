//! What a requester asks of this node as a holder, and what every reply says.

use super::connection::Remote;
use super::holder::{Holder, Lend};
use super::landing::Landing;
use super::outbox::Context;
use crate::lease::{Borrower, Completion};
use crate::protocol::Message;
use crate::types::Load;

/// What a reply says about its sender's load.
pub(super) const fn load_of(message: &Message<'_>) -> Option<Load> {
    match message {
        Message::Lease { load, .. }
        | Message::Renewed { load, .. }
        | Message::Ranks { load, .. }
        | Message::Pong { load, .. } => Some(*load),
        _ => None,
    }
}

/// What a requester asks of this node as a holder.
pub(super) fn handle_asked<L: Landing>(
    holder: &mut Holder,
    remote: &Remote,
    asked: Message<'_>,
    cx: &mut Context<'_, L>,
) {
    match asked {
        Message::Lend { request, namespace, hashes } => {
            holder.handle_lend(remote, &Lend { request, namespace, hashes }, cx);
        }
        Message::Renew { lease } => holder.handle_renew(remote, lease, cx),
        Message::Complete { lease, epoch, outcomes } => {
            let borrower = Borrower { epoch, ..remote.borrower() };
            let (count, bitmap) = (outcomes.count(), outcomes.bitmap());
            holder.handle_complete(remote, &Completion { borrower, lease, count, bitmap }, cx);
        }
        Message::Abort { lease, .. } => holder.handle_abort(remote, lease, cx.outbox),
        Message::Ping { token } => {
            let load = holder.load(cx.landing);
            cx.outbox.send(remote.connection, &Message::Pong { token, load });
        }
        _ => {}
    }
}
