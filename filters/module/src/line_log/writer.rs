//! The thread that writes the entries. Only this thread touches the disk.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::LogCounts;
use super::file::LogFile;
use super::pending::PendingEntries;
use super::queue::EntryQueue;

/// Time between two batches of entries. Without it, each of many entries would cost a wake-up and several system calls.
const BATCH_INTERVAL: Duration = Duration::from_millis(20);

/// Time between two attempts to write the same entries.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Starts the thread. The returned receiver is disconnected when the thread has ended.
pub(super) fn start(
    subject: &'static str,
    thread_name: &'static str,
    file: LogFile,
    queue: Arc<EntryQueue>,
    counts: &'static LogCounts,
) -> io::Result<Receiver<()>> {
    let (running, ended) = channel::<()>();
    let run = move || {
        let log = |path: &str, notice: &Notice<'_>| write_to_envoy_log(subject, path, notice);
        Writer { file, queue: &queue, counts, is_failing: false, log }.run();
        drop(running);
    };
    std::thread::Builder::new().name(thread_name.to_owned()).spawn(run)?;
    Ok(ended)
}

/// A message for Envoy's log.
#[derive(Debug, PartialEq, Eq)]
enum Notice<'a> {
    Failed(&'a str),
    Recovered,
}

fn write_to_envoy_log(subject: &str, path: &str, notice: &Notice<'_>) {
    match notice {
        Notice::Failed(error) => {
            envoy_abi::log!(Warn, "{subject} cannot be logged to {path}, and are retried every second: {error}");
        }
        Notice::Recovered => envoy_abi::log!(Info, "{subject} are logged to {path} again"),
    }
}

struct Writer<'a, L: Fn(&str, &Notice<'_>)> {
    file: LogFile,
    queue: &'a EntryQueue,
    counts: &'a LogCounts,
    /// Whether the last attempt has failed. Only the first failure is logged.
    is_failing: bool,
    log: L,
}

impl<L: Fn(&str, &Notice<'_>)> Writer<'_, L> {
    /// Writes entries until the queue is closed and empty. Entries that cannot be written then are dropped.
    fn run(mut self) {
        loop {
            let mut entries = PendingEntries::new(self.queue.take());
            if entries.is_empty() {
                return; // the queue is closed
            }
            // While entries are left, newer ones stay in the queue, whose size is limited.
            while !self.write(&mut entries) {
                if self.queue.wait_closed(RETRY_INTERVAL) {
                    let is_written = self.write(&mut entries);
                    if !is_written {
                        self.counts.dropped.fetch_add(entries.count(), Ordering::Relaxed);
                    }
                    break;
                }
            }
            self.queue.wait_closed(BATCH_INTERVAL);
        }
    }

    /// Returns whether all entries are written.
    fn write(&mut self, entries: &mut PendingEntries) -> bool {
        let counts = self.counts;
        let result = self.file.append(entries, |written| {
            counts.written.fetch_add(written, Ordering::Relaxed);
        });
        let was_failing = std::mem::replace(&mut self.is_failing, result.is_err());
        // After the end of the log, Envoy may have stopped, and nothing may be written to its log.
        let notify = |notice| {
            if !self.queue.wait_closed(Duration::ZERO) {
                (self.log)(&self.file.path().to_string_lossy(), &notice);
            }
        };
        match result {
            Ok(()) if was_failing => notify(Notice::Recovered),
            Ok(()) => {}
            Err(error) => {
                counts.write_errors.fetch_add(1, Ordering::Relaxed);
                if !was_failing {
                    notify(Notice::Failed(&error.to_string()));
                }
            }
        }
        entries.is_empty()
    }
}

#[cfg(test)]
mod tests;
