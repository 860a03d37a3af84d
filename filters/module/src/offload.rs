//! Offloaded connections: the module gets their events directly, in batches, instead of Envoy.
//!
//! The module serves an established session alone as long as it can forward all bytes directly. In all other cases (a full
//! socket buffer, the end of a connection, a failure) it gives the connection back to Envoy, and Envoy's hooks continue.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeSet;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::time::Duration;

use envoy_abi::events::{Event, Events, SwapResult};
use envoy_abi::socket::{IoOutcome, Socket};

use crate::clock;
use crate::conn::{Conn, ReadStep};
use crate::switches;

/// How often Envoy reads an established connection before it is offloaded. Offloading takes some system calls, which do not
/// pay for a connection that runs a statement or two.
const READS_BEFORE_OFFLOAD: u8 = 4;

/// The time until the worker's epoll descriptor is searched again. It doubles with each failure, since the search reads an
/// entry of `/proc` for each descriptor of the process.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// A connection that can be offloaded.
pub(crate) trait OffloadedConn {
    fn conn(&self) -> &Conn;
    /// Whether its session is established, so that its bytes may be forwarded directly.
    fn is_established(&self) -> bool;
    /// One read, for [`Conn::read`].
    fn step(&self, buffer: &mut [u8], passed: &mut usize) -> ReadStep;
    /// Called after each of its events, when all received bytes are passed on.
    fn on_quiescent(&self) {}
}

/// A descriptor of the module itself, which Envoy does not know.
pub(crate) trait AuxFd {
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

/// Which slot an event is for, and which of the targets that have used this slot.
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
    /// The slots of connections, so that [`Self::any_conn`] need not look for one.
    conns: BTreeSet<u32>,
}

impl EventTargets {
    fn add(&mut self, target: EventTarget) -> EventKey {
        let place = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        if let EventTarget::Conn(_) = target {
            self.conns.insert(place);
        }
        let here = &mut self.slots[place as usize];
        here.generation = here.generation.wrapping_add(1);
        here.target = Some(target);
        EventKey { slot: place, generation: here.generation }
    }

    fn remove(&mut self, key: EventKey) {
        if let Some(here) = self.slots.get_mut(key.slot as usize)
            && here.generation == key.generation
            && here.target.take().is_some()
        {
            self.free.push(key.slot);
            self.conns.remove(&key.slot);
        }
    }

    /// The target of that key. None: it was removed, and the event came too late.
    fn find(&self, key: EventKey) -> Option<EventTarget> {
        self.slots.get(key.slot as usize).filter(|here| here.generation == key.generation)?.target.clone()
    }

    /// Any offloaded connection.
    fn any_conn(&self) -> Option<Rc<dyn OffloadedConn>> {
        self.conns.iter().find_map(|&slot| match self.slots[slot as usize].target.as_ref()? {
            EventTarget::Conn(offloaded) => offloaded.upgrade(),
            EventTarget::AuxFd(_) => None,
        })
    }
}

/// When the worker's epoll descriptor is searched again.
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
    /// Their creation has failed.
    backoff: Cell<SearchBackoff>,
    targets: RefCell<EventTargets>,
    is_running: Cell<bool>,
}

impl WorkerEvents {
    /// None: offloading is not possible on this worker. If it lacks descriptors, this may change.
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
    let here = &conn.worker.events;
    let Some(events) = here.events(&conn.socket) else { return };
    let key = here.targets.borrow_mut().add(EventTarget::Conn(Rc::downgrade(&offloaded)));
    if events.offload(&conn.socket, key.to_u64()) {
        conn.set_key(Some(key));
    } else {
        here.remove_key(key);
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

/// The same for a login that fails over to another node.
pub(crate) fn try_offload_login(offloaded: Rc<dyn OffloadedConn>) -> bool {
    if offloaded.conn().is_quiescent() {
        offload(Rc::clone(&offloaded));
    }
    offloaded.conn().key().is_some()
}

/// Gives a connection back to Envoy. If it is readable now, Envoy gets an event. `closing`: Envoy needs no events.
pub(crate) fn onload(conn: &Conn, closing: bool) {
    let Some(key) = conn.key() else { return };
    conn.set_key(None);
    let here = &conn.worker.events;
    here.remove_key(key);
    let Some(events) = here.events.get() else { return };
    events.remove(&conn.socket, || Some(here.targets.borrow().any_conn()?.conn().socket.clone()));
    if !closing {
        events.return_to_envoy(&conn.socket);
    }
}

/// Processes all events. Envoy has called the read hook of one of the connections.
fn process_events(here: &WorkerEvents) {
    let Some(events) = here.events.get() else { return };
    if here.is_running.replace(true) {
        return;
    }
    events.dispatch(|Event { key, is_end: ends }| {
        let found = here.targets.borrow().find(EventKey::from_u64(key));
        match found {
            Some(EventTarget::Conn(offloaded)) => {
                if let Some(offloaded) = offloaded.upgrade() {
                    read_offloaded(&*offloaded, ends);
                }
            }
            Some(EventTarget::AuxFd(aux_fd)) => {
                if let Some(aux_fd) = aux_fd.upgrade() {
                    envoy_abi::guarded("an event past Envoy", (), || aux_fd.on_event());
                }
            }
            None => {}
        }
    });
    here.is_running.set(false);
}

fn read_offloaded(offloaded: &dyn OffloadedConn, ends: bool) {
    offloaded.conn().set_end_event(ends);
    let done = envoy_abi::guarded("reading past Envoy", false, || {
        offloaded.conn().read_offloaded(|buffer, passed| offloaded.step(buffer, passed));
        offloaded.on_quiescent();
        true
    });
    if !done {
        offloaded.conn().abort();
    }
}

/// Has a connection's events reported again that were not read because its client was held.
pub(crate) fn rearm(conn: &Conn) {
    let Some(key) = conn.key() else { return conn.socket.set_readable() };
    if let Some(events) = conn.worker.events.events.get() {
        events.rearm(&conn.socket, key.to_u64());
    }
}

impl WorkerEvents {
    /// Watches a descriptor of the module. None: this worker can watch none, or no more.
    pub(crate) fn watch(&self, descriptor: BorrowedFd<'_>, aux_fd: Weak<dyn AuxFd>) -> Option<EventKey> {
        let events = self.events.get()?;
        let key = self.targets.borrow_mut().add(EventTarget::AuxFd(aux_fd));
        if events.watch(descriptor, key.to_u64()) {
            return Some(key);
        }
        self.remove_key(key);
        None
    }

    /// Has its events reported again, if there are some.
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

    /// The same for one that is closed already.
    pub(crate) fn remove_key(&self, key: EventKey) {
        self.targets.borrow_mut().remove(key);
    }
}

/// Replaces an offloaded connection by `new`, which was watched under `key`. False: nothing has changed.
#[must_use]
pub(crate) fn swap(conn: &Conn, key: EventKey, new: OwnedFd) -> bool {
    let Some(own) = conn.key() else { return false };
    let here = &conn.worker.events;
    here.remove_key(key);
    let swapped = match here.events.get() {
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
    fn the_time_between_two_searches_grows_up_to_a_limit() {
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
    fn a_slot_is_reused_and_an_old_key_finds_no_target() {
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
