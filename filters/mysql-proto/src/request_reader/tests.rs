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
