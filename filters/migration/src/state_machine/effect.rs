//! What the caller of a migration does, and why a migration aborts.

use std::rc::Rc;

use mysql_proto::secret::SecretBytes;

use crate::restore::RestoreStatement;
#[cfg(doc)]
use crate::state_machine::Migration;
use crate::state_summary::UnusableStates;
use crate::target_login::LoginFailure;
use crate::timeouts::MigrationStep;

/// What the caller does.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    /// Send these bytes to the target.
    SendToTarget(SecretBytes),
    /// Send this statement to the target. It may be long.
    RestoreStates(Rc<RestoreStatement>),
    /// Send these bytes to the target, then start TLS. Call [`Migration::on_target_tls_established`] when it is
    /// established.
    StartTargetTls(Vec<u8>),
    /// The target is ready. Call [`Migration::start_export`] as soon as the session is idle.
    TargetReady,
    /// Forward no bytes of the client until [`Effect::Switch`] or [`Effect::Abort`]. Send these bytes to the old node,
    /// and pass its answers to [`Migration::on_old_node_bytes`].
    HoldClient(SecretBytes),
    /// Send these bytes to the old node.
    SendToOldNode(SecretBytes),
    /// Continue the session at the target, and call [`Migration::on_switched`]. If the old connection has unread bytes,
    /// read these first, and call [`Migration::retry_switch`].
    Switch,
    /// The session stays at its node. Close the connection to the target.
    Abort(AbortReason),
    /// Let other sessions migrate: this session must wait for an answer of the old node, which may take long.
    ReleaseSlots,
    /// The old node is gone or has violated the protocol, and no target has restored the session. If
    /// [`Migration::take_snapshot`] returns states, another node may still restore the session.
    Lost,
}

/// Why a session stays on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AbortReason {
    /// The target could not be reached, or closed the connection, in this step.
    Unreachable(MigrationStep),
    /// This step took too long, or the whole migration did so in this step.
    TimedOut(MigrationStep),
    /// The login or the restore at the target failed.
    TargetFailed(LoginFailure),
    /// The old node rejected the export: error 8146, with TiDB's reason in its text.
    ExportRejected(u16),
    /// The old node has no certificate to sign a token with.
    NoToken,
    /// The states cannot be restored at another node.
    UnusableStates(UnusableStates),
    /// The session need not migrate any more.
    Cancelled,
}

impl AbortReason {
    /// Whether another target may succeed.
    #[must_use]
    pub const fn is_target_fault(self) -> bool {
        match self {
            Self::Unreachable(_) | Self::TargetFailed(_) => true,
            Self::TimedOut(step) => !matches!(step, MigrationStep::Exporting | MigrationStep::WaitingForIdle),
            Self::ExportRejected(_) | Self::NoToken | Self::UnusableStates(_) | Self::Cancelled => false,
        }
    }

    /// Whether another session may succeed, between the same nodes.
    #[must_use]
    pub const fn is_session_fault(self) -> bool {
        match self {
            Self::ExportRejected(_) | Self::UnusableStates(_) => true,
            Self::TimedOut(step) => matches!(step, MigrationStep::WaitingForIdle),
            Self::Unreachable(_) | Self::TargetFailed(_) | Self::NoToken | Self::Cancelled => false,
        }
    }
}
