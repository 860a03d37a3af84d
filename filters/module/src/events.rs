//! Connections whose events come to the module, past Envoy: it hears of them together, whenever the worker wakes.
//!
//! An established session is served here as long as all of its bytes go straight. Whatever else happens (no room, an end,
//! a failure) is Envoy's business: the connection is given back to it, and Envoy's hooks go on with what was begun.

use std::cell::{Cell, OnceCell, RefCell};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::time::Duration;

use abi::events::{Event, Events, Swapped};
use abi::socket::{Outcome, Socket};

use crate::clock;
use crate::link::{Link, Step};

/// How often Envoy reads an established connection, before its events come here: it takes some calls of the kernel, which
/// do not pay for a connection that lives for a statement or two.
const READS_BEFORE: u8 = 4;

/// Until it is tried once more to have events come here.
const AGAIN: Duration = Duration::from_secs(1);

/// A connection that can be read here.
pub(crate) trait Member {
    fn link(&self) -> &Link;
    /// Whether its session is established, so that its bytes may go straight.
    fn is_established(&self) -> bool;
    /// One read, as [`Link::read`] has it.
    fn step(&self, buffer: &mut [u8], passed: &mut usize) -> Step;
    /// Called behind each of its events: all that came is passed on.
    fn rests(&self) {}
}

/// A descriptor that is not Envoy's.
pub(crate) trait Visitor {
    /// Something has come for it, or there is room for writing, or it ends.
    fn happened(self: Rc<Self>);
}

/// Who hears of an event.
#[derive(Clone)]
enum Hearer {
    Member(Weak<dyn Member>),
    Visitor(Weak<dyn Visitor>),
}

/// Envoy's hook: something has come for this connection, or, if its events come here, for any of them.
pub(crate) fn read<M: Member + 'static>(member: &Rc<M>) -> Outcome {
    let link = member.link();
    if link.key().is_some() {
        run();
        return Outcome::open(link.take_heard());
    }
    let outcome = link.read(|buffer, passed| member.step(buffer, passed));
    member.rests();
    let stays = !outcome.close && !outcome.end_of_stream && member.is_established();
    if stays && link.count_read() >= READS_BEFORE && link.is_calm() {
        take_over(Rc::clone(member) as Rc<dyn Member>);
    }
    outcome
}

/// Which member an event is for, and which of those that have had its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    place: u32,
    turn: u32,
}

impl Key {
    fn number(self) -> u64 {
        u64::from(self.turn) << 32 | u64::from(self.place)
    }

    const fn of(number: u64) -> Self {
        Self { place: number as u32, turn: (number >> 32) as u32 }
    }
}

#[derive(Default)]
struct Place {
    turn: u32,
    hearer: Option<Hearer>,
}

/// The members of one worker.
#[derive(Default)]
struct Members {
    places: Vec<Place>,
    free: Vec<u32>,
}

impl Members {
    fn add(&mut self, hearer: Hearer) -> Key {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place::default());
            (self.places.len() - 1) as u32
        });
        let here = &mut self.places[place as usize];
        here.turn = here.turn.wrapping_add(1);
        here.hearer = Some(hearer);
        Key { place, turn: here.turn }
    }

    fn remove(&mut self, key: Key) {
        if let Some(here) = self.places.get_mut(key.place as usize)
            && here.turn == key.turn
            && here.hearer.take().is_some()
        {
            self.free.push(key.place);
        }
    }

    /// Who has that key. None: nobody any more, and the event came too late.
    fn find(&self, key: Key) -> Option<Hearer> {
        self.places.get(key.place as usize).filter(|here| here.turn == key.turn)?.hearer.clone()
    }

    /// Any of the connections.
    fn any(&self) -> Option<Rc<dyn Member>> {
        self.places.iter().find_map(|here| match here.hearer.as_ref()? {
            Hearer::Member(member) => member.upgrade(),
            Hearer::Visitor(_) => None,
        })
    }
}

#[derive(Default)]
struct Here {
    events: OnceCell<Events>,
    /// When it could not be had.
    failed: Cell<Option<Duration>>,
    members: RefCell<Members>,
    running: Cell<bool>,
}

impl Here {
    /// None: they cannot be had on this worker. For want of descriptors that may be only for a time.
    fn events(&self, socket: &Socket) -> Option<&Events> {
        if self.events.get().is_some() || self.failed.get().is_some_and(|failed| clock::now() < failed + AGAIN) {
            return self.events.get();
        }
        match Events::new(socket) {
            Some(events) => Some(self.events.get_or_init(|| events)),
            None => {
                if self.failed.replace(Some(clock::now())).is_none() {
                    abi::log!(Warn, "the events of this worker's connections stay with Envoy, which costs more CPU");
                }
                None
            }
        }
    }
}

thread_local! {
    static HERE: Here = Here::default();
}

/// From now on a connection's events come here, what is readable now included.
fn take_over(member: Rc<dyn Member>) {
    let link = member.link();
    if link.key().is_some() {
        return;
    }
    HERE.with(|here| {
        let Some(events) = here.events(&link.socket) else { return };
        let key = here.members.borrow_mut().add(Hearer::Member(Rc::downgrade(&member)));
        if events.take_over(&link.socket, key.number()) {
            link.set_key(Some(key));
        } else {
            here.members.borrow_mut().remove(key);
        }
    });
}

/// Whether a connection's events come here; if they can, they do from now on.
pub(crate) fn is_taken_over(member: Rc<dyn Member>) -> bool {
    if member.is_established() && member.link().is_calm() {
        take_over(Rc::clone(&member));
        return member.link().key().is_some();
    }
    false
}

/// The same for a login that is to go on at another node.
pub(crate) fn takes_over(member: Rc<dyn Member>) -> bool {
    if member.link().is_calm() {
        take_over(Rc::clone(&member));
    }
    member.link().key().is_some()
}

/// From now on a connection's events go to Envoy again, what is there now included. `closing`: nobody needs them.
pub(crate) fn give_back(link: &Link, closing: bool) {
    let Some(key) = link.key() else { return };
    link.set_key(None);
    HERE.with(|here| {
        here.members.borrow_mut().remove(key);
        let Some(events) = here.events.get() else { return };
        events.leave(&link.socket, || Some(here.members.borrow().any()?.link().socket.clone()));
        if !closing {
            events.to_envoy(&link.socket);
        }
    });
}

/// Reads what has come for the members. Envoy has called the hook of one of them.
fn run() {
    HERE.with(|here| {
        let Some(events) = here.events.get() else { return };
        if here.running.replace(true) {
            return;
        }
        events.take(|Event { key, ends }| {
            let found = here.members.borrow().find(Key::of(key));
            match found {
                Some(Hearer::Member(member)) => {
                    if let Some(member) = member.upgrade() {
                        read_here(&*member, ends);
                    }
                }
                Some(Hearer::Visitor(visitor)) => {
                    if let Some(visitor) = visitor.upgrade() {
                        abi::guarded("an event past Envoy", (), || visitor.happened());
                    }
                }
                None => {}
            }
        });
        here.running.set(false);
    });
}

fn read_here(member: &dyn Member, ends: bool) {
    member.link().set_ends(ends);
    let done = abi::guarded("reading past Envoy", false, || {
        member.link().read_here(|buffer, passed| member.step(buffer, passed));
        member.rests();
        true
    });
    if !done {
        member.link().doom();
    }
}

/// What was not read of a connection, because its session was held, is told of again.
pub(crate) fn rouse(link: &Link) {
    let Some(key) = link.key() else { return link.socket.set_readable() };
    HERE.with(|here| {
        if let Some(events) = here.events.get() {
            events.again(&link.socket, key.number());
        }
    });
}

/// A descriptor of our own is watched from now on. None: nothing can be watched on this worker, or no more.
pub(crate) fn watch(descriptor: BorrowedFd<'_>, visitor: Weak<dyn Visitor>) -> Option<Key> {
    HERE.with(|here| {
        let events = here.events.get()?;
        let key = here.members.borrow_mut().add(Hearer::Visitor(visitor));
        if events.watch(descriptor, key.number()) {
            return Some(key);
        }
        here.members.borrow_mut().remove(key);
        None
    })
}

/// Has its events reported again, if there are some.
pub(crate) fn watch_again(descriptor: BorrowedFd<'_>, key: Key) {
    HERE.with(|here| {
        if let Some(events) = here.events.get() {
            events.watch_again(descriptor, key.number());
        }
    });
}

/// It is not watched any more.
pub(crate) fn forget(descriptor: BorrowedFd<'_>, key: Key) {
    HERE.with(|here| {
        here.members.borrow_mut().remove(key);
        if let Some(events) = here.events.get() {
            events.forget(descriptor);
        }
    });
}

/// The same for one that is closed already.
pub(crate) fn unwatch(key: Key) {
    HERE.with(|here| here.members.borrow_mut().remove(key));
}

/// A connection whose events come here becomes another, which was watched under `key`. False: it stays what it was.
#[must_use]
pub(crate) fn swap(link: &Link, key: Key, new: OwnedFd) -> bool {
    let Some(own) = link.key() else { return false };
    let swapped = HERE.with(|here| {
        here.members.borrow_mut().remove(key);
        match here.events.get() {
            Some(events) => events.swap(&link.socket, own.number(), new),
            None => Swapped::Not,
        }
    });
    if swapped == Swapped::Unwatched {
        give_back(link, false);
    }
    swapped != Swapped::Not
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nobody;

    impl Member for Nobody {
        fn link(&self) -> &Link {
            unreachable!("nobody asks for it")
        }

        fn is_established(&self) -> bool {
            false
        }

        fn step(&self, _: &mut [u8], _: &mut usize) -> Step {
            Step::Again
        }
    }

    #[test]
    fn a_place_is_taken_again_and_an_old_key_finds_nobody() {
        let mut members = Members::default();
        let (one, other): (Rc<dyn Member>, Rc<dyn Member>) = (Rc::new(Nobody), Rc::new(Nobody));
        let member = |one: &Rc<dyn Member>| Hearer::Member(Rc::downgrade(one));
        let old = members.add(member(&one));
        assert!(members.find(old).is_some() && members.any().is_some());
        members.remove(old);
        members.remove(old);
        assert!(members.find(old).is_none() && members.any().is_none());
        let new = members.add(member(&other));
        assert_eq!(old.place, new.place);
        assert!(members.find(old).is_none() && members.find(new).is_some());
        assert_eq!(Key::of(new.number()), new);
        drop(other);
        assert!(members.any().is_none());
        assert_eq!(members.add(member(&one)).place, 1);
    }
}
