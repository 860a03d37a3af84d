//! One packet at a time, out of bytes that come in any pieces.

use crate::packet::{HEADER, Header};
use crate::secret::SecretBytes;

/// Gathers a packet. Takes no byte of the next one, and never asks for memory that nothing came for yet.
#[derive(Debug, Default)]
pub(super) struct PacketReader {
    bytes: SecretBytes,
}

/// How much of a packet was received.
pub(super) enum PacketProgress {
    /// Not everything is there.
    Incomplete,
    /// Its header is complete now: reported once, before the payload is read.
    Header(Header),
    /// All of it; the payload.
    Complete(SecretBytes),
}

impl PacketReader {
    /// Takes from the front of `bytes` what the packet lacks: how many bytes, and how far it came.
    pub(super) fn receive(&mut self, bytes: &[u8]) -> (usize, PacketProgress) {
        let goal = self.header().map_or(HEADER, |header| HEADER + header.length);
        let count = bytes.len().min(goal - self.bytes.len());
        let had_header = self.bytes.len() >= HEADER;
        self.bytes.extend_from_slice(&bytes[..count]);
        let received = if self.bytes.len() < goal {
            PacketProgress::Incomplete
        } else if had_header {
            PacketProgress::Complete(std::mem::take(&mut self.bytes)[HEADER..].into())
        } else {
            self.header().map_or(PacketProgress::Incomplete, PacketProgress::Header)
        };
        (count, received)
    }

    /// The header, once it is complete.
    pub(super) fn header(&self) -> Option<Header> {
        Header::parse(&self.bytes)
    }

    /// Whether nothing of a packet is there.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The memory that it takes.
    pub(super) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }
}
