//! The events that [`crate::tracker`] reports to an observer.

use crate::command::Command;

/// What pins a session that is not busy to its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PinReason {
    Transaction,
    /// Rows of a cursor are left to be fetched.
    Cursor,
    /// Parameters were sent for a statement that was not executed yet.
    LongData,
    /// Compressed, a binlog stream, or bytes that are not understood.
    Opaque,
}

/// How a client sends the password that a node asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PasswordRequest {
    /// As clear text with TLS, else encrypted with the server's RSA key.
    Encrypted,
    /// As clear text in any case.
    ClearText,
    /// It is the token with which only the proxy logs in.
    SessionToken,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandOutcome {
    Ok,
    /// The server's error code.
    Error(u16),
    /// It has no response.
    Silent,
}

/// Gets the events of a session. All methods have empty defaults.
///
/// Each command is started once and ended once, in the order sent; a command without a response ends when it was
/// sent and all commands before it have ended. There are no events once the session is opaque: the commands outstanding
/// then (and the one that made it opaque) do not end.
pub trait CommandObserver {
    /// The first packet of a command was seen from its first byte on (5 bytes of payload, if it has so many).
    fn on_command_started(&mut self, _command: Command) {}
    /// The last byte of its response was seen (or, without a response, of the command).
    fn on_command_ended(&mut self, _command: Command, _outcome: CommandOutcome) {}
    /// Within COM_CHANGE_USER the node asks for the password itself.
    fn on_password_request(&mut self, _request: PasswordRequest) {}
}

/// Ignores all events.
impl CommandObserver for () {}
