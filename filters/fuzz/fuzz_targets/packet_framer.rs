//! Packets of one direction: entries of `fuzz::script` whose sender does not matter.

#![no_main]

use fuzz::script::{self, Cut, Entry, FULL, RAW, Turn};
use libfuzzer_sys::fuzz_target;
use packet_framer::{PacketFramer, skip_rows};

/// Used by the included framer.
mod packet {
    pub use mysql_proto::packet::{HEADER, Header, HeaderReader, MAX_PAYLOAD};
}
// The framer is included because it is private, and its users in `mysql_proto` hide parts of it from the fuzzer.
#[expect(dead_code, reason = "logins use the rest of it")]
#[path = "../../mysql-proto/src/packet_framer.rs"]
mod packet_framer;

const KEEP: usize = 5;

/// The beginning or end of a message: the first bytes, the length of its first packet, and whether it ends.
type MessageBoundary = (Vec<u8>, usize, bool);

fn frame<'a>(bytes: impl IntoIterator<Item = &'a [u8]>, cut: Cut) -> (Vec<MessageBoundary>, bool) {
    let mut packet_framer = PacketFramer::<KEEP>::new();
    let mut boundaries = Vec::new();
    for bytes in bytes {
        cut.each(bytes, |mut bytes| {
            while let Some(piece) = packet_framer.next(&mut bytes) {
                assert!(piece.begins || piece.ends);
                assert!(piece.prefix.len() >= KEEP.min(piece.length));
                let prefix = piece.prefix[..KEEP.min(piece.prefix.len())].to_vec();
                if piece.begins {
                    boundaries.push((prefix.clone(), piece.length, false));
                }
                if piece.ends {
                    boundaries.push((prefix, piece.length, true));
                }
            }
            assert!(bytes.is_empty(), "bytes are left over");
        });
    }
    (boundaries, packet_framer.is_between_messages())
}

/// The expected result of [`frame`], found by a simple reader.
fn expected(bytes: &[u8]) -> (Vec<MessageBoundary>, bool) {
    let mut boundaries = Vec::new();
    let mut rest = bytes;
    let mut message: Option<(Vec<u8>, usize)> = None;
    loop {
        let Some(header) = packet::Header::parse(rest) else {
            return (boundaries, rest.is_empty() && message.is_none());
        };
        let payload = &rest[packet::HEADER..];
        let there = payload.len().min(header.length);
        if message.is_none() {
            let prefix = &payload[..there.min(KEEP)];
            if prefix.len() < KEEP.min(header.length) {
                return (boundaries, false);
            }
            boundaries.push((prefix.to_vec(), header.length, false));
            message = Some((prefix.to_vec(), header.length));
        }
        if there < header.length {
            return (boundaries, false);
        }
        if header.length < packet::MAX_PAYLOAD
            && let Some((prefix, length)) = message.take()
        {
            boundaries.push((prefix, length, true));
        }
        rest = &payload[there..];
    }
}

/// The boundaries of an entry's message, if no entry is raw.
fn written_boundaries(entry: Entry) -> [MessageBoundary; 2] {
    let full = entry.kind & FULL != 0;
    let length = if full { packet::MAX_PAYLOAD } else { entry.bytes.len() };
    let bytes = entry.bytes.iter().copied().chain(std::iter::repeat(0));
    let prefix = bytes.take(KEEP.min(length)).collect::<Vec<_>>();
    [(prefix.clone(), length, false), (prefix, length, true)]
}

/// Checks that [`skip_rows`] skips only complete rows, and returns their number and the sequence number of the last one.
fn check_skipped(bytes: &[u8]) {
    let (rest, rows, last) = skip_rows(bytes);
    assert!(bytes.ends_with(rest));
    let mut skipped = &bytes[..bytes.len() - rest.len()];
    let (mut count, mut sequence) = (0, None);
    while !skipped.is_empty() {
        let header = packet::Header::parse(skipped).expect("a whole packet");
        sequence = Some(header.sequence);
        assert!(header.length > 0 && header.length < packet::MAX_PAYLOAD);
        assert!(skipped[packet::HEADER] < 0xfe);
        skipped = &skipped[packet::HEADER + header.length..];
        count += 1;
    }
    assert_eq!((rows, last), (count, sequence));
}

fuzz_target!(|input: &[u8]| {
    let turns = script::turns(input);
    let pieces = || turns.iter().flat_map(|(_, pieces): &Turn| pieces.iter().map(|piece| &**piece));
    let whole = frame(pieces(), Cut::Whole);
    for cut in script::cuts(input) {
        assert_eq!(frame(pieces(), cut), whole, "cut by {cut:?}");
    }
    if !script::entries(input).any(|entry| entry.kind & RAW != 0) {
        let messages = script::entries(input).flat_map(written_boundaries).collect::<Vec<_>>();
        assert_eq!(whole, (messages, true));
    }
    if pieces().all(|piece| piece.len() < packet::MAX_PAYLOAD / 2) {
        let bytes = pieces().collect::<Vec<_>>().concat();
        assert_eq!(frame([&bytes[..]], Cut::Whole), whole);
        assert_eq!(expected(&bytes), whole);
        check_skipped(&bytes);
    }
});
