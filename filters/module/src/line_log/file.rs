//! The file of a log. It follows a file that was renamed, and rotates a file that has reached its size limit.
//!
//! Several Envoys of a machine may write to the same file: each write appends whole entries, and a rotation locks the
//! file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::LogTarget;
use super::pending::PendingEntries;

/// The file has names of users or texts of statements, so it is not readable for everybody.
const MODE: u32 = 0o640;

/// Writes to a pipe of at most `PIPE_BUF` bytes are atomic (pipe(7)): entries of other writers do not end up within
/// them.
const MAX_PIPE_WRITE_BYTES: u64 = 4096;

/// The target of the log.
pub(super) struct LogFile {
    path: PathBuf,
    /// The size at which the file is rotated; 0: never.
    max_bytes: u64,
    /// How many rotated files are kept.
    kept_files: u32,
    open: Option<OpenFile>,
}

struct OpenFile {
    file: File,
    /// The device and inode of the file; None: standard output or standard error, which stay the same.
    id: Option<(u64, u64)>,
    /// The size after the last write that ended within an entry.
    length_inside_entry: Option<u64>,
}

impl LogFile {
    pub(super) fn new(target: &LogTarget) -> Self {
        Self { path: target.path.clone(), max_bytes: target.max_bytes, kept_files: target.kept_files, open: None }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends all entries, and adds their number to `count`. After an error, the rest can be written by another call.
    ///
    /// # Errors
    /// The file cannot be opened, written or rotated. If it only cannot be rotated, all entries are written nevertheless.
    pub(super) fn append(&mut self, entries: &mut PendingEntries, mut count: impl FnMut(u64)) -> io::Result<()> {
        let mut rotation = Ok(());
        while !entries.is_empty() {
            let length = self.prepare(entries)?;
            let mut max_bytes = match length {
                Some(length) if self.max_bytes > 0 && rotation.is_ok() => self.max_bytes.saturating_sub(length),
                Some(_) => u64::MAX,
                None => MAX_PIPE_WRITE_BYTES,
            };
            let fits = entries.is_inside_entry() || entries.next(max_bytes).len() as u64 <= max_bytes;
            if !fits && length.is_some_and(|length| length > 0) {
                match self.rotate() {
                    Ok(true) => continue,
                    Ok(false) => max_bytes = u64::MAX, // another Envoy is rotating the file
                    Err(error) => {
                        rotation = Err(error);
                        continue;
                    }
                }
            }
            count(self.write(entries, max_bytes)?);
        }
        rotation
    }

    /// Opens the file, or opens it again if it was renamed or deleted. Returns its size; None: it is no regular file,
    /// or is standard output.
    fn prepare(&mut self, entries: &mut PendingEntries) -> io::Result<Option<u64>> {
        if self.open.as_ref().is_some_and(|open| open.id.is_some() && open.id != id_of(&self.path)) {
            self.open = None;
        }
        let is_new = self.open.is_none();
        let open = match &mut self.open {
            Some(open) => open,
            none => none.insert(OpenFile::new(&self.path)?),
        };
        let metadata = open.file.metadata()?;
        let length = (open.id.is_some() && metadata.is_file()).then_some(metadata.len());
        // If the file is another one, or was truncated, the rest of the entry would make no sense there.
        let is_changed = is_new || length.is_some() && open.length_inside_entry != length;
        if entries.is_inside_entry() && is_changed {
            entries.restart_entry();
        }
        Ok(length)
    }

    /// Writes once. Returns how many entries are now complete.
    fn write(&mut self, entries: &mut PendingEntries, max_bytes: u64) -> io::Result<u64> {
        let Some(open) = &mut self.open else { return Ok(0) };
        loop {
            match open.file.write(entries.next(max_bytes)) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => {
                    let complete = entries.advance(written);
                    if entries.is_inside_entry() {
                        open.length_inside_entry = open.file.metadata().ok().map(|metadata| metadata.len());
                    }
                    return Ok(complete);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Renames the file to `.1`, and each rotated file to the next number. Ok(false): another process is doing it.
    fn rotate(&mut self) -> io::Result<bool> {
        // Dropping the file releases the lock.
        let Some(open) = self.open.take() else { return Ok(false) };
        match flock(&open.file, FlockOperation::NonBlockingLockExclusive).map_err(io::Error::from) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.open = Some(open);
                return Ok(false);
            }
            result => result?,
        }
        if open.id != id_of(&self.path) {
            return Ok(true); // another process has just done it
        }
        let rotated = |number: u32| {
            let mut name = self.path.clone().into_os_string();
            name.push(format!(".{number}"));
            PathBuf::from(name)
        };
        if self.kept_files == 0 {
            return fs::remove_file(&self.path).map(|()| true);
        }
        for number in (1..self.kept_files).rev() {
            match fs::rename(rotated(number), rotated(number + 1)) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&self.path, rotated(1)).map(|()| true)
    }
}

impl OpenFile {
    fn new(path: &Path) -> io::Result<Self> {
        // Opening these two paths fails if they are sockets, as in a service of systemd.
        let standard = match path.to_str() {
            Some("/dev/stdout") => Some(io::stdout().as_fd().try_clone_to_owned()?),
            Some("/dev/stderr") => Some(io::stderr().as_fd().try_clone_to_owned()?),
            _ => None,
        };
        if let Some(standard) = standard {
            return Ok(Self { file: standard.into(), id: None, length_inside_entry: None });
        }
        let file = OpenOptions::new().append(true).create(true).mode(MODE).open(path)?;
        let metadata = file.metadata()?;
        Ok(Self { file, id: Some((metadata.dev(), metadata.ino())), length_inside_entry: None })
    }
}

/// None: there is no such file.
fn id_of(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests;
