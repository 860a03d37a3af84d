//! Reads messages from bytes that are split anywhere, and splits messages into packets.

use mysql_proto::packet::{HEADER, Header, MAX_PAYLOAD};

/// A complete message: the joined payloads of its packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) payload: Vec<u8>,
    /// The sequence number of the last packet.
    pub(crate) sequence: u8,
}

/// A message exceeds the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooLong;

/// Collects bytes until a message is complete.
#[derive(Debug)]
pub(crate) struct MessageReader {
    bytes: Vec<u8>,
    /// Maximum payload bytes of a message.
    max_bytes: usize,
}

impl MessageReader {
    pub(crate) const fn new(max_bytes: usize) -> Self {
        Self { bytes: Vec::new(), max_bytes }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether no bytes are left.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Takes the next message; None if it is incomplete. Err: it exceeds the limit.
    pub(crate) fn next(&mut self) -> Result<Option<Message>, TooLong> {
        let (mut at, mut length) = (0, 0);
        loop {
            let Some(header) = self.bytes.get(at..).and_then(Header::parse) else { return Ok(None) };
            length += header.length;
            if length > self.max_bytes {
                return Err(TooLong);
            }
            at += HEADER + header.length;
            if at > self.bytes.len() {
                return Ok(None);
            }
            if header.length < MAX_PAYLOAD {
                let payload = if at == HEADER + length {
                    self.bytes[HEADER..at].to_vec()
                } else {
                    self.bytes[..at]
                        .chunks(HEADER + MAX_PAYLOAD)
                        .flat_map(|packet| &packet[HEADER..])
                        .copied()
                        .collect()
                };
                self.bytes.drain(..at);
                return Ok(Some(Message { payload, sequence: header.sequence }));
            }
        }
    }
}

/// The packets of a message, headers included; the first has the sequence number `first`.
#[must_use]
pub(crate) fn packets(payload: &[u8], first: u8) -> Vec<u8> {
    let count = payload.len() / MAX_PAYLOAD + 1;
    let mut bytes = Vec::with_capacity(payload.len() + count * HEADER);
    for number in 0..count {
        let piece = &payload[number * MAX_PAYLOAD..payload.len().min((number + 1) * MAX_PAYLOAD)];
        bytes.extend(Header { length: piece.len(), sequence: first.wrapping_add(number as u8) }.bytes());
        bytes.extend_from_slice(piece);
    }
    bytes
}

/// COM_QUERY with this text, as packets.
#[must_use]
pub(crate) fn query(text: &[u8]) -> Vec<u8> {
    const QUERY: u8 = 0x03;
    let mut payload = Vec::with_capacity(1 + text.len());
    payload.push(QUERY);
    payload.extend_from_slice(text);
    packets(&payload, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(reader: &mut MessageReader) -> Vec<Message> {
        std::iter::from_fn(|| reader.next().expect("short enough")).collect()
    }

    #[test]
    fn messages_are_read_however_bytes_are_split() {
        let bytes = [packets(b"one", 0), packets(b"", 1), packets(&[7; 300], 2)].concat();
        for size in [1, 2, 5, 64, bytes.len()] {
            let mut reader = MessageReader::new(1000);
            let mut seen = Vec::new();
            for piece in bytes.chunks(size) {
                reader.push(piece);
                seen.extend(all(&mut reader));
            }
            assert_eq!(seen.iter().map(|message| message.payload.len()).collect::<Vec<_>>(), [3, 0, 300]);
            assert_eq!(seen.iter().map(|message| message.sequence).collect::<Vec<_>>(), [0, 1, 2]);
            assert!(reader.is_empty());
        }
    }

    #[test]
    fn packet_of_maximum_length_is_continued() {
        for length in [MAX_PAYLOAD - 1, MAX_PAYLOAD, MAX_PAYLOAD + 1, 2 * MAX_PAYLOAD] {
            let payload: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            let bytes = packets(&payload, 254);
            let mut reader = MessageReader::new(length);
            reader.push(&bytes[..bytes.len() - 1]);
            assert_eq!(reader.next(), Ok(None));
            reader.push(&bytes[bytes.len() - 1..]);
            let message = reader.next().expect("short enough").expect("complete");
            assert!(message.payload == payload);
            assert_eq!(message.sequence, 254_u8.wrapping_add((length / MAX_PAYLOAD) as u8));
        }
    }

    #[test]
    fn too_long_message_is_rejected_by_its_header() {
        let mut reader = MessageReader::new(10);
        reader.push(&Header { length: 11, sequence: 0 }.bytes());
        assert_eq!(reader.next(), Err(TooLong));
    }
}
