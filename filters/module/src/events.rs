//! Connections whose events come to the module, past Envoy: it hears of them together, whenever the worker wakes.
//!
//! An established session is served here as long as all of its bytes go straight. Whatever else happens (no room, an end,
//! a failure) is Envoy's business: the connection is given back to it, and Envoy's hooks go on with what was begun.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::{Rc, Weak};

use abi::events::{Event, Events};
use abi::socket::Outcome;

use crate::link::{Link, Step};

/// How often Envoy reads an established connection, before its events come here: it takes some calls of the kernel, which
/// do not pay for a connection that lives for a statement or two.
const READS_BEFORE: u8 = 4;

/// A connection that can be read here.
pub(crate) trait Member {
    fn link(&self) -> &Link;
    /// Whether its session is established, so that its bytes may go straight.
    fn is_established(&self) -> bool;
    /// One read, as [`Link::read`] has it.
    fn step(&self, buffer: &mut [u8], passed: &mut usize) -> Step;
}

/// Envoy's hook: something has come for this connection, or, if its events come here, for any of them.
pub(crate) fn read<M: Member + 'static>(member: &Rc<M>) -> Outcome {
    let link = member.link();
    if link.key().is_some() {
        run();
        return Outcome::open(link.take_heard());
    }
    let outcome = link.read(|buffer, passed| member.step(buffer, passed));
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
    member: Option<Weak<dyn Member>>,
}

/// The members of one worker.
#[derive(Default)]
struct Members {
    places: Vec<Place>,
    free: Vec<u32>,
}

impl Members {
    fn add(&mut self, member: Weak<dyn Member>) -> Key {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place::default());
            (self.places.len() - 1) as u32
        });
        let here = &mut self.places[place as usize];
        here.turn = here.turn.wrapping_add(1);
        here.member = Some(member);
        Key { place, turn: here.turn }
    }

    fn remove(&mut self, key: Key) {
        if let Some(here) = self.places.get_mut(key.place as usize)
            && here.turn == key.turn
            && here.member.take().is_some()
        {
            self.free.push(key.place);
        }
    }

    /// The member of that key. None: it is none any more, and the event came too late.
    fn find(&self, key: Key) -> Option<Rc<dyn Member>> {
        let here = self.places.get(key.place as usize).filter(|here| here.turn == key.turn)?;
        here.member.as_ref()?.upgrade()
    }

    /// Any of them.
    fn any(&self) -> Option<Rc<dyn Member>> {
        self.places.iter().find_map(|here| here.member.as_ref()?.upgrade())
    }
}

#[derive(Default)]
struct Here {
    /// None inside: on this worker it cannot be.
    events: OnceCell<Option<Events>>,
    members: RefCell<Members>,
    running: Cell<bool>,
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
        let found = here.events.get_or_init(|| {
            let events = Events::new(&link.socket);
            if events.is_none() {
                abi::log!(Warn, "the events of this worker's connections stay with Envoy, which costs more CPU");
            }
            events
        });
        let Some(events) = found else { return };
        let key = here.members.borrow_mut().add(Rc::downgrade(&member));
        if events.take_over(&link.socket, key.number()) {
            link.set_key(Some(key));
        } else {
            here.members.borrow_mut().remove(key);
        }
    });
}

/// From now on a connection's events go to Envoy again, what is there now included. `closing`: nobody needs them.
pub(crate) fn give_back(link: &Link, closing: bool) {
    let Some(key) = link.key() else { return };
    link.set_key(None);
    HERE.with(|here| {
        here.members.borrow_mut().remove(key);
        let Some(Some(events)) = here.events.get() else { return };
        events.leave(&link.socket, || Some(here.members.borrow().any()?.link().socket.clone()));
        if !closing {
            events.to_envoy(&link.socket);
        }
    });
}

/// Reads what has come for the members. Envoy has called the hook of one of them.
fn run() {
    HERE.with(|here| {
        let Some(Some(events)) = here.events.get() else { return };
        if here.running.replace(true) {
            return;
        }
        events.take(|Event { key, ends }| {
            let member = here.members.borrow().find(Key::of(key));
            if let Some(member) = member {
                member.link().set_ends(ends);
                let done = abi::guarded("reading past Envoy", false, || {
                    member.link().read_here(|buffer, passed| member.step(buffer, passed));
                    true
                });
                if !done {
                    member.link().doom();
                }
            }
        });
        here.running.set(false);
    });
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
        let old = members.add(Rc::downgrade(&one));
        assert!(members.find(old).is_some() && members.any().is_some());
        members.remove(old);
        members.remove(old);
        assert!(members.find(old).is_none() && members.any().is_none());
        let new = members.add(Rc::downgrade(&other));
        assert_eq!(old.place, new.place);
        assert!(members.find(old).is_none() && members.find(new).is_some());
        assert_eq!(Key::of(new.number()), new);
        drop(other);
        assert!(members.find(new).is_none() && members.any().is_none());
        assert_eq!(members.add(Rc::downgrade(&one)).place, 1);
    }
}
