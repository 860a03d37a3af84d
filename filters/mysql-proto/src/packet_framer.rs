//! Finds the messages in the bytes of one direction, however the bytes are split.

use std::hint::black_box;

use crate::packet::{HEADER, Header, HeaderReader, MAX_PAYLOAD};

/// The beginning of a message, its end, or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece<'a> {
    /// The first payload bytes of the message: `KEEP`, or the whole first packet if that is shorter or arrived whole.
    pub(crate) prefix: &'a [u8],
    /// Payload bytes of the message's first packet. That is the whole message unless there are [`MAX_PAYLOAD`].
    pub(crate) length: usize,
    /// `prefix` is complete. Set once per message.
    pub(crate) begins: bool,
    /// The message is complete. Set once per message, with or after `begins`.
    pub(crate) ends: bool,
}

/// Splits the bytes of one direction into messages. Of a message in several pieces it keeps only the first `KEEP`
/// payload bytes.
#[derive(Debug)]
pub(crate) struct PacketFramer<const KEEP: usize> {
    /// Payload bytes of the current packet still to come.
    bytes_left: u32,
    /// Payload bytes of the message's first packet.
    first_packet_length: u32,
    header: HeaderReader,
    prefix_bytes: [u8; KEEP],
    /// How many bytes of `prefix_bytes` are filled.
    prefix_seen: u8,
    /// The header of the current packet is complete, but not its payload.
    is_in_payload: bool,
    /// The current packet has the maximum length, so another packet continues its message.
    is_full: bool,
    /// The current packet is not the first of its message.
    is_continuation: bool,
    /// Sequence number of the last packet whose header is complete.
    sequence: u8,
}

impl<const KEEP: usize> PacketFramer<KEEP> {
    pub(crate) const fn new() -> Self {
        Self {
            bytes_left: 0,
            first_packet_length: 0,
            header: HeaderReader::new(),
            prefix_bytes: [0; KEEP],
            prefix_seen: 0,
            is_in_payload: false,
            is_full: false,
            is_continuation: false,
            sequence: 0,
        }
    }

    /// Sequence number of the last packet whose header is complete.
    pub(crate) const fn sequence(&self) -> u8 {
        self.sequence
    }

    /// Whether no byte of the next message was received.
    pub(crate) const fn is_between_messages(&self) -> bool {
        !self.is_in_payload && !self.is_continuation && self.header.is_empty()
    }

    /// Reads up to the next beginning or end of a message, and removes the bytes from `bytes`. None: `bytes` is empty
    /// now.
    pub(crate) fn next<'a, 'b: 'a>(&'a mut self, bytes: &mut &'b [u8]) -> Option<Piece<'a>> {
        loop {
            if !self.is_in_payload {
                let Header { length, sequence } = self.header.read(bytes)?;
                self.sequence = sequence;
                if !self.is_continuation {
                    if length < MAX_PAYLOAD && length <= bytes.len() {
                        let (payload, rest) = bytes.split_at(length);
                        *bytes = rest;
                        return Some(Piece { prefix: payload, length, begins: true, ends: true });
                    }
                    self.first_packet_length = length as u32;
                    self.prefix_seen = 0;
                }
                self.bytes_left = length as u32;
                self.is_full = length == MAX_PAYLOAD;
                self.is_in_payload = true;
            }
            let (payload, rest) = bytes.split_at(bytes.len().min(self.bytes_left as usize));
            *bytes = rest;
            self.bytes_left -= payload.len() as u32;
            let begins = !self.is_continuation && self.extend_prefix(payload);
            let ends = self.bytes_left == 0 && !self.is_full;
            if self.bytes_left == 0 {
                self.is_in_payload = false;
                self.is_continuation = self.is_full;
            }
            if begins || ends {
                let prefix = &self.prefix_bytes[..usize::from(self.prefix_seen)];
                return Some(Piece { prefix, length: self.first_packet_length as usize, begins, ends });
            }
            if self.is_in_payload {
                return None;
            }
        }
    }

    /// Adds missing bytes to the prefix. Returns true when that completes it.
    fn extend_prefix(&mut self, payload: &[u8]) -> bool {
        let seen = usize::from(self.prefix_seen);
        let lacking = KEEP.min(self.first_packet_length as usize) - seen;
        if lacking == 0 {
            return false;
        }
        let now = &payload[..payload.len().min(lacking)];
        self.prefix_bytes[seen..seen + now.len()].copy_from_slice(now);
        self.prefix_seen += now.len() as u8;
        now.len() == lacking
    }
}

/// How many rows ahead a byte is loaded, as if all rows had the length of the current one. Without this, each row
/// header is a cache miss, because the processor cannot predict where the next row begins.
const ROWS_AHEAD: usize = 4;

/// Skips the complete rows at the front of `bytes`, which must begin with a packet. Returns the rest, the number of
/// rows, and the sequence number of the last one.
///
/// Stops at any packet that may not be a row and leaves it to [`PacketFramer::next`]: a packet that is empty, of the
/// maximum length or incomplete, or that begins with `fe` or `ff`.
pub(crate) fn skip_rows(mut bytes: &[u8]) -> (&[u8], u64, Option<u8>) {
    let mut touched = 0;
    let mut rows = 0;
    let mut last = None;
    while let Some(&[a, b, c, sequence, first]) = bytes.first_chunk() {
        let length = u32::from_le_bytes([a, b, c, 0]) as usize;
        touched |= bytes.get(ROWS_AHEAD * (HEADER + length)).copied().unwrap_or_default();
        // One comparison excludes length 0, where `first` belongs to the next packet, and the maximum length.
        let plain = length.wrapping_sub(1) < MAX_PAYLOAD - 1 && first < 0xfe;
        match bytes.get(HEADER + length..) {
            Some(rest) if plain => {
                bytes = rest;
                rows += 1;
                last = Some(sequence);
            }
            _ => break,
        }
    }
    black_box(touched);
    (bytes, rows, last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::splitting::split;
    use proptest::prelude::*;

    type MessageBoundary = (Vec<u8>, usize, bool);

    fn message(payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut chunks = payload.chunks(MAX_PAYLOAD).collect::<Vec<_>>();
        if payload.len().is_multiple_of(MAX_PAYLOAD) {
            chunks.push(&[]);
        }
        for (sequence, chunk) in chunks.into_iter().enumerate() {
            bytes.extend(Header { length: chunk.len(), sequence: sequence as u8 }.bytes());
            bytes.extend(chunk);
        }
        bytes
    }

    /// Frames the pieces. Each message gives (prefix, length of the first packet, false) when it begins, and (.., true)
    /// when it ends.
    fn frame<'a>(framer: &mut PacketFramer<5>, pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<MessageBoundary> {
        let mut seen = Vec::new();
        for mut bytes in pieces {
            while let Some(piece) = framer.next(&mut bytes) {
                let prefix = piece.prefix[..piece.prefix.len().min(5)].to_vec();
                if piece.begins {
                    seen.push((prefix.clone(), piece.length, false));
                }
                if piece.ends {
                    seen.push((prefix, piece.length, true));
                }
            }
            assert!(bytes.is_empty());
        }
        seen
    }

    fn expected(payloads: &[Vec<u8>]) -> Vec<MessageBoundary> {
        let both = |payload: &Vec<u8>| {
            let prefix = payload[..payload.len().min(5)].to_vec();
            let length = payload.len().min(MAX_PAYLOAD);
            [(prefix.clone(), length, false), (prefix, length, true)]
        };
        payloads.iter().flat_map(both).collect()
    }

    #[test]
    fn message_of_the_maximum_packet_length_continues_in_the_next_packet() {
        for length in [MAX_PAYLOAD - 1, MAX_PAYLOAD, MAX_PAYLOAD + 1, 2 * MAX_PAYLOAD] {
            let payloads = [vec![7; length], vec![1, 2]];
            let bytes = payloads.each_ref().map(|payload| message(payload)).concat();
            let mut framer = PacketFramer::new();
            assert_eq!(frame(&mut framer, [&bytes[..]]), expected(&payloads), "{length} at once");
            for cut in [1, 3, 4, 6, 4 + MAX_PAYLOAD - 1, 4 + MAX_PAYLOAD, bytes.len() - 7, bytes.len() - 1] {
                let mut framer = PacketFramer::new();
                assert_eq!(
                    frame(&mut framer, [&bytes[..cut], &bytes[cut..]]),
                    expected(&payloads),
                    "{length} at {cut}"
                );
                assert!(framer.is_between_messages());
            }
        }
    }

    #[test]
    fn framer_is_between_messages_only_before_the_first_byte_of_a_message() {
        let bytes = message(b"abcdefgh");
        for cut in 1..bytes.len() {
            let mut framer = PacketFramer::new();
            frame(&mut framer, [&bytes[..cut]]);
            assert!(!framer.is_between_messages(), "{cut}");
            frame(&mut framer, [&bytes[cut..]]);
            assert!(framer.is_between_messages());
        }
    }

    #[test]
    fn skip_rows_stops_at_any_packet_that_may_not_be_a_row() {
        let rows = [message(b"\x01a"), message(b"\xfb"), message(&[b'x'; 300])].concat();
        let long = message(&vec![0x01; MAX_PAYLOAD]);
        let stops: [&[u8]; 8] =
            [b"", b"\x01", b"\x01\0\0\0", b"\x02\0\0\0a", b"\0\0\0\0\x01", b"\x01\0\0\0\xfe", b"\x01\0\0\0\xff", &long];
        for stop in stops {
            let bytes = [&rows, stop].concat();
            let (rest, count, _) = skip_rows(&bytes);
            assert_eq!((rest.len(), count), (stop.len(), 3));
        }
    }

    proptest! {
        #[test]
        fn framing_does_not_depend_on_how_bytes_are_split(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
            lengths in prop::collection::vec(1..50_usize, 1..200),
        ) {
            let bytes = payloads.iter().flat_map(|payload| message(payload)).collect::<Vec<_>>();
            let mut framer = PacketFramer::new();
            prop_assert_eq!(frame(&mut framer, split(&bytes, &lengths)), expected(&payloads));
            prop_assert!(framer.is_between_messages());
        }
    }
}
