//! Records: a captured command, in the native format of TiProxy's traffic files.
//!
//! A record consists of lines `# Key: value`, of which the last one is `# Payload_len`, and of that many bytes and a
//! line feed. The source of the format is pingcap/tiproxy, `pkg/sqlreplay/cmd/native.go`.

mod command_name;
mod decoder;
mod quote;

use mysql_proto::command::Command;

pub use decoder::{Decoder, RecordError, RecordProblem};

use crate::text::push_decimal;
use crate::time::push_rfc3339;

const TIME: &[u8] = b"# Time: ";
const CONNECTION: &[u8] = b"# Conn_ID: ";
const COMMAND: &[u8] = b"# Cmd_type: ";
const SUCCESS: &[u8] = b"# Success: ";
const PREPARED_ID: &[u8] = b"# Captured_ps_id: ";
const PREPARED_TEXT: &[u8] = b"# Prepared_stmt: ";
const PAYLOAD_LENGTH: &[u8] = b"# Payload_len: ";

/// A captured command. `connection` and `time_ns` together identify it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// When the command began: nanoseconds since 1970.
    pub time_ns: i64,
    /// Not 0.
    pub connection: u64,
    pub command: Command,
    /// Whether the server answered without an error.
    pub is_success: bool,
    /// The id that the prepared statement had in the capture. None: 0, too.
    pub prepared_id: Option<u32>,
    /// The text that was prepared, in records that execute it. None: empty, too.
    pub prepared_text: Option<Vec<u8>>,
    /// The client's message without its first byte, which is the command.
    pub payload: Vec<u8>,
}

impl Record {
    pub fn as_ref(&self) -> RecordRef<'_> {
        RecordRef {
            time_ns: self.time_ns,
            connection: self.connection,
            command: self.command,
            is_success: self.is_success,
            prepared_id: self.prepared_id,
            prepared_text: self.prepared_text.as_deref(),
            payload: &self.payload,
        }
    }
}

/// A [`Record`] that is not owned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordRef<'a> {
    pub time_ns: i64,
    pub connection: u64,
    pub command: Command,
    pub is_success: bool,
    pub prepared_id: Option<u32>,
    pub prepared_text: Option<&'a [u8]>,
    pub payload: &'a [u8],
}

/// Appends a record. Allocates nothing but what `out` needs.
pub fn encode(record: RecordRef<'_>, out: &mut Vec<u8>) {
    // The keys with their values have about 150 bytes.
    out.reserve(record.payload.len() + record.prepared_text.map_or(0, <[u8]>::len) + 192);
    out.extend_from_slice(TIME);
    push_rfc3339(out, record.time_ns);
    out.push(b'\n');
    out.extend_from_slice(CONNECTION);
    push_decimal(out, record.connection);
    out.push(b'\n');
    if record.command != Command::Query {
        out.extend_from_slice(COMMAND);
        out.extend_from_slice(command_name::of(record.command).as_bytes());
        out.push(b'\n');
    }
    if !record.is_success {
        out.extend_from_slice(SUCCESS);
        out.extend_from_slice(b"false\n");
    }
    if let Some(id) = record.prepared_id.filter(|id| *id != 0) {
        out.extend_from_slice(PREPARED_ID);
        push_decimal(out, id.into());
        out.push(b'\n');
    }
    if let Some(text) = record.prepared_text.filter(|text| !text.is_empty()) {
        out.extend_from_slice(PREPARED_TEXT);
        quote::push_quoted(out, text);
        out.push(b'\n');
    }
    out.extend_from_slice(PAYLOAD_LENGTH);
    push_decimal(out, record.payload.len() as u64);
    out.push(b'\n');
    out.extend_from_slice(record.payload);
    out.push(b'\n');
}

#[cfg(test)]
impl Record {
    /// A successful COM_QUERY.
    pub(crate) fn query(connection: u64, time_ns: i64, text: &str) -> Self {
        Self {
            time_ns,
            connection,
            command: Command::Query,
            is_success: true,
            prepared_id: None,
            prepared_text: None,
            payload: text.into(),
        }
    }
}

#[cfg(test)]
mod tests;
