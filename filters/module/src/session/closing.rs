//! A connection of a session to a node ends while the session runs nothing: it ends, too, or goes on elsewhere.
//!
//! TiDB ends a connection that was killed, or was idle for too long, by a bare FIN, and then the session is over. Only a node
//! that is gone may be replaced. So the node's port is asked, and the client is held meanwhile.

use std::net::SocketAddr;
use std::rc::{Rc, Weak};

use super::{Phase, Session};
use crate::deadlines::Deadline;
use crate::port_probe::{self, Asker};
use crate::{clock, moving::Moving};

/// Whose end is looked into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    /// That of the session's node.
    Node,
    /// That of the node which has let it in, and where it is not yet.
    Target,
}

/// Whether a node that has closed a connection of a session is still there.
pub(crate) struct Question {
    session: Weak<Session>,
    whose: Whose,
    address: SocketAddr,
    deadline: Option<Deadline>,
}

impl Asker for Question {
    fn answered(self: Rc<Self>, is_there: bool) {
        let session = self.session.upgrade();
        if let Some(session) = session.filter(|session| session.is_asked_by(&self)) {
            session.answered(self.whose, is_there);
        }
    }
}

impl Session {
    /// Its node has closed the connection, or broken it off. False: the session ends with it. Else that is being looked
    /// into, or was already, and whatever comes of it follows by itself.
    pub(crate) fn asks_about_node(self: &Rc<Self>, is_reset: bool) -> bool {
        let whose = self.travel.question.borrow().as_ref().map(|question| question.whose);
        if self.phase.get() != Phase::Established || self.travel.is_committing() || whose == Some(Whose::Node) {
            return whose == Some(Whose::Node);
        }
        let moving = self.travel.moving().filter(|moving| moving.holds());
        if moving.as_ref().is_some_and(|moving| moving.is_rescue()) {
            return true; // that was known
        }
        let is_saveable = self.runs_nothing() && self.travel.has_fresh(clock::now()) && self.is_taken_over();
        let Some(address) = self.travel.node_address.get().filter(|_| moving.is_some() || is_saveable) else {
            return false;
        };
        if let Some(moving) = &moving {
            moving.old_closed();
            if whose == Some(Whose::Target) {
                moving.target_lost();
            }
        }
        // What is unread when a process closes becomes a reset, so one tells nothing where a node is asked something.
        self.asks(Whose::Node, address, is_reset && moving.as_ref().is_none_or(|moving| !moving.awaits_old()));
        true
    }

    /// The node that it moves to has let it in, and has closed then. False: that needs not be looked into.
    pub(crate) fn asks_about_target(self: &Rc<Self>, address: SocketAddr) -> bool {
        let asks = !self.travel.is_asking();
        if asks {
            self.asks(Whose::Target, address, false);
        }
        asks
    }

    fn asks(self: &Rc<Self>, whose: Whose, address: SocketAddr, is_reset: bool) {
        let deadline = self.waker().map(|waker| Deadline::new(waker, port_probe::TIMEOUT));
        let question = Rc::new(Question { session: Rc::downgrade(self), whose, address, deadline });
        self.travel.question.replace(Some(Rc::clone(&question)));
        let header = || self.travel.vehicle().map_or_else(Vec::new, |vehicle| vehicle.proxy_header());
        if let Some(is_there) = port_probe::ask(address, &question, is_reset, &header) {
            question.answered(is_there);
        }
    }

    fn is_asked_by(&self, question: &Rc<Question>) -> bool {
        self.travel.question.borrow().as_ref().is_some_and(|asked| Rc::ptr_eq(asked, question))
    }

    /// The port has not answered in time.
    pub(super) fn waits_no_longer(&self) {
        let has_passed = |question: &Rc<Question>| question.deadline.as_ref().is_some_and(Deadline::has_passed);
        let late = self.travel.question.borrow().clone().filter(has_passed);
        if let Some(question) = late {
            port_probe::give_up(question.address);
        }
        let left = self.travel.left.borrow().clone();
        if let Some(left) = left {
            left.woken();
        }
    }

    pub(super) fn asks_nothing(&self) {
        self.travel.question.replace(None);
        self.travel.left.replace(None);
    }

    fn answered(self: &Rc<Self>, whose: Whose, is_there: bool) {
        self.travel.question.replace(None);
        if is_there {
            self.ends_with_connection();
        } else if whose == Whose::Node {
            self.node_vanished();
        } else if let Some(moving) = self.travel.moving().filter(|moving| moving.holds()) {
            moving.target_lost();
        }
        if !self.travel.holds() {
            self.client_rests();
        }
    }

    /// Its node is gone: it goes on elsewhere, if it ran nothing and its states are known, or ends.
    pub(crate) fn node_vanished(self: &Rc<Self>) {
        match self.travel.moving().filter(|moving: &Rc<Moving>| moving.holds()) {
            Some(moving) => moving.old_lost(),
            None if self.is_rescued() => {}
            None => self.ends_with_connection(),
        }
    }

    /// It was killed, or its node has had enough of it: the client hears what it would hear from the node.
    pub(crate) fn ends_with_connection(&self) {
        self.travel.keep(None);
        self.stop_moving();
        if let Some(vehicle) = self.travel.vehicle() {
            vehicle.link().doom();
        }
    }
}
