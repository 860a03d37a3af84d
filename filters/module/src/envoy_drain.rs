//! The drain of this Envoy, before it stops: first it is not ready for new clients but still serves them, since load
//! balancers need time to notice. Then it refuses new clients, and each session ends when it is idle. At last all
//! remaining sessions are closed.
//!
//! The control plane ([`crate::live_config`]) or Envoy's runtime requests the drain: `POST
//! /runtime_modify?tidevoy.drain=true` at Envoy's admin port, which is what the supervisor does. If the request is
//! withdrawn, Envoy serves again.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use crate::live_config::{self, DrainTimes};
use crate::session::Session;
use crate::worker::{SessionQueue, Turn, WorkerContext};
use crate::{readiness, wakers};

/// The key of Envoy's runtime.
const RUNTIME_KEY: &str = "tidevoy.drain";
/// Time between two scans of all sessions. Most of them end by their own events.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);

/// A session that was idle for less time may be in use: its next command could meet the FIN on the way. So it ends by an
/// event of its own, which [`ClientUse`] chooses.
const QUIET: Duration = Duration::from_secs(1);
/// A client that has sent COM_PING this recently validates its connection before each use.
const VALIDATION_INTERVAL: Duration = Duration::from_secs(2);

/// How the client of an idle session uses its connection: the durations since the last command and the last COM_PING.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientUse {
    pub(crate) idle_for: Duration,
    pub(crate) pinged_before: Option<Duration>,
}

impl ClientUse {
    /// Whether the session may end at any time.
    fn is_quiet(self) -> bool {
        self.idle_for >= QUIET
    }

    /// Whether the session may end after the response that the client has just got. If the client validates its
    /// connection, the session ends at the next COM_PING instead. Then a pool opens another connection, and the
    /// application sees no error, as it would if the session ended between the COM_PING and the statement.
    pub(crate) fn may_end_after_response(self) -> bool {
        self.is_quiet() || self.pinged_before.is_none_or(|before| before >= VALIDATION_INTERVAL)
    }
}

/// The phase of the drain. The numbers are the values of the gauge `drain_phase`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum DrainPhase {
    /// There is no drain.
    Serving = 0,
    /// Not ready for new clients, but they are still served.
    NotReady = 1,
    /// New clients are refused. Sessions end when they are idle.
    Ending = 2,
    /// All sessions are closed.
    Closing = 3,
}

impl DrainPhase {
    const ALL: [Self; 4] = [Self::Serving, Self::NotReady, Self::Ending, Self::Closing];

    fn description(self) -> &'static str {
        match self {
            Self::Serving => "the drain of this Envoy is withdrawn",
            Self::NotReady => "this Envoy drains: it is not ready for new clients, but still serves them",
            Self::Ending => "this Envoy drains: it refuses new clients, and sessions end when they are idle",
            Self::Closing => "this Envoy drains: the sessions that are left are closed",
        }
    }
}

static PHASE: AtomicU8 = AtomicU8::new(DrainPhase::Serving as u8);
/// How often the workers were asked to scan all of their sessions.
static SCANS: AtomicU64 = AtomicU64::new(0);

/// The phase of the drain. Called after each event of a session, so it must be cheap.
pub(crate) fn phase() -> DrainPhase {
    DrainPhase::ALL[usize::from(PHASE.load(Ordering::Relaxed)) % DrainPhase::ALL.len()]
}

/// Whether sessions must end.
pub(crate) fn must_end_sessions() -> bool {
    phase() >= DrainPhase::Ending
}

/// The phase of a drain that began at `began_at`; None: there is no drain.
fn phase_at(began_at: Option<Duration>, now: Duration, times: DrainTimes) -> DrainPhase {
    let Some(began_at) = began_at else { return DrainPhase::Serving };
    let elapsed = now.saturating_sub(began_at);
    if elapsed < times.wait {
        DrainPhase::NotReady
    } else if elapsed < times.wait.saturating_add(times.timeout) {
        DrainPhase::Ending
    } else {
        DrainPhase::Closing
    }
}

/// Decides the phase of the drain, on Envoy's main thread.
#[derive(Default)]
pub(crate) struct DrainController {
    began_at: Cell<Option<Duration>>,
    scanned_at: Cell<Option<Duration>>,
}

impl DrainController {
    /// Sets the phase, and asks the workers to end sessions. Called at each tick.
    pub(crate) fn tick(&self, now: Duration) {
        let is_requested = envoy_abi::runtime::boolean(RUNTIME_KEY, false) || live_config::is_drain_requested();
        let began_at = is_requested.then(|| self.began_at.get().unwrap_or(now));
        self.began_at.set(began_at);
        let mut times = live_config::drain_times();
        if readiness::has_closed_ports() {
            times.wait = Duration::ZERO; // no new client can come
        }
        let next = phase_at(began_at, now, times);
        let has_changed = PHASE.swap(next as u8, Ordering::Relaxed) != next as u8;
        if has_changed {
            envoy_abi::log!(Info, "{}", next.description());
        }
        let is_due = self.scanned_at.get().is_none_or(|at| now >= at + SCAN_INTERVAL);
        if next >= DrainPhase::Ending && (has_changed || is_due) {
            self.scanned_at.set(Some(now));
            SCANS.fetch_add(1, Ordering::Relaxed);
            wakers::wake_all();
        }
    }
}

/// The sessions of one worker that may have to end.
#[derive(Default)]
pub(crate) struct WorkerDrain {
    queue: SessionQueue,
    /// [`SCANS`] when the queue was last filled with all sessions.
    scans: Cell<u64>,
}

/// Ends a session in the worker's next turn. It must not end at once: this is called within hooks of its connections.
pub(crate) fn enqueue(session: &Rc<Session>) {
    session.worker.drain.queue.borrow_mut().push_back(Rc::downgrade(session));
    session.worker.waker.wake();
}

/// Ends sessions until the turn is over. The next turn continues.
pub(crate) fn end_sessions(worker: &WorkerContext, turn: &Turn) {
    let scans = SCANS.load(Ordering::Relaxed);
    if worker.drain.scans.replace(scans) != scans {
        let mut all = VecDeque::new();
        worker.sessions.for_each(|session| {
            if phase() == DrainPhase::Closing || session.client_use().is_none_or(ClientUse::is_quiet) {
                all.push_back(Rc::downgrade(session));
            }
        });
        worker.drain.queue.replace(all);
    }
    worker.run_queue(&worker.drain.queue, turn, |_| true, Session::end_if_envoy_drains);
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn phases_follow_each_other_at_their_times() {
        let times = DrainTimes { wait: 5 * SECOND, timeout: 10 * SECOND };
        let phase = |now| phase_at(Some(100 * SECOND), now * SECOND, times);
        assert_eq!([100, 104].map(phase), [DrainPhase::NotReady; 2]);
        assert_eq!([105, 114].map(phase), [DrainPhase::Ending; 2]);
        assert_eq!([115, 1000].map(phase), [DrainPhase::Closing; 2]);
        assert_eq!(phase_at(None, 1000 * SECOND, times), DrainPhase::Serving);
    }

    #[test]
    fn sessions_in_use_end_after_a_response_or_at_a_ping() {
        let client = |idle, pinged_before: Option<u64>| ClientUse {
            idle_for: Duration::from_millis(idle),
            pinged_before: pinged_before.map(Duration::from_millis),
        };
        assert!(client(1000, Some(1000)).is_quiet());
        assert!(!client(999, None).is_quiet());
        assert!(client(0, None).may_end_after_response());
        assert!(client(0, Some(2000)).may_end_after_response());
        assert!(!client(0, Some(0)).may_end_after_response()); // the response was that to the COM_PING
        assert!(!client(0, Some(1999)).may_end_after_response());
        assert!(client(1000, Some(1999)).may_end_after_response());
    }

    #[test]
    fn phases_of_no_length_are_skipped() {
        let phase = |wait, timeout| phase_at(Some(SECOND), SECOND, DrainTimes { wait, timeout });
        assert_eq!(phase(Duration::ZERO, SECOND), DrainPhase::Ending);
        assert_eq!(phase(Duration::ZERO, Duration::ZERO), DrainPhase::Closing);
    }
}
