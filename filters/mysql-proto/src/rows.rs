//! Finds the rows in the bytes of a result, however they are split.

use crate::packet::{HEADER, Header, HeaderReader, MAX_PAYLOAD};
use crate::reply;

/// A row, or a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowPiece<'a> {
    /// The payload of a whole row.
    Whole(&'a [u8]),
    /// The next payload bytes of a row that came in parts.
    Part(&'a [u8]),
    /// All parts of the row were returned.
    End,
}

/// Reads what [`crate::tracker::CommandObserver::on_row_bytes`] gets.
#[derive(Debug, Default)]
pub struct RowReader {
    header: HeaderReader,
    /// Payload bytes of the present packet that are to come.
    bytes_left: usize,
    /// The present packet has the maximum length, so another packet continues the row.
    is_full: bool,
    /// A part of a row was read. What ends the rows is no row.
    message: Message,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Message {
    /// The next byte begins a message.
    #[default]
    None,
    /// The header of the message was read, but not its first payload byte.
    Begun,
    Row,
    /// The packet that ends the rows, or an error.
    NoRow,
}

impl RowReader {
    /// Removes bytes from the front of `bytes`. None: `bytes` is empty now.
    pub fn next<'a>(&mut self, bytes: &mut &'a [u8]) -> Option<RowPiece<'a>> {
        loop {
            if self.message == Message::None
                && self.header.is_empty()
                && let Some(Header { length, .. }) = Header::parse(bytes)
                && length < MAX_PAYLOAD
                && let Some(payload) = bytes.get(HEADER..HEADER + length)
            {
                *bytes = &bytes[HEADER + length..];
                if is_row(payload.first().copied(), length) {
                    return Some(RowPiece::Whole(payload));
                }
                continue;
            }
            if self.bytes_left == 0 && self.message != Message::Begun {
                if self.message != Message::None && !self.is_full {
                    let ended = std::mem::take(&mut self.message);
                    if ended == Message::Row {
                        return Some(RowPiece::End);
                    }
                    continue;
                }
                let Header { length, .. } = self.header.read(bytes)?;
                self.bytes_left = length;
                self.is_full = length == MAX_PAYLOAD;
                if self.message == Message::None {
                    self.message = if length == 0 { Message::Row } else { Message::Begun };
                }
                continue;
            }
            let &first = bytes.first()?;
            if self.message == Message::Begun {
                self.message = if is_row(Some(first), self.bytes_left) { Message::Row } else { Message::NoRow };
            }
            let (part, rest) = bytes.split_at(bytes.len().min(self.bytes_left));
            *bytes = rest;
            self.bytes_left -= part.len();
            if self.message == Message::Row {
                return Some(RowPiece::Part(part));
            }
        }
    }
}

/// Whether a message with this first payload byte, and this length of the first packet, is a row.
fn is_row(first: Option<u8>, length: usize) -> bool {
    first.is_none_or(|first| first != reply::ERROR && !reply::is_end(first, length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::packets;
    use crate::splitting::split;
    use proptest::prelude::*;

    fn rows<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<Vec<u8>> {
        let (mut reader, mut rows, mut partial) = (RowReader::default(), Vec::new(), Vec::new());
        for mut bytes in pieces {
            while let Some(piece) = reader.next(&mut bytes) {
                match piece {
                    RowPiece::Whole(row) => rows.push(row.to_vec()),
                    RowPiece::Part(part) => partial.extend(part),
                    RowPiece::End => rows.push(std::mem::take(&mut partial)),
                }
            }
            assert!(bytes.is_empty());
        }
        rows
    }

    #[test]
    fn row_of_several_packets_is_one_row() {
        for length in [MAX_PAYLOAD - 1, MAX_PAYLOAD, MAX_PAYLOAD + 1, 2 * MAX_PAYLOAD] {
            let row = vec![0xfe; length];
            let expected = if length < MAX_PAYLOAD { vec![] } else { vec![row.clone()] };
            let bytes = [packets(&row, 0), packets(b"\xfe\0\0\x02\0", 1)].concat();
            for cut in [1, 4, 5, HEADER + MAX_PAYLOAD - 1, bytes.len() - 4] {
                let (one, other) = bytes.split_at(cut.min(bytes.len()));
                assert!(rows([one, other]) == expected, "{length} {cut}");
            }
        }
    }

    proptest! {
        #[test]
        fn rows_do_not_depend_on_how_bytes_are_split(
            messages in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 0..20),
                    Just(b"\xfe\0\0\x02\0".to_vec()),
                    Just(b"\xff\x15\x04".to_vec()),
                ],
                0..20
            ),
            lengths in prop::collection::vec(1..50_usize, 1..200),
        ) {
            let bytes = messages.iter().flat_map(|message| packets(message, 0)).collect::<Vec<_>>();
            let expected = messages.into_iter().filter(|message| message.first().is_none_or(|first| *first < 0xfe));
            prop_assert_eq!(rows(split(&bytes, &lengths)), expected.collect::<Vec<_>>());
        }
    }
}
