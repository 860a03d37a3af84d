//! The login log: one line of JSON for each login and each change of user, in a file or on standard output.
//!
//! Workers append lines to a bounded queue ([`queue`]), and one thread ([`writer`]) writes them to the file ([`file`]).
//! So a worker never waits for the disk. If the queue is full, the line is dropped and counted.
//!
//! The control plane may change the configuration while Envoy runs. Each configuration has its own queue and thread,
//! since the thread of an earlier one may be blocked, for example by a full pipe.

mod file;
mod pending;
mod queue;
mod record;
mod writer;

pub(crate) use record::{LoginRecord, TlsRecord};

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crate::config::LoginLogConfig;
use file::LogFile;
use queue::LineQueue;

/// How long the end of Envoy may be delayed until all lines are written.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

struct ActiveLog {
    config: LoginLogConfig,
    queue: Arc<LineQueue>,
}

/// None: the log is off.
static ACTIVE: RwLock<Option<ActiveLog>> = RwLock::new(None);

/// Whether the log is on, so that workers need no lock to know.
static IS_ON: AtomicBool = AtomicBool::new(false);

/// The threads that may still run. The receiver is disconnected when its thread has ended.
static THREADS: Mutex<Vec<Receiver<()>>> = Mutex::new(Vec::new());

/// What all logs of this process have written and lost.
#[derive(Debug, Default)]
pub(crate) struct LoginLogCounts {
    pub(crate) written: AtomicU64,
    /// Lines that the queue had no room for, or that could not be written before the end of the log.
    pub(crate) dropped: AtomicU64,
    pub(crate) write_errors: AtomicU64,
}

pub(crate) static COUNTS: LoginLogCounts =
    LoginLogCounts { written: AtomicU64::new(0), dropped: AtomicU64::new(0), write_errors: AtomicU64::new(0) };

/// Whether logins are logged. Called for each login, so it must be cheap.
pub(crate) fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

/// Appends a line to the queue. Called by workers.
pub(crate) fn push(record: &LoginRecord<'_>) {
    let line = record.to_line();
    let active = ACTIVE.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(log) = &*active
        && !log.queue.push(&line)
    {
        COUNTS.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// Applies the published configuration; None: the log is off. Called on Envoy's main thread.
pub(crate) fn configure(wanted: Option<LoginLogConfig>) {
    if envoy_abi::module::validating() {
        return;
    }
    let mut active = ACTIVE.write().unwrap_or_else(PoisonError::into_inner);
    if active.as_ref().map(|log| &log.config) == wanted.as_ref() {
        return;
    }
    if let Some(before) = active.take() {
        before.queue.close(); // its thread writes what is left, and ends
    }
    *active = wanted.and_then(|config| {
        let queue = Arc::<LineQueue>::default();
        match writer::start(LogFile::new(&config), Arc::clone(&queue)) {
            Ok(thread) => {
                let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
                threads.retain(|ended| ended.try_recv() == Err(TryRecvError::Empty));
                threads.push(thread);
                Some(ActiveLog { config, queue })
            }
            Err(error) => {
                envoy_abi::log!(Error, "logins are not logged: {error}");
                None
            }
        }
    });
    IS_ON.store(active.is_some(), Ordering::Relaxed);
}

/// Ends the log, and waits until its lines are written, but no longer than [`STOP_TIMEOUT`]. Later lines are dropped.
pub(crate) fn stop() {
    IS_ON.store(false, Ordering::Relaxed);
    if let Some(log) = ACTIVE.write().unwrap_or_else(PoisonError::into_inner).take() {
        log.queue.close();
    }
    let end = Instant::now() + STOP_TIMEOUT;
    for ended in std::mem::take(&mut *THREADS.lock().unwrap_or_else(PoisonError::into_inner)) {
        let _ = ended.recv_timeout(end.saturating_duration_since(Instant::now()));
    }
}
