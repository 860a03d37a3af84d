//! The ejection of nodes: a node that failed as seen by this Envoy gets no new sessions for a while.
//!
//! All workers of the process share the state. The last usable node of a group is never ejected: for a client, an
//! attempt that may succeed is better than an error.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use crate::hosts::WorkerHosts;
use crate::node::WorkerNode;

/// Why a node is ejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EjectReason {
    /// The node refuses TCP connections, or does not answer connection attempts.
    Connect,
    /// The node accepted the connection, but closed it before its greeting was complete, or sent no greeting in time.
    /// For a login that fails over to the node, this includes the time until it answers the login.
    Closed,
    /// The node's greeting is an error that concerns every login.
    Error,
    /// The node's greeting is not valid in the MySQL protocol.
    Invalid,
    /// The TLS handshake with the node failed.
    Tls,
    /// The node no longer answers, neither on established connections nor to connection attempts.
    Vanished,
}

impl EjectReason {
    pub(crate) const ALL: [Self; 6] =
        [Self::Connect, Self::Closed, Self::Error, Self::Invalid, Self::Tls, Self::Vanished];

    /// The label in metrics.
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
    /// How long the ejection lasts. Each extension by [`Ejection::try_admit`] lasts as long.
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
        // 1, because 0 means: not ejected.
        self.since.duration_since(SystemTime::UNIX_EPOCH).map_or(1, |since| since.as_secs())
    }
}

impl Ejection {
    /// When the ejection ends, in milliseconds of `clock`. None: the node is not, or no longer, ejected.
    pub(crate) fn until(&self, now: Duration) -> Option<u64> {
        let until = self.until.load(Ordering::Relaxed);
        (milliseconds(now) < until).then_some(until)
    }

    pub(crate) fn details(&self, now: Duration) -> Option<EjectionDetails> {
        self.lock().filter(|ejected| milliseconds(now) < ejected.until)
    }

    /// Whether the calling session may use the node. When an ejection has run out, the first caller is admitted to try
    /// the node, and the node is ejected again for all others. This ejection ends when the admitted session has
    /// connected, or else after the same duration as before.
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

    pub(crate) fn begin(&self, reason: EjectReason, duration: Duration, now: Duration) {
        let mut details = self.lock();
        let since = details.map_or_else(SystemTime::now, |before| before.since);
        let until = milliseconds(now + duration);
        *details = Some(EjectionDetails { reason, since, until, duration });
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

/// Held during [`eject`]. Otherwise two threads could eject the last two nodes of a group at the same time.
static DECIDING: Mutex<()> = Mutex::new(());

/// Ejects a node. If no other node of its group is usable, ends the node's ejection instead. Returns whether the node
/// is ejected.
pub(crate) fn eject(hosts: &WorkerHosts, node: &WorkerNode, reason: EjectReason, duration: Duration) -> bool {
    let _deciding = DECIDING.lock().unwrap_or_else(PoisonError::into_inner);
    if !hosts.has_another_usable(node) {
        node.shared.end_ejection();
        return false;
    }
    node.shared.eject(reason, duration);
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
    fn ejection_ends_after_its_duration_or_when_the_node_works() {
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
    fn after_an_ejection_only_one_session_is_admitted_until_the_node_works() {
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

    /// Otherwise the policy would choose the node and be denied, again and again, until the next millisecond.
    #[test]
    fn session_is_admitted_as_soon_as_the_ejection_has_ended() {
        let (begun, ended) = (Duration::from_micros(1_900), Duration::from_micros(5_001_100));
        let ejection = Ejection::default();
        ejection.begin(EjectReason::Connect, LASTS, begun);
        assert!(ejection.until(ended).is_none() && ejection.details(ended).is_none() && ejection.try_admit(ended));
    }
}
