//! The memory that sessions' states take up, of the whole process; and the states of this worker's sessions that are kept
//! although no move needs them now.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use session::budget::{Budget, MemoryLimits};
use session::restore::RestoreStatement;

use crate::session::Session;

static DEFAULTS: LazyLock<MemoryLimits> = LazyLock::new(MemoryLimits::default);
static BUDGET: LazyLock<Arc<Budget>> = LazyLock::new(|| Arc::clone(&DEFAULTS.budget));
static PER_SESSION: LazyLock<AtomicUsize> = LazyLock::new(|| AtomicUsize::new(DEFAULTS.per_session));

/// What is kept, the oldest first.
type Kept = VecDeque<(Weak<RestoreStatement>, Weak<Session>)>;

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::default();
    /// Sessions of this worker whose nodes may send states now.
    static EXPORTING: Cell<usize> = const { Cell::new(0) };
}

/// Bytes of states that a worker reads in one turn, of all its sessions, or a little more.
const IN_A_TURN: usize = 128 * 1024;
/// Bytes that are read at once at least.
const SHORTEST_READ: usize = 4 * 1024;

/// A session is held, and its node may send states, as long as this is there.
pub(crate) struct Exporting(());

impl Exporting {
    pub(crate) fn begin() -> Self {
        EXPORTING.set(EXPORTING.get() + 1);
        Self(())
    }
}

impl Drop for Exporting {
    fn drop(&mut self) {
        EXPORTING.set(EXPORTING.get().saturating_sub(1));
    }
}

/// How many bytes are read at once from a node that may send states: each of them sends as many in a turn.
pub(crate) fn read_size() -> usize {
    (IN_A_TURN / EXPORTING.get().max(1)).max(SHORTEST_READ)
}

/// From now on one session's states may have so many bytes, and all together.
pub(crate) fn set_limits(per_session: usize, budget: usize) {
    PER_SESSION.store(per_session, Ordering::Relaxed);
    BUDGET.set_limit(budget);
}

/// How much memory a move may take.
pub(crate) fn limits() -> MemoryLimits {
    MemoryLimits { per_session: PER_SESSION.load(Ordering::Relaxed), budget: Arc::clone(&BUDGET) }
}

/// Bytes that all states take up now.
pub(crate) fn used() -> usize {
    BUDGET.used()
}

/// These states of a session are to be kept. Where there is no room, older ones of this worker are dropped: a session whose
/// node breaks off is then not saved. False: even so there is none.
pub(crate) fn keep(session: &Rc<Session>, statement: &Rc<RestoreStatement>) -> bool {
    while !statement.keep() {
        let oldest = KEPT.with_borrow_mut(VecDeque::pop_front);
        let Some((oldest, session)) = oldest else { return false };
        if oldest.strong_count() > 0
            && let Some(session) = session.upgrade()
        {
            session.travel.keep(None);
        }
    }
    KEPT.with_borrow_mut(|kept| {
        while kept.front().is_some_and(|(oldest, _)| oldest.strong_count() == 0) {
            kept.pop_front();
        }
        kept.push_back((Rc::downgrade(statement), Rc::downgrade(session)));
    });
    true
}
