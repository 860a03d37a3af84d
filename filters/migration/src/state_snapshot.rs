//! Exported states of a session that are still valid, with a token that is still valid.

use std::time::Duration;

use crate::state_export::ExportedStates;

/// A token is valid for a minute (pingcap/tidb `pkg/sessionctx/sessionstates/session_token.go`). Nodes' clocks may differ a
/// little, and a login takes its time.
const TOKEN_LIFETIME: Duration = Duration::from_secs(50);

/// Exported states. Nothing was sent to the node since the export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateSnapshot {
    pub states: ExportedStates,
    /// When the export was requested.
    pub requested_at: Duration,
}

impl StateSnapshot {
    /// When its token expires.
    #[must_use]
    pub fn expires_at(&self) -> Duration {
        self.requested_at + TOKEN_LIFETIME
    }
}
