//! Gzip (RFC 1952): files consist of members, each complete in itself, so that a file that ends abruptly loses one.

use std::io::{self, BufRead, Read, Write};

use flate2::Compression;
use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;

/// Appends `bytes` as one complete member. Fast rather than small.
pub fn gzip_member(bytes: &[u8], out: &mut Vec<u8>) {
    let mut encoder = GzEncoder::new(out, Compression::fast());
    // Writing to a Vec does not fail.
    let written = encoder.write_all(bytes).and_then(|()| encoder.finish().map(drop));
    debug_assert!(written.is_ok(), "{written:?}");
}

/// Decompresses members, and knows where it is in the compressed file.
pub(crate) struct GzipReader<R>(MultiGzDecoder<CountingReader<R>>);

impl<R: BufRead> GzipReader<R> {
    pub(crate) fn new(source: R) -> Self {
        Self(MultiGzDecoder::new(CountingReader { source, count: 0 }))
    }

    /// Bytes of the compressed file that have been used.
    pub(crate) fn offset(&self) -> u64 {
        self.0.get_ref().count
    }
}

impl<R: BufRead> Read for GzipReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
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
    use proptest::prelude::{any, prop, prop_assert_eq, proptest};

    use super::*;

    fn decompressed(file: &[u8]) -> (Vec<u8>, io::Result<u64>) {
        let mut reader = GzipReader::new(file);
        let mut out = Vec::new();
        let result = reader.read_to_end(&mut out).map(|_| reader.offset());
        (out, result)
    }

    proptest! {
        #[test]
        fn members_are_read_as_one_file(members in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..500), 1..5)) {
            let mut file = Vec::new();
            members.iter().for_each(|member| gzip_member(member, &mut file));
            let (bytes, result) = decompressed(&file);
            prop_assert_eq!(bytes, members.concat());
            prop_assert_eq!(result.expect("complete file"), file.len() as u64);
        }

        #[test]
        fn a_torn_file_has_its_complete_members(end: prop::sample::Index, first in "[a-z]{1,100}", second in "[a-z]{1,100}") {
            let mut file = Vec::new();
            gzip_member(first.as_bytes(), &mut file);
            let start = file.len();
            gzip_member(second.as_bytes(), &mut file);
            let end = start + 1 + end.index(file.len() - start - 1);
            let (bytes, result) = decompressed(&file[..end]);
            assert!(bytes.starts_with(first.as_bytes()));
            prop_assert_eq!(result.expect_err("torn").kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
