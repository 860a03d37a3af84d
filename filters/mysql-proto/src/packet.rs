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
