//! A login whose node has turned out to be full behind its greeting: it goes on at another node, if one has room.
//!
//! The connections to other nodes are the module's own. The one that takes the login gets the place of the first one
//! under Envoy's descriptor, as when a session moves.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::time::Duration;

use wire::login::{Attempt, Next};

use crate::deadlines::Deadline;
use crate::events::{self, Key, Visitor};
use crate::moving::{Destination, Vehicle};
use crate::node::ConnectFailure;
use crate::session::Session;
use crate::target::{Gone, Target};
use crate::{hosts, worker};

/// How long one node may take to answer.
const ATTEMPT: Duration = Duration::from_secs(2);

pub(crate) struct LoginElsewhere {
    session: Weak<Session>,
    vehicle: Rc<dyn Vehicle>,
    /// What is said to each node.
    login: Attempt,
    attempt: RefCell<Attempt>,
    destination: RefCell<Option<Destination>>,
    target: RefCell<Option<Target>>,
    key: Cell<Option<Key>>,
    /// Of the connection to the present node.
    failure: Cell<ConnectFailure>,
    deadline: RefCell<Option<Deadline>>,
    /// What the first node has said, which the client gets if no other node takes it.
    refusal: Vec<u8>,
}

impl LoginElsewhere {
    /// Whether it has begun. If not, the first node's word holds.
    pub(crate) fn begin(session: &Rc<Session>, vehicle: Rc<dyn Vehicle>, login: Attempt, refusal: Vec<u8>) -> bool {
        let begun = Rc::new(Self {
            session: Rc::downgrade(session),
            vehicle,
            attempt: RefCell::new(login.clone()),
            login,
            destination: RefCell::default(),
            target: RefCell::default(),
            key: Cell::new(None),
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
            session.try_node(&next.endpoint, &next.here);
            self.attempt.replace(self.login.clone());
            self.failure.set(ConnectFailure::Connect);
            if let Some(deadline) = &*self.deadline.borrow() {
                deadline.set(ATTEMPT);
            }
            let address = next.address;
            self.destination.replace(Some(next));
            if self.connect(address).is_some() {
                return true;
            }
            self.failed(ConnectFailure::Connect);
        }
        false
    }

    fn connect(self: &Rc<Self>, address: SocketAddr) -> Option<()> {
        let socket = &self.vehicle.link().socket;
        let target = socket.with_descriptor(|like| Target::connect(address, like))?.ok()?;
        target.send(&self.vehicle.proxy_header()).ok()?;
        let visitor: Weak<dyn Visitor> = Rc::downgrade(&(Rc::clone(self) as Rc<dyn Visitor>));
        self.key.set(Some(events::watch(target.descriptor(), visitor)?));
        self.target.replace(Some(target));
        Some(())
    }

    /// The present node cannot be used.
    fn failed(&self, failure: ConnectFailure) {
        if let Some(node) = &*self.destination.borrow() {
            self.vehicle.cannot_use(&node.here, &node.endpoint, failure);
        }
    }

    /// Looks for another node than the present one. Without one the client is told what the first one has said.
    fn goes_on(self: &Rc<Self>) {
        self.drop_target();
        let Some(session) = self.session.upgrade() else { return };
        if !self.tries_next(&session) {
            self.gives_up(&session);
        }
    }

    fn gives_up(&self, session: &Session) {
        session.login_elsewhere.replace(None);
        self.vehicle.hears(&self.refusal);
    }

    /// The login's time is over, or the session has ended otherwise.
    pub(crate) fn abandon(&self) -> &[u8] {
        self.deadline.replace(None);
        self.drop_target();
        &self.refusal
    }

    /// A deadline may have passed.
    pub(crate) fn woken(self: &Rc<Self>) {
        if self.deadline.borrow().as_ref().is_some_and(Deadline::has_passed) {
            self.failed(self.failure.get());
            self.goes_on();
        }
    }

    fn drop_target(&self) {
        if let Some(target) = self.target.take()
            && let Some(key) = self.key.take()
        {
            events::forget(target.descriptor(), key);
        }
    }

    fn with_target<T>(&self, run: impl FnOnce(&Target) -> Result<T, Gone>) -> Result<T, Gone> {
        self.target.borrow().as_ref().map_or(Err(Gone), run)
    }

    /// What the present node wants of us. Ok(false): it is out of the question, and the next one's turn.
    fn obey(&self, next: Next) -> Result<bool, Gone> {
        match next {
            Next::Wait => {}
            Next::Send(bytes) => self.with_target(|target| target.send(&bytes))?,
            Next::StartTls(request) => {
                let name = self.destination.borrow().as_ref().map(|node| node.here.node.name.clone());
                self.failure.set(ConnectFailure::Tls);
                let Some(Ok(stream)) = self.vehicle.tls_with(&name.unwrap_or_default()) else { return Err(Gone) };
                self.with_target(|target| {
                    target.send(&request)?;
                    target.secure(stream)
                })?;
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

    /// The present node takes the first one's place.
    fn switch(&self, answer: &[u8]) {
        let Some(session) = self.session.upgrade() else { return };
        let (Some(target), Some(key)) = (self.target.take(), self.key.take()) else { return };
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
        self.vehicle.hears(answer);
    }
}

impl Visitor for LoginElsewhere {
    fn happened(self: Rc<Self>) {
        let done = worker::with_scratch(|plain| {
            let secured = self.with_target(|target| target.take(plain));
            if !plain.is_empty() && self.failure.get() == ConnectFailure::Connect {
                self.failure.set(ConnectFailure::Closed);
            }
            let taken = if plain.is_empty() { Ok(true) } else { self.next(plain) };
            match (taken, secured) {
                (Ok(true), Ok(true)) => {
                    self.failure.set(ConnectFailure::Closed);
                    let login = self.attempt.borrow_mut().secured();
                    self.with_target(|target| target.send(&login)).map(|()| true)
                }
                // It has said all that it has to, or the connection is the session's.
                (Ok(false), _) => Ok(false),
                (Ok(true), Err(Gone)) if self.target.borrow().is_none() => Ok(true),
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
