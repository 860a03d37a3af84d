//! The connection to the node that a session has left, until that node closes it.
//!
//! Just before the session left, it may have been killed there. So COM_PING is sent right before COM_QUIT. If the node closes
//! the connection without an answer to COM_PING, it did not do so for COM_QUIT.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::time::Duration;

use tls::Stream;
use wire::packet::{HEADER, Header};

use crate::deadlines::Deadline;
use crate::events::Visitor;
use crate::port_probe::{self, Asker};
use crate::session::Session;
use crate::target::Target;
use crate::watched_target::WatchedTarget;
use crate::worker;

/// COM_QUIT.
pub(crate) const QUIT: &[u8] = &[1, 0, 0, 0, 1];
/// COM_PING and COM_QUIT.
const PING_AND_QUIT: &[u8] = &[1, 0, 0, 0, 0x0e, 1, 0, 0, 0, 1];
/// How long the node may take to close it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) struct OldConnection {
    session: Weak<Session>,
    address: Option<SocketAddr>,
    connection: WatchedTarget,
    deadline: Option<Deadline>,
    /// What the node has sent, until its answer to COM_PING is complete.
    answer: RefCell<Vec<u8>>,
    /// The node has closed it, and may be probed.
    has_ended: Cell<bool>,
}

impl OldConnection {
    /// The session has left it. If it cannot be watched, it is closed at once.
    pub(crate) fn leave(session: &Rc<Session>, connection: OwnedFd, tls: Option<Box<Stream>>) {
        let connection = Target::of(connection, tls);
        let sent = connection.send(PING_AND_QUIT);
        let old = Rc::new(Self {
            session: Rc::downgrade(session),
            address: session.travel.node_address.get(),
            connection: WatchedTarget::default(),
            deadline: session.waker().map(|waker| Deadline::new(waker, CLOSE_TIMEOUT)),
            answer: RefCell::default(),
            has_ended: Cell::new(false),
        });
        session.travel.left.replace(Some(Rc::clone(&old)));
        let visitor: Weak<dyn Visitor> = Rc::downgrade(&(Rc::clone(&old) as Rc<dyn Visitor>));
        let watched = old.connection.watch(connection, visitor);
        if sent.is_err() {
            old.ends();
        } else if watched.is_none() {
            old.is_done();
        }
    }

    /// A deadline may have passed.
    pub(crate) fn woken(&self) {
        if self.deadline.as_ref().is_some_and(Deadline::has_passed) {
            if let Some(address) = self.address.filter(|_| self.has_ended.get()) {
                port_probe::give_up(address);
            }
            self.is_done();
        }
    }

    /// The node has closed it, or reset it.
    fn ends(self: &Rc<Self>) {
        if self.has_ended.replace(true) {
            return;
        }
        let (Some(address), Some(session)) = (self.address.filter(|_| !self.is_answered()), self.session.upgrade())
        else {
            return self.is_done();
        };
        if let Some(deadline) = &self.deadline {
            deadline.set(port_probe::TIMEOUT);
        }
        let header = || session.travel.vehicle().map_or_else(Vec::new, |vehicle| vehicle.proxy_header());
        if let Some(is_there) = port_probe::ask(address, self, false, &header) {
            Rc::clone(self).answered(is_there);
        }
    }

    /// Whether the node has answered COM_PING, be it with an error: TiDB sends 1053 when it stops (pingcap/tidb
    /// `pkg/server/conn.go`, `dispatch`).
    fn is_answered(&self) -> bool {
        let answer = self.answer.borrow();
        // What it sends unasked has the number 0.
        Header::parse(&answer).is_some_and(|header| header.sequence == 1 && answer.len() >= HEADER + header.length)
    }

    fn is_done(&self) {
        self.connection.close();
        if let Some(session) = self.session.upgrade() {
            let left = &session.travel.left;
            let is_this = left.borrow().as_ref().is_some_and(|left| std::ptr::eq(Rc::as_ptr(left), self));
            let _done = if is_this { left.take() } else { None };
        }
    }
}

impl Asker for OldConnection {
    fn answered(self: Rc<Self>, is_there: bool) {
        self.is_done();
        if let Some(session) = self.session.upgrade().filter(|_| is_there) {
            session.ends_with_connection();
        }
    }
}

impl Visitor for OldConnection {
    fn happened(self: Rc<Self>) {
        let ended = worker::with_scratch(|plain| {
            let ended = self.connection.with(|connection| connection.take(plain)).is_err();
            if !self.is_answered() {
                self.answer.borrow_mut().extend_from_slice(plain);
            }
            ended
        });
        if ended {
            self.ends();
        }
    }
}
