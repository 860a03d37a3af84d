//! The server's response to a command, packet by packet, without I/O.
//!
//! Rows and their checksum are counted as in a capture. Facts: "Command Phase" (dev.mysql.com). Comments say where TiDB
//! differs.

use mysql_proto::command::Command;
use mysql_proto::error;
use mysql_proto::lenenc;
use mysql_proto::packet::MAX_PAYLOAD;
use mysql_proto::status;
use traffic_files::checksum::RowsChecksum;

const OK: u8 = 0x00;
const LOCAL_INFILE: u8 = 0xfb;
const END: u8 = 0xfe;
/// "Error code" of MariaDB's progress reports, which do not end a response.
const PROGRESS: u16 = 0xffff;

/// What the response to a command looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// One OK, EOF or ERR packet.
    Single,
    /// One packet of text.
    Text,
    /// Any number of OK packets, result sets, and requests for a file.
    Results,
    /// Rows or definitions without a column count before them.
    Rows,
    Prepared,
}

/// None: the command has no response.
const fn shape(command: Command) -> Option<Shape> {
    match command {
        Command::Quit | Command::SendLongData | Command::CloseStatement => None,
        Command::Statistics => Some(Shape::Text),
        Command::Query | Command::Execute | Command::BulkExecute | Command::ProcessInfo => Some(Shape::Results),
        Command::FieldList | Command::Fetch => Some(Shape::Rows),
        Command::Prepare => Some(Shape::Prepared),
        _ => Some(Shape::Single),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The first packet of a result.
    First,
    Definitions,
    /// The EOF packet behind definitions.
    DefinitionsEnd,
    Rows,
    Done,
}

/// What the caller does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResponseStep {
    /// Read the next packet.
    Read,
    /// The server asks for a file (LOAD DATA LOCAL). Send an empty one, then read the next packet.
    SendEmptyFile,
    Done,
}

/// The server has sent something that is no response to the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the server's response is not MySQL's protocol")]
pub(crate) struct InvalidResponse;

pub(crate) struct Response {
    command: Command,
    shape: Option<Shape>,
    deprecate_eof: bool,
    phase: Phase,
    /// Definitions to come in this block, and in the next one.
    definitions: u16,
    next_definitions: u16,
    /// The last packet had the maximum length, so the next one continues its message.
    is_continued: bool,
    /// That message is a row.
    is_in_row: bool,
    pub(crate) rows: u64,
    /// None: there was no result set.
    pub(crate) checksum: Option<RowsChecksum>,
    /// The server's error. 0: none.
    pub(crate) error: u16,
    /// The status flags that came last.
    pub(crate) status: Option<u16>,
    /// The id of the statement that COM_STMT_PREPARE has prepared.
    pub(crate) prepared_id: Option<u32>,
}

impl Response {
    pub(crate) fn new(command: Command, deprecate_eof: bool) -> Self {
        Self {
            command,
            shape: shape(command),
            deprecate_eof,
            phase: Phase::First,
            definitions: 0,
            next_definitions: 0,
            is_continued: false,
            is_in_row: false,
            rows: 0,
            checksum: None,
            error: 0,
            status: None,
            prepared_id: None,
        }
    }

    /// Whether the command has a response.
    pub(crate) fn is_expected(&self) -> bool {
        self.shape.is_some()
    }

    /// Handles the payload of a packet.
    pub(crate) fn receive(&mut self, payload: &[u8]) -> Result<ResponseStep, InvalidResponse> {
        let is_full = payload.len() == MAX_PAYLOAD;
        if self.is_continued {
            self.is_continued = is_full;
            if self.is_in_row {
                self.extend_row(payload, !is_full);
            }
        } else {
            self.is_continued = is_full;
            self.is_in_row = false;
            let step = self.on_message(payload, is_full).ok_or(InvalidResponse)?;
            if step != ResponseStep::Read {
                return Ok(step);
            }
        }
        Ok(if self.phase == Phase::Done && !self.is_continued { ResponseStep::Done } else { ResponseStep::Read })
    }

    /// Handles the first packet of a message. None: it is not understood.
    fn on_message(&mut self, payload: &[u8], is_full: bool) -> Option<ResponseStep> {
        if let Some(code) = error::code(payload) {
            if code != PROGRESS {
                self.error = code;
                self.phase = Phase::Done;
            }
            return Some(ResponseStep::Read);
        }
        let shape = self.shape?;
        let first = payload.first().copied();
        match (self.phase, shape) {
            (Phase::First, Shape::Text) => self.phase = Phase::Done,
            (Phase::First, Shape::Single) => {
                let status = if first? == END { end_status(payload, self.deprecate_eof) } else { ok_status(payload) };
                self.end_result(status?);
            }
            (Phase::First, Shape::Prepared) => {
                let [OK, a, b, c, d, columns_low, columns_high, parameters_low, parameters_high, ..] = *payload else {
                    return None;
                };
                self.prepared_id = Some(u32::from_le_bytes([a, b, c, d]));
                self.definitions = u16::from_le_bytes([parameters_low, parameters_high]);
                self.next_definitions = u16::from_le_bytes([columns_low, columns_high]);
                if self.definitions == 0 {
                    self.end_definitions();
                } else {
                    self.phase = Phase::Definitions;
                }
            }
            (Phase::First, Shape::Results) => match first? {
                OK => self.end_result(ok_status(payload)?),
                END => self.end_result(end_status(payload, self.deprecate_eof)?),
                LOCAL_INFILE => return Some(ResponseStep::SendEmptyFile),
                _ => {
                    let (count, _) = lenenc::read(payload)?;
                    self.definitions = u16::try_from(count).ok().filter(|count| *count > 0)?;
                    self.next_definitions = 0;
                    self.phase = Phase::Definitions;
                    self.checksum.get_or_insert_default();
                }
            },
            (Phase::Definitions, _) => {
                self.definitions = self.definitions.checked_sub(1)?;
                if self.definitions == 0 {
                    if self.deprecate_eof {
                        self.end_definitions();
                    } else {
                        self.phase = Phase::DefinitionsEnd;
                    }
                }
            }
            (Phase::DefinitionsEnd, _) => {
                let status = end_status(payload, self.deprecate_eof)?;
                // The rows of a cursor must be fetched.
                if self.command == Command::Execute && status & status::CURSOR_EXISTS != 0 {
                    self.end_result(status);
                } else {
                    self.end_definitions();
                }
            }
            (Phase::Rows, _) | (Phase::First, Shape::Rows) => {
                self.checksum.get_or_insert_default();
                // A row begins with this byte only if its first value has 2^24 bytes or more.
                if first == Some(END) && !is_full {
                    self.end_result(end_status(payload, self.deprecate_eof)?);
                } else {
                    self.phase = Phase::Rows;
                    self.add_row(payload, is_full);
                }
            }
            (Phase::Done, _) => return None,
        }
        Some(ResponseStep::Read)
    }

    fn add_row(&mut self, payload: &[u8], is_full: bool) {
        self.rows += 1;
        let checksum = self.checksum.get_or_insert_default();
        if is_full {
            self.is_in_row = true;
            checksum.begin();
            checksum.extend(payload);
        } else {
            checksum.add_row(payload);
        }
    }

    fn extend_row(&mut self, payload: &[u8], is_last: bool) {
        let checksum = self.checksum.get_or_insert_default();
        checksum.extend(payload);
        if is_last {
            checksum.end();
        }
    }

    /// A block of definitions is complete or empty.
    fn end_definitions(&mut self) {
        self.definitions = std::mem::take(&mut self.next_definitions);
        self.phase = match self.shape {
            _ if self.definitions > 0 => Phase::Definitions,
            Some(Shape::Prepared) => Phase::Done,
            _ => Phase::Rows,
        };
    }

    /// A result is complete; more may follow.
    fn end_result(&mut self, status: u16) {
        self.status = Some(status);
        let follows = status & status::MORE_RESULTS != 0 && self.shape == Some(Shape::Results);
        self.phase = if follows { Phase::First } else { Phase::Done };
    }
}

/// The status flags of an OK packet.
fn ok_status(payload: &[u8]) -> Option<u16> {
    let (_, affected) = lenenc::read(payload.get(1..)?)?;
    let (_, id) = lenenc::read(payload.get(1 + affected..)?)?;
    u16_at(payload, 1 + affected + id)
}

/// The status flags of an EOF packet, or of an OK packet in its place.
fn end_status(payload: &[u8], deprecate_eof: bool) -> Option<u16> {
    match payload.len() {
        5 => u16_at(payload, 3),
        7.. if deprecate_eof => ok_status(payload),
        _ => None,
    }
}

fn u16_at(payload: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*payload.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests;
