//! A login that goes on at another node, because the first one has greeted and then answers that it is full.
//!
//! The connections to other nodes are the module's own. The one on which the login goes on replaces the first one under
//! Envoy's descriptor, as when a session moves.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use wire::login::{Attempt, Next};

use crate::deadlines::Deadline;
use crate::events::{self, Visitor};
use crate::hosts::{self, Destination};
use crate::moving::Vehicle;
use crate::node::ConnectFailure;
use crate::session::Session;
use crate::target::Gone;
use crate::watched_target::WatchedTarget;
use crate::{reachability, worker};

/// How long one node may take to answer.
const ATTEMPT: Duration = Duration::from_secs(2);

pub(crate) struct LoginElsewhere {
    session: Weak<Session>,
    vehicle: Rc<dyn Vehicle>,
    /// As it begins at each node.
    login: Attempt,
    attempt: RefCell<Attempt>,
    destination: RefCell<Option<Destination>>,
    target: WatchedTarget,
    /// The reason if the connection to the present node ended now.
    failure: Cell<ConnectFailure>,
    deadline: RefCell<Option<Deadline>>,
    /// The error of the first node, for the client if no other node takes the login.
    refusal: Vec<u8>,
}

impl LoginElsewhere {
    /// False: there is no other node, and the client gets the error of the first one.
    pub(crate) fn begin(session: &Rc<Session>, vehicle: Rc<dyn Vehicle>, login: Attempt, refusal: Vec<u8>) -> bool {
        let begun = Rc::new(Self {
            session: Rc::downgrade(session),
            vehicle,
            attempt: RefCell::new(login.clone()),
            login,
            destination: RefCell::default(),
            target: WatchedTarget::default(),
            failure: Cell::new(ConnectFailure::Connect),
            deadline: RefCell::new(session.waker().map(|waker| Deadline::new(waker, ATTEMPT))),
            refusal,
        });
        let tries = begun.tries_next(session);
        if tries {
            session.login_elsewhere.replace(Some(begun));
        }
        tries
    }

    /// Connects to the next node. False: there is none.
    fn tries_next(self: &Rc<Self>, session: &Rc<Session>) -> bool {
        while let Some(next) = session.next_node_for_login() {
            let watched = reachability::endpoint(&next.endpoint, &next.here.node.name);
            session.try_node(&next.endpoint, &next.here, watched.as_ref());
            self.attempt.replace(self.login.clone());
            self.failure.set(ConnectFailure::Connect);
            if let Some(deadline) = &*self.deadline.borrow() {
                deadline.set(ATTEMPT);
            }
            let address = next.address;
            self.destination.replace(Some(next));
            let visitor: Weak<dyn Visitor> = Rc::downgrade(&(Rc::clone(self) as Rc<dyn Visitor>));
            if self.target.connect(&*self.vehicle, address, visitor).is_some() {
                return true;
            }
            self.failed(ConnectFailure::Connect);
        }
        false
    }

    /// The present node cannot be used.
    fn failed(&self, failure: ConnectFailure) {
        if let Some(node) = &*self.destination.borrow() {
            self.vehicle.cannot_use(&node.here, &node.endpoint, failure);
        }
    }

    /// Tries the next node. If there is none, the client gets the error of the first one.
    fn goes_on(self: &Rc<Self>) {
        self.target.close();
        let Some(session) = self.session.upgrade() else { return };
        if !self.tries_next(&session) {
            self.gives_up(&session);
        }
    }

    fn gives_up(&self, session: &Session) {
        session.login_elsewhere.replace(None);
        self.vehicle.receive_login(&self.refusal);
    }

    /// The login has timed out, or the session has ended. Returns the error of the first node.
    pub(crate) fn abandon(&self) -> &[u8] {
        self.deadline.replace(None);
        self.target.close();
        &self.refusal
    }

    /// A deadline may have passed.
    pub(crate) fn woken(self: &Rc<Self>) {
        if self.deadline.borrow().as_ref().is_some_and(Deadline::has_passed) {
            self.failed(self.failure.get());
            self.goes_on();
        }
    }

    /// Does what is next at the present node. Ok(false): that one cannot take the login.
    fn obey(&self, next: Next) -> Result<bool, Gone> {
        match next {
            Next::Wait => {}
            Next::Send(bytes) => self.target.with(|target| target.send(&bytes))?,
            Next::StartTls(request) => {
                self.failure.set(ConnectFailure::Tls);
                let name = self.destination.borrow().as_ref().map(|node| node.here.node.name.clone());
                self.target.secure(&*self.vehicle, &name.unwrap_or_default(), &request).map_err(|_| Gone)?;
            }
            Next::Full => {
                self.failed(ConnectFailure::Full);
                return Ok(false);
            }
            Next::Unfit => return Ok(false),
            Next::Error | Next::Invalid => {
                let invalid = next == Next::Invalid;
                self.failed(if invalid { ConnectFailure::Invalid } else { ConnectFailure::Error });
                return Ok(false);
            }
            Next::Answer(bytes) => self.switch(&bytes),
        }
        Ok(true)
    }

    /// The connection to the present node replaces that to the first one.
    fn switch(&self, answer: &[u8]) {
        let Some(session) = self.session.upgrade() else { return };
        let Some((target, key)) = self.target.take() else { return };
        let link = self.vehicle.link();
        let (connection, tls) = target.hand_over();
        if !events::swap(link, key, connection) {
            events::unwatch(key);
            return self.gives_up(&session);
        }
        link.renew(tls);
        session.login_elsewhere.replace(None);
        session.login(wire::login::Login::goes_on_elsewhere);
        if let Some(node) = &*self.destination.borrow() {
            node.here.node.restore();
        }
        self.vehicle.receive_login(answer);
    }
}

impl Visitor for LoginElsewhere {
    fn happened(self: Rc<Self>) {
        let done = worker::with_scratch(|plain| {
            let secured = self.target.with(|target| target.take(plain));
            if !plain.is_empty() && self.failure.get() == ConnectFailure::Connect {
                self.failure.set(ConnectFailure::Closed);
            }
            let taken = if plain.is_empty() { Ok(true) } else { self.next(plain) };
            match (taken, secured) {
                (Ok(true), Ok(true)) => {
                    self.failure.set(ConnectFailure::Closed);
                    let login = self.attempt.borrow_mut().secured();
                    self.target.with(|target| target.send(&login)).map(|()| true)
                }
                (Ok(false), _) => Ok(false),
                // The connection is that of the session now, which notices its end itself.
                (Ok(true), Err(Gone)) if !self.target.is_open() => Ok(true),
                (taken, secured) => secured.and(taken),
            }
        });
        match done {
            Ok(true) => {}
            Ok(false) => self.goes_on(),
            Err(Gone) => {
                self.failed(self.failure.get());
                self.goes_on();
            }
        }
    }
}

impl LoginElsewhere {
    fn next(&self, bytes: &[u8]) -> Result<bool, Gone> {
        let next = self.attempt.borrow_mut().take(bytes);
        self.obey(next)
    }
}

impl Session {
    /// Where a login may go on, within the group of its node.
    fn next_node_for_login(&self) -> Option<Destination> {
        let node = self.node()?;
        hosts::for_login(&node, |endpoint| self.has_tried(endpoint))
    }
}
