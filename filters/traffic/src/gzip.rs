//! Gzip (RFC 1952): files consist of members, each complete in itself, so that a file that ends abruptly loses one.

use std::io::{self, BufRead, Read, Write};

use flate2::Compression;
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;

/// Bytes that are read at once.
pub(crate) const PIECE: usize = 128 << 10;

/// Appends `bytes` as one complete member. Fast rather than small.
pub fn gzip_member(bytes: &[u8], out: &mut Vec<u8>) {
    let mut encoder = GzEncoder::new(out, Compression::fast());
    // Writing to a Vec does not fail.
    let written = encoder.write_all(bytes).and_then(|()| encoder.finish().map(drop));
    debug_assert!(written.is_ok(), "{written:?}");
}

/// Reads all members, and checks them. Returns where the last complete member ends, and why that is not the end: where
/// an error was noticed, and the error.
pub(crate) fn check_members(source: impl BufRead) -> (u64, Option<(u64, io::Error)>) {
    let mut source = CountingReader { source, count: 0 };
    let mut piece = vec![0; PIECE];
    loop {
        let end = source.count;
        match source.fill_buf() {
            Ok([]) => return (end, None),
            Ok(_) => {}
            Err(error) => return (end, Some((end, error))),
        }
        let mut member = GzDecoder::new(&mut source);
        loop {
            match read_some(&mut member, &mut piece) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) => return (end, Some((source.count, error))),
            }
        }
    }
}

/// Reads again when a signal interrupts.
pub(crate) fn read_some(source: &mut impl Read, piece: &mut [u8]) -> io::Result<usize> {
    loop {
        match source.read(piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

struct CountingReader<R> {
    source: R,
    count: u64,
}

impl<R: BufRead> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.source.read(buffer)?;
        self.count += length as u64;
        Ok(length)
    }
}

impl<R: BufRead> BufRead for CountingReader<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.source.fill_buf()
    }

    fn consume(&mut self, amount: usize) {
        self.count += amount as u64;
        self.source.consume(amount);
    }
}

#[cfg(test)]
mod tests {
    use flate2::bufread::MultiGzDecoder;
    use proptest::prelude::{any, prop, prop_assert_eq, proptest};

    use super::*;

    fn decompressed(file: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        MultiGzDecoder::new(file).read_to_end(&mut out).expect("complete members");
        out
    }

    proptest! {
        #[test]
        fn members_are_read_as_one_file(members in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..500), 1..5)) {
            let mut file = Vec::new();
            members.iter().for_each(|member| gzip_member(member, &mut file));
            prop_assert_eq!(decompressed(&file), members.concat());
            let (end, error) = check_members(file.as_slice());
            prop_assert_eq!((end, error.is_none()), (file.len() as u64, true));
        }

        #[test]
        fn a_torn_file_has_its_complete_members(end: prop::sample::Index, first in "[a-z]{1,100}", second in "[a-z]{1,100}") {
            let mut file = Vec::new();
            gzip_member(first.as_bytes(), &mut file);
            let start = file.len();
            gzip_member(second.as_bytes(), &mut file);
            let end = start + 1 + end.index(file.len() - start - 1);
            let (good, error) = check_members(&file[..end]);
            let (offset, error) = error.expect("torn");
            prop_assert_eq!((good, offset, error.kind()), (start as u64, end as u64, io::ErrorKind::UnexpectedEof));
        }
    }
}
