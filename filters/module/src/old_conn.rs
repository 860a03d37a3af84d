//! The connection to the node that a session has left, until the node closes this connection.
//!
//! A KILL at the old node may have ended the session just before it migrated. So the module sends COM_PING before
//! COM_QUIT. If the node closes the connection without an answer to COM_PING, COM_QUIT was not the reason.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::time::Duration;

use mysql_proto::packet::{HEADER, Header};
use tls::Stream;

use crate::deadlines::{Deadline, DeadlineOwner};
use crate::offload::AuxFd;
use crate::panics::CloseAfterPanic;
use crate::port_probe::{self, ProbeClient};
use crate::session::Session;
use crate::target_conn::TargetConn;
use crate::watched_target_conn::WatchedTargetConn;
use crate::worker::WorkerContext;

/// COM_QUIT.
pub(crate) const QUIT: &[u8] = &[1, 0, 0, 0, 1];
/// COM_PING and COM_QUIT.
const PING_AND_QUIT: &[u8] = &[1, 0, 0, 0, 0x0e, 1, 0, 0, 0, 1];
/// How long the node may take to close the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) struct OldConn {
    worker: Rc<WorkerContext>,
    session: Weak<Session>,
    address: Option<SocketAddr>,
    connection: WatchedTargetConn,
    deadline: Deadline,
    /// The received bytes, until the answer to COM_PING is complete.
    answer: RefCell<Vec<u8>>,
    /// The node has closed the connection, and may be probed now.
    is_closed: Cell<bool>,
}

impl OldConn {
    /// Sends COM_PING and COM_QUIT to the node that the session has left. If the connection cannot be watched, it is
    /// closed at once.
    pub(crate) fn start(session: &Rc<Session>, connection: OwnedFd, tls: Option<Box<Stream>>) {
        let connection = TargetConn::from_parts(Rc::clone(&session.worker), connection, tls);
        let sent = connection.send(PING_AND_QUIT);
        let old = Rc::new_cyclic(|old| Self {
            worker: Rc::clone(&session.worker),
            session: Rc::downgrade(session),
            address: session.migration.node_address.get(),
            connection: WatchedTargetConn::default(),
            deadline: Deadline::new(&session.worker.deadlines, CLOSE_TIMEOUT, old),
            answer: RefCell::default(),
            is_closed: Cell::new(false),
        });
        session.migration.old_conn.replace(Some(Rc::clone(&old)));
        let aux_fd: Weak<dyn AuxFd> = Rc::downgrade(&(Rc::clone(&old) as Rc<dyn AuxFd>));
        let watched = old.connection.watch(connection, aux_fd);
        if sent.is_err() {
            old.on_closed();
        } else if watched.is_none() {
            old.finish();
        }
    }

    /// The node has closed or reset the connection.
    fn on_closed(self: &Rc<Self>) {
        if self.is_closed.replace(true) {
            return;
        }
        let (Some(address), Some(session)) = (self.address.filter(|_| !self.has_ping_reply()), self.session.upgrade())
        else {
            return self.finish();
        };
        self.deadline.set(port_probe::TIMEOUT);
        let header = || session.upstream().map_or_else(Vec::new, |upstream| upstream.proxy_header());
        if let Some(is_there) = self.worker.ports.probe(address, self, false, &header) {
            Rc::clone(self).on_probe_result(is_there);
        }
    }

    /// Whether the node has answered COM_PING. An error is an answer, too: TiDB sends 1053 when it stops (pingcap/tidb
    /// `pkg/server/conn.go`, `dispatch`).
    fn has_ping_reply(&self) -> bool {
        let answer = self.answer.borrow();
        // A packet that the node sends without a request has the sequence number 0.
        Header::parse(&answer).is_some_and(|header| header.sequence == 1 && answer.len() >= HEADER + header.length)
    }

    /// The address of the node that may be probed.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    fn finish(&self) {
        self.connection.close();
        if let Some(session) = self.session.upgrade() {
            let current = &session.migration.old_conn;
            let is_this = current.borrow().as_ref().is_some_and(|current| std::ptr::eq(Rc::as_ptr(current), self));
            let _done = if is_this { current.take() } else { None };
            session.return_to_envoy_if_switched_off();
        }
    }
}

impl CloseAfterPanic for OldConn {
    fn close_after_panic(&self) {
        self.finish();
    }
}

impl DeadlineOwner for OldConn {
    fn on_deadline(self: Rc<Self>) {
        if let Some(address) = self.address.filter(|_| self.is_closed.get()) {
            self.worker.ports.time_out(address);
        }
        self.finish();
    }
}

impl ProbeClient for OldConn {
    fn on_probe_result(self: Rc<Self>, is_there: bool) {
        self.finish();
        if let Some(session) = self.session.upgrade().filter(|_| is_there) {
            session.end_with_connection();
        }
    }
}

impl AuxFd for OldConn {
    fn on_event(self: Rc<Self>) {
        let ended = self.worker.buffers.with_scratch(|plain| {
            let ended = self.connection.with(|connection| connection.receive(plain)).is_err();
            if !self.has_ping_reply() {
                self.answer.borrow_mut().extend_from_slice(plain);
            }
            ended
        });
        if ended {
            self.on_closed();
        }
    }
}
