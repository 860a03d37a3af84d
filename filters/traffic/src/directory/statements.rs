//! Reads traffic files together with their results files.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::file::FileReader;
use super::results::ResultsFile;
use super::{files, read_meta};
use crate::TrafficError;
use crate::names::{FileName, Kind};
use crate::record::{Decoder, Record};
use crate::result::{Line, ResultLine};

/// A record, its result, and where the record is.
#[derive(Debug, Clone)]
pub struct Statement {
    pub record: Record,
    /// None: the file has no results file, or the writer ended before it wrote this result.
    pub result: Option<ResultLine>,
    pub position: Position,
}

/// Where a record begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    pub file: Arc<Path>,
    /// In the decompressed content of the file.
    pub offset: u64,
}

/// The statements of one innermost directory, in the order of its files. Ends after the first error.
pub struct Reader {
    pairs: VecDeque<Pair>,
    traffic: Option<TrafficFile>,
    results: Option<ResultsFile>,
    dropped: u64,
    has_failed: bool,
}

/// A traffic file, and its results file.
struct Pair {
    traffic: (PathBuf, FileName),
    results: Option<(PathBuf, FileName)>,
}

impl Reader {
    /// Fails if the directory's `meta` says that it cannot be read.
    pub fn open(directory: &Path) -> Result<Self, TrafficError> {
        read_meta(directory)?;
        let pairs = pairs(files(directory, Kind::Traffic)?, files(directory, Kind::Results)?);
        Ok(Self { pairs, traffic: None, results: None, dropped: 0, has_failed: false })
    }

    /// Commands that are missing among those that have been read, by the files' own account.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    fn next_statement(&mut self) -> Result<Option<Statement>, TrafficError> {
        loop {
            if let Some(traffic) = &mut self.traffic {
                if let Some((record, position)) = traffic.next_record()? {
                    let result = self.next_result(&record)?;
                    return Ok(Some(Statement { record, result, position }));
                }
                self.finish_results()?;
                self.traffic = None;
            }
            let Some(pair) = self.pairs.pop_front() else {
                return Ok(None);
            };
            let (path, name) = pair.traffic;
            self.traffic = Some(TrafficFile::open(path, &name)?);
            self.results = pair.results.map(|(path, name)| ResultsFile::open(path, &name)).transpose()?;
        }
    }

    fn next_result(&mut self, record: &Record) -> Result<Option<ResultLine>, TrafficError> {
        let Some(results) = &mut self.results else {
            return Ok(None);
        };
        let key = (record.connection, record.time_ns);
        loop {
            match results.next_line()? {
                Some(Line::Dropped { count, .. }) => self.dropped += count,
                Some(Line::Result(result)) if (result.connection, result.time_ns) == key => return Ok(Some(result)),
                Some(Line::Result(result)) => {
                    let found = (result.connection, result.time_ns);
                    let reason = format!(
                        "the line before is of connection {} at {} ns, the record of connection {} at {} ns",
                        found.0, found.1, key.0, key.1
                    );
                    return Err(results.mismatch(reason));
                }
                None if results.is_open() => {
                    self.results = None;
                    return Ok(None);
                }
                None => return Err(results.mismatch("the traffic file has more records than this file lines".into())),
            }
        }
    }

    /// Reads what a results file has behind the results of all records.
    fn finish_results(&mut self) -> Result<(), TrafficError> {
        let Some(mut results) = self.results.take() else {
            return Ok(());
        };
        let is_traffic_open = self.traffic.as_ref().is_some_and(|traffic| traffic.file.is_open());
        loop {
            match results.next_line()? {
                Some(Line::Dropped { count, .. }) => self.dropped += count,
                Some(Line::Result(_)) if is_traffic_open => return Ok(()),
                Some(Line::Result(_)) => {
                    return Err(results.mismatch("this file has more lines than the traffic file records".into()));
                }
                None => return Ok(()),
            }
        }
    }
}

impl Iterator for Reader {
    type Item = Result<Statement, TrafficError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed {
            return None;
        }
        let next = self.next_statement().transpose();
        self.has_failed = matches!(next, Some(Err(_)));
        next
    }
}

struct TrafficFile {
    file: FileReader,
    decoder: Decoder,
    has_ended: bool,
}

impl TrafficFile {
    fn open(path: PathBuf, name: &FileName) -> Result<Self, TrafficError> {
        Ok(Self { file: FileReader::open(path, name)?, decoder: Decoder::default(), has_ended: false })
    }

    fn next_record(&mut self) -> Result<Option<(Record, Position)>, TrafficError> {
        let failed = |file: &FileReader, source| TrafficError::Record {
            file: file.path().to_path_buf(),
            content: file.content(),
            source,
        };
        loop {
            let record = self.decoder.next_record().map_err(|source| failed(&self.file, source))?;
            if let Some(record) = record {
                let position = Position { file: self.file.path().clone(), offset: self.decoder.record_offset() };
                return Ok(Some((record, position)));
            }
            if self.has_ended {
                if !self.file.is_open() {
                    self.decoder.finish().map_err(|source| failed(&self.file, source))?;
                }
                return Ok(None);
            }
            let piece = self.file.read()?;
            self.has_ended = piece.is_empty();
            self.decoder.push(piece);
        }
    }
}

/// Finds each traffic file's results file: the one with the same time. A writer that is killed while it closes a pair
/// leaves one file with the time of its end and one with that of its beginning, so what is left over belongs together.
fn pairs(traffic: Vec<(PathBuf, FileName)>, mut results: Vec<(PathBuf, FileName)>) -> VecDeque<Pair> {
    let mut pairs: VecDeque<Pair> = traffic.into_iter().map(|traffic| Pair { traffic, results: None }).collect();
    for pair in &mut pairs {
        let name = &pair.traffic.1;
        let same = |other: &FileName| (other.is_open, &other.stamp) == (name.is_open, &name.stamp);
        if let Some(index) = results.iter().position(|(_, other)| same(other)) {
            pair.results = Some(results.remove(index));
        }
    }
    let mut unpaired: Vec<&mut Pair> = pairs.iter_mut().filter(|pair| pair.results.is_none()).collect();
    if let ([pair], [(_, name)]) = (unpaired.as_mut_slice(), results.as_slice())
        && pair.traffic.1.is_open != name.is_open
    {
        pair.results = results.pop();
    }
    pairs
}
