//! Packets: a header of 4 bytes (length in 3, sequence number in 1), then the payload.
//!
//! A payload of exactly [`MAX_PAYLOAD`] bytes continues in the next packet. The message ends with the first shorter
//! payload, which may be empty.

/// Bytes of a packet header.
pub const HEADER: usize = 4;
/// Maximum payload bytes of a packet.
pub const MAX_PAYLOAD: usize = 0xff_ffff;

/// A packet header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Payload bytes that follow.
    pub length: usize,
    /// Sequence number; incremented per packet, in both directions together, and wraps at 256.
    pub sequence: u8,
}

impl Header {
    /// The header at the front of `bytes`; None if there are fewer than [`HEADER`] bytes.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let [a, b, c, sequence] = *bytes.first_chunk()?;
        Some(Self { length: usize::from(a) | usize::from(b) << 8 | usize::from(c) << 16, sequence })
    }

    /// The header as sent. `length` must not exceed [`MAX_PAYLOAD`].
    #[must_use]
    pub fn bytes(self) -> [u8; HEADER] {
        debug_assert!(self.length <= MAX_PAYLOAD);
        [self.length as u8, (self.length >> 8) as u8, (self.length >> 16) as u8, self.sequence]
    }
}

/// The packets of a message, of which the first has this sequence number.
#[must_use]
pub fn packets(payload: &[u8], mut sequence: u8) -> Vec<u8> {
    let mut packets = Vec::with_capacity(payload.len() + HEADER * (payload.len() / MAX_PAYLOAD + 1));
    let mut rest = payload;
    loop {
        let (chunk, behind) = rest.split_at(rest.len().min(MAX_PAYLOAD));
        packets.extend(Header { length: chunk.len(), sequence }.bytes());
        packets.extend(chunk);
        if chunk.len() < MAX_PAYLOAD {
            return packets;
        }
        rest = behind;
        sequence = sequence.wrapping_add(1);
    }
}

/// Reads headers from bytes that are split anywhere.
#[derive(Debug, Default)]
pub struct HeaderReader {
    bytes: [u8; HEADER],
    /// How many of `bytes` are filled.
    seen: u8,
}

impl HeaderReader {
    #[must_use]
    pub const fn new() -> Self {
        Self { bytes: [0; HEADER], seen: 0 }
    }

    /// Whether no byte of the next header was read.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.seen == 0
    }

    /// Removes a header from the front of `bytes`. None if the header is still incomplete; then `bytes` is empty.
    #[inline]
    pub fn read(&mut self, bytes: &mut &[u8]) -> Option<Header> {
        let seen = usize::from(self.seen);
        if seen == 0
            && let Some(header) = Header::parse(bytes)
        {
            *bytes = &bytes[HEADER..];
            return Some(header);
        }
        let (now, rest) = bytes.split_at(bytes.len().min(HEADER - seen));
        *bytes = rest;
        self.bytes[seen..seen + now.len()].copy_from_slice(now);
        self.seen += now.len() as u8;
        if usize::from(self.seen) < HEADER {
            return None;
        }
        self.seen = 0;
        Header::parse(&self.bytes)
    }
}
