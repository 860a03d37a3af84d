//! Something built from files, built again when they change.

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

/// A file system's clock may tick as slowly as every two seconds (FAT; ext4 and XFS: some milliseconds). A file that
/// is younger may change once more without a trace in its stamp, so its stamp is not believed yet.
const SETTLED: Duration = Duration::from_secs(2);

type Build<T> = Box<dyn Fn(&[File<'_>]) -> Result<T, TlsError> + Send + Sync>;

/// A value and the files that it was built from.
pub(crate) struct Rotating<T> {
    current: RwLock<Arc<T>>,
    seen: Mutex<Seen>,
    paths: Vec<PathBuf>,
    build: Build<T>,
}

/// What is known of the files.
struct Seen {
    /// None: look at the content next time, whatever the stamps say.
    stamps: Option<Vec<Stamp>>,
    /// What `current` was built from.
    good: Content,
    /// What could not be used, and was said to.
    bad: Option<Content>,
}

/// Enough to notice that a name leads to another file, or that the file was written to. Links are followed, so that
/// swapping a directory's link (as Kubernetes does for a mounted secret) shows too.
#[derive(PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// The SHA-256 of each file, or why it cannot be read. Nothing of a key is kept.
#[derive(Clone, PartialEq, Eq)]
struct Content(Vec<Result<[u8; 32], io::ErrorKind>>);

impl<T> Rotating<T> {
    /// Reads the files, which `build` then finds in the order of `paths`.
    pub(crate) fn load(
        paths: Vec<PathBuf>,
        build: impl Fn(&[File<'_>]) -> Result<T, TlsError> + Send + Sync + 'static,
    ) -> Result<Self, TlsError> {
        // Before the content: what changes in between is then noticed next time.
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

    /// True when the value was replaced. An error is returned once for each content that has it.
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
    let one = |text: &io::Result<SecretBytes>| match text {
        Ok(text) => {
            let mut hash = [0; 32];
            hash.copy_from_slice(digest::digest(&digest::SHA256, text).as_ref());
            Ok(hash)
        }
        Err(error) => Err(error.kind()),
    };
    Content(texts.iter().map(one).collect())
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

/// None when one of them is not to be believed.
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
