//! Offloaded connections: the module gets their events directly, in batches, instead of Envoy.
//!
//! The module serves an established session without Envoy as long as it can forward all bytes directly. In all other
//! cases (a full socket buffer, the end of a connection, a failure) it returns the connection to Envoy, and Envoy's
//! hooks continue.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeSet;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::time::Duration;

use envoy_abi::events::{Event, Events, SwapResult};
use envoy_abi::socket::{IoOutcome, Socket};

use crate::clock;
use crate::conn::{Conn, ReadStep};
use crate::panics::{CloseAfterPanic, run_guarded};
use crate::switches;

/// How often Envoy reads from an established connection before the connection is offloaded. Offloading takes some
/// system calls, which is too expensive for a connection that runs only a statement or two.
const READS_BEFORE_OFFLOAD: u8 = 4;

/// The time until the search for the worker's epoll descriptor is retried. The time doubles with each failure, since
/// the search reads an entry of `/proc` for each descriptor of the process.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// A connection that can be offloaded.
pub(crate) trait OffloadedConn {
    fn conn(&self) -> &Conn;
    /// Whether the session is established, so that its bytes may be forwarded directly.
    fn is_established(&self) -> bool;
    /// Reads once: the `step` of [`Conn::read`].
    fn step(&self, buffer: &mut [u8], passed: &mut usize) -> ReadStep;
    /// Called after each event of the connection, when all received bytes are passed on.
    fn on_quiescent(&self) {}
}

/// A descriptor of the module itself, which Envoy does not know.
pub(crate) trait AuxFd: CloseAfterPanic {
    /// The descriptor is readable, writable, or closed by the peer.
    fn on_event(self: Rc<Self>);
}

/// The receiver of an event.
#[derive(Clone)]
enum EventTarget {
    Conn(Weak<dyn OffloadedConn>),
    AuxFd(Weak<dyn AuxFd>),
}

/// Envoy's read hook: this connection is readable, or, if it is offloaded, any offloaded connection.
pub(crate) fn read<M: OffloadedConn + 'static>(offloaded: &Rc<M>) -> IoOutcome {
    let conn = offloaded.conn();
    if conn.key().is_some() {
        process_events(&conn.worker.events);
        return IoOutcome::open(conn.take_unreported_rx());
    }
    let outcome = conn.read(|buffer, passed| offloaded.step(buffer, passed));
    offloaded.on_quiescent();
    let stays = !outcome.close && !outcome.end_of_stream && offloaded.is_established();
    if stays && switches::is_offload_on() && conn.count_read() >= READS_BEFORE_OFFLOAD && conn.is_quiescent() {
        offload(Rc::clone(offloaded) as Rc<dyn OffloadedConn>);
    }
    outcome
}

/// Names the target of an event: its slot, and the generation of the slot, which changes with each new target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EventKey {
    slot: u32,
    generation: u32,
}

impl EventKey {
    fn to_u64(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.slot)
    }

    const fn from_u64(number: u64) -> Self {
        Self { slot: number as u32, generation: (number >> 32) as u32 }
    }
}

#[derive(Default)]
struct Slot {
    generation: u32,
    target: Option<EventTarget>,
}

/// The event targets of one worker.
#[derive(Default)]
struct EventTargets {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// The slots of connections, for [`Self::any_conn`].
    conns: BTreeSet<u32>,
}

impl EventTargets {
    fn add(&mut self, target: EventTarget) -> EventKey {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        if let EventTarget::Conn(_) = target {
            self.conns.insert(index);
        }
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.target = Some(target);
        EventKey { slot: index, generation: slot.generation }
    }

    fn remove(&mut self, key: EventKey) {
        if let Some(slot) = self.slots.get_mut(key.slot as usize)
            && slot.generation == key.generation
            && slot.target.take().is_some()
        {
            self.free.push(key.slot);
            self.conns.remove(&key.slot);
        }
    }

    /// The target of `key`. None: the target was removed before its event was handled.
    fn find(&self, key: EventKey) -> Option<EventTarget> {
        self.slots.get(key.slot as usize).filter(|slot| slot.generation == key.generation)?.target.clone()
    }

    /// Any offloaded connection.
    fn any_conn(&self) -> Option<Rc<dyn OffloadedConn>> {
        self.conns.iter().find_map(|&slot| match self.slots[slot as usize].target.as_ref()? {
            EventTarget::Conn(offloaded) => offloaded.upgrade(),
            EventTarget::AuxFd(_) => None,
        })
    }
}

/// When the search for the worker's epoll descriptor is retried.
#[derive(Debug, Clone, Copy, Default)]
struct SearchBackoff {
    failures: u32,
    retry_at: Duration,
}

impl SearchBackoff {
    fn after_failure(self, now: Duration) -> Self {
        let wait = FIRST_RETRY.saturating_mul(1_u32.checked_shl(self.failures).unwrap_or(u32::MAX)).min(LONGEST_RETRY);
        Self { failures: self.failures.saturating_add(1), retry_at: now + wait }
    }
}

/// The offloaded connections of one worker, and its other event targets.
#[derive(Default)]
pub(crate) struct WorkerEvents {
    events: OnceCell<Events>,
    /// Delays the next attempt to create `events`.
    backoff: Cell<SearchBackoff>,
    targets: RefCell<EventTargets>,
    /// Whether [`process_events`] is running.
    is_running: Cell<bool>,
}

impl WorkerEvents {
    /// Creates `events` if necessary. None: offloading is not possible on this worker, or not now, since no descriptor
    /// is free.
    fn events(&self, socket: &Socket) -> Option<&Events> {
        let (backoff, now) = (self.backoff.get(), clock::now());
        if self.events.get().is_some() || now < backoff.retry_at {
            return self.events.get();
        }
        match Events::new(socket) {
            Some(events) => {
                self.backoff.take();
                Some(self.events.get_or_init(|| events))
            }
            None => {
                if backoff.failures == 0 {
                    envoy_abi::log!(
                        Warn,
                        "the events of this worker's connections stay with Envoy, which costs more CPU"
                    );
                }
                self.backoff.set(backoff.after_failure(now));
                None
            }
        }
    }
}

/// Offloads a connection. If it is readable now, an event follows.
fn offload(offloaded: Rc<dyn OffloadedConn>) {
    let conn = offloaded.conn();
    if conn.key().is_some() {
        return;
    }
    let worker_events = &conn.worker.events;
    let Some(events) = worker_events.events(&conn.socket) else { return };
    let key = worker_events.targets.borrow_mut().add(EventTarget::Conn(Rc::downgrade(&offloaded)));
    if events.offload(&conn.socket, key.to_u64()) {
        conn.set_key(Some(key));
    } else {
        worker_events.remove_key(key);
    }
}

/// Offloads a connection if that is possible now. True: it is offloaded.
pub(crate) fn try_offload(offloaded: Rc<dyn OffloadedConn>) -> bool {
    if offloaded.is_established() && offloaded.conn().is_quiescent() {
        offload(Rc::clone(&offloaded));
        return offloaded.conn().key().is_some();
    }
    false
}

/// Like [`try_offload`], for a login that fails over to another node.
pub(crate) fn try_offload_login(offloaded: Rc<dyn OffloadedConn>) -> bool {
    if offloaded.conn().is_quiescent() {
        offload(Rc::clone(&offloaded));
    }
    offloaded.conn().key().is_some()
}

/// Returns a connection to Envoy. If it is readable now, Envoy gets an event. `closing`: Envoy is closing the
/// connection, and needs no events.
pub(crate) fn onload(conn: &Conn, closing: bool) {
    let Some(key) = conn.key() else { return };
    conn.set_key(None);
    let worker_events = &conn.worker.events;
    worker_events.remove_key(key);
    let Some(events) = worker_events.events.get() else { return };
    events.remove(&conn.socket, || Some(worker_events.targets.borrow().any_conn()?.conn().socket.clone()));
    if !closing {
        events.return_to_envoy(&conn.socket);
    }
}

/// Handles the events of all targets. Called when Envoy calls the read hook of an offloaded connection.
fn process_events(worker_events: &WorkerEvents) {
    let Some(events) = worker_events.events.get() else { return };
    if worker_events.is_running.replace(true) {
        return;
    }
    events.dispatch(|Event { key, is_end: ends }| {
        let found = worker_events.targets.borrow().find(EventKey::from_u64(key));
        match found {
            Some(EventTarget::Conn(offloaded)) => {
                if let Some(offloaded) = offloaded.upgrade() {
                    read_offloaded(&*offloaded, ends);
                }
            }
            Some(EventTarget::AuxFd(aux_fd)) => {
                if let Some(aux_fd) = aux_fd.upgrade() {
                    run_guarded("an event of an auxiliary descriptor", &*aux_fd, || Rc::clone(&aux_fd).on_event());
                }
            }
            None => {}
        }
    });
    worker_events.is_running.set(false);
}

fn read_offloaded(offloaded: &dyn OffloadedConn, ends: bool) {
    offloaded.conn().set_end_event(ends);
    let done = envoy_abi::guarded("reading from an offloaded connection", false, || {
        offloaded.conn().read_offloaded(|buffer, passed| offloaded.step(buffer, passed));
        offloaded.on_quiescent();
        true
    });
    if !done {
        offloaded.conn().abort();
    }
}

/// Triggers a read from a connection whose bytes were left unread while the client was held.
pub(crate) fn rearm(conn: &Conn) {
    let Some(key) = conn.key() else { return conn.socket.set_readable() };
    if let Some(events) = conn.worker.events.events.get() {
        events.rearm(&conn.socket, key.to_u64());
    }
}

impl WorkerEvents {
    /// Watches a descriptor of the module. None: this worker cannot watch the descriptor.
    pub(crate) fn watch(&self, descriptor: BorrowedFd<'_>, aux_fd: Weak<dyn AuxFd>) -> Option<EventKey> {
        let events = self.events.get()?;
        let key = self.targets.borrow_mut().add(EventTarget::AuxFd(aux_fd));
        if events.watch(descriptor, key.to_u64()) {
            return Some(key);
        }
        self.remove_key(key);
        None
    }

    /// Makes the kernel report the events of a watched descriptor again, if there are some.
    pub(crate) fn rearm_aux(&self, descriptor: BorrowedFd<'_>, key: EventKey) {
        if let Some(events) = self.events.get() {
            events.rearm_aux(descriptor, key.to_u64());
        }
    }

    /// Stops watching a descriptor.
    pub(crate) fn unwatch(&self, descriptor: BorrowedFd<'_>, key: EventKey) {
        self.remove_key(key);
        if let Some(events) = self.events.get() {
            events.unwatch(descriptor);
        }
    }

    /// Removes the target of `key`, whose descriptor is closed or is not watched.
    pub(crate) fn remove_key(&self, key: EventKey) {
        self.targets.borrow_mut().remove(key);
    }
}

/// Replaces an offloaded connection by `new`, which was watched under `key`. False: the old connection stays.
#[must_use]
pub(crate) fn swap(conn: &Conn, key: EventKey, new: OwnedFd) -> bool {
    let Some(own) = conn.key() else { return false };
    let worker_events = &conn.worker.events;
    worker_events.remove_key(key);
    let swapped = match worker_events.events.get() {
        Some(events) => events.swap(&conn.socket, own.to_u64(), new),
        None => SwapResult::Failed,
    };
    if swapped == SwapResult::Unwatched {
        onload(conn, false);
    }
    swapped != SwapResult::Failed
}

#[cfg(test)]
mod tests {
    use super::*;

    struct UnusedConn;

    impl OffloadedConn for UnusedConn {
        fn conn(&self) -> &Conn {
            unreachable!("no test uses it")
        }

        fn is_established(&self) -> bool {
            false
        }

        fn step(&self, _: &mut [u8], _: &mut usize) -> ReadStep {
            ReadStep::Wait
        }
    }

    #[test]
    fn time_between_epoll_searches_doubles_up_to_a_limit() {
        let (mut backoff, mut now, mut waits) = (SearchBackoff::default(), Duration::ZERO, Vec::new());
        for _ in 0..40 {
            backoff = backoff.after_failure(now);
            waits.push((backoff.retry_at - now).as_secs());
            now = backoff.retry_at;
        }
        assert_eq!(waits[..8], [1, 2, 4, 8, 16, 32, 60, 60]);
        assert!(waits[8..].iter().all(|&wait| wait == 60));
    }

    #[test]
    fn slot_is_reused_and_its_old_key_finds_no_target() {
        let mut targets = EventTargets::default();
        let (one, other): (Rc<dyn OffloadedConn>, Rc<dyn OffloadedConn>) = (Rc::new(UnusedConn), Rc::new(UnusedConn));
        let offloaded = |one: &Rc<dyn OffloadedConn>| EventTarget::Conn(Rc::downgrade(one));
        let old = targets.add(offloaded(&one));
        assert!(targets.find(old).is_some() && targets.any_conn().is_some());
        targets.remove(old);
        targets.remove(old);
        assert!(targets.find(old).is_none() && targets.any_conn().is_none());
        let new = targets.add(offloaded(&other));
        assert_eq!(old.slot, new.slot);
        assert!(targets.find(old).is_none() && targets.find(new).is_some());
        assert_eq!(EventKey::from_u64(new.to_u64()), new);
        drop(other);
        assert!(targets.any_conn().is_none());
        assert_eq!(targets.add(offloaded(&one)).slot, 1);
        targets.remove(new);
        assert_eq!(targets.conns.len(), 1);
    }
}
