//! How a session ends, and what its client is told.

use std::rc::Rc;
use std::time::Duration;

use mysql_proto::error::ProxyError;
use mysql_proto::tracker::TrackerState;

use super::{METADATA, Session, SessionPhase, proxy_error_index};
use crate::deadlines::{Deadline, DeadlineOwner, PANIC_REASON};
use crate::node;

/// Time that a client has to read what the node said before it closed.
const MAX_UNREAD_TIME: Duration = Duration::from_secs(60);

impl Session {
    /// Starts a deadline, in place of the one before.
    pub(super) fn start_deadline(self: &Rc<Self>, after: Duration) {
        let deadline = Deadline::new(&self.worker.deadlines, after, &Rc::downgrade(self));
        self.deadline.replace(Some(deadline));
    }

    /// Nothing more is expected of the client, which gets so much time to read what it was told, and to close.
    pub(crate) fn close_after(&self, time: Duration) {
        if let Some(deadline) = &*self.deadline.borrow() {
            deadline.set(time);
        }
    }

    /// The node has closed. What it said last is on its way to the client, who has some time to read it.
    pub(crate) fn on_node_closed(self: &Rc<Self>) {
        if self.phase.get() != SessionPhase::Established {
            return;
        }
        self.end_after(MAX_UNREAD_TIME);
    }

    /// A command of the client was rejected. The client has some time to read the error, and to close.
    pub(crate) fn end_rejected(self: &Rc<Self>, why: ProxyError, time: Duration) {
        self.record_login_failure(proxy_error_index(why)); // a change of user is a login, too
        self.end_after(time);
    }

    /// The established session is over. Its client's connection is closed when that time has passed, if not before.
    fn end_after(self: &Rc<Self>, time: Duration) {
        self.phase.set(SessionPhase::Ended);
        self.cancel_probes();
        self.abandon_migration();
        self.release_node();
        self.start_deadline(time);
    }

    /// The client still reads what a closed node has sent.
    pub(crate) fn on_client_progress(&self) {
        if self.phase.get() == SessionPhase::Ended && self.login_failure.get().is_none() {
            self.close_after(MAX_UNREAD_TIME);
        }
    }

    /// Ends the login with an error of the proxy. Returns the error packet for the client.
    pub(crate) fn reject(&self, why: ProxyError) -> Vec<u8> {
        let packet = self.with_login(|login| login.error_packet(why)).unwrap_or_default();
        self.record_login_failure(proxy_error_index(why));
        packet
    }

    /// Ends the session from outside its sockets.
    pub(crate) fn close(&self, why: ProxyError) {
        let error = self.reject(why);
        self.final_error.replace(error);
        self.close_now(why.name());
    }

    /// No node was found. If one was full, the client gets its error, which says more than the proxy's.
    fn reject_without_node(&self) -> Vec<u8> {
        match self.full_node_error.take() {
            Some((node, packet)) => {
                self.record_login_failure_in(&node.counts, node::NODE_FULL);
                packet
            }
            None => self.reject(ProxyError::NoNode),
        }
    }

    /// Takes the error packet for the client before its socket closes.
    pub(crate) fn take_final_error(&self) -> Vec<u8> {
        match self.phase.get() {
            SessionPhase::Connecting => self.reject_without_node(),
            SessionPhase::Login => self.stop_login_failover().unwrap_or_else(|| self.reject(self.login_loss_error())),
            SessionPhase::Established | SessionPhase::Ended => self.final_error.take(),
        }
    }

    /// The time of its present phase is over.
    fn on_time_out(&self) {
        match self.phase.get() {
            // It was not the client that took so long.
            SessionPhase::Connecting => {
                let error = self.reject_without_node();
                self.final_error.replace(error);
                self.close_now(ProxyError::NoNode.name());
            }
            SessionPhase::Login => match self.stop_login_failover() {
                Some(error) => {
                    self.final_error.replace(error);
                    self.close_now("node_full");
                }
                None => self.close(ProxyError::LoginTooSlow),
            },
            SessionPhase::Established => self.check_idle_timeout(),
            // It was refused, by the node or here, or the node is gone, and the client has not closed.
            SessionPhase::Ended => self.close_now("client_stayed"),
        }
    }

    pub(crate) fn close_now(&self, why: &str) {
        if let Some(filter) = self.filter.get() {
            filter.close(why);
        }
    }

    /// Runs `run`, which concerns only this session. After a panic it is closed, rather than the session through which Envoy
    /// has called the module.
    pub(crate) fn guarded(&self, run: impl FnOnce()) {
        let is_done = envoy_abi::guarded("a session's turn", false, || {
            run();
            true
        });
        if !is_done {
            envoy_abi::guarded("closing after a panic", (), || self.close_now(PANIC_REASON));
        }
    }

    /// After an export or a migration the node counts the idle time of the session from zero. The session still ends when
    /// `wait_timeout` has passed since its last command.
    pub(super) fn resume_idle_timeout(self: &Rc<Self>, wait_timeout: Option<Duration>) {
        let since = self.commands.idle_since().or(self.established_at.get());
        let (Some(limit), Some(since)) = (wait_timeout, since) else { return };
        let old_conn = |limit: Duration| limit.saturating_sub(since.elapsed());
        let idle_timeout = self.idle_timeout.get();
        let shortest =
            if idle_timeout.is_zero() { old_conn(limit) } else { old_conn(limit).min(old_conn(idle_timeout)) };
        self.idle_since.set(Some(since));
        self.start_deadline(shortest);
    }

    pub(super) fn check_idle_timeout(&self) {
        let idle_since = self.idle_since.take();
        if self.idle_timeout.get().is_zero() && idle_since != self.commands.idle_since().or(self.established_at.get()) {
            // It has done something since.
            self.deadline.replace(None);
            return;
        }
        let busy = self.tracker.borrow().as_ref().is_some_and(|tracker| match tracker.state() {
            TrackerState::Busy => true,
            TrackerState::Opaque => self.has_client_sent_last.get(),
            TrackerState::Idle | TrackerState::InTransaction => false,
        });
        if busy {
            self.restart_idle_timeout();
        } else {
            self.close_now("idle_timeout");
        }
    }

    /// Restarts the idle timeout.
    pub(super) fn restart_idle_timeout(&self) {
        let idle_timeout = self.idle_timeout.get();
        if !idle_timeout.is_zero()
            && let Some(deadline) = &*self.deadline.borrow()
        {
            deadline.set(idle_timeout);
        }
    }

    /// The client's connection has ended, and with it the session. A second call changes nothing.
    pub(crate) fn on_ended(&self, by_client: bool) {
        if matches!(self.phase.get(), SessionPhase::Connecting | SessionPhase::Login) {
            self.record_login_failure(if by_client {
                node::CLIENT_GONE
            } else {
                proxy_error_index(self.login_loss_error())
            });
        }
        self.phase.set(SessionPhase::Ended);
        self.login_slot.replace(None);
        self.deadline.replace(None);
        self.worker.waker.remove(self.id);
        if let Some(failover) = self.login_failover.take() {
            failover.abandon();
        }
        self.cancel_probes();
        self.abandon_migration();
        self.release_node();
        self.report_bytes();
        self.migration.set_snapshot(None);
        if self.migration.is_migration_requested() {
            self.migration.clear_request();
            self.worker.waker.wake(); // another session may migrate now
        }
    }

    /// For the access log, since Envoy does not count what goes past it.
    fn report_bytes(&self) {
        if let Some(filter) = self.filter.get() {
            for (key, bytes) in
                [("bytes_from_client", &self.bytes_from_client), ("bytes_to_client", &self.bytes_to_client)]
            {
                filter.set_metadata_number(METADATA, key, bytes.get() as f64);
            }
        }
    }
}

impl DeadlineOwner for Session {
    fn on_deadline(self: Rc<Self>) {
        self.migration.drop_expired_snapshot();
        if self.deadline.borrow().as_ref().is_some_and(Deadline::has_passed) {
            self.on_time_out();
        }
    }

    fn close_after_panic(&self) {
        self.close_now(PANIC_REASON);
    }
}
