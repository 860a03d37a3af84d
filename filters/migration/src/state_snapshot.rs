//! Exported states of a session that are still valid, with a token that is still valid.

use std::time::Duration;

use crate::state_export::ExportedStates;

/// Shorter than the validity of a token, one minute (pingcap/tidb `pkg/sessionctx/sessionstates/session_token.go`),
/// because clocks of nodes may differ and a login takes time.
const TOKEN_LIFETIME: Duration = Duration::from_secs(50);

/// Exported states of a session to which its client has sent nothing since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateSnapshot {
    pub states: ExportedStates,
    /// When the export was requested.
    pub requested_at: Duration,
}

impl StateSnapshot {
    /// When the token expires.
    #[must_use]
    pub fn expires_at(&self) -> Duration {
        self.requested_at + TOKEN_LIFETIME
    }
}
