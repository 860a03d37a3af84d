//! Logins that wait for a node.
//!
//! While no node of any group is in service, or all of them refuse connections, a new connection is withheld from Envoy's
//! proxy, which would close it at once. Each worker lets its waiting connections continue in the order of their arrival
//! as soon as a node accepts sessions.

use std::cell::Cell;
use std::rc::Rc;

use crate::reachability;
use crate::session::Session;
use crate::slot::Slots;
use crate::worker::{SessionQueue, Turn, WorkerContext};

/// The waiting logins of all workers.
pub(crate) static WAITING: Slots = Slots::new();

/// The logins of all workers that try nodes again and again, since all that they have tried refuse connections.
pub(crate) static RETRYING: Slots = Slots::new();

/// The maximum of [`RETRYING`]. Their attempts, about 20 per second each, must not keep the workers from other work.
pub(crate) const MAX_RETRYING: u64 = 100;

/// How many logins of one worker that have waited may connect at the same time. If all of them connected at once, the
/// nodes could not greet them in time.
const MAX_CONNECTING: usize = 100;

/// The withheld connections of one worker, the oldest first.
#[derive(Default)]
pub(crate) struct WaitingLogins {
    queue: SessionQueue,
    /// How many logins that have waited are connecting.
    connecting: Cell<usize>,
}

/// Counts a login that has waited, until a node has greeted it. Then another one may connect.
pub(crate) struct ConnectingSlot(Rc<WorkerContext>);

impl ConnectingSlot {
    pub(crate) fn new(worker: &Rc<WorkerContext>) -> Self {
        let connecting = &worker.waiting_logins.connecting;
        connecting.set(connecting.get() + 1);
        Self(Rc::clone(worker))
    }
}

impl Drop for ConnectingSlot {
    fn drop(&mut self) {
        let waiting = &self.0.waiting_logins;
        waiting.connecting.set(waiting.connecting.get() - 1);
        if !waiting.is_empty() {
            self.0.waker.wake();
        }
    }
}

impl WaitingLogins {
    pub(crate) fn add(&self, session: &Rc<Session>) {
        let mut waiting = self.queue.borrow_mut();
        // Those that have left are at the front sooner or later, since all wait equally long.
        while waiting.front().is_some_and(|first| first.strong_count() == 0) {
            waiting.pop_front();
        }
        waiting.push_back(Rc::downgrade(session));
    }

    /// False: a new login has to wait behind others.
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.borrow().is_empty()
    }
}

/// Whether a node may accept sessions.
pub(crate) fn has_node(worker: &WorkerContext) -> bool {
    worker.hosts.has_open_node() && !reachability::is_outage()
}

/// Lets waiting connections continue until the turn is over, if a node may accept sessions. The next turn continues.
pub(crate) fn resume(worker: &WorkerContext, turn: &Turn) {
    if worker.waiting_logins.is_empty() || !has_node(worker) {
        return;
    }
    let waiting = &worker.waiting_logins;
    let may_connect = || waiting.connecting.get() < MAX_CONNECTING;
    worker.run_queue_while(&waiting.queue, turn, may_connect, |_| true, Session::stop_waiting);
}
