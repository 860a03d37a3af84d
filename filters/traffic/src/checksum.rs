//! A checksum of rows that does not depend on their order: the sum of the XXH3 hashes of the rows' packets.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// The checksum of rows. A row can be added in pieces.
#[derive(Default)]
pub struct RowsChecksum {
    sum: u64,
    /// The row that is being added in pieces. It is kept for the next one, since it is large.
    partial: Option<Box<Xxh3>>,
}

impl RowsChecksum {
    /// Adds a row: the payload of its packet.
    pub fn add_row(&mut self, row: &[u8]) {
        self.sum = self.sum.wrapping_add(xxh3_64(row));
    }

    /// Adds a piece of a row. [`Self::end`] must follow the last one.
    pub fn extend(&mut self, piece: &[u8]) {
        self.partial.get_or_insert_default().update(piece);
    }

    /// Ends the row that was added in pieces. A row without a piece is empty.
    pub fn end(&mut self) {
        let partial = self.partial.get_or_insert_default();
        self.sum = self.sum.wrapping_add(partial.digest());
        partial.reset();
    }

    pub fn value(&self) -> u64 {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, prop_assert_eq, prop_assert_ne, proptest};

    use super::*;

    fn checksum<'a>(rows: impl IntoIterator<Item = &'a [u8]>) -> u64 {
        let mut checksum = RowsChecksum::default();
        rows.into_iter().for_each(|row| checksum.add_row(row));
        checksum.value()
    }

    #[test]
    fn the_hash_is_xxh3_with_seed_zero() {
        // Reference value of XXH3_64bits of nothing.
        assert_eq!(checksum([b"".as_slice()]), 0x2d06_8005_38d3_94c2);
        assert_eq!(checksum([]), 0);
        let mut without_pieces = RowsChecksum::default();
        without_pieces.end();
        assert_eq!(without_pieces.value(), checksum([b"".as_slice()]));
    }

    proptest! {
        #[test]
        fn order_does_not_matter_and_pieces_do_not_either(
            rows in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..600), 0..6),
            size in 1..300_usize,
        ) {
            let forward = checksum(rows.iter().map(Vec::as_slice));
            prop_assert_eq!(checksum(rows.iter().rev().map(Vec::as_slice)), forward);
            let mut pieces = RowsChecksum::default();
            for row in &rows {
                row.chunks(size).for_each(|piece| pieces.extend(piece));
                pieces.end();
            }
            prop_assert_eq!(pieces.value(), forward);
        }

        #[test]
        fn another_row_gives_another_checksum(row in prop::collection::vec(any::<u8>(), 1..50), index: prop::sample::Index) {
            let mut other = row.clone();
            let index = index.index(row.len());
            other[index] ^= 1;
            prop_assert_ne!(checksum([row.as_slice()]), checksum([other.as_slice()]));
        }
    }
}
