//! A node closes the connection of a session that runs nothing: the session ends, or goes on elsewhere.
//!
//! TiDB closes a connection without a word after KILL or `wait_timeout`, and then the session has to end. Only if the node
//! itself is gone does the session go on elsewhere. So the node's port is probed; the client is held meanwhile.

use std::net::SocketAddr;
use std::rc::{Rc, Weak};

use super::{Phase, Session};
use crate::deadlines::Deadline;
use crate::port_probe::{self, Asker};
use crate::{clock, moving::Moving};

/// Which node has closed a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClosedBy {
    /// The session's node.
    Node,
    /// The target of its move, after the login there.
    Target,
}

/// A session asks whether a node that has closed a connection of it is still there.
pub(crate) struct Question {
    session: Weak<Session>,
    closed_by: ClosedBy,
    address: SocketAddr,
    deadline: Option<Deadline>,
}

impl Asker for Question {
    fn answered(self: Rc<Self>, is_there: bool) {
        let session = self.session.upgrade();
        if let Some(session) = session.filter(|session| session.is_asked_by(&self)) {
            session.answered(self.closed_by, is_there);
        }
    }
}

impl Session {
    /// Its node has closed the connection, or reset it. False: the session ends with it. True: the node is probed, or was
    /// before, and the result decides.
    pub(crate) fn asks_about_node(self: &Rc<Self>, is_reset: bool) -> bool {
        let closed_by = self.travel.question.borrow().as_ref().map(|question| question.closed_by);
        if self.phase.get() != Phase::Established || closed_by == Some(ClosedBy::Node) {
            return closed_by == Some(ClosedBy::Node);
        }
        let moving = self.travel.moving().filter(|moving| moving.holds());
        if moving.as_ref().is_some_and(|moving| moving.is_rescue()) {
            return true; // it moves for that reason
        }
        let is_saveable = self.runs_nothing() && self.travel.has_fresh(clock::now()) && self.is_taken_over();
        let Some(address) = self.travel.node_address.get().filter(|_| moving.is_some() || is_saveable) else {
            return false;
        };
        if let Some(moving) = &moving {
            moving.old_closed();
            if closed_by == Some(ClosedBy::Target) {
                moving.target_lost();
            }
        }
        // A process that ends with unread bytes resets the connection. So a reset shows nothing if the node was sent something.
        self.asks(ClosedBy::Node, address, is_reset && moving.as_ref().is_none_or(|moving| !moving.awaits_old()));
        true
    }

    /// The target of its move has closed the connection after the login. False: another probe is running already.
    pub(crate) fn asks_about_target(self: &Rc<Self>, address: SocketAddr) -> bool {
        let asks = !self.travel.is_asking();
        if asks {
            self.asks(ClosedBy::Target, address, false);
        }
        asks
    }

    fn asks(self: &Rc<Self>, closed_by: ClosedBy, address: SocketAddr, is_reset: bool) {
        let deadline = self.waker().map(|waker| Deadline::new(waker, port_probe::TIMEOUT));
        let question = Rc::new(Question { session: Rc::downgrade(self), closed_by, address, deadline });
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
    pub(super) fn checks_probe_deadlines(&self) {
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

    /// Nothing depends on probes any more.
    pub(super) fn drops_probes(&self) {
        self.travel.question.replace(None);
        self.travel.left.replace(None);
        port_probe::asker_has_ended();
    }

    fn answered(self: &Rc<Self>, closed_by: ClosedBy, is_there: bool) {
        self.travel.question.replace(None);
        if is_there {
            self.ends_with_connection();
        } else if closed_by == ClosedBy::Node {
            self.node_vanished();
        } else if let Some(moving) = self.travel.moving().filter(|moving| moving.holds()) {
            moving.target_lost();
        }
        if !self.travel.holds() {
            self.client_rests();
        }
    }

    /// Its node is gone. If it ran nothing and its states are at hand, it goes on elsewhere. Else it ends.
    pub(crate) fn node_vanished(self: &Rc<Self>) {
        match self.travel.moving().filter(|moving: &Rc<Moving>| moving.holds()) {
            Some(moving) => moving.old_lost(),
            None if self.is_rescued() => {}
            None => self.ends_with_connection(),
        }
    }

    /// Its node has ended it, for KILL or `wait_timeout`: the client sees what it would see without a proxy.
    pub(crate) fn ends_with_connection(&self) {
        self.travel.keep(None);
        self.stop_moving();
        if let Some(vehicle) = self.travel.vehicle() {
            vehicle.link().doom();
        }
    }
}
