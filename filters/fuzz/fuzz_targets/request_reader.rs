//! Requests of a client. Input: which of them are data (1 byte), then entries of `fuzz::script`: payloads of requests, or
//! raw bytes. The payload of an entry with `FULL` has several packets if it is long; one entry with `LONGEST` becomes about
//! as long as what is observed.

#![no_main]

use std::cell::Cell;
use std::ops::Range;

use fuzz::script::{self, FULL, NODE, NUMBER, RAW};
use libfuzzer_sys::fuzz_target;
use packet::{HEADER, Header, MAX_PAYLOAD};
use request_reader::{Found, Interest, MAX_OBSERVED_BYTES, RequestReader, RequestStart};

/// Used by the included reader.
mod command {
    pub use mysql_proto::command::Command;
}
mod packet {
    pub use mysql_proto::packet::{HEADER, Header, HeaderReader};

    /// Small, so that an input has many requests of several packets.
    pub const MAX_PAYLOAD: usize = 24;
}
mod secret {
    pub use mysql_proto::secret::SecretBytes;
}
// The reader is included for the small packets.
#[expect(dead_code, reason = "no request is dropped")]
#[path = "../../mysql-proto/src/request_reader.rs"]
mod request_reader;

/// These bits: the payload gets zeros, up to the maximum that is observed. Rare, because it takes long.
const LONGEST: u8 = NODE | NUMBER;
/// The pieces of such an input.
const LONG_PIECE: usize = 99_999;

/// How the request with this number is treated. `data`: the numbers of messages that are no commands.
fn interest(data: &Range<usize>, number: usize, command: u8, length: usize) -> Interest {
    match command % 8 {
        _ if data.contains(&number) => Interest::None,
        0 | 1 => Interest::Observe,
        2 | 3 => Interest::Hold,
        4 if length.is_multiple_of(2) => Interest::Hold,
        7 if command > 0xf0 => Interest::Refuse,
        _ => Interest::None,
    }
}

/// What comes out: the bytes that pass, and what is shown, with the number of bytes that have passed by then.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    passed: Vec<u8>,
    /// Packets, payload, and the sequence number of the response.
    observed: Vec<(usize, Vec<u8>, Vec<u8>, u8)>,
    held: Vec<(usize, Vec<u8>, Vec<u8>, u8)>,
    refused: Option<usize>,
    /// What did not pass.
    kept: Vec<u8>,
}

fn read<'a>(data: &Range<usize>, pieces: impl IntoIterator<Item = &'a [u8]>, whole: &Seen) -> Seen {
    let mut reader = RequestReader::default();
    let mut seen = Seen::default();
    let mut fed = 0;
    let requests = Cell::new(0);
    for piece in pieces {
        if seen.refused.is_some() {
            break;
        }
        fed += piece.len();
        let joined = reader.join(piece);
        let mut rest = joined.as_deref().unwrap_or(piece);
        while !rest.is_empty() && seen.refused.is_none() {
            let before = rest;
            let found = reader.next(&mut rest, true, |start: RequestStart| {
                assert!(start.length > 0 && start.content.len() < start.length);
                let front = before.get(HEADER + 1..).map(<[u8]>::as_ptr);
                assert_eq!(start.is_first, front == Some(start.content.as_ptr()), "{start:?}");
                let interest = interest(data, requests.get(), start.command, start.length);
                // A request is asked about again if other bytes pass first.
                if start.is_first || !matches!(interest, Interest::Hold | Interest::Refuse) {
                    requests.set(requests.get() + 1);
                }
                interest
            });
            assert!(before.ends_with(rest));
            let taken = before.len() - rest.len();
            assert!(taken > 0 || found == Some(Found::Refused), "no progress");
            match found {
                None => assert!(rest.is_empty()),
                Some(Found::Bytes(passing)) => {
                    assert!(!passing.is_empty() && before.starts_with(passing));
                    seen.passed.extend(passing);
                }
                Some(Found::Observed(passing, request)) => {
                    assert_eq!(passing, &before[..taken]);
                    seen.passed.extend(passing);
                    assert!(seen.passed.ends_with(&request));
                    let payload = request.payload().into_owned();
                    seen.observed.push((seen.passed.len(), request.to_vec(), payload, request.response_sequence()));
                }
                Some(Found::Held(request)) => {
                    let payload = request.payload().into_owned();
                    assert_eq!(request.command(), payload.first().map(|byte| command::Command::from(*byte)));
                    seen.held.push((seen.passed.len(), request.to_vec(), payload, request.response_sequence()));
                    seen.passed.extend(&*request); // the decision
                }
                Some(Found::Refused) => seen.refused = Some(seen.passed.len()),
                Some(Found::TooLong { .. }) => panic!("no input is that long"),
            }
        }
        // Bytes pass as they arrive, but for those of a held request, and those that do not show the command yet.
        let passed = seen.passed.len();
        let is_held = whole.held.binary_search_by_key(&passed, |(at, ..)| *at).is_ok() || passed == whole.passed.len();
        assert!(seen.refused.is_some() || fed - passed <= HEADER || is_held, "{} bytes wait", fed - passed);
    }
    assert!(!reader.has_dropped(), "no input is that long");
    if seen.refused.is_none() {
        let has_partial_request = reader.has_partial_request();
        seen.kept = reader.stop().to_vec();
        assert!(has_partial_request || seen.kept.is_empty());
        assert_eq!(reader.stop(), b"");
    }
    seen
}

/// The expected result of [`read`], by a reader that has all bytes. None: a header has an impossible length.
fn expected(data: &Range<usize>, bytes: &[u8]) -> Option<Seen> {
    let mut seen = Seen::default();
    let mut at = 0;
    let mut requests = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let Some(header) = Header::parse(rest) else { break };
        if header.length == 0 {
            at += HEADER;
            continue;
        }
        let Some(&command) = rest.get(HEADER) else { break };
        let interest = interest(data, requests, command, header.length);
        requests += 1;
        if interest == Interest::Refuse {
            seen.refused = Some(at);
            break;
        }
        let Some((end, payload, last)) = request(rest)? else {
            if interest != Interest::Hold {
                at = bytes.len();
            }
            break;
        };
        let packets = rest[..end].to_vec();
        match interest {
            Interest::Observe if end <= MAX_OBSERVED_BYTES => {
                seen.observed.push((at + end, packets, payload, last.wrapping_add(1)));
            }
            Interest::Hold => seen.held.push((at, packets, payload, last.wrapping_add(1))),
            _ => {}
        }
        at += end;
    }
    seen.passed = bytes[..at].to_vec();
    if seen.refused.is_none() {
        seen.kept = bytes[at..].to_vec();
    }
    Some(seen)
}

/// The length with headers, the payload, and the last sequence number of the request at the front. Some(None): it is
/// incomplete.
#[expect(clippy::option_option, reason = "the outer one is for impossible packets")]
fn request(bytes: &[u8]) -> Option<Option<(usize, Vec<u8>, u8)>> {
    let (mut at, mut payload) = (0, Vec::new());
    while let Some(header) = Header::parse(&bytes[at..]) {
        if at > 0 && header.length > MAX_PAYLOAD {
            return None;
        }
        at += HEADER;
        let Some(content) = bytes.get(at..at + header.length) else { break };
        payload.extend(content);
        at += header.length;
        if header.length != MAX_PAYLOAD {
            return Some(Some((at, payload, header.sequence)));
        }
    }
    Some(None)
}

/// The bytes of the input's entries.
fn stream(input: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut is_long = false;
    for entry in script::entries(input) {
        if entry.kind & RAW != 0 {
            bytes.extend(entry.bytes);
            continue;
        }
        let mut payload = entry.bytes.to_vec();
        if entry.kind & LONGEST == LONGEST && !is_long {
            is_long = true;
            payload.resize(MAX_OBSERVED_BYTES - 8 + payload.len() % 16, 0);
        }
        let chunk = if entry.kind & FULL != 0 { MAX_PAYLOAD } else { payload.len().max(1) };
        let mut sequence = entry.kind >> 4;
        for packet in payload.chunks(chunk) {
            bytes.extend(Header { length: packet.len(), sequence }.bytes());
            bytes.extend(packet);
            sequence = sequence.wrapping_add(1);
        }
        if entry.kind & FULL != 0 && payload.len() % MAX_PAYLOAD == 0 {
            bytes.extend(Header { length: 0, sequence }.bytes());
        }
    }
    bytes
}

fuzz_target!(|input: &[u8]| {
    let Some((&first, rest)) = input.split_first() else { return };
    let begin = usize::from(first & 0xf);
    let data = begin..begin + usize::from(first >> 4);
    let bytes = stream(rest);
    let Some(whole) = expected(&data, &bytes) else { return };
    let check = |how: &dyn std::fmt::Debug, seen: Seen| {
        assert!(seen == whole, "cut by {how:?}: {seen:?} instead of {whole:?}");
    };
    check(&"nothing", read(&data, [&bytes[..]], &whole));
    if bytes.len() > LONG_PIECE {
        return check(&LONG_PIECE, read(&data, bytes.chunks(LONG_PIECE), &whole));
    }
    for cut in script::cuts(input) {
        let mut pieces = Vec::new();
        cut.each(&bytes, |piece| pieces.push(piece));
        check(&cut, read(&data, pieces, &whole));
    }
});
