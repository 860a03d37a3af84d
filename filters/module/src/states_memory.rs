//! The memory that the states of sessions take in this process, and the states that a worker keeps after a migration,
//! for a failover if the node fails.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use migration::budget::{Budget, MemoryLimits};
use migration::restore::RestoreStatement;

use crate::session::Session;

static DEFAULTS: LazyLock<MemoryLimits> = LazyLock::new(MemoryLimits::default);
static BUDGET: LazyLock<Arc<Budget>> = LazyLock::new(|| Arc::clone(&DEFAULTS.budget));
static PER_SESSION: LazyLock<AtomicUsize> = LazyLock::new(|| AtomicUsize::new(DEFAULTS.per_session));

/// The states that are kept, the oldest first.
type RetainedStates = VecDeque<(Weak<RestoreStatement>, Weak<Session>)>;

/// The states of one worker's sessions.
#[derive(Default)]
pub(crate) struct WorkerStates {
    retained: RefCell<RetainedStates>,
    /// The number of sessions whose nodes may send states now.
    exporting: Rc<Cell<usize>>,
}

/// About how many bytes of states a worker reads for all its sessions before it handles other events.
const TURN_BYTES: usize = 128 * 1024;
const MIN_READ: usize = 4 * 1024;

/// Exists while the module holds a client whose node may send states.
pub(crate) struct ExportGuard(Rc<Cell<usize>>);

impl WorkerStates {
    pub(crate) fn begin_export(&self) -> ExportGuard {
        self.exporting.set(self.exporting.get() + 1);
        ExportGuard(Rc::clone(&self.exporting))
    }

    /// How many bytes are read at once from a node that may send states. All such nodes share [`TURN_BYTES`].
    pub(crate) fn read_size(&self) -> usize {
        (TURN_BYTES / self.exporting.get().max(1)).max(MIN_READ)
    }
}

impl Drop for ExportGuard {
    fn drop(&mut self) {
        self.0.set(self.0.get().saturating_sub(1));
    }
}

/// Sets how many bytes the states of one session, and of all sessions, may take.
pub(crate) fn set_limits(per_session: usize, budget: usize) {
    PER_SESSION.store(per_session, Ordering::Relaxed);
    BUDGET.set_limit(budget);
}

/// The limits for the memory of a migration.
pub(crate) fn limits() -> MemoryLimits {
    MemoryLimits { per_session: PER_SESSION.load(Ordering::Relaxed), budget: Arc::clone(&BUDGET) }
}

/// The number of bytes that all states take now.
pub(crate) fn used() -> usize {
    BUDGET.used()
}

/// Keeps the states of a session. If there is no room, the oldest states that this worker keeps are dropped; their
/// sessions then end if their nodes fail. False: there is no room, since other workers keep too many states.
pub(crate) fn retain(session: &Rc<Session>, statement: &Rc<RestoreStatement>) -> bool {
    let retained = &session.worker.states.retained;
    let mut freed = 0;
    while !statement.retain() {
        if freed >= statement.reserved_bytes() {
            return false; // others took what was freed
        }
        let oldest = retained.borrow_mut().pop_front();
        let Some((oldest, session)) = oldest else { return false };
        if let Some(oldest) = oldest.upgrade()
            && let Some(session) = session.upgrade()
        {
            freed += oldest.reserved_bytes();
            session.kept_states.set(None);
        }
    }
    let mut retained = retained.borrow_mut();
    while retained.front().is_some_and(|(oldest, _)| oldest.strong_count() == 0) {
        retained.pop_front();
    }
    retained.push_back((Rc::downgrade(statement), Rc::downgrade(session)));
    true
}
