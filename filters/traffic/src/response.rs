//! What the response to a command contained. Captures and replays count it in the same way, so that their result lines can
//! be compared.

use mysql_proto::rows::{RowPiece, RowReader};
use mysql_proto::tracker::ResultSize;

use crate::checksum::RowsChecksum;

/// The sizes and the rows of all results of one command. The methods take what
/// [`mysql_proto::tracker::CommandObserver`] reports.
#[derive(Default)]
pub struct ResponseContent {
    reader: RowReader,
    checksum: RowsChecksum,
    has_result_set: bool,
    size: ResultSize,
}

impl ResponseContent {
    /// Bytes of rows, with packet headers.
    pub fn on_row_bytes(&mut self, mut bytes: &[u8]) {
        self.has_result_set = true;
        while let Some(piece) = self.reader.next(&mut bytes) {
            match piece {
                RowPiece::Whole(row) => self.checksum.add_row(row),
                RowPiece::Part(part) => self.checksum.extend(part),
                RowPiece::End => self.checksum.end(),
            }
        }
    }

    pub fn on_result_ended(&mut self, size: ResultSize) {
        self.size.rows += size.rows;
        self.size.bytes += size.bytes;
    }

    /// The sum over all results.
    pub fn size(&self) -> ResultSize {
        self.size
    }

    /// The checksum of the rows of all result sets. None: there was no result set, or an error ended the response.
    pub fn checksum(&self, error: u16) -> Option<u64> {
        (self.has_result_set && error == 0).then(|| self.checksum.value())
    }
}
