//! The deadlines of a worker. Network filters have no timers, so Envoy's main thread wakes the worker when its first
//! deadline is due: see [`NextTurn`].
//!
//! Each deadline has one owner, which is called when the deadline has passed. Deadlines take no lock.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use crate::clock;
use crate::panics::{CloseAfterPanic, run_guarded};
use crate::wakers::{NEVER, NextTurn};
use crate::worker::Turn;

/// The owner of a deadline.
pub(crate) trait DeadlineOwner: CloseAfterPanic {
    /// The deadline has passed. The owner is not called again unless it sets the deadline again.
    fn on_deadline(self: Rc<Self>);
}

/// An entry of the queue. Setting a later time leaves the queue unchanged until the earlier time has come. This makes
/// it cheap to set a session's idle timeout for each command.
struct Entry {
    id: u64,
    due_at: Cell<u64>,
    /// The time under which the entry is in the queue. [`NEVER`]: the entry is not in the queue.
    queued_at: Cell<u64>,
    owner: Weak<dyn DeadlineOwner>,
}

/// The deadlines of one worker.
pub(crate) struct Deadlines {
    /// By time in milliseconds of `clock`, then by id.
    queue: RefCell<BTreeMap<(u64, u64), Rc<Entry>>>,
    next_id: Cell<u64>,
    next_turn: Arc<NextTurn>,
}

/// A deadline, which is cancelled when it is dropped.
pub(crate) struct Deadline {
    entry: Rc<Entry>,
    deadlines: Rc<Deadlines>,
}

/// What was found at the front of the queue.
enum Front {
    /// Nothing is due.
    NotDue,
    /// The deadline was set to a later time.
    Later,
    Due(Weak<dyn DeadlineOwner>),
}

impl Deadlines {
    pub(crate) fn new(next_turn: &Arc<NextTurn>) -> Rc<Self> {
        Rc::new(Self { queue: RefCell::default(), next_id: Cell::new(0), next_turn: Arc::clone(next_turn) })
    }

    /// Calls the owners of passed deadlines until the turn is over. If passed deadlines are left, the main thread finds
    /// that the first one is due, and the next turn follows.
    pub(crate) fn run_due(&self, turn: &Turn) {
        self.run_until(now(), turn, &call);
    }

    fn run_until(&self, now: u64, turn: &Turn, call: &dyn Fn(Rc<dyn DeadlineOwner>)) {
        loop {
            match self.pop_due(now) {
                Front::NotDue => break,
                Front::Later => {}
                Front::Due(owner) => {
                    owner.upgrade().map(call);
                }
            }
            if turn.is_over() {
                break;
            }
        }
        self.publish();
    }

    fn pop_due(&self, now: u64) -> Front {
        let mut queue = self.queue.borrow_mut();
        let Some(first) = queue.first_entry().filter(|first| first.key().0 <= now) else { return Front::NotDue };
        let entry = first.remove();
        entry.queued_at.set(NEVER);
        if entry.due_at.get() <= now {
            return Front::Due(Weak::clone(&entry.owner));
        }
        insert(&mut queue, entry);
        Front::Later
    }

    /// Sets when an entry is due.
    fn set(&self, entry: &Rc<Entry>, at: u64) {
        entry.due_at.set(at);
        if at < entry.queued_at.get() {
            {
                let mut queue = self.queue.borrow_mut();
                queue.remove(&(entry.queued_at.get(), entry.id));
                insert(&mut queue, Rc::clone(entry));
            }
            self.publish();
        }
    }

    fn remove(&self, entry: &Entry) {
        if entry.queued_at.get() != NEVER {
            self.queue.borrow_mut().remove(&(entry.queued_at.get(), entry.id));
            self.publish();
        }
    }

    /// Publishes to the main thread when the first deadline is due.
    fn publish(&self) {
        let first = self.queue.borrow().first_key_value().map_or(NEVER, |((at, _), _)| *at);
        self.next_turn.set_deadline(first);
    }
}

fn insert(queue: &mut BTreeMap<(u64, u64), Rc<Entry>>, entry: Rc<Entry>) {
    let at = entry.due_at.get();
    entry.queued_at.set(at);
    if at != NEVER {
        queue.insert((at, entry.id), entry);
    }
}

fn call(owner: Rc<dyn DeadlineOwner>) {
    run_guarded("a deadline", &*owner, || Rc::clone(&owner).on_deadline());
}

impl Deadline {
    /// Creates a deadline that calls `owner` after the time `after`.
    pub(crate) fn new<T: DeadlineOwner + 'static>(deadlines: &Rc<Deadlines>, after: Duration, owner: &Weak<T>) -> Self {
        let owner: Weak<dyn DeadlineOwner> = Weak::<T>::clone(owner);
        let id = deadlines.next_id.get();
        deadlines.next_id.set(id + 1);
        let entry = Rc::new(Entry { id, due_at: Cell::new(NEVER), queued_at: Cell::new(NEVER), owner });
        let deadline = Self { entry, deadlines: Rc::clone(deadlines) };
        deadline.set(after);
        deadline
    }

    /// Sets the deadline to the time `after` from now.
    pub(crate) fn set(&self, after: Duration) {
        // Rounded up, so that the deadline does not pass too early.
        let at = clock::now().saturating_add(after).as_nanos().div_ceil(1_000_000);
        self.deadlines.set(&self.entry, u64::try_from(at).unwrap_or(NEVER));
    }

    /// Whether the deadline has passed. The worker may call the owner later.
    pub(crate) fn has_passed(&self) -> bool {
        now() >= self.entry.due_at.get()
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        self.deadlines.remove(&self.entry);
    }
}

/// The current time in milliseconds of `clock`, the unit of deadlines.
pub(crate) fn now() -> u64 {
    u64::try_from(clock::now().as_millis()).unwrap_or(NEVER)
}

#[cfg(test)]
mod tests;
