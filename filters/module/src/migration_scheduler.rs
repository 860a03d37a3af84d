//! Schedules the migrations of a worker: which sessions migrate, and in which order.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use envoy_abi::events::Events;
use migration::rate_limit::{Limiter, RateLimit};
use migration::state_machine::AbortReason;
use migration::timeouts::MigrationStep;

use crate::clock;
use crate::deadlines::{Deadline, DeadlineOwner, Deadlines};
use crate::delay_queue::DelayQueue;
use crate::migration_driver::{MigrationDriver, MigrationResult};
use crate::panics::CloseAfterPanic;
use crate::session::{MigrationBlocker, Session, StartResult};
use crate::switches;
use crate::worker::{self, SessionQueue, Turn, WorkerContext};

/// Shared by all workers.
static LIMITER: LazyLock<Mutex<Limiter>> =
    LazyLock::new(|| Mutex::new(Limiter::new(RateLimit::default(), clock::now())));

/// Whether migrations are possible on this machine.
static IS_POSSIBLE: LazyLock<bool> = LazyLock::new(|| match Events::self_test() {
    Ok(()) => true,
    Err(why) => {
        envoy_abi::log!(Warn, "sessions stay where they are, also when their nodes are drained: on this machine {why}");
        false
    }
});

/// How many clients may be held at the same time, over all workers, but at least one for each worker. The more clients
/// are held, the longer each of them waits for its nodes. A few are enough to keep the nodes busy.
const MAX_HELD: usize = 2;
/// How many migrations of a worker may start while their session is busy, so that they may have to wait for the end of
/// a statement. More of them would delay idle sessions.
const MAX_WAITING: usize = 16;
/// The time until a busy session beyond this limit is tried again.
const WAITING_RETRY: Duration = Duration::from_secs(1);

/// The migrations of one worker.
pub(crate) struct MigrationScheduler {
    /// Sessions that are to migrate, and have not started.
    queue: RefCell<DelayQueue<Weak<Session>>>,
    /// Passes when [`run_due`] has something to do.
    alarm: Deadline,
    /// How many clients count as held.
    holding: Cell<usize>,
    /// How many migrations have started while their session was busy, and still have their slot.
    waiting: Cell<usize>,
    /// A session that was selected for rebalancing could not migrate, so another one may be selected instead.
    needs_replacement: Cell<bool>,
    /// Sessions whose clients cannot be held yet, since too many others are held. The first one is next.
    hold_queue: RefCell<VecDeque<Weak<Session>>>,
    /// The states of nodes have changed, and [`apply_node_changes`] has not reacted yet.
    have_nodes_changed: Cell<bool>,
    /// Sessions that must be closed, since their nodes are force-closed.
    close_queue: SessionQueue,
}

impl MigrationScheduler {
    pub(crate) fn new(worker: &Weak<WorkerContext>, deadlines: &Rc<Deadlines>) -> Self {
        Self {
            queue: RefCell::default(),
            alarm: Deadline::new(deadlines, Duration::MAX, worker),
            holding: Cell::new(0),
            waiting: Cell::new(0),
            needs_replacement: Cell::new(false),
            hold_queue: RefCell::default(),
            have_nodes_changed: Cell::new(false),
            close_queue: RefCell::default(),
        }
    }
}

impl CloseAfterPanic for WorkerContext {
    fn close_after_panic(&self) {}
}

/// Handles [`MigrationScheduler::alarm`].
impl DeadlineOwner for WorkerContext {
    fn on_deadline(self: Rc<Self>) {
        run_due(&self);
    }
}

fn limiter() -> MutexGuard<'static, Limiter> {
    // Nothing panics while it is held.
    LIMITER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the rate limit, and tests whether migrations are possible.
pub(crate) fn configure(limit: RateLimit) {
    limiter().set_limit(limit);
    let _ = *IS_POSSIBLE;
}

/// Whether migrations are possible on this machine, and switched on.
pub(crate) fn is_possible() -> bool {
    *IS_POSSIBLE && switches::is_migration_on()
}

/// Must be called when the states of nodes have changed, or migrations were switched on or off. The worker reacts in
/// its next turn. It must not do so at once: Envoy may be choosing a node now, and then no session may be closed.
pub(crate) fn on_nodes_changed(worker: &WorkerContext) {
    worker.migrations.have_nodes_changed.set(true);
    worker.waker.wake();
}

/// Closes the sessions of force-closed nodes until the turn is over. The next turn continues.
pub(crate) fn close_sessions(worker: &WorkerContext, turn: &Turn) {
    let queue = &worker.migrations.close_queue;
    worker.run_queue(queue, turn, Session::is_on_force_closed_node, |session| {
        session.end_with_error("drain_deadline", mysql_proto::error::node_taken_away());
    });
}

/// Reacts to changed states of nodes: starts and cancels migrations, and collects the sessions to be closed.
pub(crate) fn apply_node_changes(worker: &WorkerContext) {
    if !worker.migrations.have_nodes_changed.take() {
        return;
    }
    let mut to_stop = Vec::<(Rc<Session>, Rc<MigrationDriver>)>::new();
    let mut to_close = VecDeque::new();
    worker.sessions.for_each(|session| {
        session.check_rebalance_round();
        if session.is_on_force_closed_node() {
            to_close.push_back(Rc::downgrade(session));
            return;
        }
        let driver = session
            .migration
            .driver()
            .filter(|driver| driver.is_target_draining() || !driver.is_failover() && !session.has_to_migrate());
        to_stop.extend(driver.map(|driver| (Rc::clone(session), driver)));
        if session.is_on_draining_node() && is_possible() && session.migration.request_migration() {
            enqueue(session);
        }
    });
    worker.migrations.close_queue.replace(to_close);
    // After `for_each`, during which no session may end.
    for (session, driver) in to_stop {
        if driver.is_failover() {
            session.retarget_failover(&driver);
        } else {
            driver.cancel();
        }
    }
    if is_possible() {
        select_for_rebalance(worker);
    }
}

/// Selects sessions of nodes with more than their share, within the quotas of these nodes. Idle sessions come first,
/// since their migration need not wait. True: at least one session was selected.
fn select_for_rebalance(worker: &WorkerContext) -> bool {
    let (sources, now) = (worker.hosts.rebalance_sources(), clock::now());
    let has_any = Cell::new(false);
    for idle in [true, false].into_iter().filter(|_| !sources.is_empty()) {
        worker.sessions.for_each(|session| {
            if session.may_rebalance(idle, &sources, now) && session.reserve_rebalance() {
                enqueue(session);
                has_any.set(true);
            }
        });
    }
    has_any.get()
}

/// Must be called when a session cannot migrate. True: the session stays, since only rebalancing wanted it to migrate.
fn give_up_rebalance(session: &Session, why: MigrationBlocker) -> bool {
    let has_given_up = session.give_up_rebalance(why);
    if has_given_up && why != MigrationBlocker::Nodes {
        session.worker.migrations.needs_replacement.set(true);
    }
    has_given_up
}

/// Queues a session until its backoffs have passed. If it first has to run another statement, defers its migration
/// until it is idle after that.
pub(crate) fn enqueue(session: &Rc<Session>) {
    let Some(until) = session.migration.export_backoff.get().retry_at() else {
        return session.migration.defer_until_idle();
    };
    let until = until.max(session.migration.backoff.borrow().retry_at());
    session.worker.migrations.queue.borrow_mut().push(Rc::downgrade(session), until, clock::now());
}

/// Starts the migrations that are due.
pub(crate) fn run_due(worker: &WorkerContext) {
    let scheduler = &worker.migrations;
    if scheduler.queue.borrow().is_empty() && !scheduler.needs_replacement.get() {
        return;
    }
    let now = clock::now();
    let mut pause = Duration::from_secs(1);
    loop {
        let next = scheduler.queue.borrow_mut().pop_ready(now);
        let Some(next) = next else {
            if scheduler.needs_replacement.take() && is_possible() && select_for_rebalance(worker) {
                continue;
            }
            break;
        };
        let Some(session) = next.upgrade().filter(|session| session.migration.driver().is_none()) else { continue };
        if !session.has_to_migrate() {
            session.give_up_rebalance(MigrationBlocker::NotNow);
            session.migration.clear_request();
            continue;
        }
        if session.is_rebalance_blocked() && give_up_rebalance(&session, MigrationBlocker::NotNow) {
            continue;
        }
        let is_busy = !session.is_idle();
        if is_busy && scheduler.waiting.get() >= MAX_WAITING {
            scheduler.queue.borrow_mut().push(next, now + WAITING_RETRY, now);
            continue;
        }
        if !limiter().try_acquire(now) {
            pause = limiter().time_until_token().clamp(Duration::from_millis(1), pause);
            scheduler.queue.borrow_mut().push_front(next);
            break;
        }
        match session.start_migration(None) {
            StartResult::Started => {
                if is_busy && let Some(driver) = session.migration.driver() {
                    scheduler.waiting.set(scheduler.waiting.get() + 1);
                    driver.set_waiting();
                }
                continue;
            }
            StartResult::Deferred => session.migration.defer_until_idle(),
            StartResult::Blocked(why) if give_up_rebalance(&session, why) => {}
            StartResult::Blocked(_) => {
                session.migration.backoff.borrow_mut().record_failure(None, now);
                enqueue(&session);
            }
        }
        // No migration has started.
        limiter().release();
    }
    let queue = scheduler.queue.borrow();
    let pause = queue.next_due().map_or(pause, |due| due.saturating_sub(now).min(pause));
    scheduler.alarm.set(if queue.is_empty() { Duration::MAX } else { pause });
}

/// How many clients one worker may hold.
fn max_held() -> usize {
    (MAX_HELD / worker::worker_count()).max(1)
}

/// True: the client of the session may be held, and counts as held until [`release_slots`]. False: the session waits in
/// the hold queue.
pub(crate) fn try_hold(session: &Rc<Session>) -> bool {
    let scheduler = &session.worker.migrations;
    let is_allowed = scheduler.holding.get() < max_held();
    if is_allowed {
        scheduler.holding.set(scheduler.holding.get() + 1);
    } else if session.migration.join_hold_queue() {
        scheduler.hold_queue.borrow_mut().push_back(Rc::downgrade(session));
    }
    is_allowed
}

/// Releases the slots of a migration that has ended, or takes so long that other migrations should not wait.
pub(crate) fn release_slots(worker: &WorkerContext, driver: &MigrationDriver) {
    let slots = driver.take_slots();
    if slots.running {
        limiter().release();
    }
    let scheduler = &worker.migrations;
    scheduler.waiting.set(scheduler.waiting.get().saturating_sub(usize::from(slots.waiting)));
    scheduler.holding.set(scheduler.holding.get().saturating_sub(usize::from(slots.holding)));
    if slots.holding {
        admit_from_hold_queue(scheduler);
    }
}

/// Lets sessions of the hold queue continue, as many as may be held.
fn admit_from_hold_queue(scheduler: &MigrationScheduler) {
    let next = || {
        let is_allowed = scheduler.holding.get() < max_held();
        is_allowed.then(|| scheduler.hold_queue.borrow_mut().pop_front()).flatten()
    };
    while let Some(next) = next() {
        if let Some(session) = next.upgrade() {
            session.migration.leave_hold_queue();
            session.on_quiescent();
        }
    }
}

/// Counts a failover, which starts regardless of the rate limit.
pub(crate) fn start_failover() {
    limiter().acquire_unconditionally();
}

/// Must be called when a migration has ended.
pub(crate) fn on_migration_finished(session: &Rc<Session>, driver: &MigrationDriver, result: MigrationResult) {
    session.on_migration_finished(result);
    session.return_to_envoy_if_switched_off();
    release_slots(&session.worker, driver);
    match result {
        MigrationResult::Aborted(reason) if give_up_rebalance(session, MigrationBlocker::from_abort_reason(reason)) => {
        }
        MigrationResult::Migrated => {
            session.migration.clear_request();
            // The new node may be draining by now, too.
            if session.is_on_draining_node() && session.migration.request_migration() {
                enqueue(session);
            }
        }
        // The session is tried again when its statement or transaction ends.
        MigrationResult::Aborted(AbortReason::TimedOut(MigrationStep::WaitingForIdle)) => {
            session.migration.defer_until_idle();
        }
        MigrationResult::Aborted(_) => enqueue(session),
        MigrationResult::Lost => return,
    }
    run_due(&session.worker);
}
