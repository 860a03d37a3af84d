//! A login that fails over to another node, because the first one has greeted and then answers that it is full.
//!
//! The connections to other nodes belong to the module. The one on which the login continues replaces the first one under
//! Envoy's descriptor, as in a migration.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use mysql_proto::login::{FailoverAction, LoginAttempt};

use crate::deadlines::{Deadline, DeadlineOwner, PANIC_REASON};
use crate::hosts::TargetNode;
use crate::migration_driver::UpstreamSocket;
use crate::node::{ConnectFailure, WorkerNode};
use crate::offload::{self, AuxFd};
use crate::reachability::{self, MonitoredEndpoint};
use crate::session::Session;
use crate::target_conn::TargetLost;
use crate::watched_target_conn::WatchedTargetConn;

/// How long one node may take to answer.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) struct LoginFailover {
    session: Weak<Session>,
    upstream: Rc<dyn UpstreamSocket>,
    /// The login as it starts at each node.
    login: LoginAttempt,
    attempt: RefCell<LoginAttempt>,
    target_node: RefCell<Option<TargetNode>>,
    target_conn: WatchedTargetConn,
    /// The failure to report if the connection to the present node ended now.
    failure_on_close: Cell<ConnectFailure>,
    deadline: RefCell<Option<Deadline>>,
    /// The node that is full, and its endpoint.
    first_node: Option<Rc<WorkerNode>>,
    first_endpoint: Option<Arc<MonitoredEndpoint>>,
    /// The error of that node, for the client if no other node takes the login.
    full_error: Vec<u8>,
}

impl LoginFailover {
    /// False: there is no other node, and the client gets the error of the first one.
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

    /// Connects to the next node. False: there is none.
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

    /// The present node cannot be used.
    fn report_failure(&self, failure: ConnectFailure) {
        if let Some(node) = &*self.target_node.borrow() {
            self.upstream.report_connect_failure(&node.node, &node.endpoint, failure);
        }
    }

    /// Tries the next node. If there is none, the client gets the error of the first one.
    fn fail_over(self: &Rc<Self>) {
        self.target_conn.close();
        let Some(session) = self.session.upgrade() else { return };
        if !self.try_next(&session) {
            self.give_up(&session);
        }
    }

    /// The login fails with the error of the first node, as whose failure it counts.
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

    /// The login has timed out, or the session has ended. Returns the error of the first node.
    pub(crate) fn abandon(&self) -> &[u8] {
        self.deadline.replace(None);
        self.target_conn.close();
        self.return_to_first_node();
        &self.full_error
    }

    /// Applies an action at the present node. Ok(false): that node cannot take the login.
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
                let invalid = next == FailoverAction::Invalid;
                self.report_failure(if invalid { ConnectFailure::Invalid } else { ConnectFailure::Error });
                return Ok(false);
            }
            FailoverAction::Answer(bytes) => self.switch(&bytes),
        }
        Ok(true)
    }

    /// The connection to the present node replaces that to the first one.
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
        session.resume_login();
        session.with_login(mysql_proto::login::Login::on_switched_node);
        if let Some(node) = &*self.target_node.borrow() {
            node.node.shared.end_ejection();
        }
        self.upstream.receive_login(answer);
    }
}

impl DeadlineOwner for LoginFailover {
    /// The present node takes too long.
    fn on_deadline(self: Rc<Self>) {
        self.report_failure(self.failure_on_close.get());
        self.fail_over();
    }

    fn close_after_panic(&self) {
        if let Some(session) = self.session.upgrade() {
            session.close_now(PANIC_REASON);
        }
    }
}

impl AuxFd for LoginFailover {
    fn on_event(self: Rc<Self>) {
        let done = self.upstream.conn().worker.buffers.with_scratch(|plain| {
            let secured = self.target_conn.with(|target| target.receive(plain));
            if !plain.is_empty() && self.failure_on_close.get() == ConnectFailure::Connect {
                self.failure_on_close.set(ConnectFailure::Closed);
            }
            let taken = if plain.is_empty() { Ok(true) } else { self.receive(plain) };
            match (taken, secured) {
                (Ok(true), Ok(true)) => {
                    self.failure_on_close.set(ConnectFailure::Closed);
                    let login = self.attempt.borrow_mut().on_tls_established();
                    self.target_conn.with(|target| target.send(&login)).map(|()| true)
                }
                (Ok(false), _) => Ok(false),
                // The connection is that of the session now, which notices its end itself.
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
    /// The next node that the login may fail over to, within the group of its node.
    fn next_login_target(&self) -> Option<TargetNode> {
        let node = self.node()?;
        self.worker.hosts.find_login_target(&node, |endpoint| self.has_tried(endpoint))
    }
}
