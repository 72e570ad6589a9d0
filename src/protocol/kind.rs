//! Kinds of messages and the codes in them.

macro_rules! codes {
    (
        $(#[$doc:meta])*
        $name:ident { $( $(#[$vdoc:meta])* $variant:ident = $code:literal, $text:literal; )+ }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $( $(#[$vdoc])* $variant, )+ }

        impl $name {
            /// All of them, in the order of their codes.
            pub const ALL: &'static [Self] = &[ $( Self::$variant, )+ ];

            /// The code on the wire.
            #[must_use]
            pub const fn code(self) -> u8 {
                match self { $( Self::$variant => $code, )+ }
            }

            /// The meaning of a code; `None` where it has none.
            #[must_use]
            pub const fn from_code(code: u8) -> Option<Self> {
                match code { $( $code => Some(Self::$variant), )+ _ => None }
            }

            /// The name that output and golden files use.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $( Self::$variant => $text, )+ }
            }
        }
    };
}

codes! {
    /// What a message is; its first byte.
    Kind {
        /// The initiator introduces itself.
        Hello = 1, "hello";
        /// The acceptor introduces itself, proves, and lists its regions.
        Welcome = 2, "welcome";
        /// The initiator proves and lists its regions.
        Confirm = 3, "confirm";
        /// The handshake is refused.
        Reject = 4, "reject";
        /// Asks for blocks.
        Lend = 5, "lend";
        /// Answers [`Kind::Lend`].
        Lease = 6, "lease";
        /// Asks for more time.
        Renew = 7, "renew";
        /// Answers [`Kind::Renew`].
        Renewed = 8, "renewed";
        /// Says which blocks arrived, and ends the lease.
        Complete = 9, "complete";
        /// Answers [`Kind::Complete`].
        Ranks = 10, "ranks";
        /// Gives a lease back unread.
        Abort = 11, "abort";
        /// Are you there?
        Ping = 12, "ping";
        /// Answers [`Kind::Ping`].
        Pong = 13, "pong";
        /// The sender closes the connection next.
        Goodbye = 14, "goodbye";
        /// Says how blocks lie that leases will name by their numbers.
        Layout = 15, "layout";
        /// The initiator of a connection that shall take another one's place introduces itself.
        Beside = 16, "beside";
        /// Asks for such a connection.
        Widen = 17, "widen";
    }
}

codes! {
    /// Why a handshake is refused.
    RejectReason {
        /// The peer speaks another version.
        Version = 1, "version";
        /// The proof is wrong.
        Authentication = 2, "authentication";
        /// No more requesters can be told apart; the holder's restart makes room.
        RequestersExhausted = 3, "requesters_exhausted";
        /// Another connection between these two nodes stays.
        Duplicate = 4, "duplicate";
        /// The node is shutting down.
        Draining = 5, "draining";
        /// Both ends have one node id.
        SameNode = 6, "same_node";
        /// Another node, connected now, reads under this requester identity.
        RequesterInUse = 7, "requester_in_use";
    }
}

codes! {
    /// Why a lease is given back unread.
    AbortReason {
        /// Nobody waits for the blocks any more.
        Cancelled = 1, "cancelled";
        /// The requester has no memory for them.
        NoMemory = 2, "no_memory";
        /// The answer came too late to be used.
        Late = 3, "late";
        /// Names no lease but all that were granted before this connection: none is read any more.
        Reconnected = 4, "reconnected";
    }
}

codes! {
    /// Why a connection is about to be closed.
    GoodbyeReason {
        /// The node stops.
        Shutdown = 1, "shutdown";
        /// The peer broke the protocol.
        Violation = 2, "violation";
        /// Another connection, or a later start of the peer, takes its place.
        Replaced = 3, "replaced";
        /// The peer did not answer in time.
        Unresponsive = 4, "unresponsive";
    }
}

codes! {
    /// How a completion was taken.
    RanksStatus {
        /// Ranks moved.
        Recorded = 1, "recorded";
        /// It had been taken before; these are the ranks of that time.
        Replayed = 2, "replayed";
        /// The lease is not known, or not the sender's: no rank moved, none is told.
        Unknown = 3, "unknown";
    }
}
