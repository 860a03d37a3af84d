//! Locks of files between processes.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::AsRawFd;

/// Locks the file for this process, until the file is closed. False: another process has locked it.
///
/// # Errors
/// The file system has no locks.
pub fn try_lock(file: &File) -> Result<bool> {
    // SAFETY: the descriptor is open as long as `file`.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(true);
    }
    match Error::last_os_error() {
        error if error.kind() == ErrorKind::WouldBlock => Ok(false),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_ends_when_the_file_is_closed() {
        let open = || File::open(std::env::current_exe().expect("a path")).expect("a file");
        let (one, other) = (open(), open());
        assert!(try_lock(&one).expect("a lock"));
        assert!(!try_lock(&other).expect("a lock"));
        drop(one);
        assert!(try_lock(&other).expect("a lock"));
    }
}
