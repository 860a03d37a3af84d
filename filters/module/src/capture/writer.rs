//! The thread that compresses and writes the records. Only this thread touches the disk.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, SystemTime};

use super::CaptureCounts;
use super::encoder::{Batch, Encoder};
use super::files::CaptureFiles;
use super::queue::{CommandQueue, Entry};

/// Time between two batches. Larger batches compress better; the records of a batch are lost if Envoy is killed.
const BATCH_INTERVAL: Duration = Duration::from_millis(500);

/// The size of a batch, before compression, after which the next one begins.
const MAX_BATCH_BYTES: usize = 8 << 20;

/// Time between two attempts to write the same batch.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// What the thread shares with the workers.
pub(super) struct Shared {
    pub(super) queue: CommandQueue,
    pub(super) counts: CaptureCounts,
}

/// Starts the thread. The returned receiver is disconnected when the thread has ended. `max_bytes`: the size of the
/// files at which the capture ends; 0: no limit.
pub(super) fn start(shared: Arc<Shared>, files: CaptureFiles, max_bytes: u64) -> io::Result<Receiver<()>> {
    let (running, ended) = channel::<()>();
    let run = move || {
        let mut writer = Writer { shared: &shared, encoder: Encoder::default(), files, max_bytes, is_failing: false };
        writer.run();
        shared.counts.is_active.store(false, Ordering::Relaxed);
        drop(running);
    };
    std::thread::Builder::new().name("tidevoy-capture".to_owned()).spawn(run)?;
    Ok(ended)
}

struct Writer<'a> {
    shared: &'a Shared,
    encoder: Encoder,
    files: CaptureFiles,
    max_bytes: u64,
    /// Whether the last attempt has failed. Only the first failure is logged.
    is_failing: bool,
}

impl Writer<'_> {
    /// Writes commands until the queue is closed and empty. Those that cannot be written then are lost.
    fn run(&mut self) {
        let (mut entries, mut batch) = (Vec::new(), Batch::default());
        loop {
            let is_closed = self.shared.queue.take(&mut entries, BATCH_INTERVAL);
            let mut entries = entries.drain(..).peekable();
            while entries.peek().is_some() {
                batch.clear();
                while batch.traffic.len() < MAX_BATCH_BYTES
                    && let Some(entry) = entries.next()
                {
                    self.encode(entry, &mut batch);
                }
                self.write_or_drop(&batch, is_closed);
            }
            if is_closed {
                break;
            }
            if self.max_bytes > 0 && self.files.bytes() >= self.max_bytes {
                envoy_abi::log!(Warn, "the capture in {} ends: it has reached capture.max_bytes", self.name());
                self.shared.queue.close();
            }
        }
        let filtered = self.shared.counts.filtered.load(Ordering::Relaxed);
        if let Err(error) = self.files.finish(filtered, SystemTime::now()) {
            self.count_error(&error);
        }
    }

    fn encode(&mut self, entry: Entry, batch: &mut Batch) {
        match entry {
            Entry::Command(command) => {
                if !self.encoder.add(&command, batch) {
                    self.shared.counts.filtered.fetch_add(1, Ordering::Relaxed);
                }
            }
            Entry::Dropped(count) => {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                batch.add_dropped(count, i64::try_from(now.as_nanos()).unwrap_or(i64::MAX));
            }
        }
    }

    /// While a batch cannot be written, newer commands stay in the queue, whose size is limited.
    fn write_or_drop(&mut self, batch: &Batch, is_closed: bool) {
        let mut may_wait = !is_closed;
        while !batch.is_empty() && !self.write(batch) {
            if !may_wait {
                self.shared.counts.dropped.fetch_add(batch.records, Ordering::Relaxed);
                return;
            }
            may_wait = !self.shared.queue.wait_closed(RETRY_INTERVAL);
        }
    }

    fn name(&self) -> String {
        self.files.directory().to_string_lossy().into_owned()
    }

    /// After the end of the capture, Envoy may have stopped, and nothing may be written to its log.
    fn may_log(&self) -> bool {
        !self.shared.queue.wait_closed(Duration::ZERO)
    }

    /// Returns whether the batch is written.
    fn write(&mut self, batch: &Batch) -> bool {
        let counts = &self.shared.counts;
        let filtered = counts.filtered.load(Ordering::Relaxed);
        match self.files.append(batch, filtered, SystemTime::now()) {
            Ok(()) => {
                counts.records.fetch_add(batch.records, Ordering::Relaxed);
                counts.bytes.store(self.files.bytes(), Ordering::Relaxed);
                if std::mem::take(&mut self.is_failing) && self.may_log() {
                    envoy_abi::log!(Info, "traffic is captured to {} again", self.name());
                }
                true
            }
            Err(error) => {
                self.count_error(&error);
                false
            }
        }
    }

    fn count_error(&mut self, error: &io::Error) {
        self.shared.counts.write_errors.fetch_add(1, Ordering::Relaxed);
        if !std::mem::replace(&mut self.is_failing, true) && self.may_log() {
            envoy_abi::log!(
                Warn,
                "traffic cannot be captured to {}, which is tried again every second: {error}",
                self.name()
            );
        }
    }
}
