//! Reads results files alone.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use super::file::FileReader;
use super::files;
use crate::TrafficError;
use crate::names::{FileName, Kind};
use crate::result::{self, Line, ResultLine};

/// A longer line is not a result: names have at most 64 characters.
const MAX_LINE: usize = 1 << 20;

/// Iterates over the results in the directory of one Envoy process, in the order of its files. It ends after the first
/// error.
pub struct ResultsReader {
    files: VecDeque<(PathBuf, FileName)>,
    current: Option<ResultsFile>,
    dropped: u64,
    has_failed: bool,
}

impl ResultsReader {
    pub fn open(directory: &Path) -> Result<Self, TrafficError> {
        let files = files(directory, Kind::Results)?.into();
        Ok(Self { files, current: None, dropped: 0, has_failed: false })
    }

    /// Commands that are missing among those that have been read, by the files' own account.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    fn next_result(&mut self) -> Result<Option<ResultLine>, TrafficError> {
        loop {
            if let Some(file) = &mut self.current {
                match file.next_line()? {
                    Some(Line::Result(result)) => return Ok(Some(result)),
                    Some(Line::Dropped { count, .. }) => self.dropped += count,
                    None => self.current = None,
                }
                continue;
            }
            let Some((path, name)) = self.files.pop_front() else {
                return Ok(None);
            };
            self.current = Some(ResultsFile::open(path, &name)?);
        }
    }
}

impl Iterator for ResultsReader {
    type Item = Result<ResultLine, TrafficError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed {
            return None;
        }
        let next = self.next_result().transpose();
        self.has_failed = matches!(next, Some(Err(_)));
        next
    }
}

/// The lines of one file.
pub(super) struct ResultsFile {
    file: FileReader,
    buffer: Vec<u8>,
    start: usize,
    base: u64,
    has_ended: bool,
}

impl ResultsFile {
    pub(super) fn open(path: PathBuf, name: &FileName) -> Result<Self, TrafficError> {
        let file = FileReader::open(path, name)?;
        Ok(Self { file, buffer: Vec::new(), start: 0, base: 0, has_ended: false })
    }

    pub(super) fn is_open(&self) -> bool {
        self.file.is_open()
    }

    /// None: the file has ended.
    pub(super) fn next_line(&mut self) -> Result<Option<Line>, TrafficError> {
        loop {
            let rest = &self.buffer[self.start..];
            if let Some(length) = memchr::memchr(b'\n', rest) {
                let parsed = result::parse(&rest[..length]).map_err(|source| TrafficError::Line {
                    file: self.file.path().to_path_buf(),
                    content: self.file.content(),
                    offset: self.offset(),
                    source,
                })?;
                self.start += length + 1;
                return Ok(Some(parsed));
            }
            let is_unended = self.has_ended && !rest.is_empty() && !self.file.is_open();
            if is_unended || rest.len() > MAX_LINE {
                return Err(TrafficError::UnendedLine {
                    file: self.file.path().to_path_buf(),
                    content: self.file.content(),
                    offset: self.offset(),
                });
            }
            if self.has_ended {
                return Ok(None);
            }
            self.buffer.drain(..self.start);
            self.base += self.start as u64;
            self.start = 0;
            let piece = self.file.read()?;
            self.has_ended = piece.is_empty();
            self.buffer.extend_from_slice(piece);
        }
    }

    pub(super) fn mismatch(&self, reason: String) -> TrafficError {
        TrafficError::Mismatch {
            file: self.file.path().to_path_buf(),
            content: self.file.content(),
            offset: self.offset(),
            reason,
        }
    }

    fn offset(&self) -> u64 {
        self.base + self.start as u64
    }
}
