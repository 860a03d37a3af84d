//! Reads records from bytes that come in pieces of any size.

use mysql_proto::command::Command;

use super::{
    COMMAND, CONNECTION, PAYLOAD_LENGTH, PREPARED_ID, PREPARED_TEXT, Record, SUCCESS, TIME, command_name, quote,
};
use crate::text::parse_decimal;
use crate::time::parse_rfc3339;

/// TiDB accepts no larger message (`max_allowed_packet`). A line within a record has the same limit.
const MAX_LENGTH: usize = 1 << 30;

/// Bytes of a wrong line that an error shows.
const MAX_SHOWN: usize = 80;

/// What is wrong with a record, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct RecordError {
    /// The byte at which the wrong line begins, or the payload; counted from 0 over all that was pushed.
    pub offset: u64,
    pub problem: RecordProblem,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecordProblem {
    #[error("a line of a record begins with '# ', not with '{0}'")]
    NoKey(String),
    #[error("'{0}' is not '# key: value'")]
    NoValue(String),
    #[error("not a value that this key can have: '{0}'")]
    WrongValue(String),
    #[error("a record has one Time and one Conn_ID, not a second '{0}'")]
    Repeated(String),
    #[error("the record has no Time")]
    NoTime,
    #[error("the record has no Conn_ID")]
    NoConnection,
    #[error("the payload does not end with a line feed after {0} bytes")]
    WrongLength(usize),
    #[error("a length of more than {MAX_LENGTH} bytes")]
    TooLong,
    #[error("the last record is not complete")]
    Incomplete,
}

/// The lines of a record that have been read so far.
#[derive(Debug, Default)]
struct Header {
    time_ns: Option<i64>,
    connection: u64,
    command: Option<Command>,
    is_failure: bool,
    prepared_id: Option<u32>,
    prepared_text: Option<Vec<u8>>,
    /// With this one, the header ends.
    payload_length: Option<usize>,
}

/// Decodes records. Push bytes, and take records until there is none.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Where in the buffer the next line or payload begins.
    start: usize,
    /// Bytes before the buffer.
    base: u64,
    /// The bytes from `start` on of which is known that they have no line feed.
    scanned: usize,
    header: Header,
    /// Whether a line of the next record has been read.
    has_header: bool,
    /// Where the record begins that was returned last.
    record_offset: u64,
    /// Where the record begins that is read.
    header_offset: u64,
    failure: Option<RecordError>,
}

impl Decoder {
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.base += self.start as u64;
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next record. None: it needs more bytes. After an error, the same error.
    pub fn next_record(&mut self) -> Result<Option<Record>, RecordError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        self.decode().map_err(|problem| {
            let failure = RecordError { offset: self.offset(), problem };
            self.failure = Some(failure.clone());
            failure
        })
    }

    /// To be called after the last bytes: an error if they end within a record.
    pub fn finish(&self) -> Result<(), RecordError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        if self.has_header || self.start < self.buffer.len() {
            return Err(RecordError { offset: self.offset(), problem: RecordProblem::Incomplete });
        }
        Ok(())
    }

    /// Where the record begins that was returned last.
    pub fn record_offset(&self) -> u64 {
        self.record_offset
    }

    fn offset(&self) -> u64 {
        self.base + self.start as u64
    }

    fn decode(&mut self) -> Result<Option<Record>, RecordProblem> {
        loop {
            if let Some(length) = self.header.payload_length {
                return self.take_payload(length);
            }
            let rest = &self.buffer[self.start..];
            let Some(index) = memchr::memchr(b'\n', &rest[self.scanned..]) else {
                self.scanned = rest.len();
                return if self.scanned > MAX_LENGTH { Err(RecordProblem::TooLong) } else { Ok(None) };
            };
            let length = self.scanned + index;
            let line = &rest[..length];
            self.header.read_line(line.strip_suffix(b"\r").unwrap_or(line))?;
            self.has_header = true;
            self.start += length + 1;
            self.scanned = 0;
        }
    }

    fn take_payload(&mut self, length: usize) -> Result<Option<Record>, RecordProblem> {
        let rest = &self.buffer[self.start..];
        match rest.get(length) {
            None => return Ok(None),
            Some(b'\n') => {}
            Some(_) => return Err(RecordProblem::WrongLength(length)),
        }
        let payload = rest[..length].to_vec();
        let header = std::mem::take(&mut self.header);
        self.has_header = false;
        let record = header.with_payload(payload)?;
        self.start += length + 1;
        self.record_offset = self.header_offset;
        self.header_offset = self.offset();
        Ok(Some(record))
    }
}

impl Header {
    fn read_line(&mut self, line: &[u8]) -> Result<(), RecordProblem> {
        if !line.starts_with(b"# ") {
            return Err(RecordProblem::NoKey(shown(line)));
        }
        let colon = memchr::memchr_iter(b':', line).find(|index| line.get(index + 1) == Some(&b' '));
        let split = colon.map(|index| line.split_at(index + 2));
        let Some((key, value)) = split.filter(|(_, value)| !value.is_empty()) else {
            return Err(RecordProblem::NoValue(shown(line)));
        };
        let wrong_value = || RecordProblem::WrongValue(shown(line));
        match key {
            TIME if self.time_ns.is_some() => return Err(RecordProblem::Repeated(shown(line))),
            TIME => self.time_ns = Some(parse_rfc3339(value).ok_or_else(wrong_value)?),
            CONNECTION if self.connection != 0 => return Err(RecordProblem::Repeated(shown(line))),
            CONNECTION => self.connection = parse_decimal(value).ok_or_else(wrong_value)?,
            COMMAND => self.command = Some(command_name::parse(value)),
            SUCCESS => self.is_failure = value != b"true",
            PREPARED_ID => {
                let id: u32 = parse_decimal(value).and_then(|id| id.try_into().ok()).ok_or_else(wrong_value)?;
                self.prepared_id = Some(id).filter(|id| *id != 0);
            }
            PREPARED_TEXT => {
                let text = quote::unquote(value).ok_or_else(wrong_value)?;
                self.prepared_text = Some(text).filter(|text| !text.is_empty());
            }
            PAYLOAD_LENGTH => {
                let length = usize::try_from(parse_decimal(value).ok_or_else(wrong_value)?);
                let length = length.ok().filter(|length| *length <= MAX_LENGTH).ok_or(RecordProblem::TooLong)?;
                self.payload_length = Some(length);
            }
            _ => {}
        }
        Ok(())
    }

    fn with_payload(self, payload: Vec<u8>) -> Result<Record, RecordProblem> {
        let time_ns = self.time_ns.ok_or(RecordProblem::NoTime)?;
        if self.connection == 0 {
            return Err(RecordProblem::NoConnection);
        }
        Ok(Record {
            time_ns,
            connection: self.connection,
            command: self.command.unwrap_or(Command::Query),
            is_success: !self.is_failure,
            prepared_id: self.prepared_id,
            prepared_text: self.prepared_text,
            payload,
        })
    }
}

fn shown(line: &[u8]) -> String {
    let shown = line[..line.len().min(MAX_SHOWN)].escape_ascii().to_string();
    if line.len() > MAX_SHOWN { shown + "..." } else { shown }
}
