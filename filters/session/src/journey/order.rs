//! What a journey has its caller do, and why a session stays.

use std::rc::Rc;

use crate::arrival::Failure;
#[cfg(doc)]
use crate::journey::Journey;
use crate::limits::Step;
use crate::restore::RestoreStatement;
use crate::states::Unusable;

/// What the caller is to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Order {
    /// Send this to the target.
    Target(Vec<u8>),
    /// Send this to the target, which may take a while.
    Restore(Rc<RestoreStatement>),
    /// Send this to the target, and begin TLS behind it. [`Journey::secured`] when it stands.
    Secure(Vec<u8>),
    /// All is ready. [`Journey::depart`] as soon as the session runs nothing.
    Ready,
    /// Pass on nothing of the client until [`Order::Switch`] or [`Order::Release`], and send this to the old node. What
    /// it says goes to [`Journey::old`].
    Hold(Vec<u8>),
    /// Send this to the old node.
    Old(Vec<u8>),
    /// The target has all of the session, which goes on there: call [`Journey::switched`] then. If the old connection has
    /// unread bytes, these are read first, and [`Journey::retry`] follows.
    Switch,
    /// It is over, and the session stays. The target's connection can be closed.
    Release(Stay),
    /// The old node owes an answer that the session cannot go on without. That takes longer than others should wait for.
    Overdue,
    /// The session is lost at the old node, which has gone or cannot be followed, and was not taken anywhere. Where there
    /// are [`Journey::take_fresh`] states, another node may still take it.
    Lost,
}

/// Why a session stays where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stay {
    /// The target cannot be reached, or has broken off, in this step.
    Unreachable(Step),
    /// Something took too long.
    TooSlow(Step),
    /// The target cannot take it.
    Target(Failure),
    /// The old node does not let it go: 8146, and TiDB's reason is in its text.
    Refused(u16),
    /// The old node has no certificate to sign tokens with.
    NoToken,
    /// Its states cannot be carried over.
    States(Unusable),
    /// Nobody wants it to move any more.
    Cancelled,
}

impl Stay {
    /// Whether another target may do better.
    #[must_use]
    pub const fn blames_target(self) -> bool {
        match self {
            Self::Unreachable(_) | Self::Target(_) => true,
            Self::TooSlow(step) => !matches!(step, Step::Exporting | Step::Waiting),
            Self::Refused(_) | Self::NoToken | Self::States(_) | Self::Cancelled => false,
        }
    }

    /// Whether another session may do better, between the same nodes.
    #[must_use]
    pub const fn blames_session(self) -> bool {
        match self {
            Self::Refused(_) | Self::States(_) => true,
            Self::TooSlow(step) => matches!(step, Step::Waiting),
            Self::Unreachable(_) | Self::Target(_) | Self::NoToken | Self::Cancelled => false,
        }
    }
}
