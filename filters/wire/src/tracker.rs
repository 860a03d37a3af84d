//! Follows an established session: which command runs, when its response is complete, what state is left.

use crate::capability::Capabilities;
use crate::command::Command;

/// Where a session stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// No command is outstanding, and no transaction is open.
    Idle,
    /// A command is outstanding, or part of one was sent.
    Busy,
    /// No command is outstanding, a transaction is open.
    InTransaction,
    /// The bytes are not followed any more.
    Opaque,
}

/// Why a session that is not busy could not move to another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pinned {
    Transaction,
    /// Rows of a cursor are left to be fetched.
    Cursor,
    /// Parameters were sent for a statement that was not executed yet.
    LongData,
    /// Compressed, a binlog stream, or bytes that are not understood.
    Opaque,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Ok,
    /// The server's error code.
    Error(u16),
    /// It has no response.
    Silent,
}

/// Told of what happens. All have empty defaults.
pub trait Listener {
    /// The first packet of a command was seen from its first byte on.
    fn started(&mut self, _command: Command) {}
    /// The last byte of its response was seen (or, without a response, of the command).
    fn ended(&mut self, _command: Command, _outcome: Outcome) {}
}

/// Listens to nothing.
impl Listener for () {}

/// One session.
#[derive(Debug)]
pub struct Tracker {
    capabilities: Capabilities,
}

impl Tracker {
    /// `capabilities` are what client and node agreed on.
    #[must_use]
    pub fn new(capabilities: Capabilities) -> Self {
        Self { capabilities }
    }

    /// Takes bytes from the client, in any pieces.
    pub fn client(&mut self, bytes: &[u8], listener: &mut impl Listener) {
        let _ = (bytes, listener, self.capabilities);
    }

    /// Takes bytes from the node, in any pieces.
    pub fn node(&mut self, bytes: &[u8], listener: &mut impl Listener) {
        let _ = (bytes, listener);
    }

    #[must_use]
    pub fn state(&self) -> State {
        State::Idle
    }

    /// Why the session could not move, were it not busy; None when it could.
    #[must_use]
    pub fn pinned(&self) -> Option<Pinned> {
        None
    }

    /// Stops following.
    pub fn give_up(&mut self) {}
}
