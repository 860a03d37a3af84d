use std::cell::RefCell;
use std::path::Path;

use tempfile::TempDir;

use super::*;
use crate::line_log::LogTarget;

fn file(path: &Path) -> LogFile {
    LogFile::new(&LogTarget { path: path.to_path_buf(), max_bytes: 0, kept_files: 0 })
}

fn counted(counts: &LogCounts) -> [u64; 3] {
    counts.get()
}

/// Waits until the writer has done something that another thread notices only in its result.
fn wait_until(is_done: impl Fn() -> bool) {
    while !is_done() {
        std::thread::yield_now();
    }
}

#[test]
fn all_lines_are_written_before_the_writer_ends() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("logins");
    let (queue, counts) = (EntryQueue::default(), LogCounts::default());
    let writer = Writer {
        file: file(&path),
        queue: &queue,
        counts: &counts,
        is_failing: false,
        log: |_, _| panic!("no notice"),
    };
    assert!(queue.push(b"one\n") && queue.push(b"two\n"));
    queue.close();
    writer.run();
    assert_eq!(std::fs::read(path).expect("a file"), b"one\ntwo\n");
    assert_eq!(counted(&counts), [2, 0, 0]);
}

#[test]
fn writer_survives_errors_and_writes_the_lines_later() {
    let directory = TempDir::new().expect("a directory");
    let parent = directory.path().join("later");
    let path = parent.join("logins");
    let (queue, counts, notices) = (EntryQueue::default(), LogCounts::default(), RefCell::default());
    std::thread::scope(|scope| {
        let (queue, counts, path) = (&queue, &counts, &path);
        let writer = scope.spawn(move || {
            let notices = RefCell::new(Vec::new());
            let log = |_: &str, notice: &Notice<'_>| notices.borrow_mut().push(*notice == Notice::Recovered);
            Writer { file: file(path), queue, counts, is_failing: false, log }.run();
            notices.into_inner()
        });
        assert!(queue.push(b"one\n"));
        wait_until(|| counted(counts)[2] == 2);
        assert!(queue.push(b"two\n"));
        std::fs::create_dir(&parent).expect("a directory");
        wait_until(|| counted(counts)[0] == 2);
        queue.close();
        notices.replace(writer.join().expect("the writer"));
    });
    assert_eq!(std::fs::read(path).expect("a file"), b"one\ntwo\n");
    assert_eq!(notices.into_inner(), [false, true], "the second error is not logged");
    assert_eq!(counted(&counts)[1], 0);
}

#[test]
fn lines_that_cannot_be_written_at_the_end_are_dropped_and_counted() {
    let (queue, counts) = (EntryQueue::default(), LogCounts::default());
    let log = |_: &str, _: &Notice<'_>| panic!("nothing may be logged after the end");
    let writer = Writer { file: file(Path::new("/dev/full")), queue: &queue, counts: &counts, is_failing: false, log };
    assert!(queue.push(b"one\n") && queue.push(b"two\n"));
    queue.close();
    writer.run();
    assert_eq!(counted(&counts), [0, 2, 2]);
}
