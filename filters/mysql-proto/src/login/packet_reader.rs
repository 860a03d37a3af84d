//! Reads single packets from bytes that are split anywhere.

use crate::packet::{HEADER, Header};
use crate::secret::SecretBytes;

/// Collects one packet. Takes no byte of the next packet, and allocates no memory ahead of received bytes.
#[derive(Debug, Default)]
pub(super) struct PacketReader {
    bytes: SecretBytes,
}

/// How much of a packet was received.
pub(super) enum PacketProgress {
    Incomplete,
    /// The header is complete. Reported once, before the payload is read.
    Header(Header),
    /// The packet is complete; this is its payload.
    Complete(SecretBytes),
}

impl PacketReader {
    /// Takes the packet's missing bytes from the front of `bytes`. Returns how many were taken, and the progress.
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

    pub(super) fn header(&self) -> Option<Header> {
        Header::parse(&self.bytes)
    }

    /// Whether no byte of a packet was received.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Bytes of memory that the reader takes.
    pub(super) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }
}
