//! How long each step of a migration may take.

use std::time::Duration;

/// A step of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MigrationStep {
    /// The target has not accepted the connection, or not sent its greeting.
    Connecting,
    /// The TLS handshake with the target.
    StartingTls,
    /// The target is ready, but the session is not idle.
    WaitingForIdle,
    /// The old node exports the states. The client is held from here on.
    Exporting,
    /// The target processes the login, and then restores the states.
    Restoring,
    /// The old node undoes what the export has changed.
    Undoing,
}

impl MigrationStep {
    /// All steps, for tables and counters.
    pub const ALL: [Self; 6] =
        [Self::Connecting, Self::StartingTls, Self::WaitingForIdle, Self::Exporting, Self::Restoring, Self::Undoing];

    /// The name in counters and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connect",
            Self::StartingTls => "tls",
            Self::WaitingForIdle => "wait",
            Self::Exporting => "export",
            Self::Restoring => "enter",
            Self::Undoing => "undo",
        }
    }
}

/// The timeouts of the steps, and of the whole migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationTimeouts {
    pub connect: Duration,
    pub tls: Duration,
    /// Less than the 10 s or so after which a node may close a connection that does not log in.
    pub idle_wait: Duration,
    pub export: Duration,
    pub restore: Duration,
    pub overall: Duration,
}

impl Default for MigrationTimeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            tls: Duration::from_secs(2),
            idle_wait: Duration::from_secs(5),
            export: Duration::from_secs(2),
            restore: Duration::from_secs(3),
            overall: Duration::from_secs(10),
        }
    }
}

impl MigrationTimeouts {
    pub(crate) const fn of_step(&self, step: MigrationStep) -> Duration {
        match step {
            MigrationStep::Connecting => self.connect,
            MigrationStep::StartingTls => self.tls,
            MigrationStep::WaitingForIdle => self.idle_wait,
            MigrationStep::Exporting => self.export,
            MigrationStep::Restoring => self.restore,
            MigrationStep::Undoing => self.export,
        }
    }
}
