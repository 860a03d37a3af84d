//! Conversations as a fuzzer writes them.
//!
//! Entries follow each other: a byte that says what it is, the length (1 byte, or 2, little-endian), so many bytes.
//! Whatever a fuzzer makes of it is a conversation: what is too long ends with the input.

use mysql_proto::packet::{Header, MAX_PAYLOAD};
use std::borrow::Cow;
use std::sync::OnceLock;

/// The node speaks; else the client does.
pub const NODE: u8 = 1;
/// Bytes as they go on the wire; else the payload of one packet.
pub const RAW: u8 = 2;
/// The length has 2 bytes.
pub const LONG: u8 = 4;
/// The message has a packet of the greatest length in front: the entry's bytes, and zeros. Not behind raw
/// bytes: the zeros might be millions of empty messages then.
pub const FULL: u8 = 8;
/// In these bits: what is added to the sequence number that is due.
pub const NUMBER: u8 = 0xf0;

/// What is said at one time.
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

    /// The bytes that go on the wire, where `due` is the sequence number that is due.
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

/// Appends an entry; `kind` gets the form of its length here.
pub fn write(input: &mut Vec<u8>, kind: u8, bytes: &[u8]) {
    let [low, high] = (bytes.len() as u16).to_le_bytes();
    if high == 0 {
        input.extend([kind & !LONG, low]);
    } else {
        input.extend([kind | LONG, low, high]);
    }
    input.extend(bytes);
}

/// Bytes of one side, up to where the other goes on. A packet of the greatest length is not copied.
pub type Turn<'a> = (bool, Vec<Cow<'a, [u8]>>);

/// Turns of a session, where sequence numbers do not matter: from the node or not, and the bytes.
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
                    // So that several messages come at once.
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

/// Pieces of at least so many bytes are zeros of a full packet.
const LARGE: usize = MAX_PAYLOAD - 0xffff;

fn full(bytes: &[u8]) -> Vec<Cow<'_, [u8]>> {
    static ZEROS: OnceLock<Vec<u8>> = OnceLock::new();
    let zeros = ZEROS.get_or_init(|| vec![0; MAX_PAYLOAD]);
    let head = [&Header { length: MAX_PAYLOAD, sequence: 0 }.bytes()[..], bytes].concat();
    vec![Cow::Owned(head), Cow::Borrowed(&zeros[bytes.len()..])]
}

/// Cuts bytes as sockets might.
#[derive(Debug, Clone, Copy)]
pub enum Cut {
    /// Not at all.
    Whole,
    /// Into single bytes. Of a full packet, some at both ends.
    Bytes,
    /// Into pieces of pseudo-random lengths.
    Random(u64),
}

impl Cut {
    /// Shows the pieces of `bytes`, in their order.
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
                    // Knuth's generator: its upper bits are good.
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let (piece, after) = rest.split_at(rest.len().min((state >> 60) as usize + 1));
                    show(piece);
                    rest = after;
                }
            }
        }
    }
}

/// The cuts that must give the same as [`Cut::Whole`].
#[must_use]
pub fn cuts(input: &[u8]) -> [Cut; 2] {
    // Any number that the input decides on: what fails must fail again.
    let seed = input.iter().fold(input.len() as u64, |sum, &byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
    [Cut::Bytes, Cut::Random(seed)]
}
