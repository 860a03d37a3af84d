//! The deadlines of a session, and how it ends.

use std::rc::Rc;
use std::time::Duration;

use mysql_proto::error::ProxyError;

use super::lifecycle::Event;
use super::traffic::Traffic;
use super::{METADATA, Session, SessionPhase};
use crate::deadlines::{Deadline, DeadlineOwner};
use crate::envoy_drain::{self, ClientUse, DrainPhase};
use crate::live_config;
use crate::panics::{CloseAfterPanic, PANIC_REASON, run_guarded};

/// COM_PING with its header.
const PING: [u8; 5] = [1, 0, 0, 0, 0x0e];

impl Session {
    /// Replaces the deadline.
    pub(super) fn start_deadline(self: &Rc<Self>, after: Duration) {
        let deadline = Deadline::new(&self.worker.deadlines, after, &Rc::downgrade(self));
        self.deadline.replace(Some(deadline));
    }

    /// Moves the deadline, if there is one.
    pub(crate) fn extend_deadline(&self, after: Duration) {
        if let Some(deadline) = &*self.deadline.borrow() {
            deadline.set(after);
        }
    }

    /// Stops everything that depends on the node, and stops counting the session at the node.
    pub(super) fn leave_node(&self) {
        self.cancel_probes();
        self.abandon_migration();
        self.with_traffic(|traffic| traffic.commands.statements.forget()); // their places under limits are free
        self.release_node();
    }

    /// Ends the login with this error.
    pub(crate) fn close(self: &Rc<Self>, why: ProxyError) {
        self.handle(Event::LoginRefused(why));
    }

    /// Takes the error packet that the client gets before its connection closes.
    pub(crate) fn take_final_error(self: &Rc<Self>) -> Vec<u8> {
        if self.is_ended_by_drain.get() && self.may_get_error() && self.client.has_unread() {
            // A command has arrived in the last moment. It does not run.
            self.final_error.replace(mysql_proto::error::envoy_stopped());
        }
        self.handle(Event::ClientClosing);
        self.final_error.take()
    }

    /// Lets Envoy's proxy see the connection, which [`Self::try_wait_for_node`] has withheld.
    pub(super) fn continue_connection(self: &Rc<Self>) {
        self.start_deadline(live_config::limits().login_timeout);
        if let Some(attached) = self.filter.get() {
            attached.filter.continue_connection();
        }
    }

    /// Ends the session if this Envoy drains, and nothing is lost by that: a client that logs in gets an error, an
    /// idle session ends without one, and a transaction or a running command continues until the drain's timeout.
    pub(crate) fn end_if_envoy_drains(self: &Rc<Self>) {
        let drain = envoy_drain::phase();
        match self.phase() {
            SessionPhase::Established if self.is_ended_by_drain() => self.close_now("envoy_drain"),
            _ if drain < DrainPhase::Ending => {}
            SessionPhase::Waiting | SessionPhase::Connecting | SessionPhase::Login | SessionPhase::LoginFailover => {
                self.close(ProxyError::EnvoyDraining);
            }
            SessionPhase::Established if drain == DrainPhase::Closing => {
                self.end_with_error("envoy_drain", mysql_proto::error::envoy_stopped());
            }
            SessionPhase::NodeClosed if drain == DrainPhase::Closing => self.close_now("envoy_drain"),
            SessionPhase::Established if self.may_end_now() => {
                self.is_ended_by_drain.set(true);
                self.close_now("envoy_drain");
            }
            SessionPhase::Established | SessionPhase::Rejected | SessionPhase::NodeClosed | SessionPhase::Closed => {}
        }
    }

    /// Ends the session instead of answering these bytes of the client, if they are a COM_PING and this Envoy drains.
    /// Returns whether it does.
    pub(crate) fn try_finish_at_ping(self: &Rc<Self>, bytes: &[u8]) -> bool {
        let may_finish = bytes == PING && envoy_drain::must_end_sessions() && self.may_end_now();
        if may_finish {
            self.finish_in_drain();
        }
        may_finish
    }

    /// Whether the session may end with the response that is held back.
    pub(super) fn may_end_after_response(&self) -> bool {
        self.may_end_now() && self.client_use().is_some_and(ClientUse::may_end_after_response)
    }

    /// Sends the FIN at once, in the segment of the response, so that the client has it before it sends another command.
    /// Envoy closes the connection in the worker's next turn.
    pub(super) fn finish_in_drain(self: &Rc<Self>) {
        self.is_ended_by_drain.set(true);
        self.client.finish();
        envoy_drain::enqueue(self);
    }

    /// Whether the drain of this Envoy has ended the session. What the client still sends is ignored.
    pub(crate) fn is_ended_by_drain(&self) -> bool {
        self.is_ended_by_drain.get()
    }

    /// Whether the session is idle, has no transaction, the client has got all responses, and no command of the client
    /// has arrived.
    pub(super) fn may_end_now(&self) -> bool {
        self.phase() == SessionPhase::Established
            && self.is_idle()
            && !self.has_held_request()
            && !self.has_partial_request()
            && self.migration.driver().is_none()
            && !self.migration.is_probing()
            && self.client.is_quiescent()
            && !self.client.has_unsent()
            && self.upstream().is_some_and(|upstream| upstream.conn().is_quiescent())
            && !self.client.has_unread()
    }

    /// Whether the client would take an error for the response to its next command. Behind a part of a response, the
    /// error would damage this response.
    fn may_get_error(&self) -> bool {
        self.phase() == SessionPhase::Established && self.awaits_client() && !self.client.has_unsent()
    }

    /// Ends the session. If the client has got all responses, it gets `error` for the command that it sends next.
    /// Otherwise it just loses the connection, since its command may have run. `why`: the reason in the access log.
    pub(crate) fn end_with_error(&self, why: &str, error: Vec<u8>) {
        if self.may_get_error() {
            self.final_error.replace(error);
        }
        self.close_now(why);
    }

    /// Makes Envoy close the client's connection. `why`: the reason in the access log.
    pub(crate) fn close_now(&self, why: &str) {
        if let Some(attached) = self.filter.get() {
            attached.filter.close(why);
        }
    }

    /// Calls `run`, which concerns only this session. After a panic in `run` this session is closed, and not the
    /// session whose hook Envoy has called.
    pub(crate) fn guarded(&self, run: impl FnOnce()) {
        run_guarded("a session's turn", self, run);
    }

    /// Zero: there is no idle timeout.
    pub(super) fn idle_timeout(&self) -> Duration {
        self.filter.get().map_or(Duration::ZERO, |attached| attached.idle_timeout)
    }

    /// An export or a migration resets the idle time that the node counts. So the module ends the session when
    /// `wait_timeout` has passed since the last command.
    pub(super) fn resume_idle_timeout(self: &Rc<Self>, wait_timeout: Option<Duration>) {
        let since = self.with_traffic(|traffic| traffic.last_command_ended_at());
        let (Some(limit), Some(since)) = (wait_timeout, since) else { return };
        let idle_timeout = Some(self.idle_timeout()).filter(|timeout| !timeout.is_zero());
        let shortest = idle_timeout.map_or(limit, |timeout| limit.min(timeout));
        self.with_traffic(|traffic| traffic.idle_since = Some(since));
        self.start_deadline(shortest.saturating_sub(since.elapsed()));
    }

    pub(super) fn check_idle_timeout(&self) {
        let has_idle_timeout = !self.idle_timeout().is_zero();
        if self.has_held_request() {
            return self.restart_idle_timeout();
        }
        let check = |traffic: &mut Traffic| {
            let idle_since = traffic.idle_since.take();
            let has_run_command = idle_since != Some(traffic.last_command_ended_at());
            (has_run_command, traffic.is_busy())
        };
        match self.with_traffic(check) {
            Some((true, _)) if !has_idle_timeout => drop(self.deadline.take()),
            Some((_, true)) => self.restart_idle_timeout(),
            _ => self.close_now("idle_timeout"),
        }
    }

    /// Restarts the idle timeout, if there is one.
    pub(super) fn restart_idle_timeout(&self) {
        let idle_timeout = self.idle_timeout();
        if !idle_timeout.is_zero() {
            self.extend_deadline(idle_timeout);
        }
    }

    /// The session has ended, since the client's connection has.
    pub(super) fn release_all(&self) {
        self.deadline.replace(None);
        self.worker.waker.remove(self.id);
        if let Some(failover) = self.take_login_failover() {
            failover.abandon();
        }
        // Dropped when its cell is no longer borrowed.
        let _login = self.login.take();
        let node = self.node_name();
        self.with_traffic(|traffic| traffic.commands.statements.on_disconnected(&node));
        self.leave_node();
        self.release_slots();
        self.report_bytes();
        self.kept_states.set(None);
        self.ids.release();
        if self.migration.is_migration_requested() {
            self.migration.clear_request();
            self.worker.waker.wake(); // another session may migrate now
        }
    }

    /// Reports the bytes of the session for the access log, since Envoy does not count directly forwarded bytes.
    fn report_bytes(&self) {
        let Some(filter) = self.logged_filter() else { return };
        let (from_client, to_client) =
            self.with_traffic(|traffic| (traffic.bytes_from_client, traffic.bytes_to_client)).unwrap_or_default();
        for (key, bytes) in [("bytes_from_client", from_client), ("bytes_to_client", to_client)] {
            filter.set_metadata_number(METADATA, key, bytes as f64);
        }
    }
}

impl CloseAfterPanic for Session {
    fn close_after_panic(&self) {
        self.close_now(PANIC_REASON);
    }
}

impl DeadlineOwner for Session {
    fn on_deadline(self: Rc<Self>) {
        self.kept_states.drop_expired();
        self.release_pin();
        self.retry_waiting_request();
        if self.deadline.borrow().as_ref().is_some_and(Deadline::has_passed) {
            self.handle(Event::TimedOut);
        }
    }
}
