//! Errors of readers: each names the file, and where in it something is wrong.

use std::io;
use std::path::PathBuf;

use crate::meta::MetaError;
use crate::record::RecordError;
use crate::result::LineError;

/// Which bytes of a file an offset counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Bytes of the file.
    Stored,
    /// Bytes that gzip gives.
    Decompressed,
}

impl std::fmt::Display for Content {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Stored => "byte",
            Self::Decompressed => "decompressed byte",
        })
    }
}

/// Why files cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TrafficError {
    #[error("{}: {source}", file.display())]
    Io { file: PathBuf, source: io::Error },
    #[error("{}: no traffic or results file, and no directory with one", path.display())]
    NothingFound { path: PathBuf },
    #[error("{}: {source}", file.display())]
    Meta { file: PathBuf, source: MetaError },
    /// The file ends within a gzip member, or is damaged.
    #[error("{}, byte {offset}: {reason}", file.display())]
    Gzip { file: PathBuf, offset: u64, reason: String },
    #[error("{}, {content} {}: {source}", file.display(), source.offset)]
    Record { file: PathBuf, content: Content, source: RecordError },
    #[error("{}, {content} {offset}: {source}", file.display())]
    Line { file: PathBuf, content: Content, offset: u64, source: LineError },
    #[error("{}, {content} {offset}: the line does not end, or has more than 1 MiB", file.display())]
    UnendedLine { file: PathBuf, content: Content, offset: u64 },
    /// The texts of statements that a replay has written.
    #[error("{}: {reason}", file.display())]
    Texts { file: PathBuf, reason: String },
    /// The lines of a results file are not those of the traffic file's records.
    #[error("{}, {content} {offset}: {reason}", file.display())]
    Mismatch { file: PathBuf, content: Content, offset: u64, reason: String },
}
