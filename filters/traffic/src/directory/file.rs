//! Reads one file in pieces.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, Take};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;

use crate::gzip::{PIECE, check_members, read_some};
use crate::names::FileName;
use crate::{Content, TrafficError};

enum Source {
    Plain(File),
    /// No complete gzip member.
    Empty,
    Gzip(Box<MultiGzDecoder<BufReader<Take<File>>>>),
}

pub(super) struct FileReader {
    path: Arc<Path>,
    is_open: bool,
    source: Source,
    piece: Vec<u8>,
}

impl FileReader {
    /// Checks all gzip members, so that nothing is used of a damaged file.
    pub(super) fn open(path: PathBuf, name: &FileName) -> Result<Self, TrafficError> {
        let failed = |source| TrafficError::Io { file: path.clone(), source };
        let mut file = File::open(&path).map_err(failed)?;
        let source = if name.is_gzip {
            let length = checked_length(&path, &file, name.is_open)?;
            file.rewind().map_err(failed)?;
            let members = BufReader::with_capacity(PIECE, file.take(length));
            if length == 0 { Source::Empty } else { Source::Gzip(Box::new(MultiGzDecoder::new(members))) }
        } else {
            Source::Plain(file)
        };
        Ok(Self { path: path.into(), is_open: name.is_open, source, piece: vec![0; PIECE] })
    }

    pub(super) fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// Whether the file was not closed, so that it may end anywhere.
    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    /// What the offsets count that a caller knows.
    pub(super) fn content(&self) -> Content {
        match &self.source {
            Source::Plain(_) => Content::Stored,
            Source::Empty | Source::Gzip(_) => Content::Decompressed,
        }
    }

    /// The next bytes; empty at the end.
    pub(super) fn read(&mut self) -> Result<&[u8], TrafficError> {
        let read = match &mut self.source {
            Source::Plain(file) => read_some(file, &mut self.piece),
            Source::Empty => Ok(0),
            Source::Gzip(reader) => read_some(reader.as_mut(), &mut self.piece),
        };
        let length = read.map_err(|source| TrafficError::Io { file: self.path.to_path_buf(), source })?;
        Ok(&self.piece[..length])
    }
}

/// The length of all complete members. What follows them is an error, unless it is the beginning of a member in a file
/// that was not closed.
fn checked_length(path: &Path, file: &File, is_open: bool) -> Result<u64, TrafficError> {
    let (length, error) = check_members(BufReader::with_capacity(PIECE, file));
    let Some((offset, error)) = error else {
        return Ok(length);
    };
    let file = path.to_path_buf();
    match error.kind() {
        io::ErrorKind::UnexpectedEof if is_open => Ok(length),
        io::ErrorKind::UnexpectedEof => {
            Err(TrafficError::Gzip { file, offset, reason: "the file ends within a gzip member".into() })
        }
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
            Err(TrafficError::Gzip { file, offset, reason: format!("damaged gzip data: {error}") })
        }
        _ => Err(TrafficError::Io { file, source: error }),
    }
}
