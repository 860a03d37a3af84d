//! The deadlines of a worker. Network filters have no timers, so Envoy's main thread wakes the worker when the first one is
//! due: see [`NextTurn`].
//!
//! Each belongs to one owner, and only that owner is called. Nothing here takes a lock.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use crate::clock;
use crate::wakers::{NEVER, NextTurn};
use crate::worker::Turn;

/// Who has deadlines.
pub(crate) trait DeadlineOwner {
    /// A deadline has passed. It is not reported again before it is set again.
    fn on_deadline(self: Rc<Self>);
    /// [`Self::on_deadline`] has panicked: closes the session that the owner serves, if any.
    fn close_after_panic(&self);
}

/// The access log's reason for a session that was closed after a panic.
pub(crate) const PANIC_REASON: &str = "tidevoy_bug";

/// When a deadline is due. The queue finds out that it was set to a later time when the earlier one has come: the idle
/// timeout of a session is set for each of its commands.
struct Entry {
    id: u64,
    due_at: Cell<u64>,
    /// By which time it is in the queue. [`NEVER`]: it is not in it.
    queued_at: Cell<u64>,
    owner: Weak<dyn DeadlineOwner>,
}

/// The deadlines of one worker.
pub(crate) struct Deadlines {
    /// By time, in milliseconds of `clock`, and then in the order in which they were created.
    queue: RefCell<BTreeMap<(u64, u64), Rc<Entry>>>,
    next_id: Cell<u64>,
    next_turn: Arc<NextTurn>,
}

/// A deadline. It is removed when it is dropped.
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

    /// Calls the owners of the deadlines that have passed, as many as the turn has time for. The next turn follows, since the
    /// main thread finds that the first deadline is due.
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

    /// It is due at that time.
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

    /// Tells the main thread when the first deadline is due.
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
    let is_done = envoy_abi::guarded("a deadline", false, || {
        Rc::clone(&owner).on_deadline();
        true
    });
    if !is_done {
        envoy_abi::guarded("closing after a panic", (), || owner.close_after_panic());
    }
}

impl Deadline {
    /// `owner` is called when `after` has passed.
    pub(crate) fn new<T: DeadlineOwner + 'static>(deadlines: &Rc<Deadlines>, after: Duration, owner: &Weak<T>) -> Self {
        let owner: Weak<dyn DeadlineOwner> = Weak::<T>::clone(owner);
        let id = deadlines.next_id.get();
        deadlines.next_id.set(id + 1);
        let entry = Rc::new(Entry { id, due_at: Cell::new(NEVER), queued_at: Cell::new(NEVER), owner });
        let deadline = Self { entry, deadlines: Rc::clone(deadlines) };
        deadline.set(after);
        deadline
    }

    /// The owner has so much time from now on.
    pub(crate) fn set(&self, after: Duration) {
        // Rounded up: it has not passed before.
        let at = clock::now().saturating_add(after).as_nanos().div_ceil(1_000_000);
        self.deadlines.set(&self.entry, u64::try_from(at).unwrap_or(NEVER));
    }

    /// Whether it has passed. A worker may handle it later.
    pub(crate) fn has_passed(&self) -> bool {
        now() >= self.entry.due_at.get()
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        self.deadlines.remove(&self.entry);
    }
}

/// Milliseconds of `clock`, as deadlines are counted.
pub(crate) fn now() -> u64 {
    u64::try_from(clock::now().as_millis()).unwrap_or(NEVER)
}

#[cfg(test)]
mod tests;
