//! Splits the bytes of a server into packets, wherever the bytes are cut, without storing payloads.

use mysql_proto::packet::{Header, HeaderReader};

/// A piece of a packet's payload. An empty payload gives one empty piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece<'a> {
    pub(crate) sequence: u8,
    /// The length of the whole payload.
    pub(crate) length: usize,
    /// The offset of `bytes` in the payload.
    pub(crate) at: usize,
    pub(crate) bytes: &'a [u8],
}

impl Piece<'_> {
    /// Whether this piece is the last one of the payload.
    pub(crate) fn ends(&self) -> bool {
        self.at + self.bytes.len() == self.length
    }
}

/// Splits a byte stream into pieces of packets.
#[derive(Debug, Default)]
pub(crate) struct PacketSplitter {
    header: HeaderReader,
    current: Option<Current>,
}

#[derive(Debug, Clone, Copy)]
struct Current {
    sequence: u8,
    length: usize,
    at: usize,
}

impl PacketSplitter {
    /// Takes the next piece from `bytes`. None: there are no more bytes.
    pub(crate) fn next<'a>(&mut self, bytes: &mut &'a [u8]) -> Option<Piece<'a>> {
        let Current { sequence, length, at } = match self.current {
            Some(_) if bytes.is_empty() => return None,
            Some(current) => current,
            None => {
                let header = self.header.read(bytes)?;
                Current { sequence: header.sequence, length: header.length, at: 0 }
            }
        };
        let (piece, rest) = bytes.split_at(bytes.len().min(length - at));
        *bytes = rest;
        let end = at + piece.len();
        self.current = (end < length).then_some(Current { sequence, length, at: end });
        if piece.is_empty() && length > 0 {
            return None;
        }
        Some(Piece { sequence, length, at, bytes: piece })
    }
}

/// A packet with this payload, which must be smaller than 2^24 - 1 bytes.
pub(crate) fn packet(sequence: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Header { length: payload.len(), sequence }.bytes().to_vec();
    bytes.extend(payload);
    bytes
}

/// A whole COM_QUERY packet.
pub(crate) fn query(statement: &str) -> Vec<u8> {
    let mut payload = vec![mysql_proto::command::Command::Query as u8];
    payload.extend(statement.as_bytes());
    packet(0, &payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sequence number, length and payload of each packet.
    fn collect<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<(u8, usize, Vec<u8>)> {
        let mut packets = PacketSplitter::default();
        let (mut found, mut kept) = (Vec::new(), Vec::new());
        for mut bytes in pieces {
            while let Some(piece) = packets.next(&mut bytes) {
                assert_eq!(piece.at, kept.len());
                kept.extend(piece.bytes);
                if piece.ends() {
                    found.push((piece.sequence, piece.length, std::mem::take(&mut kept)));
                }
            }
            assert!(bytes.is_empty());
        }
        found
    }

    #[test]
    fn packets_are_found_wherever_the_bytes_are_cut() {
        let bytes = [packet(7, b"abc"), packet(8, b""), packet(9, &[5; 300])].concat();
        let expected = collect([&bytes[..]]);
        assert_eq!(expected.len(), 3);
        assert_eq!(expected[1], (8, 0, vec![]));
        for first in 0..bytes.len() {
            for second in (first..bytes.len()).step_by(7) {
                let pieces = [&bytes[..first], &bytes[first..second], &bytes[second..]];
                assert_eq!(collect(pieces), expected, "{first} {second}");
            }
        }
        assert_eq!(collect(bytes.chunks(1)), expected);
    }

    #[test]
    fn statement_is_encoded_as_one_packet() {
        assert_eq!(query("do 1"), b"\x05\0\0\0\x03do 1");
    }
}
