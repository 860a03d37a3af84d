//! States of a session that are still true, with a token that is still good.

use std::time::Duration;

use crate::export::States;

/// A token is good for a minute (pingcap/tidb `pkg/sessionctx/sessionstates/session_token.go`). Nodes' clocks may differ a
/// little, and a login takes its time.
const TOKEN: Duration = Duration::from_secs(50);

/// States that were exported, and nothing was sent to the node since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fresh {
    pub states: States,
    /// When the node was asked for them.
    pub since: Duration,
}

impl Fresh {
    /// When its token is not good any more.
    #[must_use]
    pub fn ends(&self) -> Duration {
        self.since + TOKEN
    }
}
