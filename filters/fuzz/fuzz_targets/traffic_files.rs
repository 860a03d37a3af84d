//! Traffic files: the bytes of a traffic file without compression, or of a line of a results file.

#![no_main]

use libfuzzer_sys::fuzz_target;
use traffic_files::names;
use traffic_files::record::{Decoder, Record, RecordError, encode};
use traffic_files::result::{self, Line};

/// All records, from pieces of a size, and how it ends.
fn decoded(bytes: &[u8], size: usize) -> (Vec<Record>, Result<(), RecordError>) {
    let mut decoder = Decoder::default();
    let mut records = Vec::new();
    for piece in bytes.chunks(size) {
        decoder.push(piece);
        loop {
            match decoder.next_record() {
                Ok(Some(record)) => records.push(record),
                Ok(None) => break,
                Err(error) => return (records, Err(error)),
            }
        }
    }
    (records, decoder.finish())
}

fuzz_target!(|bytes: &[u8]| {
    let (records, end) = decoded(bytes, bytes.len().max(1));
    assert_eq!(decoded(bytes, 1), (records.clone(), end.clone()));
    if let Err(error) = end {
        assert!(error.offset <= bytes.len() as u64, "{error:?}");
    }
    let mut written = Vec::new();
    records.iter().for_each(|record| encode(record.as_ref(), &mut written));
    assert_eq!(decoded(&written, written.len().max(1)), (records, Ok(())));

    match result::parse(bytes) {
        Ok(Line::Result(read)) => {
            let mut line = Vec::new();
            result::encode(read.as_ref(), &mut line);
            assert_eq!(result::parse(&line), Ok(Line::Result(read)));
        }
        Ok(Line::Dropped { count, time_ns }) => {
            let mut line = Vec::new();
            result::encode_dropped(count, time_ns, &mut line);
            assert_eq!(result::parse(&line), Ok(Line::Dropped { count, time_ns }));
        }
        Err(_) => {}
    }
    if let Some(name) = str::from_utf8(bytes).ok().and_then(names::parse) {
        let begins = [&b"traffic-"[..], b"traffic.log", b"results-"].iter().any(|prefix| bytes.starts_with(prefix));
        assert!(begins, "{name:?}");
    }
});
