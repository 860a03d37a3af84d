//! The format of conversations in a fuzzer's input.
//!
//! An input is a sequence of entries: a byte with the kind, the length (1 byte, or 2, little-endian), the bytes. Every
//! input is a valid conversation: an entry that is too long ends with the input.

use mysql_proto::packet::{Header, MAX_PAYLOAD};
use std::borrow::Cow;
use std::sync::OnceLock;

/// Bit: the node sends the entry, not the client.
pub const NODE: u8 = 1;
/// Bit: the entry has bytes as sent, not the payload of one packet.
pub const RAW: u8 = 2;
/// Bit: the length has 2 bytes.
pub const LONG: u8 = 4;
/// Bit: the message begins with a packet of the maximum length, which has the entry's bytes and zeros. Ignored after
/// raw bytes, because the zeros could be millions of empty messages.
pub const FULL: u8 = 8;
/// Bits: this number is added to the expected sequence number.
pub const NUMBER: u8 = 0xf0;

/// A part of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    pub kind: u8,
    pub bytes: &'a [u8],
}

impl Entry<'_> {
    #[must_use]
    pub fn from_node(self) -> bool {
        self.kind & NODE != 0
    }

    /// The bytes to send; `due`: the expected sequence number.
    #[must_use]
    pub fn packet(self, due: u8) -> Vec<u8> {
        if self.kind & RAW != 0 {
            return self.bytes.to_vec();
        }
        let sequence = due.wrapping_add(self.kind >> 4);
        [&Header { length: self.bytes.len(), sequence }.bytes()[..], self.bytes].concat()
    }
}

/// The entries of an input.
pub fn entries(mut input: &[u8]) -> impl Iterator<Item = Entry<'_>> {
    std::iter::from_fn(move || {
        let (&kind, rest) = input.split_first()?;
        let (length, rest) = match rest {
            [low, high, rest @ ..] if kind & LONG != 0 => (usize::from(u16::from_le_bytes([*low, *high])), rest),
            [length, rest @ ..] => (usize::from(*length), rest),
            [] => (0, rest),
        };
        let (bytes, rest) = rest.split_at(length.min(rest.len()));
        input = rest;
        Some(Entry { kind, bytes })
    })
}

/// Appends an entry, and sets [`LONG`] in its kind if needed.
pub fn write(input: &mut Vec<u8>, kind: u8, bytes: &[u8]) {
    let [low, high] = (bytes.len() as u16).to_le_bytes();
    if high == 0 {
        input.extend([kind & !LONG, low]);
    } else {
        input.extend([kind | LONG, low, high]);
    }
    input.extend(bytes);
}

/// Bytes of one side until the other side sends: whether the node sends them, and the bytes in pieces. Packets of the
/// maximum length are not copied.
pub type Turn<'a> = (bool, Vec<Cow<'a, [u8]>>);

/// The turns of a session, whose sequence numbers do not matter.
#[must_use]
pub fn turns(input: &[u8]) -> Vec<Turn<'_>> {
    let mut turns: Vec<Turn> = Vec::new();
    let mut raw = false;
    for entry in entries(input) {
        raw |= entry.kind & RAW != 0;
        let mut pieces = if entry.kind & FULL != 0 && !raw { full(entry.bytes) } else { vec![] };
        pieces.push(Cow::Owned(entry.packet(0)));
        match turns.last_mut() {
            Some((from_node, before)) if *from_node == entry.from_node() => {
                for piece in pieces {
                    // Joined, so that several messages arrive at once.
                    match before.last_mut() {
                        Some(last) if last.len() < LARGE && piece.len() < LARGE => last.to_mut().extend(&*piece),
                        _ => before.push(piece),
                    }
                }
            }
            _ => turns.push((entry.from_node(), pieces)),
        }
    }
    turns
}

/// Pieces of at least this length are the zeros of a packet of the maximum length.
const LARGE: usize = MAX_PAYLOAD - 0xffff;

fn full(bytes: &[u8]) -> Vec<Cow<'_, [u8]>> {
    static ZEROS: OnceLock<Vec<u8>> = OnceLock::new();
    let zeros = ZEROS.get_or_init(|| vec![0; MAX_PAYLOAD]);
    let head = [&Header { length: MAX_PAYLOAD, sequence: 0 }.bytes()[..], bytes].concat();
    vec![Cow::Owned(head), Cow::Borrowed(&zeros[bytes.len()..])]
}

/// Ways to split bytes, as sockets might.
#[derive(Debug, Clone, Copy)]
pub enum Cut {
    /// Not split.
    Whole,
    /// Into single bytes. Of long zeros, only some at both ends.
    Bytes,
    /// Into pieces of pseudo-random lengths.
    Random(u64),
}

impl Cut {
    /// Calls `show` with the pieces of `bytes`, in order.
    pub fn each<'a>(self, bytes: &'a [u8], mut show: impl FnMut(&'a [u8])) {
        if bytes.len() < LARGE || matches!(self, Self::Whole) {
            return self.each_small(bytes, &mut show);
        }
        let (front, rest) = bytes.split_at(64);
        let (middle, back) = rest.split_at(rest.len() - 64);
        self.each_small(front, &mut show);
        show(middle);
        self.each_small(back, &mut show);
    }

    fn each_small<'a>(self, bytes: &'a [u8], show: &mut impl FnMut(&'a [u8])) {
        match self {
            Self::Whole => show(bytes),
            Self::Bytes => bytes.chunks(1).for_each(show),
            Self::Random(mut state) => {
                let mut rest = bytes;
                while !rest.is_empty() {
                    // Knuth's generator, whose upper bits are good.
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let (piece, after) = rest.split_at(rest.len().min((state >> 60) as usize + 1));
                    show(piece);
                    rest = after;
                }
            }
        }
    }
}

/// Ways to split whose results must equal those of [`Cut::Whole`].
#[must_use]
pub fn cuts(input: &[u8]) -> [Cut; 2] {
    // The input determines the seed, so that failures are reproducible.
    let seed = input.iter().fold(input.len() as u64, |sum, &byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
    [Cut::Bytes, Cut::Random(seed)]
}
