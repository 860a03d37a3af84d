//! What all sessions of a replay share.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sql_text::Digest;

use crate::budget::Budget;
use crate::recorder::Finished;
use crate::running::Running;
use crate::stop::Stop;
use crate::target::Target;
use crate::totals::Totals;

pub(crate) struct Context {
    pub(crate) target: Target,
    pub(crate) reads_only: bool,
    pub(crate) timeout: Duration,
    pub(crate) stop: Stop,
    pub(crate) budget: Budget,
    pub(crate) running: Running,
    pub(crate) counters: Counters,
    pub(crate) digests: KnownDigests,
    pub(crate) warnings: Warnings,
    /// Why the replay cannot go on; the first reason.
    pub(crate) failure: Failure,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Sessions that have not ended.
    pub(crate) live_sessions: AtomicUsize,
    pub(crate) sessions: AtomicU64,
    pub(crate) displaced_sessions: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) lost_connections: AtomicU64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn add_to(&self, totals: &mut Totals) {
        totals.sessions += self.sessions.load(Ordering::Relaxed);
        totals.displaced_sessions += self.displaced_sessions.load(Ordering::Relaxed);
        totals.connections += self.connections.load(Ordering::Relaxed);
        totals.lost_connections += self.lost_connections.load(Ordering::Relaxed);
    }
}

/// The digests whose texts are recorded.
#[derive(Debug, Default)]
pub(crate) struct KnownDigests(Mutex<HashSet<Digest>>);

impl KnownDigests {
    /// Adds a digest. False: it is known already.
    pub(crate) fn insert(&self, digest: &Digest) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(*digest)
    }
}

/// Messages on standard error: only the first ones, because there may be very many.
#[derive(Debug, Default)]
pub(crate) struct Warnings(AtomicU64);

impl Warnings {
    const MAX: u64 = 20;

    pub(crate) fn show(&self, text: &str) {
        match self.0.fetch_add(1, Ordering::Relaxed) + 1 {
            number if number < Self::MAX => eprintln!("{text}"),
            Self::MAX => eprintln!("{text} (further messages like this are not shown)"),
            _ => {}
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Failure(Mutex<Option<String>>);

impl Failure {
    /// Ends the replay because of this.
    pub(crate) fn set(&self, reason: String, stop: &Stop) {
        self.set_later(reason);
        stop.request();
    }

    /// Keeps this reason, while sessions do what they have.
    pub(crate) fn set_later(&self, reason: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(reason);
    }

    pub(crate) fn take(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Where sessions report.
pub(crate) type Reports = SyncSender<Finished>;
