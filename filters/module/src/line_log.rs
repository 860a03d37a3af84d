//! Logs in files or on standard output: each event is an entry of one or more lines.
//!
//! Workers append entries to a bounded queue ([`queue`]), and one thread ([`writer`]) writes them to the file ([`file`]).
//! So a worker never waits for the disk. If the queue is full, the entry is dropped and counted.
//!
//! The control plane may change the configuration while Envoy runs. Each configuration has its own queue and thread,
//! since the thread of an earlier one may be blocked, for example by a full pipe.

mod entries;
mod file;
pub(crate) mod json;
mod pending;
mod queue;
mod writer;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use file::LogFile;
use queue::EntryQueue;

/// How long the end of Envoy may be delayed until all entries are written.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// Where a log is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LogTarget {
    pub(crate) path: PathBuf,
    /// The size at which the module rotates the file; 0: never.
    pub(crate) max_bytes: u64,
    /// How many rotated files are kept.
    pub(crate) kept_files: u32,
}

/// A log of this process. `C`: what is configured besides the target.
pub(crate) struct LineLog<C> {
    /// What it logs, in messages of Envoy's log.
    subject: &'static str,
    thread_name: &'static str,
    /// None: the log is off.
    active: RwLock<Option<ActiveLog<C>>>,
    /// Whether the log is on, so that workers need no lock to know.
    is_on: AtomicBool,
    /// The threads that may still run. The receiver is disconnected when its thread has ended.
    threads: Mutex<Vec<Receiver<()>>>,
    counts: LogCounts,
}

struct ActiveLog<C> {
    target: LogTarget,
    config: C,
    queue: Arc<EntryQueue>,
}

/// What a log has written and lost since the start of the process.
#[derive(Debug, Default)]
pub(crate) struct LogCounts {
    /// Entries.
    pub(crate) written: AtomicU64,
    /// Entries that the queue had no room for, or that could not be written before the end of the log.
    pub(crate) dropped: AtomicU64,
    pub(crate) write_errors: AtomicU64,
}

impl LogCounts {
    const fn new() -> Self {
        Self { written: AtomicU64::new(0), dropped: AtomicU64::new(0), write_errors: AtomicU64::new(0) }
    }

    /// Entries written, entries dropped, and write errors.
    pub(crate) fn get(&self) -> [u64; 3] {
        [&self.written, &self.dropped, &self.write_errors].map(|count| count.load(Ordering::Relaxed))
    }
}

impl<C: PartialEq> LineLog<C> {
    pub(crate) const fn new(subject: &'static str, thread_name: &'static str) -> Self {
        Self {
            subject,
            thread_name,
            active: RwLock::new(None),
            is_on: AtomicBool::new(false),
            threads: Mutex::new(Vec::new()),
            counts: LogCounts::new(),
        }
    }

    /// Whether the log is on. Workers call it often, so it must be cheap.
    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    pub(crate) fn counts(&self) -> &LogCounts {
        &self.counts
    }

    /// Appends the entry that `format` returns to the queue. None: there is none for this configuration. Called by
    /// workers.
    pub(crate) fn push(&self, format: impl FnOnce(&C) -> Option<Vec<u8>>) {
        let active = self.active.read().unwrap_or_else(PoisonError::into_inner);
        let Some(log) = &*active else { return };
        if let Some(entry) = format(&log.config)
            && !log.queue.push(&entry)
        {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Applies the published configuration; None: the log is off. Called on Envoy's main thread.
    pub(crate) fn configure(&'static self, wanted: Option<(LogTarget, C)>) {
        if envoy_abi::module::validating() {
            return;
        }
        let mut active = self.active.write().unwrap_or_else(PoisonError::into_inner);
        if let (Some(log), Some((target, _))) = (&mut *active, &wanted)
            && log.target == *target
        {
            // The same queue and thread go on with other rules.
            if let Some((_, config)) = wanted {
                log.config = config;
            }
            return;
        }
        if let Some(before) = active.take() {
            before.queue.close(); // its thread writes what is left, and ends
        }
        *active = wanted.and_then(|(target, config)| self.start(target, config));
        self.is_on.store(active.is_some(), Ordering::Relaxed);
    }

    fn start(&'static self, target: LogTarget, config: C) -> Option<ActiveLog<C>> {
        let queue = Arc::<EntryQueue>::default();
        let file = LogFile::new(&target);
        match writer::start(self.subject, self.thread_name, file, Arc::clone(&queue), &self.counts) {
            Ok(thread) => {
                let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
                threads.retain(|ended| ended.try_recv() == Err(TryRecvError::Empty));
                threads.push(thread);
                Some(ActiveLog { target, config, queue })
            }
            Err(error) => {
                envoy_abi::log!(Error, "{} are not logged: {error}", self.subject);
                None
            }
        }
    }
}

/// A log of any configuration that can be ended.
pub(crate) trait Stop {
    /// Ends the log: later entries are dropped. Returns the threads that still write.
    fn close(&self) -> Vec<Receiver<()>>;
}

impl<C> Stop for LineLog<C> {
    fn close(&self) -> Vec<Receiver<()>> {
        self.is_on.store(false, Ordering::Relaxed);
        if let Some(log) = self.active.write().unwrap_or_else(PoisonError::into_inner).take() {
            log.queue.close();
        }
        std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Ends the logs, and waits until their entries are written, but no longer than [`STOP_TIMEOUT`].
pub(crate) fn stop(logs: &[&dyn Stop]) {
    let threads: Vec<_> = logs.iter().flat_map(|log| log.close()).collect();
    let end = Instant::now() + STOP_TIMEOUT;
    for ended in threads {
        let _ = ended.recv_timeout(end.saturating_duration_since(Instant::now()));
    }
}
