use std::io::Read;
use std::os::unix::fs::PermissionsExt;

use tempfile::TempDir;

use super::*;

const LINE: &[u8] = b"a line\n";

/// A log in a directory of its own. Its file has room for three lines.
struct TestLog {
    directory: TempDir,
    log: LogFile,
}

impl TestLog {
    fn new(keep: u32) -> Self {
        let directory = TempDir::new().expect("a directory");
        let log = Self::open(&directory.path().join("logins"), keep);
        Self { directory, log }
    }

    fn open(path: &Path, keep: u32) -> LogFile {
        let max_bytes = 3 * LINE.len() as u64;
        LogFile::new(&LogTarget { path: path.to_path_buf(), max_bytes, kept_files: keep })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn append(&mut self, text: &[u8]) -> io::Result<u64> {
        append(&mut self.log, text)
    }

    /// The number of whole lines in each file, by name.
    fn lines(&self) -> Vec<(String, usize)> {
        let mut files: Vec<_> = fs::read_dir(self.directory.path())
            .expect("a directory")
            .map(|entry| {
                let entry = entry.expect("an entry");
                let content = fs::read(entry.path()).expect("a file");
                assert_eq!(content, LINE.repeat(content.len() / LINE.len()));
                (entry.file_name().into_string().expect("a name"), content.len() / LINE.len())
            })
            .collect();
        files.sort();
        files
    }
}

fn pending(lines: &[u8]) -> PendingEntries {
    PendingEntries::new(lines.into())
}

fn append(log: &mut LogFile, text: &[u8]) -> io::Result<u64> {
    let (mut lines, mut written) = (pending(text), 0);
    log.append(&mut lines, |count| written += count).map(|()| written)
}

fn named(files: &[(&str, usize)]) -> Vec<(String, usize)> {
    files.iter().map(|(name, lines)| ((*name).to_owned(), *lines)).collect()
}

#[test]
fn lines_are_appended_to_a_file_that_not_everybody_can_read() {
    let mut test = TestLog::new(1);
    fs::write(test.path("logins"), LINE).expect("a file");
    assert_eq!(test.append(&LINE.repeat(2)).expect("written"), 2);
    assert_eq!(test.lines(), named(&[("logins", 3)]));
    fs::remove_file(test.path("logins")).expect("removed");
    test.append(LINE).expect("written");
    let mode = fs::metadata(test.path("logins")).expect("a file").permissions().mode();
    assert_eq!(mode & 0o007, 0);
}

#[test]
fn full_file_is_rotated_and_the_oldest_file_is_dropped() {
    let mut test = TestLog::new(2);
    assert_eq!(test.append(&LINE.repeat(7)).expect("written"), 7);
    assert_eq!(test.lines(), named(&[("logins", 1), ("logins.1", 3), ("logins.2", 3)]));
    test.append(&LINE.repeat(5)).expect("written");
    assert_eq!(test.lines(), named(&[("logins", 3), ("logins.1", 3), ("logins.2", 3)]));
}

#[test]
fn full_file_is_deleted_if_no_file_is_kept() {
    let mut test = TestLog::new(0);
    test.append(&LINE.repeat(7)).expect("written");
    assert_eq!(test.lines(), named(&[("logins", 1)]));
}

#[test]
fn file_without_a_limit_is_not_rotated() {
    let mut test = TestLog::new(2);
    test.log.max_bytes = 0;
    test.append(&LINE.repeat(9)).expect("written");
    assert_eq!(test.lines(), named(&[("logins", 9)]));
}

#[test]
fn lines_go_to_a_new_file_after_a_rename_or_deletion() {
    let mut test = TestLog::new(2);
    test.append(LINE).expect("written");
    fs::rename(test.path("logins"), test.path("moved")).expect("renamed");
    test.append(&LINE.repeat(2)).expect("written");
    assert_eq!(test.lines(), named(&[("logins", 2), ("moved", 1)]));
    fs::remove_file(test.path("logins")).expect("removed");
    test.append(LINE).expect("written");
    assert_eq!(test.lines(), named(&[("logins", 1), ("moved", 1)]));
}

#[test]
fn two_processes_lose_no_lines_when_both_rotate_the_file() {
    let test = TestLog::new(400);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let mut log = TestLog::open(&test.path("logins"), 400);
            scope.spawn(move || {
                for _ in 0..300 {
                    append(&mut log, LINE).expect("written");
                }
            });
        }
    });
    assert_eq!(test.lines().iter().map(|(_, lines)| lines).sum::<usize>(), 600);
}

#[test]
fn file_that_another_process_rotates_gets_all_lines() {
    let mut test = TestLog::new(2);
    test.append(LINE).expect("written");
    let other = File::open(test.path("logins")).expect("a file");
    flock(&other, FlockOperation::LockExclusive).expect("a lock");
    assert_eq!(test.append(&LINE.repeat(4)).expect("written"), 4);
    assert_eq!(test.lines(), named(&[("logins", 5)]));
    drop(other);
    test.append(LINE).expect("written");
    assert_eq!(test.lines(), named(&[("logins", 1), ("logins.1", 5)]));
}

#[test]
fn line_cut_by_an_error_is_completed_and_repeated_in_another_file() {
    let mut test = TestLog::new(2);
    test.append(LINE).expect("written");
    let mut lines = pending(&LINE.repeat(2));
    let write_part = |test: &mut TestLog, lines: &mut PendingEntries| {
        let open = test.log.open.as_mut().expect("an open file");
        open.file.write_all(&LINE[..2]).expect("written");
        lines.advance(2);
        open.length_inside_entry = Some(open.file.metadata().expect("a file").len());
    };
    write_part(&mut test, &mut lines);
    test.log.prepare(&mut lines).expect("an open file"); // as in an attempt that writes nothing
    test.log.append(&mut lines, |_| {}).expect("written");
    assert_eq!(test.lines(), named(&[("logins", 3)]));

    let mut lines = pending(LINE);
    write_part(&mut test, &mut lines);
    fs::write(test.path("logins"), b"").expect("truncated");
    test.log.append(&mut lines, |_| {}).expect("written");
    assert_eq!(test.lines(), named(&[("logins", 1)]));

    let mut lines = pending(LINE);
    write_part(&mut test, &mut lines);
    fs::remove_file(test.path("logins")).expect("removed");
    test.log.append(&mut lines, |_| {}).expect("written");
    assert_eq!(test.lines(), named(&[("logins", 1)]));
}

#[test]
fn file_that_cannot_be_rotated_still_gets_all_lines() {
    let mut test = TestLog::new(1);
    fs::create_dir(test.path("logins.1")).expect("a directory"); // a file cannot replace a directory
    let mut lines = pending(&LINE.repeat(5));
    assert!(test.log.append(&mut lines, |_| {}).is_err());
    assert!(lines.is_empty());
    assert_eq!(fs::read(test.path("logins")).expect("a file"), LINE.repeat(5));
}

#[test]
fn error_keeps_the_lines_that_are_not_written() {
    let mut full = TestLog::open(Path::new("/dev/full"), 1);
    let mut lines = pending(&LINE.repeat(2));
    let error = full.append(&mut lines, |_| {}).expect_err("no space");
    assert_eq!((error.kind(), lines.count()), (ErrorKind::StorageFull, 2));
    let mut missing = TestLog::open(Path::new("/no/such/directory/logins"), 1);
    assert_eq!(missing.append(&mut lines, |_| {}).expect_err("no directory").kind(), ErrorKind::NotFound);
    assert_eq!(lines.count(), 2);
}

#[test]
fn lines_for_a_pipe_are_written_in_atomic_pieces_and_never_rotated() {
    let test = TestLog::new(1);
    let (mut reader, writer) = io::pipe().expect("a pipe");
    let mut log = TestLog::open(&test.path("logins"), 1);
    log.open = Some(OpenFile { file: std::os::fd::OwnedFd::from(writer).into(), id: None, length_inside_entry: None });
    let mut lines = pending(&LINE.repeat(1000));
    let mut pieces = Vec::new();
    log.append(&mut lines, |count| pieces.push(count)).expect("written");
    assert_eq!(pieces, [585, 415], "4096 bytes have room for 585 lines");
    drop(log);
    let mut read = Vec::new();
    reader.read_to_end(&mut read).expect("read");
    assert_eq!(read, LINE.repeat(1000));
    assert!(test.lines().is_empty());
}
