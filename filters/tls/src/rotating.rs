//! A value that is built from files, and rebuilt when they change.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest;
use mysql_proto::secret::SecretBytes;

use crate::TlsError;
use crate::pem::File;

/// How long ago a file must have been modified before its stamp is trusted. A file system's clock may tick only every
/// two seconds (FAT), so a file modified more recently may change again with the same stamp.
const SETTLED: Duration = Duration::from_secs(2);

type Build<T> = Box<dyn Fn(&[File<'_>]) -> Result<T, TlsError> + Send + Sync>;

/// A value, and the files that it is built from.
pub(crate) struct Rotating<T> {
    current: RwLock<Arc<T>>,
    seen: Mutex<Seen>,
    paths: Vec<PathBuf>,
    build: Build<T>,
}

/// What was last read from the files.
struct Seen {
    /// None: the next refresh reads the files, whatever their stamps are.
    stamps: Option<Vec<Stamp>>,
    /// The content that `current` was built from.
    good: Content,
    /// Content that could not be used, and whose error was returned.
    bad: Option<Content>,
}

/// Detects that a path leads to another file, or that the file was written to. Follows links, so that a replaced link
/// to a directory (Kubernetes replaces one to update a mounted secret) is detected too.
#[derive(PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// The SHA-256 of each file, or why it cannot be read. Keys are not stored.
#[derive(Clone, PartialEq, Eq)]
struct Content(Vec<Result<[u8; 32], io::ErrorKind>>);

impl<T> Rotating<T> {
    /// Reads the files. `build` gets them in the order of `paths`.
    pub(crate) fn load(
        paths: Vec<PathBuf>,
        build: impl Fn(&[File<'_>]) -> Result<T, TlsError> + Send + Sync + 'static,
    ) -> Result<Self, TlsError> {
        // Taken before the content is read: the next refresh detects changes in between.
        let stamps = stamps(&paths);
        let texts = read(&paths);
        let good = content(&texts);
        let current = RwLock::new(Arc::new(make(&build, &paths, texts)?));
        let seen = Mutex::new(Seen { stamps, good, bad: None });
        Ok(Self { current, seen, paths, build: Box::new(build) })
    }

    pub(crate) fn current(&self) -> Arc<T> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns true if the value was replaced. Each bad content causes one error.
    pub(crate) fn refresh(&self) -> Result<bool, TlsError> {
        let mut seen = self.seen();
        let stamps = stamps(&self.paths);
        if stamps.is_some() && stamps == seen.stamps {
            return Ok(false);
        }
        seen.stamps = stamps;
        let texts = read(&self.paths);
        let found = content(&texts);
        if found == seen.good {
            seen.bad = None;
            return Ok(false);
        }
        if seen.bad.as_ref() == Some(&found) {
            return Ok(false);
        }
        match make(&self.build, &self.paths, texts) {
            Ok(value) => {
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
                seen.good = found;
                seen.bad = None;
                Ok(true)
            }
            Err(error) => {
                seen.bad = Some(found);
                Err(error)
            }
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(paths: &[PathBuf]) -> Vec<io::Result<SecretBytes>> {
    paths.iter().map(|path| fs::read(path).map(SecretBytes::from)).collect()
}

fn content(texts: &[io::Result<SecretBytes>]) -> Content {
    let hash_or_error = |text: &io::Result<SecretBytes>| match text {
        Ok(text) => {
            let mut hash = [0; 32];
            hash.copy_from_slice(digest::digest(&digest::SHA256, text).as_ref());
            Ok(hash)
        }
        Err(error) => Err(error.kind()),
    };
    Content(texts.iter().map(hash_or_error).collect())
}

fn make<T>(
    build: &impl Fn(&[File<'_>]) -> Result<T, TlsError>,
    paths: &[PathBuf],
    texts: Vec<io::Result<SecretBytes>>,
) -> Result<T, TlsError> {
    let texts = paths.iter().zip(texts).map(|(path, text)| {
        text.map(|text| (path, text)).map_err(|source| TlsError::Read { path: path.clone(), source })
    });
    let texts = texts.collect::<Result<Vec<_>, _>>()?;
    let files: Vec<File<'_>> = texts.iter().map(|(path, text)| File { path, text }).collect();
    build(&files)
}

/// None if the stamp of a file cannot be used.
fn stamps(paths: &[PathBuf]) -> Option<Vec<Stamp>> {
    let now = SystemTime::now();
    paths.iter().map(|path| stamp(path, now)).collect()
}

fn stamp(path: &Path, now: SystemTime) -> Option<Stamp> {
    let found = fs::metadata(path).ok()?;
    let age = now.duration_since(found.modified().ok()?).ok()?;
    (age > SETTLED).then(|| Stamp {
        device: found.dev(),
        inode: found.ino(),
        size: found.size(),
        modified: (found.mtime(), found.mtime_nsec()),
        changed: (found.ctime(), found.ctime_nsec()),
    })
}
