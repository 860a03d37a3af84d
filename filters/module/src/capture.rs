//! The capture of traffic: the commands of clients and their results, in files from which they can be replayed.
//!
//! The control plane starts and ends a capture by the live configuration. Workers move the commands of sessions
//! ([`session`]) into a bounded queue ([`queue`]), and one thread ([`writer`]) encodes ([`encoder`]) and writes them
//! ([`files`]), so that a client never waits for the disk. Commands for which the queue has no room are dropped,
//! counted, and marked in the files. Statements that may hold secrets ([`secrets`]) are left out.

mod command;
mod encoder;
mod files;
mod queue;
mod secrets;
mod session;
mod writer;

pub(crate) use command::{CapturedCommand, SessionNames, is_captured};
pub(crate) use secrets::Secrecy;
pub(crate) use session::SessionCapture;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use traffic_files::names::stamp;

use crate::config::CaptureConfig;
use command::EndedCommand;
use files::CaptureFiles;
use queue::{CommandQueue, Pushed};
use writer::Shared;

/// A capture that runs in this process.
pub(crate) struct ActiveCapture {
    config: CaptureConfig,
    shared: Arc<Shared>,
    /// Distinguishes the connections of this process in this capture from those of all others.
    process: u32,
}

/// What a capture has written and lost.
#[derive(Debug, Default)]
pub(crate) struct CaptureCounts {
    /// Written to the files.
    pub(crate) records: AtomicU64,
    /// Lost: the disk was too slow or full, a request was too long or had query attributes for which the format has no
    /// place, or a session ended before its command.
    pub(crate) dropped: AtomicU64,
    /// Left out, since they may hold secrets.
    pub(crate) filtered: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) write_errors: AtomicU64,
    /// Sessions of which nothing is captured yet, since their states were not exported.
    pub(crate) waiting: AtomicU64,
    pub(crate) is_active: AtomicBool,
}

/// The running capture.
static CURRENT: RwLock<Option<Arc<ActiveCapture>>> = RwLock::new(None);

/// Changes with each start and end of a capture, so that workers notice them without a lock. Even: nothing is captured.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// The running or last capture: what the control plane has published, and its state. Only Envoy's main thread uses it.
static LATEST: Mutex<Option<Latest>> = Mutex::new(None);

struct Latest {
    config: CaptureConfig,
    shared: Arc<Shared>,
    /// Disconnected when the writer has ended.
    writer: Receiver<()>,
}

/// How long a shutdown of Envoy may be delayed until all records are written.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// Whether traffic is captured. Called for each read from a client, so it must be cheap.
pub(crate) fn is_on() -> bool {
    generation() % 2 == 1
}

/// The number of starts and ends.
pub(crate) fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// The running capture.
pub(crate) fn current() -> Option<Arc<ActiveCapture>> {
    CURRENT.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Applies the published configuration; None ends the running capture. Called on Envoy's main thread.
pub(crate) fn configure(wanted: Option<CaptureConfig>) {
    if envoy_abi::module::validating() {
        return;
    }
    let mut latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
    let is_same = |latest: &Latest| wanted.as_ref().is_some_and(|wanted| wanted.is_same_capture(&latest.config));
    if latest.as_ref().is_some_and(is_same) {
        return;
    }
    stop(latest.as_ref());
    if let Some(config) = wanted.filter(|config| SystemTime::now() < config.end()) {
        match ActiveCapture::start(config) {
            Ok((active, started)) => {
                *latest = Some(started);
                set_current(Some(Arc::new(active)));
            }
            Err(error) => envoy_abi::log!(Error, "no traffic is captured: {error}"),
        }
    }
}

/// Ends the capture if its time is over, or if its files have reached their limit. Called periodically on Envoy's main
/// thread.
pub(crate) fn end_if_due() {
    let latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
    let is_due = |latest: &Latest| {
        SystemTime::now() >= latest.config.end() || !latest.shared.counts.is_active.load(Ordering::Relaxed)
    };
    if is_on() && latest.as_ref().is_some_and(is_due) {
        stop(latest.as_ref());
    }
}

/// Ends the capture, and waits until its records are written, but no longer than [`STOP_TIMEOUT`].
pub(crate) fn shut_down() {
    let latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
    stop(latest.as_ref());
    let end = Instant::now() + STOP_TIMEOUT;
    if let Some(latest) = &*latest {
        let _ = latest.writer.recv_timeout(end.saturating_duration_since(Instant::now()));
    }
}

/// Calls `put` with the end of the running or last capture, in milliseconds since 1970, and its counts.
pub(crate) fn report(put: impl FnOnce(u64, &CaptureCounts)) {
    let latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(latest) = &*latest {
        put(latest.config.until_milliseconds(), &latest.shared.counts);
    }
}

fn stop(latest: Option<&Latest>) {
    if let Some(latest) = latest {
        latest.shared.queue.close(); // its thread writes what is left, and ends
    }
    if is_on() {
        set_current(None);
    }
}

fn set_current(active: Option<Arc<ActiveCapture>>) {
    let must_be_on = active.is_some();
    let _before = std::mem::replace(&mut *CURRENT.write().unwrap_or_else(PoisonError::into_inner), active);
    GENERATION.fetch_add(1, Ordering::Relaxed);
    debug_assert_eq!(is_on(), must_be_on, "a capture starts only after the end of another one");
}

impl ActiveCapture {
    fn start(config: CaptureConfig) -> std::io::Result<(Self, Latest)> {
        let now = SystemTime::now();
        let directory = directory_of(&config, now);
        let shared = Arc::new(Shared { queue: CommandQueue::default(), counts: CaptureCounts::default() });
        shared.counts.is_active.store(true, Ordering::Relaxed);
        let files = CaptureFiles::new(directory, now);
        let writer = writer::start(Arc::clone(&shared), files, config.max_bytes as u64)?;
        let latest = Latest { config: config.clone(), shared: Arc::clone(&shared), writer };
        Ok((Self { config, shared, process: fastrand::u32(1..) }, latest))
    }

    /// Whether the sessions of this user and group are captured.
    pub(crate) fn wants(&self, user: &str, group: &str) -> bool {
        let has = |names: &[String], name: &str| names.is_empty() || names.iter().any(|known| known == name);
        has(&self.config.users, user) && has(&self.config.groups, group)
    }

    /// The number of a client's connection in the files.
    fn connection(&self, id: u64) -> u64 {
        u64::from(self.process) << 32 | id & u64::from(u32::MAX)
    }

    /// Queues a command for the writer. Returns whether it was queued.
    fn push(&self, command: EndedCommand) -> bool {
        let pushed = self.shared.queue.push(command);
        if pushed == Pushed::Dropped {
            self.counts().dropped.fetch_add(1, Ordering::Relaxed);
        }
        pushed == Pushed::Accepted
    }

    fn counts(&self) -> &CaptureCounts {
        &self.shared.counts
    }

    /// A command is lost before it reached the queue: its request was too long, the format has no place for a part of
    /// it, or its session ended first.
    fn count_dropped(&self) {
        self.shared.queue.add_dropped();
        self.counts().dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// A command is left out, since it may hold a secret.
    fn count_filtered(&self) {
        self.counts().filtered.fetch_add(1, Ordering::Relaxed);
    }
}

/// The directory of this process in the directory of a capture.
fn directory_of(config: &CaptureConfig, now: SystemTime) -> PathBuf {
    let is_safe = |character: char| character.is_ascii_alphanumeric() || "._-".contains(character);
    let envoy: String = config.envoy.chars().map(|it| if is_safe(it) { it } else { '_' }).collect();
    config.directory.join(&config.name).join(format!("{envoy}-{}", stamp(now)))
}
