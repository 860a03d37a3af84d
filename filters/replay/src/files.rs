//! Files that are never seen half written.

use std::path::Path;
use std::{fs, io};

/// Replaces a file. If it fails, the old one stays.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut temporary = path.to_path_buf().into_os_string();
    temporary.push(".tmp");
    fs::write(&temporary, content)?;
    fs::rename(temporary, path)
}
