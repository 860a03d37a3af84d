//! Nodes that get no new sessions for a while, on the evidence of this Envoy alone.
//!
//! The state belongs to the process: what one worker finds out holds for all. The last usable node of a group is never
//! ejected, for a node that may work is worth more to a client than an error that is certain.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use crate::hosts;
use crate::node::Here;

/// Why a node is ejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EjectReason {
    /// It refuses TCP connections, or does not answer to them.
    Connect,
    /// It closed before its greeting was whole, or had none in time.
    Closed,
    /// It greeted with an error that concerns every login.
    Error,
    /// It greeted with something that is not MySQL's protocol.
    Invalid,
    /// TLS with it failed.
    Tls,
    /// It does not answer any more on connections that it has.
    Vanished,
}

impl EjectReason {
    pub(crate) const ALL: [Self; 6] =
        [Self::Connect, Self::Closed, Self::Error, Self::Invalid, Self::Tls, Self::Vanished];

    /// As a label of metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Closed => "closed",
            Self::Error => "error",
            Self::Invalid => "invalid",
            Self::Tls => "tls",
            Self::Vanished => "vanished",
        }
    }
}

/// What is known of an ejection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ejected {
    pub(crate) reason: EjectReason,
    /// Since when the node has been unusable without an interruption.
    pub(crate) since: SystemTime,
    /// By `clock`.
    pub(crate) until: Duration,
    /// How long it lasts at a time.
    lasts: Duration,
}

/// Whether a node is ejected. Shared by all workers.
#[derive(Debug, Default)]
pub(crate) struct Ejection {
    /// Milliseconds of `clock`; 0: it is not ejected, nor was it since it worked last. Read for each choice of a node.
    until: AtomicU64,
    details: Mutex<Option<Ejected>>,
}

impl Ejected {
    /// Since when, in seconds since 1970.
    pub(crate) fn since_unix(&self) -> u64 {
        self.since.duration_since(SystemTime::UNIX_EPOCH).map_or(1, |since| since.as_secs())
    }
}

impl Ejection {
    /// Until when it lasts, in milliseconds of `clock`. None: it is not ejected, or that time is over.
    pub(crate) fn until(&self, now: Duration) -> Option<u64> {
        let until = self.until.load(Ordering::Relaxed);
        (milliseconds(now) < until).then_some(until)
    }

    pub(crate) fn details(&self, now: Duration) -> Option<Ejected> {
        self.lock().filter(|ejected| now < ejected.until)
    }

    /// A session wants to use the node. When its ejection has just ended, one session finds out for all whether it works:
    /// meanwhile the node stays ejected for the others. False: another session does so.
    pub(crate) fn admits(&self, now: Duration) -> bool {
        if self.until.load(Ordering::Relaxed) == 0 {
            return true;
        }
        let mut details = self.lock();
        let Some(ejected) = details.as_mut() else { return true };
        if now < ejected.until {
            return false;
        }
        ejected.until = now + ejected.lasts;
        self.until.store(milliseconds(ejected.until), Ordering::Relaxed);
        true
    }

    pub(crate) fn begin(&self, reason: EjectReason, lasts: Duration, now: Duration) {
        let mut details = self.lock();
        let since = details.map_or_else(SystemTime::now, |before| before.since);
        let until = now + lasts;
        *details = Some(Ejected { reason, since, until, lasts });
        self.until.store(milliseconds(until), Ordering::Relaxed);
    }

    pub(crate) fn end(&self) {
        if self.until.load(Ordering::Relaxed) != 0 {
            *self.lock() = None;
            self.until.store(0, Ordering::Relaxed);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Ejected>> {
        self.details.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// One decision at a time, or two workers could eject the last two nodes at the same moment.
static DECIDING: Mutex<()> = Mutex::new(());

/// Ejects a node for so long, unless no other node of its group could be used instead. True: it is ejected.
pub(crate) fn eject(here: &Here, reason: EjectReason, lasts: Duration) -> bool {
    let _deciding = DECIDING.lock().unwrap_or_else(PoisonError::into_inner);
    if !hosts::has_another_usable(here) {
        here.node.restore();
        return false;
    }
    here.node.eject(reason, lasts);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const LASTS: Duration = Duration::from_secs(5);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn an_ejection_is_over_in_time_or_when_the_node_works() {
        let ejection = Ejection::default();
        assert_eq!((ejection.until(at(1)), ejection.details(at(1)), ejection.admits(at(1))), (None, None, true));
        ejection.begin(EjectReason::Closed, LASTS, at(1));
        assert_eq!(ejection.until(at(5)), Some(6_000));
        assert_eq!(ejection.details(at(5)).map(|ejected| ejected.reason), Some(EjectReason::Closed));
        assert!(!ejection.admits(at(5)));
        assert_eq!((ejection.until(at(6)), ejection.details(at(6))), (None, None));
        ejection.begin(EjectReason::Connect, LASTS, at(6));
        ejection.end();
        assert_eq!((ejection.until(at(7)), ejection.details(at(7)), ejection.admits(at(7))), (None, None, true));
    }

    #[test]
    fn when_it_is_over_one_session_finds_out_for_all_whether_the_node_works() {
        let ejection = Ejection::default();
        ejection.begin(EjectReason::Connect, LASTS, at(0));
        let since = ejection.details(at(0)).map(|ejected| ejected.since);
        assert!(ejection.admits(at(5)));
        assert!(!ejection.admits(at(5)) && ejection.until(at(9)).is_some());
        ejection.begin(EjectReason::Closed, LASTS, at(6));
        let ejected = ejection.details(at(6)).expect("it failed again");
        assert_eq!((Some(ejected.since), ejected.reason, ejected.until), (since, EjectReason::Closed, at(11)));
        // A session that never found out does not keep the node out for ever.
        assert!(ejection.admits(at(11)) && ejection.admits(at(16)));
        ejection.end();
        assert!(ejection.admits(at(16)) && ejection.admits(at(16)));
    }
}
