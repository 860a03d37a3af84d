//! The files of one capture by this Envoy process: pairs of a traffic file and a results file.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use traffic_files::gzip::gzip_member;
use traffic_files::meta::Meta;
use traffic_files::names::{Kind, META, file_name, local_milliseconds};

use super::encoder::Batch;

/// The files have texts of statements with literals, so only their owner can read them.
const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;

/// The size of a traffic file, before compression, after which the next pair begins.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Writes batches. After an error, the same batch can be written again: no part of it stays in the files.
pub(super) struct CaptureFiles {
    directory: PathBuf,
    started_at: SystemTime,
    pair: Option<OpenPair>,
    /// The time in the names that were used last. The next one is later, so that no name is used twice.
    named_at: SystemTime,
    /// Of all closed and open files.
    bytes: u64,
    records: u64,
    filtered: u64,
    /// A buffer for the next gzip member, kept to save allocations.
    member: Vec<u8>,
}

struct OpenPair {
    traffic: OpenFile,
    results: OpenFile,
    /// Before compression.
    traffic_bytes: u64,
    /// An incomplete batch is at the end of a file. Readers accept that only if the name ends in `.open`.
    is_torn: bool,
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
        if self.pair.as_ref().is_some_and(|pair| pair.traffic_bytes >= MAX_FILE_BYTES || pair.is_torn) {
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
                // If this fails, too, the next pair begins, and readers stop at the incomplete batch.
                pair.is_torn = pair.traffic.truncate().and(pair.results.truncate()).is_err();
                Err(error)
            }
        }
    }

    /// Renames the open files to their final names. `filtered`: statements that were left out in all.
    ///
    /// # Errors
    /// Readers find all files nevertheless.
    pub(super) fn finish(&mut self, filtered: u64, now: SystemTime) -> io::Result<()> {
        self.filtered = filtered;
        self.close_pair(now)
    }

    fn open_pair(&mut self, now: SystemTime) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(&self.directory)?;
        let time = self.next_name_time(now);
        let traffic = OpenFile::new(&self.directory, Kind::Traffic, time)?;
        let results = OpenFile::new(&self.directory, Kind::Results, time)
            .inspect_err(|_| drop(fs::remove_file(&traffic.path)))?;
        self.pair = Some(OpenPair { traffic, results, traffic_bytes: 0, is_torn: false });
        self.write_meta(now)
    }

    fn close_pair(&mut self, now: SystemTime) -> io::Result<()> {
        let time = self.next_name_time(now);
        let Some(pair) = self.pair.take() else { return Ok(()) };
        if !pair.is_torn {
            for file in [&pair.results, &pair.traffic] {
                fs::rename(&file.path, self.directory.join(file_name(file.kind, time, false)))?;
            }
        }
        self.write_meta(now)
    }

    fn next_name_time(&mut self, now: SystemTime) -> SystemTime {
        self.named_at = later_name_time(self.named_at, now, local_milliseconds);
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

/// The time for the name of the next file: later than `last`, the time in the previous name. Readers sort files by
/// name, and names show local time in milliseconds, so it is also later in local time when daylight saving time ends.
fn later_name_time(last: SystemTime, now: SystemTime, local: impl Fn(SystemTime) -> i64) -> SystemTime {
    let time = now.max(last + Duration::from_millis(1));
    let missing = local(last).saturating_add(1).saturating_sub(local(time));
    time + Duration::from_millis(u64::try_from(missing).unwrap_or_default())
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
    fn truncate(&self) -> io::Result<()> {
        self.file.set_len(self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_in_names_grow_when_local_clocks_are_set_back() {
        let at = |seconds: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let milliseconds = |time: SystemTime| {
            i64::try_from(time.duration_since(SystemTime::UNIX_EPOCH).expect("later").as_millis()).expect("small")
        };
        // The local clock is two hours ahead, and one hour from 10,000 s on.
        let local = |time: SystemTime| milliseconds(time) + if time < at(10_000) { 2 * 3_600_000 } else { 3_600_000 };
        let mut last = at(0);
        for now in [9_000, 9_999, 9_999, 10_001, 10_002, 13_000, 14_000] {
            let next = later_name_time(last, at(now), local);
            assert!(next > last && local(next) > local(last), "{now}");
            assert!(local(next) <= local(last) + 1 || next == at(now), "{now}");
            last = next;
        }
        assert_eq!(last, at(14_000));
    }
}
