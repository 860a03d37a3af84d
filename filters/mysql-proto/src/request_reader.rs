//! Finds the requests in the bytes of a client, however they are split, and collects those that somebody has to see as
//! a whole.

use std::borrow::Cow;
use std::ops::Deref;

use crate::command::Command;
use crate::packet::{HEADER, Header, HeaderReader, MAX_PAYLOAD};
use crate::secret::SecretBytes;

/// How a request is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// Its bytes pass as they arrive.
    None,
    /// Its bytes pass as they arrive, and the whole request is shown when it is complete, unless it is longer than
    /// [`MAX_OBSERVED_BYTES`].
    Observe,
    /// Its bytes pass only when it is complete. If it is longer than [`MAX_HELD_BYTES`], it never passes:
    /// [`Found::TooLong`].
    Hold,
    /// It does not pass.
    Refuse,
}

/// The longest request that is observed, with its headers.
pub const MAX_OBSERVED_BYTES: usize = 1024 * 1024;

/// The longest request that is held, with its headers: the default of TiDB's `max_allowed_packet`.
pub const MAX_HELD_BYTES: usize = 64 * 1024 * 1024;

/// The beginning of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestStart<'a> {
    /// The first byte of the payload.
    pub command: u8,
    /// Payload bytes of the first packet.
    pub length: usize,
    /// What was received of the payload, behind the command.
    pub content: &'a [u8],
    /// Nothing before this request is still to be forwarded, so what is known of the session is up to date.
    pub is_first: bool,
}

/// What the reader has found.
#[derive(Debug, PartialEq, Eq)]
pub enum Found<'a> {
    /// Bytes that pass.
    Bytes(&'a [u8]),
    /// Bytes that pass and end with the end of an observed request.
    Observed(&'a [u8], Request<'a>),
    /// A held request; none of its bytes has passed.
    Held(Request<'a>),
    /// A request of this command was to be held, but its bytes are dropped: it was too long, or the caller wanted it.
    TooLong { command: u8, response_sequence: u8 },
    /// A request that does not pass. The reader must not be used after this.
    Refused,
}

/// A whole request.
#[derive(Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Its packets, a part of the bytes of the last read.
    Received(&'a [u8]),
    /// Its packets, from several reads.
    Collected(SecretBytes),
}

impl Request<'_> {
    /// The command. None: the payload is empty.
    #[must_use]
    pub fn command(&self) -> Option<Command> {
        self.get(HEADER).map(|command| Command::from(*command))
    }

    /// The sequence number of the response.
    #[must_use]
    pub fn response_sequence(&self) -> u8 {
        let mut packets = &**self;
        let mut sequence = 0;
        while let Some(header) = Header::parse(packets) {
            sequence = header.sequence;
            packets = &packets[HEADER + header.length..];
        }
        sequence.wrapping_add(1)
    }

    /// The payload of all packets.
    #[must_use]
    pub fn payload(&self) -> Cow<'_, [u8]> {
        match Header::parse(self) {
            Some(header) if header.length == MAX_PAYLOAD => {
                Cow::Owned(self.chunks(HEADER + MAX_PAYLOAD).flat_map(|packet| &packet[HEADER..]).copied().collect())
            }
            _ => Cow::Borrowed(&self[HEADER..]),
        }
    }
}

/// The packets, with headers.
impl Deref for Request<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Received(packets) => packets,
            Self::Collected(packets) => packets,
        }
    }
}

/// The reader of one session.
#[derive(Debug, Default)]
pub struct RequestReader {
    /// The first bytes of a request, which do not yet show its command.
    start: SecretBytes,
    /// The request of which the beginning was read. None: the next byte begins a request.
    partial: Option<Box<PartialRequest>>,
}

#[derive(Debug)]
struct PartialRequest {
    command: u8,
    interest: Interest,
    /// The packets so far, if the request is observed or held.
    packets: SecretBytes,
    /// The request should be held, but its bytes are dropped.
    is_dropped: bool,
    /// The sequence number of the present packet.
    sequence: u8,
    /// Bytes of the present packet that are to come.
    bytes_left: usize,
    /// The present packet has the maximum length, so another packet follows.
    is_full: bool,
    header: HeaderReader,
}

impl PartialRequest {
    /// Takes its bytes from the front of `bytes`. Returns how many, and whether the request is complete.
    fn take(&mut self, bytes: &[u8]) -> (usize, bool) {
        let mut rest = bytes;
        let is_complete = loop {
            let (_, behind) = rest.split_at(rest.len().min(self.bytes_left));
            self.bytes_left -= rest.len() - behind.len();
            rest = behind;
            if self.bytes_left > 0 {
                break false;
            }
            if !self.is_full {
                break true;
            }
            let Some(header) = self.header.read(&mut rest) else { break false };
            self.sequence = header.sequence;
            self.bytes_left = header.length;
            self.is_full = header.length == MAX_PAYLOAD;
        };
        let taken = bytes.len() - rest.len();
        if self.interest == Interest::Observe && self.packets.len() + taken > MAX_OBSERVED_BYTES {
            self.interest = Interest::None;
            self.packets = SecretBytes::default();
        }
        if self.interest == Interest::Hold && self.packets.len() + taken > MAX_HELD_BYTES {
            self.drop_bytes();
        }
        if matches!(self.interest, Interest::Observe | Interest::Hold) && !self.is_dropped {
            self.packets.extend_from_slice(&bytes[..taken]);
        }
        (taken, is_complete)
    }

    fn drop_bytes(&mut self) {
        self.is_dropped = true;
        self.packets = SecretBytes::default();
    }
}

impl RequestReader {
    /// Whether a part of a request was received, but not all of it.
    #[must_use]
    pub fn has_partial_request(&self) -> bool {
        !self.start.is_empty() || self.partial.is_some()
    }

    /// How many bytes of an incomplete request are held.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held().map_or(0, |partial| partial.packets.len())
    }

    /// Drops the bytes of the incomplete request that is held, and those that follow: [`Found::TooLong`].
    pub fn drop_held(&mut self) {
        if let Some(partial) = self.partial.as_mut().filter(|partial| partial.interest == Interest::Hold) {
            partial.drop_bytes();
        }
    }

    /// Whether bytes of the present request were dropped.
    #[must_use]
    pub fn has_dropped(&self) -> bool {
        self.held().is_some_and(|partial| partial.is_dropped)
    }

    fn held(&self) -> Option<&PartialRequest> {
        self.partial.as_deref().filter(|partial| partial.interest == Interest::Hold)
    }

    /// Ends the reading: returns the bytes that did not pass. They precede all later bytes.
    pub fn stop(&mut self) -> SecretBytes {
        match self.partial.take() {
            Some(partial) if partial.interest == Interest::Hold => partial.packets,
            _ => std::mem::take(&mut self.start),
        }
    }

    /// Call this first with received bytes. Some: read these bytes instead: the incomplete start of a request, which was kept,
    /// and `bytes`.
    pub fn join(&mut self, bytes: &[u8]) -> Option<SecretBytes> {
        if self.start.is_empty() {
            return None;
        }
        let mut joined = std::mem::take(&mut self.start);
        joined.extend_from_slice(bytes);
        Some(joined)
    }

    /// Removes bytes from the front of `bytes`, which must not be empty. None: the reader has kept all of them.
    /// `interest` is asked once for each request. `expects_command`: the client's next message is a command. Otherwise, it
    /// is a part of a file, for example, and at most this message is removed, since a command may follow.
    pub fn next<'a>(
        &mut self,
        bytes: &mut &'a [u8],
        expects_command: bool,
        interest: impl Fn(RequestStart) -> Interest,
    ) -> Option<Found<'a>> {
        let input = *bytes;
        let mut passed = 0;
        loop {
            if let Some(partial) = &mut self.partial {
                let (taken, is_complete) = partial.take(&input[passed..]);
                passed += taken;
                *bytes = &input[passed..];
                if !is_complete {
                    return (partial.interest != Interest::Hold).then_some(Found::Bytes(input));
                }
                if partial.is_dropped {
                    let (command, response_sequence) = (partial.command, partial.sequence.wrapping_add(1));
                    self.partial = None;
                    return Some(Found::TooLong { command, response_sequence });
                }
                let request = Request::Collected(std::mem::take(&mut partial.packets));
                let interest = partial.interest;
                self.partial = None;
                match interest {
                    Interest::Observe => return Some(Found::Observed(&input[..passed], request)),
                    Interest::Hold => return Some(Found::Held(request)),
                    // What the message changes decides how the following one is treated.
                    Interest::None | Interest::Refuse => return Some(Found::Bytes(&input[..passed])),
                }
            }
            let rest = &input[passed..];
            *bytes = rest;
            let header = Header::parse(rest);
            if let Some(Header { length: 0, .. }) = header {
                passed += HEADER;
                if !expects_command {
                    *bytes = &input[passed..];
                    return Some(Found::Bytes(&input[..passed]));
                }
                continue;
            }
            let (Some(Header { length, sequence }), Some(&command)) = (header, rest.get(HEADER)) else {
                self.start.extend_from_slice(rest);
                *bytes = &[];
                return (passed > 0).then_some(Found::Bytes(&input[..passed]));
            };
            let content = &rest[HEADER + 1..rest.len().min(HEADER + length)];
            let start = RequestStart { command, length, content, is_first: passed == 0 };
            let interest = if expects_command { interest(start) } else { Interest::None };
            if passed > 0 && matches!(interest, Interest::Hold | Interest::Refuse) {
                return Some(Found::Bytes(&input[..passed])); // the next call finds the request at the front
            }
            if interest == Interest::Refuse {
                return Some(Found::Refused);
            }
            let end = HEADER + length;
            if length == MAX_PAYLOAD || end > rest.len() {
                self.partial = Some(Box::new(PartialRequest {
                    command,
                    interest,
                    packets: SecretBytes::default(),
                    is_dropped: false,
                    sequence,
                    bytes_left: end,
                    is_full: length == MAX_PAYLOAD,
                    header: HeaderReader::new(),
                }));
                continue;
            }
            *bytes = &rest[end..];
            let request = Request::Received(&rest[..end]);
            match interest {
                Interest::Observe if end <= MAX_OBSERVED_BYTES => {
                    return Some(Found::Observed(&input[..passed + end], request));
                }
                Interest::Hold => return Some(Found::Held(request)),
                _ if !expects_command => return Some(Found::Bytes(&input[..passed + end])),
                _ => passed += end,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::splitting::split;
    use proptest::prelude::*;

    const OBSERVED: u8 = 1;
    const HELD: u8 = 2;

    fn interest(start: RequestStart<'_>) -> Interest {
        match start.command {
            OBSERVED => Interest::Observe,
            HELD => Interest::Hold,
            3 => Interest::Refuse,
            _ => Interest::None,
        }
    }

    fn packets(payload: &[u8]) -> Vec<u8> {
        crate::packet::packets(payload, 0)
    }

    /// What comes out of the reader: the bytes that pass, and the requests that are shown, with the number of bytes
    /// that have passed by then.
    #[derive(Debug, Default, PartialEq)]
    struct Seen {
        passed: Vec<u8>,
        observed: Vec<(Vec<u8>, usize)>,
        held: Vec<(Vec<u8>, usize)>,
    }

    fn read<'a>(reader: &mut RequestReader, pieces: impl IntoIterator<Item = &'a [u8]>) -> Seen {
        let mut seen = Seen::default();
        for piece in pieces {
            let joined = reader.join(piece);
            let mut rest = joined.as_deref().unwrap_or(piece);
            while !rest.is_empty() {
                match reader.next(&mut rest, true, interest) {
                    None => assert!(rest.is_empty()),
                    Some(Found::Bytes(bytes)) => seen.passed.extend(bytes),
                    Some(Found::Observed(bytes, request)) => {
                        seen.passed.extend(bytes);
                        assert!(request.len() > bytes.len() || bytes.ends_with(&request));
                        seen.observed.push((request.payload().into_owned(), seen.passed.len()));
                    }
                    Some(Found::Held(request)) => {
                        let packets = request.payload().len() / MAX_PAYLOAD + 1;
                        assert_eq!(usize::from(request.response_sequence()), packets);
                        seen.held.push((request.payload().into_owned(), seen.passed.len()));
                        seen.passed.extend(&*request);
                    }
                    Some(found @ (Found::TooLong { .. } | Found::Refused)) => panic!("{found:?}"),
                }
            }
        }
        seen
    }

    fn expected(payloads: &[Vec<u8>]) -> Seen {
        let mut seen = Seen::default();
        for payload in payloads {
            let before = seen.passed.len();
            seen.passed.extend(packets(payload));
            match payload.first() {
                Some(&OBSERVED) if seen.passed.len() - before <= MAX_OBSERVED_BYTES => {
                    seen.observed.push((payload.clone(), seen.passed.len()));
                }
                Some(&HELD) => seen.held.push((payload.clone(), before)),
                _ => {}
            }
        }
        seen
    }

    #[test]
    fn request_of_several_packets_is_found_however_it_is_split() {
        for command in [0, OBSERVED, HELD] {
            for length in [MAX_OBSERVED_BYTES - HEADER, MAX_OBSERVED_BYTES, MAX_PAYLOAD, MAX_PAYLOAD + 9] {
                let payloads = [vec![0; 3], vec![command; length], vec![HELD, 7]];
                let bytes = payloads.each_ref().map(|payload| packets(payload)).concat();
                for cut in [1, 8, HEADER + MAX_PAYLOAD + 9, bytes.len() - 5] {
                    let (one, other) = bytes.split_at(cut.min(bytes.len()));
                    assert!(read(&mut RequestReader::default(), [one, other]) == expected(&payloads), "{length} {cut}");
                }
            }
        }
    }

    #[test]
    fn command_behind_data_is_found_only_when_a_command_is_expected() {
        for data in [&packets(b"file")[..], &packets(b"")] {
            let bytes = [data, &packets(b"\x02held")].concat();
            let mut reader = RequestReader::default();
            let mut rest = &bytes[..];
            assert_eq!(reader.next(&mut rest, false, interest), Some(Found::Bytes(data)));
            assert!(matches!(reader.next(&mut rest, true, interest), Some(Found::Held(_))));
            // The data arrives in two parts.
            let (one, other) = bytes.split_at(data.len() - 1);
            let mut reader = RequestReader::default();
            let mut rest = one;
            let first = reader.next(&mut rest, false, interest);
            assert!(matches!(first, None | Some(Found::Bytes(_))) && rest.is_empty());
            let joined = reader.join(other);
            let mut rest = joined.as_deref().unwrap_or(other);
            assert!(matches!(reader.next(&mut rest, false, interest), Some(Found::Bytes(_))));
            assert!(matches!(reader.next(&mut rest, true, interest), Some(Found::Held(_))));
        }
    }

    #[test]
    fn refused_request_is_reported_after_what_precedes_it() {
        let bytes = [packets(b"\0"), packets(b"\x03x")].concat();
        let mut reader = RequestReader::default();
        let mut rest = &bytes[..];
        assert_eq!(reader.next(&mut rest, true, interest), Some(Found::Bytes(&bytes[..5])));
        assert_eq!(reader.next(&mut rest, true, interest), Some(Found::Refused));
    }

    #[test]
    fn held_request_that_is_too_long_is_dropped() {
        let long = packets(&vec![HELD; MAX_HELD_BYTES + MAX_PAYLOAD]);
        let bytes = [&long[..], &packets(b"\x02next")].concat();
        let mut reader = RequestReader::default();
        let (mut kept, behind) = bytes.split_at(MAX_HELD_BYTES);
        assert_eq!(reader.next(&mut kept, true, interest), None);
        assert!(!reader.has_dropped());
        let (mut dropped, mut rest) = behind.split_at(1);
        assert_eq!(reader.next(&mut dropped, true, interest), None);
        assert!(reader.has_dropped());
        let found = reader.next(&mut rest, true, interest);
        assert_eq!(found, Some(Found::TooLong { command: HELD, response_sequence: 6 }));
        assert!(!reader.has_dropped());
        assert!(matches!(reader.next(&mut rest, true, interest), Some(Found::Held(_))));
        assert_eq!(rest, b"");
    }

    #[test]
    fn held_request_can_be_dropped() {
        let bytes = [packets(&[HELD; 20]), packets(b"\x02next")].concat();
        let mut reader = RequestReader::default();
        let (mut kept, mut rest) = bytes.split_at(10);
        assert_eq!(reader.next(&mut kept, true, interest), None);
        assert_eq!(reader.held_bytes(), 10);
        reader.drop_held();
        assert_eq!((reader.held_bytes(), reader.has_dropped()), (0, true));
        let found = reader.next(&mut rest, true, interest);
        assert_eq!(found, Some(Found::TooLong { command: HELD, response_sequence: 1 }));
        assert!(matches!(reader.next(&mut rest, true, interest), Some(Found::Held(_))));
    }

    #[test]
    fn stopped_reader_returns_what_it_has_kept() {
        for (command, length, kept) in [(HELD, 3, 3), (HELD, 7, 7), (0, 3, 3), (0, 7, 0), (OBSERVED, 7, 0)] {
            let bytes = packets(&[command; 9]);
            let mut reader = RequestReader::default();
            read(&mut reader, [&bytes[..length]]);
            assert_eq!(reader.stop(), &bytes[..kept]);
            assert_eq!(reader.stop(), b"");
        }
    }

    proptest! {
        #[test]
        fn what_is_found_does_not_depend_on_how_bytes_are_split(
            payloads in prop::collection::vec(
                prop::collection::vec(0..3_u8, 0..40),
                0..20
            ),
            lengths in prop::collection::vec(1..50_usize, 1..200),
        ) {
            let bytes = payloads.iter().flat_map(|payload| packets(payload)).collect::<Vec<_>>();
            let mut reader = RequestReader::default();
            prop_assert_eq!(read(&mut reader, split(&bytes, &lengths)), expected(&payloads));
            prop_assert_eq!(reader.stop(), b"");
        }
    }
}
