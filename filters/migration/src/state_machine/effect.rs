//! What a migration has its caller do, and why it aborts.

use std::rc::Rc;

use mysql_proto::secret::SecretBytes;

use crate::restore::RestoreStatement;
#[cfg(doc)]
use crate::state_machine::Migration;
use crate::state_summary::UnusableStates;
use crate::target_login::LoginFailure;
use crate::timeouts::MigrationStep;

/// What the caller is to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    /// Send this to the target.
    SendToTarget(SecretBytes),
    /// Send this to the target. It may be long.
    RestoreStates(Rc<RestoreStatement>),
    /// Send this to the target, and begin TLS behind it. [`Migration::on_target_tls_established`] when TLS is
    /// established.
    StartTargetTls(Vec<u8>),
    /// The target is ready. [`Migration::start_export`] as soon as the session is idle.
    TargetReady,
    /// Pass on nothing of the client until [`Effect::Switch`] or [`Effect::Abort`], and send this to the old node. What
    /// it sends goes to [`Migration::on_old_node_bytes`].
    HoldClient(SecretBytes),
    /// Send this to the old node.
    SendToOldNode(SecretBytes),
    /// The session continues at the target: call [`Migration::on_switched`] then. If the old connection has
    /// unread bytes, these are read first, and [`Migration::retry_switch`] follows.
    Switch,
    /// The session stays. The connection to the target can be closed.
    Abort(AbortReason),
    /// Let other sessions migrate meanwhile: the session cannot continue without an answer that the old node owes, and that
    /// may take long.
    ReleaseSlots,
    /// The old node is gone or cannot be followed, and no target has restored the session. If there
    /// are [`Migration::take_snapshot`] states, another node may still restore it.
    Lost,
}

/// Why a session stays on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AbortReason {
    /// The target cannot be reached, or has closed the connection, in this step.
    Unreachable(MigrationStep),
    /// This step, or the whole migration in this step, took too long.
    TimedOut(MigrationStep),
    /// The login or the restore at the target failed.
    TargetFailed(LoginFailure),
    /// The old node rejects the export: error 8146, with TiDB's reason in its text.
    ExportRejected(u16),
    /// The old node has no certificate to sign tokens with.
    NoToken,
    /// Its states cannot be restored at another node.
    UnusableStates(UnusableStates),
    /// The session does not need to migrate any more.
    Cancelled,
}

impl AbortReason {
    /// Whether another target may do better.
    #[must_use]
    pub const fn is_target_fault(self) -> bool {
        match self {
            Self::Unreachable(_) | Self::TargetFailed(_) => true,
            Self::TimedOut(step) => !matches!(step, MigrationStep::Exporting | MigrationStep::WaitingForIdle),
            Self::ExportRejected(_) | Self::NoToken | Self::UnusableStates(_) | Self::Cancelled => false,
        }
    }

    /// Whether another session may do better, between the same nodes.
    #[must_use]
    pub const fn is_session_fault(self) -> bool {
        match self {
            Self::ExportRejected(_) | Self::UnusableStates(_) => true,
            Self::TimedOut(step) => matches!(step, MigrationStep::WaitingForIdle),
            Self::Unreachable(_) | Self::TargetFailed(_) | Self::NoToken | Self::Cancelled => false,
        }
    }
}
