//! A node's answer to `SHOW SESSION_STATES`: one row with two columns of JSON, the states of the session and a token
//! for a login at another node.
//!
//! The row is not stored. While it arrives, its JSON is scanned and becomes the statement that restores the states. If
//! it is too long for that, it is only scanned.
//!
//! Sources: TiDB's `pkg/executor/show.go` (columns), `pkg/sessionctx/sessionstates` (their content), and
//! `pkg/session/session.go` (reasons for error 8146).

mod row;

use std::rc::Rc;

use mysql_proto::error;
use mysql_proto::packet::{HEADER, Header, MAX_PAYLOAD};
use mysql_proto::secret::SecretBytes;

use crate::budget::MemoryLimits;
use crate::messages::query;
use crate::restore::RestoreStatement;
use crate::state_summary::{StateSummary, UnusableStates};
use row::Row;

/// Maximum bytes of a message other than the row. Errors are the longest.
const MAX_SHORT_MESSAGE_BYTES: usize = 64 * 1024;

/// The statement `SHOW SESSION_STATES`, as a packet.
#[must_use]
pub fn export_query() -> Vec<u8> {
    query(b"SHOW SESSION_STATES")
}

/// The exported states of a session.
#[derive(Clone, PartialEq, Eq)]
pub struct ExportedStates {
    /// Restores the states at another node. It contains data of the client.
    pub statement: Rc<RestoreStatement>,
    /// Logs in as the session's user at any node, for one minute.
    pub token: SecretBytes,
    pub summary: StateSummary,
}

/// Hides the statement and the token, which must not be logged.
impl std::fmt::Debug for ExportedStates {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "States({:?}, token of {} bytes)", self.statement, self.token.len())
    }
}

/// How an export ended.
#[derive(Debug, PartialEq, Eq)]
pub enum ExportOutcome {
    States(ExportedStates),
    /// OK, after [`StateExport::awaiting_ok`].
    Ok,
    /// The row has no token: the node has no certificate to sign one with.
    NoToken(StateSummary),
    /// The states cannot be restored at another node.
    Unusable(UnusableStates, StateSummary),
    /// The node's error code. The session continues, but its `ROW_COUNT()` may have become 0.
    Rejected(u16),
    /// Not an answer to an export. It is unknown what the next bytes of the node belong to.
    ProtocolError,
}

#[derive(Debug)]
enum ExportPhase {
    /// Only OK or ERR may follow.
    Ok,
    Columns,
    /// Number of definitions still to come.
    Definitions(u64),
    /// The EOF packet after the definitions.
    DefinitionsEnd,
    Row,
    End(ExportOutcome),
    /// The answer is complete.
    Finished,
}

/// Reads the answer to an export, or to a statement without a result.
#[derive(Debug)]
pub struct StateExport {
    phase: ExportPhase,
    deprecate_eof: bool,
    limits: MemoryLimits,
    /// The received bytes of the packet's header.
    header: Vec<u8>,
    /// Payload bytes of the packet still to come.
    bytes_left: usize,
    /// Another packet continues this one.
    continues: bool,
    message: PartialMessage,
    has_trailing_bytes: bool,
}

/// An incomplete message.
#[derive(Debug)]
enum PartialMessage {
    None,
    /// A message that is processed when it is complete.
    Short(Vec<u8>),
    Row(Box<Row>),
}

impl StateExport {
    /// `deprecate_eof`: whether the session uses no EOF packets.
    #[must_use]
    pub fn new(deprecate_eof: bool, limits: MemoryLimits) -> Self {
        Self::at(ExportPhase::Columns, deprecate_eof, limits)
    }

    /// For the answer to a statement without a result.
    #[must_use]
    pub fn awaiting_ok() -> Self {
        Self::at(ExportPhase::Ok, false, MemoryLimits::default())
    }

    fn at(phase: ExportPhase, deprecate_eof: bool, limits: MemoryLimits) -> Self {
        let (header, message) = (Vec::new(), PartialMessage::None);
        Self {
            phase,
            deprecate_eof,
            limits,
            header,
            bytes_left: 0,
            continues: false,
            message,
            has_trailing_bytes: false,
        }
    }

    /// Processes bytes of the node. Returns the outcome once the answer is complete.
    pub fn receive(&mut self, bytes: &[u8]) -> Option<ExportOutcome> {
        let mut rest = bytes;
        loop {
            if self.header.len() < HEADER {
                let taken = rest.len().min(HEADER - self.header.len());
                self.header.extend_from_slice(&rest[..taken]);
                rest = &rest[taken..];
                let header = Header::parse(&self.header)?;
                self.bytes_left = header.length;
                self.continues = header.length == MAX_PAYLOAD;
            }
            let taken = rest.len().min(self.bytes_left);
            if !self.push(&rest[..taken]) {
                return Some(ExportOutcome::ProtocolError);
            }
            self.bytes_left -= taken;
            rest = &rest[taken..];
            if self.bytes_left > 0 {
                return None;
            }
            self.header.clear();
            if !self.continues
                && let Some(ended) = self.end_message()
            {
                self.phase = ExportPhase::Finished;
                self.has_trailing_bytes = !rest.is_empty();
                return Some(ended);
            }
        }
    }

    /// Whether more bytes came together with the end of the answer. A node sends unrequested bytes when it closes.
    #[must_use]
    pub const fn has_trailing_bytes(&self) -> bool {
        self.has_trailing_bytes
    }

    /// Processes payload bytes of a message. False: the message is invalid.
    fn push(&mut self, bytes: &[u8]) -> bool {
        if let (PartialMessage::None, Some(&first)) = (&self.message, bytes.first()) {
            // A row begins with a length (`mysql_proto::lenenc`): never with ff, and with fe only if the row takes
            // several packets.
            let is_short = !matches!(self.phase, ExportPhase::Row) || first == 0xff || self.is_end(first);
            self.message =
                if is_short { PartialMessage::Short(Vec::new()) } else { PartialMessage::Row(Row::new(&self.limits)) };
        }
        match &mut self.message {
            PartialMessage::None => true,
            PartialMessage::Short(message) => {
                message.extend_from_slice(bytes);
                message.len() <= MAX_SHORT_MESSAGE_BYTES
            }
            PartialMessage::Row(row) => row.push(bytes),
        }
    }

    /// Whether a message with this first byte is an EOF packet, or the OK packet that replaces it.
    const fn is_end(&self, first: u8) -> bool {
        const END: u8 = 0xfe;
        first == END && !self.continues
    }

    fn end_message(&mut self) -> Option<ExportOutcome> {
        match std::mem::replace(&mut self.message, PartialMessage::None) {
            PartialMessage::None => self.step(&[]),
            PartialMessage::Short(payload) => self.step(&payload),
            PartialMessage::Row(row) => match row.finish() {
                Some(found) => {
                    self.phase = ExportPhase::End(found);
                    None
                }
                None => Some(ExportOutcome::ProtocolError),
            },
        }
    }

    fn step(&mut self, payload: &[u8]) -> Option<ExportOutcome> {
        if let Some(code) = error::code(payload) {
            return Some(ExportOutcome::Rejected(code));
        }
        let ends = payload.first().is_some_and(|&first| self.is_end(first));
        let next = match &mut self.phase {
            ExportPhase::Ok if payload.first() == Some(&0) => return Some(ExportOutcome::Ok),
            ExportPhase::Columns => match columns(payload) {
                Some(true) => ExportPhase::Definitions(2),
                Some(false) if self.deprecate_eof => ExportPhase::Row,
                Some(false) => ExportPhase::DefinitionsEnd,
                None => return Some(ExportOutcome::ProtocolError),
            },
            ExportPhase::Definitions(_) if ends => return Some(ExportOutcome::ProtocolError),
            ExportPhase::Definitions(2..) => ExportPhase::Definitions(1),
            ExportPhase::Definitions(_) if self.deprecate_eof => ExportPhase::Row,
            ExportPhase::Definitions(_) => ExportPhase::DefinitionsEnd,
            ExportPhase::DefinitionsEnd if ends => ExportPhase::Row,
            ExportPhase::End(found) if ends => return Some(std::mem::replace(found, ExportOutcome::ProtocolError)),
            ExportPhase::Ok
            | ExportPhase::DefinitionsEnd
            | ExportPhase::Row
            | ExportPhase::End(_)
            | ExportPhase::Finished => {
                return Some(ExportOutcome::ProtocolError);
            }
        };
        self.phase = next;
        None
    }
}

/// Whether definitions follow the column count, which must be two. The byte after the count exists only with
/// CLIENT_OPTIONAL_RESULTSET_METADATA.
fn columns(payload: &[u8]) -> Option<bool> {
    match payload {
        [2] | [2, 1] => Some(true),
        [2, 0] => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
