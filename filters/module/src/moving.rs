//! One session on its way to another node: what [`journey`] decides, done with the module's sockets.
//!
//! The connection to the target is the module's own until the session is there. Then it takes the place of the old one
//! under Envoy's descriptor, so that Envoy's connection goes on as if nothing had happened.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use session::arrival::Failure;
use session::fresh::Fresh;
use session::identity::Identity;
use session::journey::{Journey, Order, Stay};
use session::limits::{Limits, Step};
use session::states::Unusable;
use tls::{Stream, TlsError};
use wire::login::NodeTls;

use crate::deadlines::Deadline;
use crate::events::{self, Member, Visitor};
use crate::hosts::Destination;
use crate::node::{BUCKETS, ConnectFailure, Counts, Here, MOVES};
use crate::old_connection::{OldConnection, QUIT};
use crate::session::Session;
use crate::states_memory::Exporting;
use crate::target::{Gone, TargetFault};
use crate::watched_target::WatchedTarget;
use crate::{clock, departures, port_probe, states_memory, worker};

/// A session's socket to its node.
pub(crate) trait Vehicle: Member {
    /// What goes to a node before it greets.
    fn proxy_header(&self) -> Vec<u8>;
    /// Whether a connection to another node needs TLS.
    fn target_tls(&self) -> NodeTls;
    /// Begins TLS with a node of that name. None: it is not set up.
    fn tls_with(&self, name: &str) -> Option<Result<Stream, TlsError>>;
    /// Takes bytes of the login that the module itself has received from a node.
    fn receive_login(&self, bytes: &[u8]);
    /// A node could not be used at that endpoint.
    fn cannot_use(&self, node: &Here, endpoint: &str, failure: ConnectFailure);
}

/// How a move has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Moved,
    Stayed(Stay),
    /// The old node is gone, and the session was not taken anywhere.
    Lost,
}

impl Ended {
    /// The reason in `MOVES`.
    fn reason(self) -> &'static str {
        match self {
            Self::Moved => "ok",
            Self::Lost => "lost",
            Self::Stayed(stay) => match stay {
                Stay::Unreachable(_) => UNREACHABLE,
                Stay::TooSlow(_) => "slow",
                Stay::Target(Failure::Denied(_)) => "denied",
                Stay::Target(Failure::NotRestored(_)) => "not_restored",
                Stay::Target(Failure::Unwelcome(_) | Failure::Incapable | Failure::NoTls | Failure::Nonsense) => {
                    "invalid"
                }
                Stay::Refused(_) => "refused",
                Stay::NoToken => "no_token",
                Stay::States(Unusable::TooLarge) => "states_too_large",
                Stay::States(Unusable::OverBudget) => "states_budget",
                Stay::States(Unusable::NoJson | Unusable::CharacterSet) => "states",
                Stay::Cancelled => "cancelled",
            },
        }
    }
}

/// There is nothing to move to.
pub(crate) const NO_NODE: &str = "no_node";
/// The target cannot be reached, or no connection can be made at all.
pub(crate) const UNREACHABLE: &str = "unreachable";

/// Counts a move by the reason for its end. One that nobody wanted any more is none.
pub(crate) fn count(reason: &str, counts: &Counts) {
    if let Some(index) = MOVES.iter().position(|(_, one)| *one == reason) {
        counts.moves[index].add(1);
    }
}

pub(crate) struct Moving {
    session: Weak<Session>,
    vehicle: Rc<dyn Vehicle>,
    destination: Destination,
    journey: RefCell<Journey>,
    target: WatchedTarget,
    deadline: RefCell<Option<Deadline>>,
    began: Instant,
    over: Cell<bool>,
    /// The session's node was gone before the move began.
    is_rescue: bool,
    /// The session's node is gone.
    old_is_gone: Cell<bool>,
    places: Cell<Places>,
    exporting: Cell<Option<Exporting>>,
}

/// What it takes up of what there is for all moves.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Places {
    /// Of those that move at the same time.
    pub(crate) at_all: bool,
    /// Of those that ran something when they began to.
    pub(crate) patient: bool,
    /// Of those that are held.
    pub(crate) held: bool,
}

impl Moving {
    /// Begins. `fresh`: the session's states, when its node is gone. None: no connection can be made, or none can be
    /// watched.
    pub(crate) fn begin(
        session: &Rc<Session>,
        vehicle: Rc<dyn Vehicle>,
        identity: Identity,
        destination: Destination,
        fresh: Option<Fresh>,
    ) -> Option<Rc<Self>> {
        let (tls, limits, now) = (vehicle.target_tls(), Limits::default(), clock::now());
        let is_rescue = fresh.is_some();
        let journey = match fresh {
            None => Journey::begin(identity, tls, limits, now),
            Some(fresh) => Journey::resume(identity, tls, limits, fresh, now),
        };
        let moving = Rc::new(Self {
            session: Rc::downgrade(session),
            vehicle,
            destination,
            journey: RefCell::new(journey.within(states_memory::limits())),
            target: WatchedTarget::default(),
            deadline: RefCell::new(session.waker().map(|waker| Deadline::new(waker, Duration::MAX))),
            began: Instant::now(),
            over: Cell::new(false),
            is_rescue,
            old_is_gone: Cell::new(is_rescue),
            places: Cell::new(Places { at_all: true, ..Places::default() }),
            exporting: Cell::new(None),
        });
        let visitor: Weak<dyn Visitor> = Rc::downgrade(&(Rc::clone(&moving) as Rc<dyn Visitor>));
        moving.target.connect(&*moving.vehicle, moving.destination.address, visitor)?;
        moving.set_deadline();
        // Those on their way count, or all that begin together would choose the same node.
        moving.destination.here.node.sessions.fetch_add(1, Ordering::Relaxed);
        Some(moving)
    }

    pub(crate) fn destination(&self) -> &Destination {
        &self.destination
    }

    /// Counts how it has ended.
    pub(crate) fn count_end(&self, ended: Ended, counts: &Counts) {
        count(ended.reason(), counts);
        if ended == Ended::Moved {
            let took = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
            counts.move_latency[BUCKETS.partition_point(|&end| end < took)].add(1);
            counts.move_microseconds.add(took);
        }
    }

    /// Whether nothing of the client may be passed on.
    pub(crate) fn holds(&self) -> bool {
        self.journey.borrow().holds()
    }

    /// The session's states, as they were exported on this occasion.
    pub(crate) fn take_fresh(&self) -> Option<Fresh> {
        self.journey.borrow_mut().take_fresh()
    }

    /// How long the session's node lets it be idle, if that is known.
    pub(crate) fn wait_timeout(&self) -> Option<Duration> {
        self.journey.borrow().wait_timeout()
    }

    /// Whether the session no longer needs its old node.
    pub(crate) fn is_alone(&self) -> bool {
        self.journey.borrow().is_alone()
    }

    /// Whether the old node owes an answer.
    pub(crate) fn awaits_old(&self) -> bool {
        self.journey.borrow().awaits_old()
    }

    /// Whether it must not be given up, as the session has no node any more.
    pub(crate) fn is_rescue(&self) -> bool {
        self.is_rescue
    }

    /// Whether the node that it goes to is one that sessions are to leave.
    pub(crate) fn goes_to_a_left_node(&self) -> bool {
        self.destination.here.is_to_be_left()
    }

    /// Whether all is ready, and the session only has to run nothing for a moment.
    pub(crate) fn waits(&self) -> bool {
        self.journey.borrow().step() == Step::Waiting && !self.holds()
    }

    /// The session runs nothing, and nothing of it is on its way.
    pub(crate) fn depart(&self, identity: Identity) {
        self.places.set(Places { held: true, ..self.places.get() });
        self.exporting.set(Some(Exporting::begin()));
        self.go_on(|journey, now| journey.depart(identity, now));
    }

    /// The session ran something when it began to move.
    pub(crate) fn set_patient(&self) {
        self.places.set(Places { patient: true, ..self.places.get() });
    }

    /// What it took up, and does not any more.
    pub(crate) fn take_places(&self) -> Places {
        self.places.take()
    }

    /// The old node speaks while the client is held.
    pub(crate) fn old(&self, bytes: &[u8]) {
        self.go_on(|journey, now| journey.old(bytes, now));
    }

    /// The old node has closed the connection, and is being probed.
    pub(crate) fn old_closed(&self) {
        self.journey.borrow_mut().old_closed();
    }

    /// The old node is gone.
    pub(crate) fn old_lost(&self) {
        self.old_is_gone.set(true);
        self.go_on(|journey, _| journey.old_lost());
    }

    /// The target is gone.
    pub(crate) fn target_lost(&self) {
        self.go_on(Journey::target_lost);
    }

    /// What the old node has sent was read. If the switch only waited for that, it follows now.
    pub(crate) fn retry(&self) {
        self.go_on(|journey, _| journey.retry());
    }

    /// A deadline may have passed.
    pub(crate) fn woken(&self) {
        if self.deadline.borrow().as_ref().is_some_and(Deadline::has_passed) {
            self.go_on(|journey, now| journey.late(now));
        }
    }

    /// Nobody wants the session to move any more.
    pub(crate) fn cancel(&self) {
        self.go_on(|journey, now| journey.cancel(now));
    }

    /// The session has ended; so does this, without a word.
    pub(crate) fn abandon(&self) {
        self.arrives_no_more();
        self.exporting.set(None);
        self.deadline.replace(None);
        self.target.close();
    }

    fn go_on(&self, step: impl FnOnce(&mut Journey, Duration) -> Vec<Order>) {
        if self.over.get() {
            return;
        }
        let mut orders = VecDeque::from(step(&mut self.journey.borrow_mut(), clock::now()));
        while let Some(order) = orders.pop_front() {
            let journey = || self.journey.borrow_mut();
            match self.obey(order) {
                Ok(()) => {}
                Err(TargetFault::Gone) => orders.extend(journey().target_lost(clock::now())),
                Err(TargetFault::Invalid) => orders.extend(journey().target_invalid(clock::now())),
            }
        }
        self.target.give_turn();
        self.set_deadline();
    }

    fn obey(&self, order: Order) -> Result<(), TargetFault> {
        match order {
            Order::Target(bytes) => self.target.with(|target| target.send(&bytes))?,
            Order::Restore(statement) => self.target.with(|target| target.restore(statement))?,
            Order::Secure(request) => {
                self.target.secure(&*self.vehicle, &self.destination.here.node.name, &request)?;
            }
            Order::Ready => {
                port_probe::has_greeted(|| Some(self.destination.address));
                if let Some(session) = self.session.upgrade() {
                    session.rests();
                }
            }
            Order::Hold(bytes) | Order::Old(bytes) => {
                // Should it be broken, its events tell.
                let _ = self.vehicle.link().say(&bytes);
            }
            Order::Overdue => departures::makes_room(self),
            Order::Switch => self.switch()?,
            Order::Release(stay) => self.end(Ended::Stayed(stay)),
            Order::Lost => self.end(Ended::Lost),
        }
        Ok(())
    }

    fn switch(&self) -> Result<(), TargetFault> {
        let link = self.vehicle.link();
        if !self.target.with(|target| Ok::<_, Gone>(target.has_sent_all()))? {
            return Err(TargetFault::Invalid); // it has confirmed states that it has not received
        }
        if !self.old_is_gone.get() && link.has_unread() {
            // It may be a FIN, after KILL: that is read first. Then `retry` follows.
            events::rouse(link);
            return Ok(());
        }
        let (target, key) = self.target.take().ok_or(Gone)?;
        let here = events::is_taken_over(Rc::clone(&self.vehicle) as Rc<dyn Member>);
        let old = link.duplicate().filter(|_| !self.old_is_gone.get());
        let (connection, tls) = target.hand_over();
        self.journey.borrow_mut().switched();
        if here && events::swap(link, key, connection) {
            let old_tls = link.renew(tls);
            if let (Some(old), Some(session)) = (old, self.session.upgrade()) {
                OldConnection::leave(&session, old, old_tls);
            }
            self.end(Ended::Moved);
        } else {
            link.say_last(QUIT);
            events::unwatch(key);
            self.end(Ended::Lost);
        }
        Ok(())
    }

    fn end(&self, ended: Ended) {
        if ended == Ended::Moved
            && let Some(place) = self.destination.place.take()
        {
            place.reached();
        }
        self.abandon();
        if let Some(session) = self.session.upgrade() {
            departures::ended(&session, self, ended);
        }
    }

    /// Its target is that of nobody any more, or of the session.
    fn arrives_no_more(&self) {
        if !self.over.replace(true) {
            self.destination.here.node.sessions.fetch_sub(1, Ordering::Relaxed);
            drop(self.destination.place.take());
        }
    }

    fn set_deadline(&self) {
        if let Some(deadline) = &*self.deadline.borrow() {
            let at = self.journey.borrow().deadline();
            deadline.set(at.map_or(Duration::MAX, |at| at.saturating_sub(clock::now())));
        }
    }
}

impl Visitor for Moving {
    fn happened(self: Rc<Self>) {
        let secured = worker::with_scratch(|plain| {
            let secured = self.target.with(|target| target.take(plain));
            if !plain.is_empty() {
                self.go_on(|journey, now| journey.target(plain, now));
            }
            secured
        });
        match secured {
            Ok(false) => self.target.give_turn(),
            Ok(true) => self.go_on(Journey::secured),
            Err(Gone) => self.target_closed(),
        }
    }
}

impl Moving {
    /// The target has closed the connection. If its process list shows the session already, the cause may be a KILL.
    fn target_closed(&self) {
        let session = self.session.upgrade().filter(|_| self.journey.borrow().is_let_in() && !self.over.get());
        self.target.close();
        if !session.is_some_and(|session| session.asks_about_target(self.destination.address)) {
            self.target_lost();
        }
    }
}
