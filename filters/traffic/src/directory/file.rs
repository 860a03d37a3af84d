//! Reads one file in pieces.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::gzip::GzipReader;
use crate::names::FileName;
use crate::{Content, TrafficError};

const PIECE: usize = 128 << 10;

enum Source {
    Plain(File),
    Gzip(Box<GzipReader<BufReader<File>>>),
    Ended,
}

pub(super) struct FileReader {
    path: Arc<Path>,
    is_open: bool,
    is_gzip: bool,
    source: Source,
    piece: Vec<u8>,
}

impl FileReader {
    pub(super) fn open(path: PathBuf, name: &FileName) -> Result<Self, TrafficError> {
        let failed = |source| TrafficError::Io { file: path.clone(), source };
        let file = File::open(&path).map_err(failed)?;
        let is_empty = file.metadata().map_err(failed)?.len() == 0;
        let source = match name.is_gzip {
            _ if is_empty => Source::Ended,
            true => Source::Gzip(Box::new(GzipReader::new(BufReader::with_capacity(PIECE, file)))),
            false => Source::Plain(file),
        };
        let piece = vec![0; PIECE];
        Ok(Self { path: path.into(), is_open: name.is_open, is_gzip: name.is_gzip, source, piece })
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
        if self.is_gzip { Content::Decompressed } else { Content::Stored }
    }

    /// The next bytes; empty at the end, which in an open file may be within a gzip member.
    pub(super) fn read(&mut self) -> Result<&[u8], TrafficError> {
        let length = match &mut self.source {
            Source::Plain(file) => read_some(file, &mut self.piece)
                .map_err(|source| TrafficError::Io { file: self.path.to_path_buf(), source })?,
            Source::Gzip(reader) => match read_some(reader.as_mut(), &mut self.piece) {
                Ok(length) => length,
                Err(error) if self.is_open && error.kind() == io::ErrorKind::UnexpectedEof => 0,
                Err(error) => return Err(gzip_error(&self.path, reader.offset(), error)),
            },
            Source::Ended => 0,
        };
        if length == 0 {
            self.source = Source::Ended;
        }
        Ok(&self.piece[..length])
    }
}

fn read_some(source: &mut impl Read, piece: &mut [u8]) -> io::Result<usize> {
    loop {
        match source.read(piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

fn gzip_error(path: &Path, offset: u64, error: io::Error) -> TrafficError {
    let file = path.to_path_buf();
    match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            TrafficError::Gzip { file, offset, reason: "the file ends within a gzip member".into() }
        }
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
            TrafficError::Gzip { file, offset, reason: format!("damaged gzip data: {error}") }
        }
        _ => TrafficError::Io { file, source: error },
    }
}
