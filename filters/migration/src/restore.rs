//! The statements that restore a session's states at another node. The longest is built while the states arrive.
//!
//! The JSON is escaped directly into the packets to send; there is no other copy. The packets are stored in pieces, so
//! that no bytes are copied when they grow. Each piece is reserved in the budget before it is allocated.

use std::cell::RefCell;

use memchr::memchr2;
use mysql_proto::packet::{HEADER, Header, MAX_PAYLOAD};
use mysql_proto::secret::SecretBytes;

use crate::budget::Reservation;
use crate::state_summary::RestoreFrame;

/// Maximum bytes of a piece.
pub const MAX_PIECE_BYTES: usize = 64 * 1024;
/// Minimum bytes of a piece.
const MIN_PIECE_BYTES: usize = 512;
/// Bytes of a piece in addition to the JSON, for doubled quotes and backslashes.
const ESCAPE_RESERVE_BYTES: usize = 256;
/// Bytes of JSON that are escaped at a time.
const ESCAPE_CHUNK_BYTES: usize = 256;

const QUERY_PREFIX: &[u8] = b"\x03SET SESSION_STATES '";

/// The number of statements in a [`RestoreStatement`]. The node answers each.
pub(crate) const RESTORE_STATEMENTS: u8 = 3;

/// `SET SESSION_STATES` and the statements before and after it, as packets.
pub struct RestoreStatement {
    pieces: Vec<SecretBytes>,
    reservation: RefCell<Reservation>,
}

impl RestoreStatement {
    /// The bytes of all packets, in order.
    #[must_use]
    pub fn pieces(&self) -> &[SecretBytes] {
        &self.pieces
    }

    /// The memory that is reserved for the statement, in bytes.
    #[must_use]
    pub fn reserved_bytes(&self) -> usize {
        self.reservation.borrow().bytes()
    }

    /// Marks the statement as not needed by a migration. False: the budget has no room for that
    /// ([`Reservation::retain`]).
    #[must_use]
    pub fn retain(&self) -> bool {
        self.reservation.borrow_mut().retain()
    }
}

impl PartialEq for RestoreStatement {
    fn eq(&self, other: &Self) -> bool {
        self.pieces == other.pieces
    }
}

impl Eq for RestoreStatement {}

/// Hides the states, which must not be logged.
impl std::fmt::Debug for RestoreStatement {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "RestoreStatement({} bytes)", self.pieces.iter().map(|piece| piece.len()).sum::<usize>())
    }
}

/// The budget is used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OverBudget;

/// Builds a [`RestoreStatement`].
#[derive(Debug)]
pub(crate) struct RestoreBuilder {
    pieces: Vec<SecretBytes>,
    reservation: Reservation,
    /// The capacity of all pieces.
    allocated: usize,
    /// Bytes of JSON still to come.
    bytes_left: usize,
    /// Where the header of the last packet is: index of the piece, and offset in the piece.
    header: (usize, usize),
    /// Payload bytes of the last packet.
    payload: usize,
    sequence: u8,
}

impl RestoreBuilder {
    /// Starts a statement for `json` bytes of JSON.
    pub(crate) fn new(json: usize, mut reservation: Reservation) -> Result<Self, OverBudget> {
        if !reservation.grow(json) {
            return Err(OverBudget);
        }
        let mut builder = Self {
            pieces: Vec::new(),
            reservation,
            allocated: 0,
            bytes_left: json,
            header: (0, 0),
            payload: 0,
            sequence: 0,
        };
        builder.add_piece(0)?;
        builder.begin_packet()?;
        builder.write(QUERY_PREFIX)?;
        Ok(builder)
    }

    /// Adds the next bytes of the JSON. A doubled quote means the same in all SQL modes; the preparation sets a mode in
    /// which backslashes escape.
    pub(crate) fn push(&mut self, json: &[u8]) -> Result<(), OverBudget> {
        let mut escaped = [0; 2 * ESCAPE_CHUNK_BYTES];
        for chunk in json.chunks(ESCAPE_CHUNK_BYTES) {
            self.bytes_left = self.bytes_left.saturating_sub(chunk.len());
            if memchr2(b'\'', b'\\', chunk).is_none() {
                self.write(chunk)?;
                continue;
            }
            let mut length = 0;
            for &byte in chunk {
                escaped[length] = byte;
                // The second byte is overwritten unless the first must be doubled.
                escaped[length + 1] = byte;
                length += 1 + usize::from(byte == b'\'' || byte == b'\\');
            }
            self.write(&escaped[..length])?;
        }
        Ok(())
    }

    /// Adds the statements before and after.
    pub(crate) fn finish(mut self, frame: RestoreFrame) -> Result<RestoreStatement, OverBudget> {
        self.write(b"'")?;
        if self.payload == MAX_PAYLOAD {
            self.begin_packet()?;
        }
        let (piece, at) = self.header;
        let header = Header { length: self.payload, sequence: self.sequence.wrapping_sub(1) };
        self.pieces[piece][at..at + HEADER].copy_from_slice(&header.bytes());
        self.reservation.shrink_to(self.allocated);
        let (preparation, completion) = (SecretBytes::from(frame.preparation), frame.completion);
        if !self.reservation.grow(preparation.capacity() + completion.capacity()) {
            return Err(OverBudget);
        }
        self.pieces.insert(0, preparation);
        self.pieces.push(completion);
        Ok(RestoreStatement { pieces: self.pieces, reservation: RefCell::new(self.reservation) })
    }

    /// Appends `bytes` to the payload.
    fn write(&mut self, bytes: &[u8]) -> Result<(), OverBudget> {
        let mut rest = bytes;
        while !rest.is_empty() {
            if self.payload == MAX_PAYLOAD {
                self.begin_packet()?;
            }
            if self.room() == 0 {
                self.add_piece(rest.len())?;
            }
            let now = rest.len().min(self.room()).min(MAX_PAYLOAD - self.payload);
            self.last().extend_from_slice(&rest[..now]);
            self.payload += now;
            rest = &rest[now..];
        }
        Ok(())
    }

    /// Begins a packet of the maximum length. [`Self::finish`] corrects the length of the last packet.
    fn begin_packet(&mut self) -> Result<(), OverBudget> {
        if self.room() < HEADER {
            self.add_piece(HEADER)?;
        }
        self.header = (self.pieces.len() - 1, self.last().len());
        let header = Header { length: MAX_PAYLOAD, sequence: self.sequence };
        self.last().extend_from_slice(&header.bytes());
        self.sequence = self.sequence.wrapping_add(1);
        self.payload = 0;
        Ok(())
    }

    /// Adds a piece for `bytes` bytes and the JSON still to come, within the size limits.
    fn add_piece(&mut self, bytes: usize) -> Result<(), OverBudget> {
        let bytes = bytes + self.bytes_left;
        let size = (bytes + bytes / 16 + ESCAPE_RESERVE_BYTES).clamp(MIN_PIECE_BYTES, MAX_PIECE_BYTES);
        let missing = (self.allocated + size).saturating_sub(self.reservation.bytes());
        if !self.reservation.grow(missing) {
            return Err(OverBudget);
        }
        self.allocated += size;
        self.pieces.push(SecretBytes::with_capacity(size));
        Ok(())
    }

    fn room(&mut self) -> usize {
        let last = self.last();
        last.capacity() - last.len()
    }

    fn last(&mut self) -> &mut SecretBytes {
        let last = self.pieces.len() - 1;
        &mut self.pieces[last]
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::budget::{Budget, MemoryLimits};
    use crate::messages::query;

    /// The packets between those of the preparation and of the completion.
    pub(crate) fn framed_bytes(statement: &RestoreStatement) -> Vec<u8> {
        let pieces = statement.pieces();
        pieces[1..pieces.len() - 1].iter().flat_map(|piece| piece.iter().copied()).collect()
    }

    fn frame() -> RestoreFrame {
        RestoreFrame { preparation: query(b"SET @@x=1"), completion: query(b"SET SESSION_STATES '{}'").into() }
    }

    /// Builds a statement from JSON in pieces.
    pub(crate) fn statement(json: &[u8]) -> RestoreStatement {
        let mut builder = RestoreBuilder::new(json.len(), MemoryLimits::default().budget.reservation()).expect("room");
        for piece in json.chunks(70_001) {
            builder.push(piece).expect("room");
        }
        builder.finish(frame()).expect("room")
    }

    /// The bytes of all packets.
    fn bytes_of(statement: &RestoreStatement) -> Vec<u8> {
        statement.pieces().iter().flat_map(|piece| piece.iter().copied()).collect()
    }

    /// The packets of the statement `text` and of the statements before and after it.
    fn framed(text: &[u8]) -> Vec<u8> {
        [&frame().preparation[..], &query(text), &frame().completion].concat()
    }

    fn expected(json: &[u8]) -> Vec<u8> {
        let mut text = b"SET SESSION_STATES '".to_vec();
        for &byte in json {
            text.extend(std::iter::repeat_n(byte, if matches!(byte, b'\'' | b'\\') { 2 } else { 1 }));
        }
        text.push(b'\'');
        framed(&text)
    }

    #[test]
    fn quotes_and_backslashes_are_doubled() {
        for json in [&b"{}"[..], br#"{"a":"it's \"b\""}"#, b"''''", b"\\'\\", b"", &[b'\\'; 300_000]] {
            assert!(bytes_of(&statement(json)) == expected(json));
        }
    }

    #[test]
    fn long_statements_take_several_packets() {
        let fits = MAX_PAYLOAD - QUERY_PREFIX.len() - 1;
        let alphabet: Vec<u8> = (b'a'..=b'z').collect();
        for length in [fits - 1, fits, fits + 1, fits + MAX_PAYLOAD] {
            let mut json = alphabet.repeat(length / alphabet.len() + 1);
            json.truncate(length);
            let whole = [&QUERY_PREFIX[1..], &json, b"'"].concat();
            assert!(bytes_of(&statement(&json)) == framed(&whole), "{length}");
        }
    }

    #[test]
    fn pieces_never_grow_and_are_fully_reserved() {
        for (length, byte) in [(10, b'x'), (8_000, b'x'), (8_000, b'\''), (300_000, b'x'), (300_000, b'\\')] {
            let budget = Budget::new(1 << 20);
            let mut builder = RestoreBuilder::new(length, budget.reservation()).expect("room");
            builder.push(&vec![byte; length]).expect("room");
            let statement = builder.finish(frame()).expect("room");
            let allocated: usize = statement.pieces().iter().map(SecretBytes::capacity).sum();
            let used: usize = statement.pieces().iter().map(|piece| piece.len()).sum();
            assert_eq!(budget.used(), allocated);
            assert!(statement.pieces().iter().all(|piece| piece.capacity() <= MAX_PIECE_BYTES));
            assert!(allocated < used + used / 10 + 1024, "{allocated} for {used}");
            drop(statement);
            assert_eq!(budget.used(), 0);
        }
    }

    #[test]
    fn states_over_the_budget_are_rejected() {
        let budget = Budget::new(100_000);
        assert!(RestoreBuilder::new(100_001, budget.reservation()).is_err());
        let mut builder = RestoreBuilder::new(90_000, budget.reservation()).expect("room");
        assert_eq!(builder.push(&[b'\''; 90_000]), Err(OverBudget));
        assert!(budget.used() <= 100_000);
        drop(builder);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn debug_output_hides_states() {
        assert!(!format!("{:?}", statement(b"secret")).contains("secret"));
        let mut builder = RestoreBuilder::new(6, MemoryLimits::default().budget.reservation()).expect("room");
        builder.push(b"secret").expect("room");
        let shown = format!("{builder:?}");
        assert!(!shown.contains("secret") && !shown.contains("115, 101, 99"), "{shown}");
    }
}
