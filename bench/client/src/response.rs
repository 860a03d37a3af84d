//! Checks the responses to COM_QUERY, COM_PING and similar commands as they arrive, packet by packet.
//!
//! These clients request neither multiple results nor CLIENT_DEPRECATE_EOF, so EOF packets end columns and rows
//! (MySQL: "Text Resultset").

use mysql_proto::lenenc;
use mysql_proto::packet::MAX_PAYLOAD;

use crate::failure::Failure;
use crate::packets::{PacketSplitter, Piece};

const OK: u8 = 0x00;
const EOF: u8 = 0xfe;
const ERR: u8 = 0xff;
/// Payload bytes of an EOF packet.
const EOF_LENGTH: usize = 5;
/// The maximum payload of a packet that is not a row. Names have at most 256 characters.
const MAX_OTHER_PAYLOAD: usize = 16 * 1024;

/// Checks the content of a result set. An error text says what is wrong.
pub(crate) trait Rows {
    /// Checks the complete definition of a column.
    fn column(&mut self, _definition: &[u8]) -> Result<(), String> {
        Ok(())
    }

    /// Checks `bytes`, which are at offset `at` of a row of `length` bytes.
    fn row(&mut self, _at: usize, _length: usize, _bytes: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// Accepts everything.
impl Rows for () {}

/// The answer to a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Ok,
    Rows(u64),
    Refused { code: u16, text: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    First,
    Columns(u64),
    ColumnsEnd,
    Rows,
}

/// The current response on a connection.
#[derive(Debug)]
pub(crate) struct Response {
    packets: PacketSplitter,
    phase: Phase,
    /// The sequence number of the current or the next packet.
    sequence: u8,
    rows: u64,
    /// The kind of the current packet.
    current: Kind,
    /// The last packet was a row of maximum length, so that the row continues in the next packet.
    continues: bool,
    /// The first pieces of a packet that is not a row.
    kept: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Row,
    Other,
}

impl Response {
    pub(crate) fn new() -> Self {
        Self {
            packets: PacketSplitter::default(),
            phase: Phase::First,
            sequence: 1,
            rows: 0,
            current: Kind::Other,
            continues: false,
            kept: Vec::new(),
        }
    }

    /// Consumes `bytes` up to the end of the response. None: the response is not complete.
    pub(crate) fn take(&mut self, bytes: &mut &[u8], rows: &mut impl Rows) -> Result<Option<Answer>, Failure> {
        while let Some(piece) = self.packets.next(bytes) {
            if piece.at == 0 {
                self.begin(piece)?;
            }
            if self.current == Kind::Row {
                rows.row(piece.at, piece.length, piece.bytes).map_err(Failure::Content)?;
                if piece.ends() {
                    self.sequence = self.sequence.wrapping_add(1);
                    self.continues = piece.length == MAX_PAYLOAD;
                    self.rows += u64::from(!self.continues);
                }
                continue;
            }
            if !piece.ends() {
                self.kept.extend_from_slice(piece.bytes);
                continue;
            }
            self.sequence = self.sequence.wrapping_add(1);
            let answer = if self.kept.is_empty() {
                self.on_packet(piece.bytes, rows)?
            } else {
                let mut payload = std::mem::take(&mut self.kept);
                payload.extend_from_slice(piece.bytes);
                let answer = self.on_packet(&payload, rows)?;
                payload.clear();
                self.kept = payload; // reuses the memory
                answer
            };
            if answer.is_some() {
                (self.phase, self.sequence, self.rows) = (Phase::First, 1, 0);
                return Ok(answer);
            }
        }
        Ok(None)
    }

    /// Finds the kind of a packet from its first piece, and checks its sequence number.
    fn begin(&mut self, piece: Piece<'_>) -> Result<(), Failure> {
        if piece.sequence != self.sequence {
            let (found, due) = (piece.sequence, self.sequence);
            return Err(Failure::Protocol(format!("a packet has sequence number {found}, where {due} is due")));
        }
        let first = piece.bytes.first();
        let is_end = first == Some(&ERR) || (first == Some(&EOF) && piece.length == EOF_LENGTH);
        self.current = if self.phase == Phase::Rows && (self.continues || !is_end) { Kind::Row } else { Kind::Other };
        if self.current == Kind::Other && piece.length > MAX_OTHER_PAYLOAD {
            let (length, byte) = (piece.length, first.copied().unwrap_or_default());
            return Err(Failure::Protocol(format!("{length} bytes beginning with {byte:#04x} are no row")));
        }
        Ok(())
    }

    /// Handles a complete packet that is not a row.
    fn on_packet(&mut self, payload: &[u8], rows: &mut impl Rows) -> Result<Option<Answer>, Failure> {
        let Some(&first) = payload.first() else { return Err(Failure::Protocol("an empty packet".into())) };
        if first == ERR {
            return parse_error(payload).map(Some);
        }
        let is_eof = first == EOF && payload.len() == EOF_LENGTH;
        match self.phase {
            Phase::First if first == OK => Ok(Some(Answer::Ok)),
            Phase::First => match lenenc::read(payload) {
                Some((count, length)) if count > 0 && length == payload.len() => {
                    self.phase = Phase::Columns(count);
                    Ok(None)
                }
                _ => Err(unexpected("a number of columns", payload)),
            },
            Phase::Columns(left) if !is_eof => {
                rows.column(payload).map_err(Failure::Content)?;
                self.phase = if left == 1 { Phase::ColumnsEnd } else { Phase::Columns(left - 1) };
                Ok(None)
            }
            Phase::ColumnsEnd if is_eof => {
                self.phase = Phase::Rows;
                Ok(None)
            }
            Phase::Rows if is_eof => Ok(Some(Answer::Rows(self.rows))),
            Phase::Columns(_) => Err(unexpected("the definition of a column", payload)),
            Phase::ColumnsEnd | Phase::Rows => Err(unexpected("an EOF packet", payload)),
        }
    }
}

/// Parses an ERR packet.
pub(crate) fn parse_error(payload: &[u8]) -> Result<Answer, Failure> {
    let code = mysql_proto::error::code(payload).ok_or_else(|| unexpected("an error", payload))?;
    let text = payload.get(3..).unwrap_or_default();
    // The SQLSTATE precedes the text, except in errors before the login.
    let text = if text.first() == Some(&b'#') { text.get(6..).unwrap_or_default() } else { text };
    Ok(Answer::Refused { code, text: String::from_utf8_lossy(text).into_owned() })
}

fn unexpected(due: &str, payload: &[u8]) -> Failure {
    let shown = &payload[..payload.len().min(48)];
    Failure::Protocol(format!("\"{}\" where {due} is due", shown.escape_ascii()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packets::packet;

    /// Keeps columns and rows.
    #[derive(Default, PartialEq, Eq, Debug)]
    struct Kept {
        columns: Vec<Vec<u8>>,
        rows: Vec<Vec<u8>>,
    }

    impl Rows for Kept {
        fn column(&mut self, definition: &[u8]) -> Result<(), String> {
            self.columns.push(definition.to_vec());
            Ok(())
        }

        fn row(&mut self, at: usize, _: usize, bytes: &[u8]) -> Result<(), String> {
            if at == 0 {
                self.rows.push(Vec::new());
            }
            self.rows.last_mut().ok_or("no row has begun")?.extend(bytes);
            Ok(())
        }
    }

    const EOF_PACKET: &[u8] = b"\xfe\0\0\x02\0";
    const OK_PACKET: &[u8] = b"\0\0\0\x02\0\0\0";

    fn result(rows: &[&[u8]]) -> Vec<u8> {
        let mut payloads: Vec<&[u8]> = vec![b"\x02", b"\x03defa", b"\x03defb", EOF_PACKET];
        payloads.extend(rows);
        payloads.push(EOF_PACKET);
        payloads.iter().zip(1_usize..).flat_map(|(payload, number)| packet(number as u8, payload)).collect()
    }

    #[test]
    fn responses_are_parsed_wherever_the_bytes_are_cut() {
        let long = [[0xfc, 0x2c, 1].to_vec(), vec![b'x'; 300]].concat();
        let bytes = [result(&[b"\x01a\x01b", &long, b"\xfb\xfb", b"\0\0"]), packet(1, OK_PACKET)].concat();
        for size in 1..bytes.len() {
            let (mut response, mut kept, mut answers) = (Response::new(), Kept::default(), Vec::new());
            for mut piece in bytes.chunks(size) {
                while !piece.is_empty() {
                    answers.extend(response.take(&mut piece, &mut kept).expect("an answer"));
                }
            }
            assert_eq!(answers, [Answer::Rows(4), Answer::Ok], "{size}");
            assert_eq!(kept.columns, [b"\x03defa", b"\x03defb"]);
            assert_eq!(kept.rows[1], long);
        }
    }

    #[test]
    fn sequence_numbers_wrap() {
        let row: &[u8] = b"\x01a\x01b";
        let bytes = result(&vec![row; 1000]);
        assert_eq!(Response::new().take(&mut &bytes[..], &mut ()).expect("rows"), Some(Answer::Rows(1000)));
    }

    #[test]
    fn error_packet_ends_a_result_at_any_packet() {
        for (rows, cut) in [(0, 0), (0, 5), (1, 5 + 9 + 9 + 9 + 8)] {
            let row: &[u8] = b"\x01a\x01b";
            let mut bytes = result(&vec![row; rows])[..cut].to_vec();
            let sequence = if cut == 0 {
                1
            } else if cut == 5 {
                2
            } else {
                6
            };
            bytes.extend(packet(sequence, b"\xff\x25\x05#70100Query execution was interrupted"));
            let answer = Response::new().take(&mut &bytes[..], &mut ()).expect("an answer");
            let text = "Query execution was interrupted".to_string();
            assert_eq!(answer, Some(Answer::Refused { code: 1317, text }), "{cut}");
        }
    }

    #[test]
    fn invalid_responses_are_rejected_with_a_reason() {
        let mut skipped = result(&[b"\x01a\x01b"]);
        skipped[5 + 9 + 9 + 9 + 3] = 9;
        for (bytes, text) in [
            (packet(2, OK_PACKET), "sequence number 2, where 1 is due"),
            (packet(1, b""), "an empty packet"),
            (packet(1, b"\xfb"), "a number of columns"),
            ([packet(1, b"\x01"), packet(2, EOF_PACKET)].concat(), "the definition of a column"),
            ([packet(1, b"\x01"), packet(2, b"\x03def"), packet(3, b"\x01a")].concat(), "an EOF packet"),
            (packet(1, &[b'x'; MAX_OTHER_PAYLOAD + 1]), "are no row"),
            (skipped, "sequence number 9, where 5 is due"),
        ] {
            let failure = Response::new().take(&mut &bytes[..], &mut ()).expect_err(text);
            assert!(failure.to_string().contains(text), "{failure}");
        }
    }

    #[test]
    fn row_of_maximum_length_continues_in_the_next_packet() {
        let first = vec![0xfd; MAX_PAYLOAD];
        let bytes = [&result(&[])[..5 + 9 + 9 + 9], &packet(5, &first), &packet(6, EOF_PACKET), &packet(7, EOF_PACKET)]
            .concat();
        assert_eq!(Response::new().take(&mut &bytes[..], &mut ()).expect("rows"), Some(Answer::Rows(1)));
    }
}
