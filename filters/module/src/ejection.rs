//! Nodes that get no new sessions for a while, because of what this Envoy has observed itself.
//!
//! The state is shared by all workers of the process. The last usable node of a group is never ejected: to try a node that
//! may work is better for a client than an error.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use crate::hosts::WorkerHosts;
use crate::node::WorkerNode;

/// Why a node is ejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EjectReason {
    /// It refuses TCP connections, or does not answer them.
    Connect,
    /// It closed the connection before its greeting was complete, or sent none in time.
    Closed,
    /// Its greeting is an error that concerns every login.
    Error,
    /// Its greeting is not of the MySQL protocol.
    Invalid,
    /// The TLS handshake with it failed.
    Tls,
    /// It no longer answers on connections that are established.
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

/// The details of an ejection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EjectionDetails {
    pub(crate) reason: EjectReason,
    /// When the node was ejected for the first time since it last worked.
    pub(crate) since: SystemTime,
    /// Milliseconds of `clock`.
    until: u64,
    /// How long the ejection lasts, and each extension by [`Ejection::try_admit`].
    duration: Duration,
}

/// Whether a node is ejected. Shared by all workers.
#[derive(Debug, Default)]
pub(crate) struct Ejection {
    /// A copy of `details.until`, read without the lock for each choice of a node, and written with the lock held.
    /// 0: the node was never ejected, or has worked since.
    until: AtomicU64,
    details: Mutex<Option<EjectionDetails>>,
}

impl EjectionDetails {
    /// In seconds since 1970.
    pub(crate) fn since_unix(&self) -> u64 {
        self.since.duration_since(SystemTime::UNIX_EPOCH).map_or(1, |since| since.as_secs())
    }
}

impl Ejection {
    /// When it ends, in milliseconds of `clock`. None: the node is not ejected, or not any more.
    pub(crate) fn until(&self, now: Duration) -> Option<u64> {
        let until = self.until.load(Ordering::Relaxed);
        (milliseconds(now) < until).then_some(until)
    }

    pub(crate) fn details(&self, now: Duration) -> Option<EjectionDetails> {
        self.lock().filter(|ejected| milliseconds(now) < ejected.until)
    }

    /// Whether the session that asks may use the node. After an ejection one session tries the node for all: it gets true,
    /// and the node is ejected again for the others until that session has connected. If the session ends before, the
    /// ejection lasts as long as the one before.
    pub(crate) fn try_admit(&self, now: Duration) -> bool {
        if self.until.load(Ordering::Relaxed) == 0 {
            return true;
        }
        let mut details = self.lock();
        let Some(ejected) = details.as_mut() else { return true };
        if milliseconds(now) < ejected.until {
            return false;
        }
        ejected.until = milliseconds(now + ejected.duration);
        self.until.store(ejected.until, Ordering::Relaxed);
        true
    }

    pub(crate) fn begin(&self, reason: EjectReason, lasts: Duration, now: Duration) {
        let mut details = self.lock();
        let since = details.map_or_else(SystemTime::now, |before| before.since);
        let until = milliseconds(now + lasts);
        *details = Some(EjectionDetails { reason, since, until, duration: lasts });
        self.until.store(until, Ordering::Relaxed);
    }

    pub(crate) fn end(&self) {
        if self.until.load(Ordering::Relaxed) != 0 {
            let mut details = self.lock();
            *details = None;
            self.until.store(0, Ordering::Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<EjectionDetails>> {
        self.details.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Held during a decision. Otherwise two threads could eject the last two nodes at the same moment.
static DECIDING: Mutex<()> = Mutex::new(());

/// Ejects a node, or restores it if no other node of its group is usable. Returns whether it is ejected.
pub(crate) fn eject(hosts: &WorkerHosts, here: &WorkerNode, reason: EjectReason, lasts: Duration) -> bool {
    let _deciding = DECIDING.lock().unwrap_or_else(PoisonError::into_inner);
    if !hosts.has_another_usable(here) {
        here.shared.end_ejection();
        return false;
    }
    here.shared.eject(reason, lasts);
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
    fn an_ejection_ends_in_time_or_when_the_node_works() {
        let ejection = Ejection::default();
        assert_eq!((ejection.until(at(1)), ejection.details(at(1)), ejection.try_admit(at(1))), (None, None, true));
        ejection.begin(EjectReason::Closed, LASTS, at(1));
        assert_eq!(ejection.until(at(5)), Some(6_000));
        assert_eq!(ejection.details(at(5)).map(|ejected| ejected.reason), Some(EjectReason::Closed));
        assert!(!ejection.try_admit(at(5)));
        assert_eq!((ejection.until(at(6)), ejection.details(at(6))), (None, None));
        ejection.begin(EjectReason::Connect, LASTS, at(6));
        ejection.end();
        assert_eq!((ejection.until(at(7)), ejection.details(at(7)), ejection.try_admit(at(7))), (None, None, true));
    }

    #[test]
    fn after_an_ejection_one_session_tries_the_node_for_all() {
        let ejection = Ejection::default();
        ejection.begin(EjectReason::Connect, LASTS, at(0));
        let since = ejection.details(at(0)).map(|ejected| ejected.since);
        assert!(ejection.try_admit(at(5)));
        assert!(!ejection.try_admit(at(5)) && ejection.until(at(9)).is_some());
        ejection.begin(EjectReason::Closed, LASTS, at(6));
        let ejected = ejection.details(at(6)).expect("it failed again");
        assert_eq!((Some(ejected.since), ejected.reason, ejected.until), (since, EjectReason::Closed, 11_000));
        // The session that was to try the node ended without a result: another one tries it.
        assert!(ejection.try_admit(at(11)) && ejection.try_admit(at(16)));
        ejection.end();
        assert!(ejection.try_admit(at(16)) && ejection.try_admit(at(16)));
    }

    /// Otherwise the policy would choose the node, not be admitted, and choose it again, until the next millisecond.
    #[test]
    fn a_node_that_is_not_ejected_any_more_admits_a_session() {
        let (begun, ended) = (Duration::from_micros(1_900), Duration::from_micros(5_001_100));
        let ejection = Ejection::default();
        ejection.begin(EjectReason::Connect, LASTS, begun);
        assert!(ejection.until(ended).is_none() && ejection.details(ended).is_none() && ejection.try_admit(ended));
    }
}
