//! How long each step of a journey may take.

use std::time::Duration;

/// What a journey is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// The target has not answered the connection, or not greeted.
    Connecting,
    /// TLS with the target.
    Securing,
    /// All is ready at the target; the session runs a statement, or is in a transaction.
    Waiting,
    /// The old node was asked for the states. The client is held from here on.
    Exporting,
    /// The target has the login, and then the states.
    Entering,
    /// The old node puts back what the export has changed.
    Undoing,
}

impl Step {
    /// Every one, for tables and counters.
    pub const ALL: [Self; 6] =
        [Self::Connecting, Self::Securing, Self::Waiting, Self::Exporting, Self::Entering, Self::Undoing];

    /// The name in counters and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connect",
            Self::Securing => "tls",
            Self::Waiting => "wait",
            Self::Exporting => "export",
            Self::Entering => "enter",
            Self::Undoing => "undo",
        }
    }
}

/// The most that steps may take, and all of a journey.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub connect: Duration,
    pub secure: Duration,
    /// A node keeps a connection that does not log in for about 10 s.
    pub wait: Duration,
    pub export: Duration,
    pub enter: Duration,
    pub whole: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            secure: Duration::from_secs(2),
            wait: Duration::from_secs(5),
            export: Duration::from_secs(2),
            enter: Duration::from_secs(3),
            whole: Duration::from_secs(10),
        }
    }
}

impl Limits {
    pub(crate) const fn of(&self, step: Step) -> Duration {
        match step {
            Step::Connecting => self.connect,
            Step::Securing => self.secure,
            Step::Waiting => self.wait,
            Step::Exporting => self.export,
            Step::Entering => self.enter,
            Step::Undoing => self.export,
        }
    }
}
