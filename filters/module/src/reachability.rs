//! Which nodes no longer answer, and what a worker does about it.
//!
//! The main thread watches the addresses of nodes for all workers ([`crate::sentinels`]). It watches an address as
//! long as at least one [`MonitoredEndpoint`] for it exists. The load-balancing policy holds one for each node that may get
//! new sessions, and each session holds one for its node.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use migration::sentinel::Reachability;

use crate::session::Session;
use crate::worker::WorkerContext;
use crate::{clock, wakers};

/// A sign of life that is older than this is older than the sentinel's suspicion.
const RECENT: Duration = Duration::from_secs(2);

/// Sessions that a worker ends, or begins to move, before it handles other events.
const SESSIONS_PER_TURN: usize = 256;

/// An address, and the control plane's name for the node.
pub(crate) type EndpointKey = (SocketAddr, String);

type Endpoints = HashMap<EndpointKey, Arc<MonitoredEndpoint>>;

static ENDPOINTS: LazyLock<Mutex<Endpoints>> = LazyLock::new(Mutex::default);

/// Counts the changes that workers have to react to.
static CHANGES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// [`CHANGES`] when this worker reacted last.
    static SEEN: Cell<u64> = const { Cell::new(0) };
}

/// An address of a node. Shared by all workers.
#[derive(Debug)]
pub(crate) struct MonitoredEndpoint {
    pub(crate) address: SocketAddr,
    /// The control plane's name for the node.
    pub(crate) node: String,
    state: AtomicU8,
    /// When a session received something from it, in milliseconds of `clock`. 0: not since the last
    /// [`Self::take_heard`].
    heard_at: AtomicU64,
}

impl MonitoredEndpoint {
    pub(crate) fn has_state(&self, state: Reachability) -> bool {
        self.state.load(Ordering::Relaxed) == state as u8
    }

    /// Sets a new state, and has the workers react to it.
    pub(crate) fn set_state(&self, state: Reachability) {
        self.state.store(state as u8, Ordering::Relaxed);
        notify_workers();
    }

    /// When a session received something from it since the last call.
    pub(crate) fn take_heard(&self) -> Option<Duration> {
        Some(self.heard_at.swap(0, Ordering::Relaxed)).filter(|&at| at > 0).map(Duration::from_millis)
    }

    fn has_heard(&self) -> bool {
        self.heard_at.load(Ordering::Relaxed) > 0
    }

    fn record_heard(&self, at: Duration) {
        self.heard_at.fetch_max(u64::try_from(at.as_millis()).unwrap_or(0), Ordering::Relaxed);
    }
}

/// Has all workers check their sessions.
pub(crate) fn notify_workers() {
    // With the load in `look`: a worker that sees the change also sees the state that was set before.
    CHANGES.fetch_add(1, Ordering::Release);
    wakers::wake_all();
}

fn endpoints() -> MutexGuard<'static, Endpoints> {
    // Nothing panics while it is held.
    ENDPOINTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The node of that name at that `ip:port`, which is watched from now on. None: that is no IP address.
pub(crate) fn monitor(address: &str, node: &str) -> Option<Arc<MonitoredEndpoint>> {
    let address: SocketAddr = address.parse().ok()?;
    let new_endpoint = || {
        let state = AtomicU8::new(Reachability::Reachable as u8);
        Arc::new(MonitoredEndpoint { address, node: node.to_owned(), state, heard_at: AtomicU64::new(0) })
    };
    Some(Arc::clone(endpoints().entry((address, node.to_owned())).or_insert_with(new_endpoint)))
}

/// All endpoints that the policy or a session holds; the others are removed. `is_watched`: whether the caller holds it, too.
pub(crate) fn list_watched(is_watched: impl Fn(&EndpointKey) -> bool) -> Vec<Arc<MonitoredEndpoint>> {
    let mut all = endpoints();
    all.retain(|key, endpoint| Arc::strong_count(endpoint) > 1 + usize::from(is_watched(key)));
    all.values().cloned().collect()
}

/// Checks this worker's sessions after a change.
///
/// At a suspected address it looks for a session that has received something lately. If there is none, one of them requests
/// an answer of the kernel there, which the next check finds. Sessions at an unreachable address end, or move elsewhere.
pub(crate) fn check_sessions(worker: &WorkerContext) {
    let changes = CHANGES.load(Ordering::Acquire);
    if SEEN.get() == changes {
        return;
    }
    let now = clock::now();
    let to_probe = RefCell::new(HashMap::<EndpointKey, Rc<Session>>::new());
    let lost = RefCell::new(Vec::<Rc<Session>>::new());
    worker.sessions.for_each(|session| {
        let Some(endpoint) = session.monitored_endpoint() else { return };
        if !endpoint.has_state(Reachability::Suspected) {
            session.restore_keepalive_time();
        }
        if endpoint.has_state(Reachability::Suspected) {
            if endpoint.has_heard() {
                return;
            }
            let Some(quiet) = session.since_heard() else { return };
            if quiet < RECENT {
                endpoint.record_heard(now.saturating_sub(quiet));
            } else {
                to_probe
                    .borrow_mut()
                    .entry((endpoint.address, endpoint.node.clone()))
                    .or_insert_with(|| Rc::clone(session));
            }
        } else if endpoint.has_state(Reachability::Unreachable)
            && lost.borrow().len() <= SESSIONS_PER_TURN
            && session.depends_on_lost_node()
        {
            lost.borrow_mut().push(Rc::clone(session));
        }
    });
    for session in to_probe.into_inner().into_values() {
        if session.monitored_endpoint().is_some_and(|endpoint| !endpoint.has_heard()) {
            session.send_keepalive_probe();
        }
    }
    let mut lost = lost.into_inner();
    if lost.len() > SESSIONS_PER_TURN {
        lost.truncate(SESSIONS_PER_TURN);
        worker.waker.continue_later();
    } else {
        SEEN.set(changes);
    }
    for session in lost {
        session.on_node_unreachable();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_watched_as_long_as_it_is_held() {
        let names = |is_watched: bool| -> Vec<String> {
            let here = list_watched(|_| is_watched).into_iter().map(|endpoint| endpoint.node.clone());
            here.filter(|name| name.starts_with("held-")).collect()
        };
        assert!(monitor("not an address", "held-none").is_none());
        let session = monitor("127.0.0.1:1", "held-a").expect("an address");
        let again = monitor("127.0.0.1:1", "held-a").expect("an address");
        assert!(Arc::ptr_eq(&session, &again));
        drop(again);
        assert_eq!(names(false), ["held-a"], "before anybody watches it");
        let watch = Arc::clone(&session);
        assert_eq!(names(true), ["held-a"]);
        drop(session);
        assert!(names(true).is_empty());
        drop(watch);
        assert!(monitor("127.0.0.1:1", "held-a").is_some_and(|new| new.has_state(Reachability::Reachable)));
    }

    #[test]
    fn a_sign_of_life_is_taken_once() {
        let endpoint = monitor("127.0.0.1:2", "sign").expect("an address");
        assert_eq!(endpoint.take_heard(), None);
        endpoint.record_heard(Duration::from_millis(5));
        endpoint.record_heard(Duration::from_millis(3));
        assert_eq!((endpoint.take_heard(), endpoint.take_heard()), (Some(Duration::from_millis(5)), None));
    }
}
