//! The events that [`crate::tracker`] reports to an observer.

use crate::command::Command;

/// Why a session must stay on its node although it is not busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PinReason {
    Transaction,
    /// Rows of a cursor are left to be fetched.
    Cursor,
    /// Parameters were sent for a statement that has not been executed yet.
    LongData,
    /// The tracker cannot follow the session: compression, a binlog stream, or unknown bytes.
    Opaque,
}

/// How a client sends the password that a node asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PasswordRequest {
    /// In clear text with TLS, else encrypted with the server's RSA key.
    Encrypted,
    /// Always in clear text.
    ClearText,
    /// The node asks for the token with which only the proxy may log in.
    SessionToken,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandOutcome {
    Ok,
    /// The server's error code.
    Error(u16),
    /// The command has no response.
    Silent,
}

/// What a node has sent for a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResultSize {
    pub rows: u64,
    /// With the packet headers.
    pub bytes: u64,
}

/// Receives the events of a session. All methods do nothing by default.
///
/// Each command starts once and ends once, in the order sent. A command without a response ends when it is complete and
/// all earlier commands have ended. An opaque session has no events: its outstanding commands, and the command that
/// made it opaque, do not end.
pub trait CommandObserver {
    /// The first 5 payload bytes of a command were received, or all if it is shorter.
    fn on_command_started(&mut self, _command: Command) {}
    /// A result of the oldest command is complete. A response has one result for each statement of the command, and an
    /// error ends it. `is_in_transaction`: whether a transaction is open, as the node has reported last.
    fn on_result_ended(&mut self, _outcome: CommandOutcome, _size: ResultSize, _is_in_transaction: bool) {}
    /// The node has prepared the statement of the oldest command under this id.
    fn on_prepared(&mut self, _statement: u32) {}
    /// Whether the observer wants [`Self::on_row_bytes`]. The tracker asks for each piece of a result, so this must be
    /// cheap.
    fn wants_rows(&self) -> bool {
        false
    }
    /// Bytes of the oldest command's rows, and of what ends them, with packet headers and split anywhere. Each
    /// result's end is reported before the next result's rows begin.
    fn on_row_bytes(&mut self, _bytes: &[u8]) {}
    /// The last byte of the response was received or, for a command without a response, of the command.
    fn on_command_ended(&mut self, _command: Command, _outcome: CommandOutcome) {}
    /// The node asks for the password itself in COM_CHANGE_USER.
    fn on_password_request(&mut self, _request: PasswordRequest) {}
}

/// Ignores all events.
impl CommandObserver for () {}
