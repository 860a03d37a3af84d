//! The traffic of an established session.

use std::rc::Rc;

use migration::ping_reply::PingOutcome;
use mysql_proto::error::ProxyError;
use mysql_proto::tracker::{PasswordRequest, Tracker};

use super::{PassDecision, Session, proxy_error_index, session_state};
use crate::commands::{CommandRecorder, IdentityChange};
use crate::migration_scheduler;
use crate::node::{self, SessionState};

impl Session {
    /// The client's connection has TLS, the node's has none, and passwords must not go from the one to the other.
    pub(crate) fn set_plain_node_side(&self) {
        self.has_plain_node_side.set(true);
    }

    /// Tracks bytes of the client. `is_checked`: they are a change of user that was found to be one that may be sent.
    ///
    /// # Errors
    /// They must not be forwarded, and the session must end, with this error if there is one.
    pub(crate) fn on_client_bytes(&self, bytes: &[u8], is_checked: bool) -> Result<(), Option<ProxyError>> {
        self.has_client_sent_last.set(true);
        self.bytes_from_client.set(self.bytes_from_client.get() + bytes.len() as u64);
        self.with_counts(|counts| counts.to_node.add(bytes.len() as u64));
        self.track(|tracker, recorder| tracker.on_client_bytes(bytes, recorder));
        let change = self.commands.take_identity_change();
        let begins = change == IdentityChange::Began && !is_checked;
        if self.token_plugin_scan.borrow_mut().push(bytes, begins) {
            return Err(Some(ProxyError::SessionTokenPlugin));
        }
        self.migration.on_client_bytes(bytes, change);
        self.restart_idle_timeout();
        if self.may_expose_password() { Err(None) } else { Ok(()) }
    }

    /// Tracks bytes of the node, up to an answer to COM_PING that follows other answers. Returns how many bytes were taken,
    /// and what to do with them.
    pub(crate) fn on_node_bytes(&self, bytes: &[u8]) -> (usize, PassDecision) {
        self.has_client_sent_last.set(false);
        let mut taken = bytes.len();
        self.track(|tracker, recorder| taken = tracker.on_node_bytes_until_ping_reply(bytes, recorder));
        self.bytes_to_client.set(self.bytes_to_client.get() + taken as u64);
        self.with_counts(|counts| counts.to_client.add(taken as u64));
        let change = self.commands.take_identity_change();
        if matches!(change, IdentityChange::Done | IdentityChange::Failed) {
            self.token_plugin_scan.borrow_mut().stop();
        }
        self.migration.on_node_bytes(change);
        self.restart_idle_timeout();
        let rejection = self.commands.take_password_request().and_then(|request| self.check_password_request(request));
        let passing = if let Some(why) = rejection {
            // A change of user is a login, too.
            self.with_counts(|counts| counts.login_failures[proxy_error_index(why)].add(1));
            PassDecision::Reject(why)
        } else if self.may_expose_password() {
            PassDecision::PassAndClose
        } else {
            PassDecision::Pass
        };
        (taken, passing)
    }

    /// Whether the node's next answer is that to a COM_PING.
    pub(crate) fn owes_ping_reply(&self) -> bool {
        self.tracker.borrow().as_ref().is_some_and(Tracker::owes_ping_reply)
    }

    /// Bytes of the node that answer a COM_PING: how many were taken, and what goes to the client once it is whole.
    /// If the node announces its shutdown in this way, its sessions migrate, and the client does not see the announcement,
    /// unless migrations are impossible or switched off.
    pub(crate) fn on_ping_reply(self: &Rc<Self>, bytes: &[u8]) -> (usize, Option<Vec<u8>>) {
        let status = self.tracker.borrow().as_ref().map_or(0, Tracker::status);
        let (taken, answer) = self.migration.ping_reply.borrow_mut().receive(bytes, status);
        let (packet, stops) = match answer {
            PingOutcome::Incomplete => return (taken, None),
            PingOutcome::Complete(packet) => (packet, false),
            PingOutcome::ShuttingDown { hidden, .. } if migration_scheduler::is_possible() => (hidden, true),
            PingOutcome::ShuttingDown { original, .. } => (original, true),
        };
        let node = self.node.borrow().clone();
        if node.is_some_and(|node| node.record_shutdown_announcement(stops)) {
            migration_scheduler::on_nodes_changed(&self.worker);
        }
        (taken, Some(packet))
    }

    /// Whether the node speaks next: it has all of a command, and owes the response.
    pub(crate) fn awaits_node(&self) -> bool {
        self.tracker.borrow().as_ref().is_some_and(Tracker::awaits_node)
    }

    /// Whether the client speaks next: it has all of the responses.
    pub(crate) fn awaits_client(&self) -> bool {
        matches!(self.counted_state.get(), Some((SessionState::Idle | SessionState::Transaction, _)))
    }

    /// Why the client must not answer this request within a change of user; None: it may.
    fn check_password_request(&self, request: PasswordRequest) -> Option<ProxyError> {
        let node_has_tls = || self.migration.upstream().is_some_and(|upstream| upstream.conn().has_tls());
        match request {
            PasswordRequest::SessionToken => Some(ProxyError::SessionTokenPlugin),
            _ if self.has_plain_node_side.get() => Some(ProxyError::ClearTextPassword),
            // The client would ask for an RSA key, and encrypt its password with it. A node with TLS wants it as it is.
            PasswordRequest::Encrypted if !self.client_has_tls() && node_has_tls() => {
                Some(ProxyError::ChangeUserWithoutTls)
            }
            PasswordRequest::Encrypted | PasswordRequest::ClearText => None,
        }
    }

    /// Whether a change of user might expose a password unseen.
    pub(super) fn may_expose_password(&self) -> bool {
        let lost = self.has_plain_node_side.get()
            && self.counted_state.get().is_some_and(|(state, _)| state == SessionState::Opaque);
        if lost {
            envoy_abi::log!(Warn, "a session is ended: it cannot be followed any more, so it might expose a password");
        }
        lost
    }

    pub(super) fn track(&self, run: impl FnOnce(&mut Tracker, &mut CommandRecorder<'_>)) {
        let mut tracker = self.tracker.borrow_mut();
        let Some(tracker) = tracker.as_mut() else {
            return;
        };
        let node = self.node.borrow();
        let Some(node) = &*node else { return };
        run(tracker, &mut self.commands.recorder(&node.counts));
        let now = Some(self.state_and_pin(tracker));
        if now != self.counted_state.get() {
            self.set_counted_state(now);
        }
    }

    pub(super) fn update_counted_state(&self) {
        let now = self.tracker.borrow().as_ref().map(|tracker| self.state_and_pin(tracker));
        self.set_counted_state(now);
    }

    /// Its state, and what pins it.
    fn state_and_pin(&self, tracker: &Tracker) -> (SessionState, Option<usize>) {
        let (state, pinned) = session_state(tracker);
        if pinned != Some(node::PINNED_BY_TRANSACTION) {
            self.has_endless_transactions.set(false);
        } else if self.has_endless_transactions.get() {
            return (state, Some(node::PINNED_BY_ENDLESS_TRANSACTIONS));
        }
        (state, pinned)
    }
}
