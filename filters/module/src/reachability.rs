//! Which nodes no longer answer, and how a worker reacts.
//!
//! The main thread watches the addresses of nodes for all workers ([`crate::sentinels`]). It watches an address as long
//! as at least one [`MonitoredEndpoint`] for it exists. The load-balancing policy holds one for each node that may get
//! new sessions, and each session holds one for its node.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use migration::sentinel::Reachability;

use crate::session::{Event, Session};
use crate::worker::{SessionQueue, Turn, WorkerContext};
use crate::{clock, wakers};

/// The highest age of a useful sign of life. The sentinel suspects a node after the same time without an answer.
const RECENT: Duration = Duration::from_secs(2);

/// An address, and the control plane's name for the node.
pub(crate) type EndpointKey = (SocketAddr, String);

type Endpoints = HashMap<EndpointKey, Arc<MonitoredEndpoint>>;

static ENDPOINTS: LazyLock<Mutex<Endpoints>> = LazyLock::new(Mutex::default);

/// Counts the changes that workers have to react to.
static CHANGES: AtomicU64 = AtomicU64::new(0);

/// An address of a node. Shared by all workers.
#[derive(Debug)]
pub(crate) struct MonitoredEndpoint {
    pub(crate) address: SocketAddr,
    /// The control plane's name for the node.
    pub(crate) node: String,
    state: AtomicU8,
    /// When a session received something from the node, in milliseconds of `clock`. 0: not since the last
    /// [`Self::take_received_at`].
    received_at: AtomicU64,
}

impl MonitoredEndpoint {
    pub(crate) fn has_state(&self, state: Reachability) -> bool {
        self.state.load(Ordering::Relaxed) == state as u8
    }

    /// Sets a new state, and notifies the workers.
    pub(crate) fn set_state(&self, state: Reachability) {
        self.state.store(state as u8, Ordering::Relaxed);
        notify_workers();
    }

    /// When a session received something from the node. None: not since the last call.
    pub(crate) fn take_received_at(&self) -> Option<Duration> {
        Some(self.received_at.swap(0, Ordering::Relaxed)).filter(|&at| at > 0).map(Duration::from_millis)
    }

    fn has_received(&self) -> bool {
        self.received_at.load(Ordering::Relaxed) > 0
    }

    fn record_received(&self, at: Duration) {
        self.received_at.fetch_max(u64::try_from(at.as_millis()).unwrap_or(0), Ordering::Relaxed);
    }
}

/// Makes all workers check their sessions.
pub(crate) fn notify_workers() {
    // Pairs with the load in `check_sessions`: a worker that sees this change also sees the state that was set before.
    CHANGES.fetch_add(1, Ordering::Release);
    wakers::wake_all();
}

fn endpoints() -> MutexGuard<'static, Endpoints> {
    // Nothing panics while the lock is held.
    ENDPOINTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether all nodes in service refuse connections or no longer answer.
static IS_OUTAGE: AtomicBool = AtomicBool::new(false);
/// A login was refused by all nodes, and the sentinels have not checked that yet.
static IS_OUTAGE_SUSPECTED: AtomicBool = AtomicBool::new(false);

/// Whether all nodes in service refuse connections or no longer answer, as far as sentinels and logins have found.
pub(crate) fn is_outage() -> bool {
    IS_OUTAGE.load(Ordering::Relaxed) || IS_OUTAGE_SUSPECTED.load(Ordering::Relaxed)
}

/// Must be called when all nodes have refused a login. Has an effect until the sentinels' next observation.
pub(crate) fn suspect_outage() {
    IS_OUTAGE_SUSPECTED.store(true, Ordering::Relaxed);
}

/// Sets the value of [`is_outage`] as the sentinels have found it. Called by the main thread.
pub(crate) fn set_outage(is_outage: bool) {
    let was_suspected = IS_OUTAGE_SUSPECTED.swap(false, Ordering::Relaxed);
    let was_outage = IS_OUTAGE.swap(is_outage, Ordering::Relaxed);
    if is_outage && !was_outage {
        envoy_abi::log!(Warn, "all nodes in service refuse connections or do not answer: new clients wait");
    } else if was_outage && !is_outage {
        envoy_abi::log!(Info, "a node in service accepts connections again");
    }
    if !is_outage && (was_outage || was_suspected) {
        wakers::wake_all();
    }
}

/// The endpoint of the node at `address`, an `ip:port`. The endpoint is watched from now on. None: `address` is
/// invalid.
pub(crate) fn monitor(address: &str, node: &str) -> Option<Arc<MonitoredEndpoint>> {
    let address: SocketAddr = address.parse().ok()?;
    let new_endpoint = || {
        let state = AtomicU8::new(Reachability::Reachable as u8);
        Arc::new(MonitoredEndpoint { address, node: node.to_owned(), state, received_at: AtomicU64::new(0) })
    };
    Some(Arc::clone(endpoints().entry((address, node.to_owned())).or_insert_with(new_endpoint)))
}

/// All endpoints that the policy or a session holds. The others are removed. `is_watched`: whether the caller holds the
/// endpoint, too.
pub(crate) fn list_watched(is_watched: impl Fn(&EndpointKey) -> bool) -> Vec<Arc<MonitoredEndpoint>> {
    let mut all = endpoints();
    all.retain(|key, endpoint| Arc::strong_count(endpoint) > 1 + usize::from(is_watched(key)));
    all.values().cloned().collect()
}

/// What one worker knows about unreachable nodes.
#[derive(Default)]
pub(crate) struct WorkerReachability {
    /// The value of [`CHANGES`] when the worker last checked its sessions.
    seen: Cell<u64>,
    /// Sessions whose nodes were unreachable then, and that were not ended or moved yet.
    lost: SessionQueue,
}

/// Reacts to changes since the last call.
pub(crate) fn react(worker: &WorkerContext, turn: &Turn) {
    check_sessions(worker);
    leave_lost_nodes(worker, turn);
}

/// Checks the worker's sessions after a change.
///
/// For each suspected endpoint, this finds a session that has received something lately. If there is none, one of the
/// sessions sends a keepalive probe, whose answer the next check finds.
fn check_sessions(worker: &WorkerContext) {
    let changes = CHANGES.load(Ordering::Acquire);
    if worker.reachability.seen.get() == changes {
        return;
    }
    worker.reachability.seen.set(changes);
    let now = clock::now();
    let mut to_probe = HashMap::<EndpointKey, Rc<Session>>::new();
    let mut lost = VecDeque::new();
    worker.sessions.for_each(|session| {
        let Some(endpoint) = session.monitored_endpoint() else { return };
        if !endpoint.has_state(Reachability::Suspected) {
            session.restore_keepalive_time();
        }
        if endpoint.has_state(Reachability::Suspected) {
            if endpoint.has_received() {
                return;
            }
            let Some(quiet) = session.since_heard() else { return };
            if quiet < RECENT {
                endpoint.record_received(now.saturating_sub(quiet));
            } else {
                to_probe.entry((endpoint.address, endpoint.node.clone())).or_insert_with(|| Rc::clone(session));
            }
        } else if session.has_lost_node() {
            lost.push_back(Rc::downgrade(session));
        }
    });
    worker.reachability.lost.replace(lost);
    for session in to_probe.into_values() {
        if session.monitored_endpoint().is_some_and(|endpoint| !endpoint.has_received()) {
            session.send_keepalive_probe();
        }
    }
}

/// Ends the sessions whose nodes are unreachable, or begins to move them, until the turn is over. The next turn
/// continues.
fn leave_lost_nodes(worker: &WorkerContext, turn: &Turn) {
    let queue = &worker.reachability.lost;
    worker.run_queue(queue, turn, Session::has_lost_node, |session| session.handle(Event::NodeUnreachable));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_is_watched_as_long_as_a_session_holds_it() {
        let names = |is_watched: bool| -> Vec<String> {
            let watched = list_watched(|_| is_watched).into_iter().map(|endpoint| endpoint.node.clone());
            watched.filter(|name| name.starts_with("held-")).collect()
        };
        assert!(monitor("not an address", "held-none").is_none());
        let session = monitor("127.0.0.1:1", "held-a").expect("an address");
        let again = monitor("127.0.0.1:1", "held-a").expect("an address");
        assert!(Arc::ptr_eq(&session, &again));
        drop(again);
        assert_eq!(names(false), ["held-a"], "the caller does not hold the endpoint yet");
        let watch = Arc::clone(&session);
        assert_eq!(names(true), ["held-a"]);
        drop(session);
        assert!(names(true).is_empty());
        drop(watch);
        assert!(monitor("127.0.0.1:1", "held-a").is_some_and(|new| new.has_state(Reachability::Reachable)));
    }

    #[test]
    fn unused_endpoints_are_removed() {
        for index in 0..10_000 {
            drop(monitor("127.0.0.1:3", &format!("gone-{index}")));
        }
        assert!(list_watched(|_| false).iter().all(|endpoint| !endpoint.node.starts_with("gone-")));
        assert!(endpoints().keys().all(|(_, name)| !name.starts_with("gone-")));
    }

    #[test]
    fn latest_sign_of_life_is_returned_once() {
        let endpoint = monitor("127.0.0.1:2", "sign").expect("an address");
        assert_eq!(endpoint.take_received_at(), None);
        endpoint.record_received(Duration::from_millis(5));
        endpoint.record_received(Duration::from_millis(3));
        assert_eq!((endpoint.take_received_at(), endpoint.take_received_at()), (Some(Duration::from_millis(5)), None));
    }
}
