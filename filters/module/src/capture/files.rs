//! The files of one capture by this Envoy process: pairs of a traffic file and a results file.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use traffic_files::gzip::gzip_member;
use traffic_files::meta::Meta;
use traffic_files::names::{Kind, META, file_name};

use super::encoder::Batch;

/// The files have texts of statements with literals, so only their owner can read them.
const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;

/// The size of a traffic file, before compression, after which the next pair begins.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Writes batches. After an error, the same batch can be written again: no part of it is left in the files.
pub(super) struct CaptureFiles {
    directory: PathBuf,
    started_at: SystemTime,
    pair: Option<OpenPair>,
    /// The time in the last names: no name is used twice.
    named_at: SystemTime,
    /// Of all closed and open files.
    bytes: u64,
    records: u64,
    filtered: u64,
    /// Lent to [`gzip_member`].
    member: Vec<u8>,
}

struct OpenPair {
    traffic: OpenFile,
    results: OpenFile,
    /// Before compression.
    traffic_bytes: u64,
}

struct OpenFile {
    file: File,
    path: PathBuf,
    kind: Kind,
    /// The length up to the end of the last whole batch.
    length: u64,
}

impl CaptureFiles {
    /// `directory`: that of this process. It is created with the first batch.
    pub(super) fn new(directory: PathBuf, started_at: SystemTime) -> Self {
        Self {
            directory,
            started_at,
            pair: None,
            named_at: SystemTime::UNIX_EPOCH,
            bytes: 0,
            records: 0,
            filtered: 0,
            member: Vec::new(),
        }
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The size of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// `filtered`: statements that were left out so far.
    ///
    /// # Errors
    /// Nothing of the batch is in the files.
    pub(super) fn append(&mut self, batch: &Batch, filtered: u64, now: SystemTime) -> io::Result<()> {
        self.filtered = filtered;
        if self.pair.as_ref().is_some_and(|pair| pair.traffic_bytes >= MAX_FILE_BYTES) {
            self.close_pair(now)?;
        }
        if self.pair.is_none() {
            self.open_pair(now)?;
        }
        let Some(pair) = &mut self.pair else { return Ok(()) };
        let written = pair.traffic.append(&batch.traffic, &mut self.member).and_then(|traffic| {
            let results = pair.results.append(&batch.results, &mut self.member)?;
            Ok((traffic, results))
        });
        match written {
            Ok((traffic, results)) => {
                pair.traffic.length += traffic;
                pair.results.length += results;
                pair.traffic_bytes += batch.traffic.len() as u64;
                self.bytes += traffic + results;
                self.records += batch.records;
                Ok(())
            }
            Err(error) => {
                // If this fails, too, readers stop at what is left of the batch, as after a crash.
                pair.traffic.cut();
                pair.results.cut();
                Err(error)
            }
        }
    }

    /// Gives the files the names that they keep.
    ///
    /// # Errors
    /// Readers find all files nevertheless.
    pub(super) fn finish(&mut self, now: SystemTime) -> io::Result<()> {
        self.close_pair(now)
    }

    fn open_pair(&mut self, now: SystemTime) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(&self.directory)?;
        let time = self.next_name_time(now);
        let open = |kind| OpenFile::new(&self.directory, kind, time);
        let pair = OpenPair { traffic: open(Kind::Traffic)?, results: open(Kind::Results)?, traffic_bytes: 0 };
        self.pair = Some(pair);
        self.write_meta(now)
    }

    fn close_pair(&mut self, now: SystemTime) -> io::Result<()> {
        let time = self.next_name_time(now);
        if let Some(pair) = self.pair.take() {
            for file in [&pair.results, &pair.traffic] {
                fs::rename(&file.path, self.directory.join(file_name(file.kind, time, false)))?;
            }
            self.write_meta(now)?;
        }
        Ok(())
    }

    /// Times in names have whole milliseconds.
    fn next_name_time(&mut self, now: SystemTime) -> SystemTime {
        self.named_at = now.max(self.named_at + Duration::from_millis(1));
        self.named_at
    }

    fn write_meta(&self, now: SystemTime) -> io::Result<()> {
        let duration = now.duration_since(self.started_at).unwrap_or_default();
        let meta = Meta { duration, commands: self.records, filtered: self.filtered };
        let (path, temporary) = (self.directory.join(META), self.directory.join("meta.new"));
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(FILE_MODE).open(&temporary)?;
        file.write_all(meta.to_json().as_bytes())?;
        fs::rename(temporary, path)
    }
}

impl OpenFile {
    fn new(directory: &Path, kind: Kind, time: SystemTime) -> io::Result<Self> {
        let path = directory.join(file_name(kind, time, true));
        let file = OpenOptions::new().append(true).create(true).mode(FILE_MODE).open(&path)?;
        let length = file.metadata()?.len();
        Ok(Self { file, path, kind, length })
    }

    /// Appends a compressed piece. Returns its size.
    fn append(&mut self, content: &[u8], member: &mut Vec<u8>) -> io::Result<u64> {
        if content.is_empty() {
            return Ok(0);
        }
        member.clear();
        gzip_member(content, member);
        self.file.write_all(member)?;
        Ok(member.len() as u64)
    }

    /// Removes what was written of an incomplete batch.
    fn cut(&self) {
        let _ = self.file.set_len(self.length);
    }
}
