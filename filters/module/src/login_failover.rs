//! Fails a login over to another node, after the first node has greeted and then answered the login with the error that
//! it is full.
//!
//! The module opens the connections to other nodes. The connection to the node that accepts the login replaces the
//! first connection under Envoy's descriptor, as in a migration.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use mysql_proto::login::{FailoverAction, LoginAttempt};

use crate::deadlines::{Deadline, DeadlineOwner};
use crate::hosts::TargetNode;
use crate::migration_driver::UpstreamSocket;
use crate::node::{ConnectFailure, WorkerNode};
use crate::offload::{self, AuxFd};
use crate::panics::{CloseAfterPanic, PANIC_REASON};
use crate::reachability::{self, MonitoredEndpoint};
use crate::session::Session;
use crate::target_conn::TargetLost;
use crate::watched_target_conn::WatchedTargetConn;

/// How long one node may take to answer.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) struct LoginFailover {
    session: Weak<Session>,
    upstream: Rc<dyn UpstreamSocket>,
    /// The initial state of the login at each node.
    login: LoginAttempt,
    attempt: RefCell<LoginAttempt>,
    target_node: RefCell<Option<TargetNode>>,
    target_conn: WatchedTargetConn,
    /// The failure to report if the connection to the present target ended now.
    failure_on_close: Cell<ConnectFailure>,
    deadline: RefCell<Option<Deadline>>,
    /// The node that was full first, and its endpoint.
    first_node: Option<Rc<WorkerNode>>,
    first_endpoint: Option<Arc<MonitoredEndpoint>>,
    /// The error of the first node. The client gets it if no other node accepts the login.
    full_error: Vec<u8>,
}

impl LoginFailover {
    /// Starts a failover. False: there is no other node, and the client gets the error of the first node.
    pub(crate) fn start(
        session: &Rc<Session>,
        upstream: Rc<dyn UpstreamSocket>,
        login: LoginAttempt,
        full_error: Vec<u8>,
    ) -> bool {
        let failover = Rc::new_cyclic(|failover| Self {
            session: Rc::downgrade(session),
            upstream,
            attempt: RefCell::new(login.clone()),
            login,
            target_node: RefCell::default(),
            target_conn: WatchedTargetConn::default(),
            failure_on_close: Cell::new(ConnectFailure::Connect),
            deadline: RefCell::new(Some(Deadline::new(&session.worker.deadlines, ATTEMPT_TIMEOUT, failover))),
            first_node: session.node(),
            first_endpoint: session.monitored_endpoint(),
            full_error,
        });
        let has_target = failover.try_next(session);
        if has_target {
            session.set_login_failover(failover);
        } else {
            failover.return_to_first_node();
        }
        has_target
    }

    /// Connects to the next node. False: there is no other node.
    fn try_next(self: &Rc<Self>, session: &Rc<Session>) -> bool {
        while let Some(next) = session.next_login_target() {
            let endpoint = reachability::monitor(&next.endpoint, &next.node.shared.name);
            session.try_node(&next.endpoint, &next.node, endpoint);
            self.attempt.replace(self.login.clone());
            self.failure_on_close.set(ConnectFailure::Connect);
            if let Some(deadline) = &*self.deadline.borrow() {
                deadline.set(ATTEMPT_TIMEOUT);
            }
            let address = next.address;
            self.target_node.replace(Some(next));
            let aux_fd: Weak<dyn AuxFd> = Rc::downgrade(&(Rc::clone(self) as Rc<dyn AuxFd>));
            if self.target_conn.connect(&*self.upstream, address, aux_fd).is_some() {
                return true;
            }
            self.report_failure(ConnectFailure::Connect);
        }
        false
    }

    /// Reports that the present target cannot be used.
    fn report_failure(&self, failure: ConnectFailure) {
        if let Some(node) = &*self.target_node.borrow() {
            self.upstream.report_connect_failure(&node.node, &node.endpoint, failure);
        }
    }

    /// Tries the next node. If there is no other node, the client gets the error of the first node.
    fn fail_over(self: &Rc<Self>) {
        self.target_conn.close();
        let Some(session) = self.session.upgrade() else { return };
        if !self.try_next(&session) {
            self.give_up(&session);
        }
    }

    /// Assigns the session to the first node, at which the failed login then counts.
    fn return_to_first_node(&self) {
        if let (Some(session), Some(node)) = (self.session.upgrade(), &self.first_node) {
            session.set_login_node(node, self.first_endpoint.clone());
        }
    }

    fn give_up(&self, session: &Rc<Session>) {
        session.resume_login();
        self.return_to_first_node();
        self.upstream.receive_login(&self.full_error);
    }

    /// Stops the failover, after a timeout or the end of the session. Returns the error of the first node.
    pub(crate) fn abandon(&self) -> &[u8] {
        self.deadline.replace(None);
        self.target_conn.close();
        self.return_to_first_node();
        &self.full_error
    }

    /// Applies an action at the present target. Ok(false): the target cannot accept the login.
    fn apply(&self, next: FailoverAction) -> Result<bool, TargetLost> {
        match next {
            FailoverAction::Wait => {}
            FailoverAction::Send(bytes) => self.target_conn.with(|target| target.send(&bytes))?,
            FailoverAction::StartTls(request) => {
                self.failure_on_close.set(ConnectFailure::Tls);
                let name = self.target_node.borrow().as_ref().map(|node| node.node.shared.name.clone());
                self.target_conn
                    .start_tls(&*self.upstream, &name.unwrap_or_default(), &request)
                    .map_err(|_| TargetLost)?;
            }
            FailoverAction::Full => {
                self.report_failure(ConnectFailure::Full);
                return Ok(false);
            }
            FailoverAction::MissingCapability => return Ok(false),
            FailoverAction::Error | FailoverAction::Invalid => {
                let is_invalid = next == FailoverAction::Invalid;
                self.report_failure(if is_invalid { ConnectFailure::Invalid } else { ConnectFailure::Error });
                return Ok(false);
            }
            FailoverAction::Answer(bytes) => self.switch(&bytes),
        }
        Ok(true)
    }

    /// Replaces the connection to the first node by the connection to the present target.
    fn switch(&self, answer: &[u8]) {
        let Some(session) = self.session.upgrade() else { return };
        let Some((target, key)) = self.target_conn.take() else { return };
        let conn = self.upstream.conn();
        let (connection, tls) = target.into_parts();
        if !offload::swap(conn, key, connection) {
            conn.worker.events.remove_key(key);
            return self.give_up(&session);
        }
        conn.replace_connection(tls);
        session.set_node_id(self.attempt.borrow().node_connection_id());
        session.resume_login();
        if let Some(node) = &*self.target_node.borrow() {
            node.node.shared.end_ejection();
        }
        self.upstream.receive_login(answer);
    }
}

impl CloseAfterPanic for LoginFailover {
    fn close_after_panic(&self) {
        if let Some(session) = self.session.upgrade() {
            session.close_now(PANIC_REASON);
        }
    }
}

impl DeadlineOwner for LoginFailover {
    /// The present target takes too long.
    fn on_deadline(self: Rc<Self>) {
        self.report_failure(self.failure_on_close.get());
        self.fail_over();
    }
}

impl AuxFd for LoginFailover {
    fn on_event(self: Rc<Self>) {
        if self.failure_on_close.get() == ConnectFailure::Connect && self.target_conn.is_connected() {
            self.failure_on_close.set(ConnectFailure::Closed);
        }
        let done = self.upstream.conn().worker.buffers.with_scratch(|plain| {
            let secured = self.target_conn.with(|target| target.receive(plain));
            let taken = if plain.is_empty() { Ok(true) } else { self.receive(plain) };
            match (taken, secured) {
                (Ok(true), Ok(true)) => {
                    self.failure_on_close.set(ConnectFailure::Closed);
                    let login = self.attempt.borrow_mut().on_tls_established();
                    self.target_conn.with(|target| target.send(&login)).map(|()| true)
                }
                (Ok(false), _) => Ok(false),
                // The session uses this connection now, and notices itself that the connection has ended.
                (Ok(true), Err(TargetLost)) if !self.target_conn.is_open() => Ok(true),
                (taken, secured) => secured.and(taken),
            }
        });
        match done {
            Ok(true) => {}
            Ok(false) => self.fail_over(),
            Err(TargetLost) => {
                self.report_failure(self.failure_on_close.get());
                self.fail_over();
            }
        }
    }
}

impl LoginFailover {
    fn receive(&self, bytes: &[u8]) -> Result<bool, TargetLost> {
        let next = self.attempt.borrow_mut().receive(bytes);
        self.apply(next)
    }
}

impl Session {
    /// The next node that the login may fail over to, within the group of the session's node.
    fn next_login_target(&self) -> Option<TargetNode> {
        let node = self.node()?;
        self.worker.hosts.find_login_target(&node, |endpoint| self.has_tried(endpoint))
    }
}
