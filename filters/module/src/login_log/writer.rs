//! The thread that writes the lines. Only this thread touches the disk.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::file::LogFile;
use super::pending::PendingLines;
use super::queue::LineQueue;
use super::{COUNTS, LoginLogCounts};

/// Time between two batches of lines. Without it, each of many logins would cost a wake-up and several system calls.
const BATCH_INTERVAL: Duration = Duration::from_millis(20);

/// Time between two attempts to write the same lines.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Starts the thread. The returned receiver is disconnected when the thread has ended.
pub(super) fn start(file: LogFile, queue: Arc<LineQueue>) -> io::Result<Receiver<()>> {
    let (running, ended) = channel::<()>();
    let run = move || {
        Writer { file, queue: &queue, counts: &COUNTS, is_failing: false, log: write_to_envoy_log }.run();
        drop(running);
    };
    std::thread::Builder::new().name("tidevoy-logins".to_owned()).spawn(run)?;
    Ok(ended)
}

/// A message for Envoy's log.
#[derive(Debug, PartialEq, Eq)]
enum Notice<'a> {
    Failed(&'a str),
    Recovered,
}

fn write_to_envoy_log(path: &str, notice: &Notice<'_>) {
    match notice {
        Notice::Failed(error) => {
            envoy_abi::log!(Warn, "logins cannot be logged to {path}, and are retried every second: {error}");
        }
        Notice::Recovered => envoy_abi::log!(Info, "logins are logged to {path} again"),
    }
}

struct Writer<'a, L: Fn(&str, &Notice<'_>)> {
    file: LogFile,
    queue: &'a LineQueue,
    counts: &'a LoginLogCounts,
    /// Whether the last attempt has failed. Only the first failure is logged.
    is_failing: bool,
    log: L,
}

impl<L: Fn(&str, &Notice<'_>)> Writer<'_, L> {
    /// Writes lines until the queue is closed and empty. Lines that cannot be written then are dropped.
    fn run(mut self) {
        loop {
            let mut lines = PendingLines::new(self.queue.take());
            if lines.is_empty() {
                return; // the queue is closed
            }
            // While lines are left, newer ones stay in the queue, whose size is limited.
            while !self.write(&mut lines) {
                if self.queue.wait_closed(RETRY_INTERVAL) {
                    let is_written = self.write(&mut lines);
                    if !is_written {
                        self.counts.dropped.fetch_add(lines.line_count(), Ordering::Relaxed);
                    }
                    break;
                }
            }
            self.queue.wait_closed(BATCH_INTERVAL);
        }
    }

    /// Returns whether all lines are written.
    fn write(&mut self, lines: &mut PendingLines) -> bool {
        let counts = self.counts;
        let result = self.file.append(lines, |written| {
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
        lines.is_empty()
    }
}

#[cfg(test)]
mod tests;
