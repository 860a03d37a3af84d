//! One packet at a time, out of bytes that come in any pieces.

use crate::packet::{HEADER, Header};

/// Gathers a packet. Takes no byte of the next one, and never asks for memory that nothing came for yet.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
}

/// How far a packet came.
pub(super) enum Arrived {
    /// Not everything is there.
    Part,
    /// Its header is complete now: told once, before the payload is taken.
    Header(Header),
    /// All of it; the payload.
    Whole(Vec<u8>),
}

impl Inbox {
    /// Takes from the front of `bytes` what the packet lacks: how many bytes, and how far it came.
    pub(super) fn take(&mut self, bytes: &[u8]) -> (usize, Arrived) {
        let goal = self.header().map_or(HEADER, |header| HEADER + header.length);
        let count = bytes.len().min(goal - self.bytes.len());
        let had_header = self.bytes.len() >= HEADER;
        self.bytes.extend_from_slice(&bytes[..count]);
        let arrived = if self.bytes.len() < goal {
            Arrived::Part
        } else if had_header {
            Arrived::Whole(std::mem::take(&mut self.bytes).split_off(HEADER))
        } else {
            self.header().map_or(Arrived::Part, Arrived::Header)
        };
        (count, arrived)
    }

    /// The header, once it is complete.
    pub(super) fn header(&self) -> Option<Header> {
        Header::parse(&self.bytes)
    }

    /// Whether nothing of a packet is there.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }
}
