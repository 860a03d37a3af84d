//! Packets: a header of 4 bytes (length in 3, sequence number in 1), then the payload.
//!
//! A payload of exactly [`MAX_PAYLOAD`] bytes is continued in the next packet; the message ends with the first
//! shorter one, which may be empty.

/// Bytes of a packet header.
pub const HEADER: usize = 4;
/// Payload bytes of the longest packet.
pub const MAX_PAYLOAD: usize = 0xff_ffff;

/// What a packet header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Payload bytes that follow.
    pub length: usize,
    /// Sequence number; counts on per packet, both directions together, and wraps at 256.
    pub sequence: u8,
}

impl Header {
    /// The header at the front of `bytes`, or None when fewer than [`HEADER`] are there.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let [a, b, c, sequence] = *bytes.first_chunk()?;
        Some(Self { length: usize::from(a) | usize::from(b) << 8 | usize::from(c) << 16, sequence })
    }

    /// The header as it goes on the wire. `length` is at most [`MAX_PAYLOAD`].
    #[must_use]
    pub fn bytes(self) -> [u8; HEADER] {
        debug_assert!(self.length <= MAX_PAYLOAD);
        [self.length as u8, (self.length >> 8) as u8, (self.length >> 16) as u8, self.sequence]
    }
}

/// Reads headers from bytes that may be cut anywhere.
#[derive(Debug, Default)]
pub struct HeaderReader {
    bytes: [u8; HEADER],
    /// How many of `bytes` are there.
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

    /// Removes a header from the front of `bytes`. None: `bytes` are used up, and the header is not complete yet.
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
