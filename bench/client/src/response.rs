//! The response to COM_QUERY, COM_PING and the like, checked as it comes, packet by packet.
//!
//! Clients here ask for neither several results nor CLIENT_DEPRECATE_EOF: EOF packets end columns and rows
//! (MySQL: "Text Resultset").

use mysql_proto::lenenc;
use mysql_proto::packet::MAX_PAYLOAD;

use crate::failure::Failure;
use crate::packets::{Packets, Piece};

const OK: u8 = 0x00;
const EOF: u8 = 0xfe;
const ERR: u8 = 0xff;
/// Payload bytes of an EOF packet.
const EOF_LENGTH: usize = 5;
/// Payload bytes of a packet that is no row: names have at most 256 characters.
const MOST: usize = 16 * 1024;

/// Looks at what a result set holds; an error text says what is wrong with it.
pub(crate) trait Rows {
    /// One column's definition, whole.
    fn column(&mut self, _definition: &[u8]) -> Result<(), String> {
        Ok(())
    }

    /// A part of a row of `length` bytes: `bytes`, which stand at `at`.
    fn row(&mut self, _at: usize, _length: usize, _bytes: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// Takes everything.
impl Rows for () {}

/// How a command was answered.
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

/// One response after the other of one connection.
#[derive(Debug)]
pub(crate) struct Response {
    packets: Packets,
    phase: Phase,
    /// Sequence number of the packet to come, or that is coming.
    sequence: u8,
    rows: u64,
    /// What the current packet is, told by its first byte.
    current: Kind,
    /// A row of the greatest length: the next packet belongs to it.
    continues: bool,
    /// Of a packet that is no row and comes in pieces.
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
            packets: Packets::default(),
            phase: Phase::First,
            sequence: 1,
            rows: 0,
            current: Kind::Other,
            continues: false,
            kept: Vec::new(),
        }
    }

    /// Takes bytes up to the end of this response, and cuts them off `bytes`. None: more are to come.
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
                self.understand(piece.bytes, rows)?
            } else {
                let mut payload = std::mem::take(&mut self.kept);
                payload.extend_from_slice(piece.bytes);
                let answer = self.understand(&payload, rows)?;
                payload.clear();
                self.kept = payload; // its memory, for the next
                answer
            };
            if answer.is_some() {
                (self.phase, self.sequence, self.rows) = (Phase::First, 1, 0);
                return Ok(answer);
            }
        }
        Ok(None)
    }

    /// The first piece of a packet says what the packet is.
    fn begin(&mut self, piece: Piece<'_>) -> Result<(), Failure> {
        if piece.sequence != self.sequence {
            let (found, due) = (piece.sequence, self.sequence);
            return Err(Failure::Protocol(format!("a packet has sequence number {found}, where {due} is due")));
        }
        let first = piece.bytes.first();
        let is_end = first == Some(&ERR) || (first == Some(&EOF) && piece.length == EOF_LENGTH);
        self.current = if self.phase == Phase::Rows && (self.continues || !is_end) { Kind::Row } else { Kind::Other };
        if self.current == Kind::Other && piece.length > MOST {
            let (length, byte) = (piece.length, first.copied().unwrap_or_default());
            return Err(Failure::Protocol(format!("{length} bytes beginning with {byte:#04x} are no row")));
        }
        Ok(())
    }

    /// A whole packet that is no row.
    fn understand(&mut self, payload: &[u8], rows: &mut impl Rows) -> Result<Option<Answer>, Failure> {
        let Some(&first) = payload.first() else { return Err(Failure::Protocol("an empty packet".into())) };
        if first == ERR {
            return refusal(payload).map(Some);
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

/// What an ERR packet says.
pub(crate) fn refusal(payload: &[u8]) -> Result<Answer, Failure> {
    let code = mysql_proto::error::code(payload).ok_or_else(|| unexpected("an error", payload))?;
    let text = payload.get(3..).unwrap_or_default();
    // The SQLSTATE stands in front of the text, but for errors before the login.
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

    /// Keeps what it is shown.
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
    fn every_cut_gives_the_same() {
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
    fn an_error_ends_a_result_anywhere() {
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
    fn what_is_no_answer_is_told() {
        let mut skipped = result(&[b"\x01a\x01b"]);
        skipped[5 + 9 + 9 + 9 + 3] = 9;
        for (bytes, told) in [
            (packet(2, OK_PACKET), "sequence number 2, where 1 is due"),
            (packet(1, b""), "an empty packet"),
            (packet(1, b"\xfb"), "a number of columns"),
            ([packet(1, b"\x01"), packet(2, EOF_PACKET)].concat(), "the definition of a column"),
            ([packet(1, b"\x01"), packet(2, b"\x03def"), packet(3, b"\x01a")].concat(), "an EOF packet"),
            (packet(1, &[b'x'; MOST + 1]), "are no row"),
            (skipped, "sequence number 9, where 5 is due"),
        ] {
            let failure = Response::new().take(&mut &bytes[..], &mut ()).expect_err(told);
            assert!(failure.to_string().contains(told), "{failure}");
        }
    }

    #[test]
    fn a_row_of_the_greatest_length_continues() {
        let first = vec![0xfd; MAX_PAYLOAD];
        let bytes = [&result(&[])[..5 + 9 + 9 + 9], &packet(5, &first), &packet(6, EOF_PACKET), &packet(7, EOF_PACKET)]
            .concat();
        assert_eq!(Response::new().take(&mut &bytes[..], &mut ()).expect("rows"), Some(Answer::Rows(1)));
    }
}
