//! What [`crate::tracker`] tells of a session.

use crate::command::Command;

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
///
/// Each command is started once and ended once, in the order sent; a command without a response ends when it was
/// sent and all commands before it have ended. Nothing is told once the session is opaque: the commands outstanding
/// then (and the one that made it opaque) do not end.
pub trait Listener {
    /// The first packet of a command was seen from its first byte on (5 bytes of payload, if it has so many).
    fn started(&mut self, _command: Command) {}
    /// The last byte of its response was seen (or, without a response, of the command).
    fn ended(&mut self, _command: Command, _outcome: Outcome) {}
    /// Within COM_CHANGE_USER the node asks for a password that clients with TLS send as clear text.
    fn asked_for_clear_text(&mut self) {}
}

/// Listens to nothing.
impl Listener for () {}
