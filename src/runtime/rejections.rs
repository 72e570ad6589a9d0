//! Refused handshakes, said to people: nearly always two nodes whose settings do not fit.

use crate::protocol::{Kind, Message, RejectReason, decode, kind_of};
use crate::runtime::seldom::Seldom;
use crate::types::Timestamp;

/// Who refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// This node.
    Us,
    /// The peer.
    Peer,
}

/// Logs refusals that come by as messages.
#[derive(Debug, Default)]
pub(super) struct Rejections {
    /// By code; ours, then the peers'.
    lines: [[Seldom; RejectReason::ALL.len() + 1]; 2],
}

impl Rejections {
    /// Looks at a message that is sent or that has arrived. Most are told by their first byte to be
    /// something else, without a look at the clock.
    pub(super) fn observe(&self, by: By, message: &[u8], now: impl FnOnce() -> Timestamp) {
        if kind_of(message) == Some(Kind::Reject)
            && let Ok(Message::Reject { reason }) = decode(message)
            && self.is_news(by, reason, now())
        {
            let (name, remedy) = (reason.name(), remedy(reason));
            match by {
                By::Us => tracing::warn!(reason = name, "refused a peer's connection: {remedy}"),
                By::Peer => tracing::warn!(reason = name, "a peer refused to connect: {remedy}"),
            }
        }
    }

    /// Whether to say it: two nodes that connect at once is everyday life, and what was said just
    /// now is not said again.
    fn is_news(&self, by: By, reason: RejectReason, now: Timestamp) -> bool {
        let lines = self.lines.get(usize::from(by == By::Peer));
        let line = lines.and_then(|lines| lines.get(usize::from(reason.code())));
        line.is_some_and(|line| reason != RejectReason::Duplicate && line.is_due(now))
    }
}

/// What it means, and what to do.
const fn remedy(reason: RejectReason) -> &'static str {
    match reason {
        RejectReason::Version => "run one release of kvrail on all nodes",
        RejectReason::Authentication => {
            "the two nodes have different cluster secrets; give both the same --cluster-secret-file"
        }
        RejectReason::RequestersExhausted => {
            "the holder has met as many requesters as it can tell apart; restart it, and give nodes \
             a stable --requester-id"
        }
        RejectReason::Duplicate => "another connection between the two nodes stays",
        RejectReason::Draining => "the node is shutting down",
        RejectReason::SameNode => "two nodes have one --node-id; give each its own",
        RejectReason::RequesterInUse => {
            "another node reads under the same name; give each node its own --requester-id"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::seldom::PAUSE;

    #[test]
    fn a_reason_is_said_once_in_a_while_and_each_direction_by_itself() {
        let rejections = Rejections::default();
        let (reason, now) = (RejectReason::RequesterInUse, Timestamp::ZERO);
        assert!(rejections.is_news(By::Us, reason, now));
        assert!(!rejections.is_news(By::Us, reason, now + PAUSE / 2));
        assert!(rejections.is_news(By::Peer, reason, now));
        assert!(rejections.is_news(By::Us, RejectReason::Version, now));
        assert!(rejections.is_news(By::Us, reason, now + PAUSE));
        assert!(!rejections.is_news(By::Us, RejectReason::Duplicate, now));
    }
}
