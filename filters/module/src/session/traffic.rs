//! The traffic of an established session.

use std::rc::Rc;
use std::time::Instant;

use migration::ping_reply::{PingOutcome, PingReply};
use migration::transaction_start::begins_transaction;
use mysql_proto::capability::Capabilities;
use mysql_proto::error::ProxyError;
use mysql_proto::packet::{HEADER, Header};
use mysql_proto::tracker::{PasswordRequest, Tracker, TrackerState};

use super::Session;
use super::assigned_node::{AssignedNode, CountedState};
use super::token_plugin_scan::TokenPluginScan;
use crate::commands::{CommandRecorder, Commands, IdentityChange};
use crate::envoy_drain::{self, ClientUse};
use crate::migration_scheduler;
use crate::node::{self, LoginFailure, SessionState};
use crate::statements::{SessionStatements, StatementCollector};

/// Whether the bytes of a node go to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PassDecision {
    Pass,
    /// The bytes go to the client, and then the session ends.
    PassAndClose,
    /// The bytes must not go to the client: in a change of user, they request a password that must not or cannot be
    /// sent.
    Reject(ProxyError),
}

/// What an established session knows about its commands.
pub(super) struct Traffic {
    pub(super) capabilities: Capabilities,
    pub(super) tracker: Tracker,
    pub(super) commands: Commands,
    token_plugin_scan: TokenPluginScan,
    ping_reply: PingReply,
    pub(super) established_at: Instant,
    /// Since when the session is idle, if an export or a migration has reset the idle time that the node counts.
    pub(super) idle_since: Option<Instant>,
    /// The session is to migrate, and the client has begun the open transaction within another one.
    has_endless_transactions: bool,
    /// The client's connection has TLS, the node's has none, and the module must not forward passwords in clear text.
    has_plain_node_side: bool,
    has_client_sent_last: bool,
    pub(super) bytes_from_client: u64,
    pub(super) bytes_to_client: u64,
}

impl Traffic {
    /// `database`: the database that the client has selected in its login.
    pub(super) fn new(capabilities: Capabilities, has_plain_node_side: bool, database: &[u8]) -> Self {
        let mut tracker = Tracker::new(capabilities);
        if capabilities.0 & (Capabilities::COMPRESS.0 | Capabilities::ZSTD_COMPRESSION.0) != 0 {
            tracker.stop_tracking();
        }
        Self {
            capabilities,
            tracker,
            commands: Commands::new(SessionStatements::new(capabilities, database)),
            token_plugin_scan: TokenPluginScan::default(),
            ping_reply: PingReply::default(),
            established_at: Instant::now(),
            idle_since: None,
            has_endless_transactions: false,
            has_plain_node_side,
            has_client_sent_last: false,
            bytes_from_client: 0,
            bytes_to_client: 0,
        }
    }

    /// Since when no command runs.
    pub(super) fn last_command_ended_at(&self) -> Instant {
        self.commands.idle_since().unwrap_or(self.established_at)
    }

    /// How the client uses the connection.
    fn client_use(&self) -> ClientUse {
        ClientUse {
            idle_for: self.last_command_ended_at().elapsed(),
            pinged_before: self.commands.pinged_at().map(|at| at.elapsed()),
        }
    }

    /// Whether a command runs, as far as the module knows.
    pub(super) fn is_busy(&self) -> bool {
        match self.tracker.state() {
            TrackerState::Busy => true,
            TrackerState::Opaque => self.has_client_sent_last,
            TrackerState::Idle | TrackerState::InTransaction => false,
        }
    }

    /// Runs `step`, and then counts the session in its new state.
    fn track<T>(
        &mut self,
        assigned: &AssignedNode,
        collector: &StatementCollector,
        step: impl FnOnce(&mut Tracker, &mut CommandRecorder<'_>) -> T,
    ) -> T {
        let result = step(&mut self.tracker, &mut self.commands.recorder(&assigned.node, collector));
        if self.tracker.state() == TrackerState::Opaque {
            self.commands.statements.forget(); // the ends of the commands will not be seen
        }
        self.count_at(assigned);
        result
    }

    fn count_at(&mut self, assigned: &AssignedNode) {
        let state = CountedState::of(&self.tracker, self.has_endless_transactions);
        self.has_endless_transactions &= state.is_in_transaction();
        assigned.count_as(state);
    }

    /// Whether a change of user could expose a password unnoticed.
    fn may_expose_password(&self) -> bool {
        let is_lost = self.has_plain_node_side && self.tracker.state() == TrackerState::Opaque;
        if is_lost {
            envoy_abi::log!(
                Warn,
                "a session is ended: the module can no longer track it, so it might expose a password"
            );
        }
        is_lost
    }
}

impl Session {
    /// None: the session is not established yet.
    pub(super) fn with_traffic<T>(&self, run: impl FnOnce(&mut Traffic) -> T) -> Option<T> {
        self.traffic.borrow_mut().as_mut().map(run)
    }

    /// None: the session is not established yet.
    pub(crate) fn client_use(&self) -> Option<ClientUse> {
        self.with_traffic(|traffic| traffic.client_use())
    }

    /// Tracks bytes of the client. `is_checked`: the bytes are a change of user that has passed the module's checks.
    ///
    /// # Errors
    /// The bytes must not be forwarded, and the session must end, with the error if there is one.
    pub(crate) fn on_client_bytes(&self, bytes: &[u8], is_checked: bool) -> Result<(), Option<ProxyError>> {
        let (change, is_forbidden, may_expose) = {
            let (mut traffic, node) = (self.traffic.borrow_mut(), self.node.borrow());
            let (Some(traffic), Some(assigned)) = (&mut *traffic, &*node) else { return Ok(()) };
            traffic.has_client_sent_last = true;
            traffic.idle_since = None;
            traffic.bytes_from_client += bytes.len() as u64;
            assigned.node.counts.bytes_to_node.add(bytes.len() as u64);
            traffic.track(assigned, &self.worker.statements, |tracker, recorder| {
                tracker.on_client_bytes(bytes, recorder);
            });
            let change = traffic.commands.take_identity_change();
            let begins = change == IdentityChange::Began && !is_checked;
            (change, traffic.token_plugin_scan.push(bytes, begins), traffic.may_expose_password())
        };
        if is_forbidden {
            return Err(Some(ProxyError::SessionTokenPlugin));
        }
        self.kept_states.on_client_bytes();
        self.migration.on_client_bytes();
        self.identity.on_client_bytes(bytes, change);
        self.restart_idle_timeout();
        if may_expose { Err(None) } else { Ok(()) }
    }

    /// Tracks bytes of the node, up to a response to COM_PING that follows other responses. Returns how many bytes it
    /// has tracked, and whether these go to the client.
    pub(crate) fn on_node_bytes(&self, bytes: &[u8]) -> (usize, PassDecision) {
        if envoy_drain::must_end_sessions() {
            self.client.set_cork(true); // the session may end with this response
        }
        let (taken, change, change_user, request, may_expose) = {
            let (mut traffic, node) = (self.traffic.borrow_mut(), self.node.borrow());
            let (Some(traffic), Some(assigned)) = (&mut *traffic, &*node) else {
                return (bytes.len(), PassDecision::Pass);
            };
            traffic.has_client_sent_last = false;
            let taken = traffic.track(assigned, &self.worker.statements, |tracker, recorder| {
                tracker.on_node_bytes_until_ping_reply(bytes, recorder)
            });
            traffic.bytes_to_client += taken as u64;
            assigned.node.counts.bytes_to_client.add(taken as u64);
            let change = traffic.commands.take_identity_change();
            let mut change_user = None;
            if matches!(change, IdentityChange::Done | IdentityChange::Failed) {
                traffic.token_plugin_scan.stop();
                change_user = traffic.commands.take_change_user_result();
            }
            (taken, change, change_user, traffic.commands.take_password_request(), traffic.may_expose_password())
        };
        if let Some(result) = change_user {
            self.log_change_user(result);
            self.update_statements_user(result);
        }
        self.identity.on_node_bytes(change);
        self.on_identity_change(change);
        self.restart_idle_timeout();
        let passing = if let Some(why) = request.and_then(|request| self.check_password_request(request)) {
            self.record_login_failure(LoginFailure::Error(why)); // a change of user counts as a login
            PassDecision::Reject(why)
        } else if may_expose {
            PassDecision::PassAndClose
        } else {
            PassDecision::Pass
        };
        (taken, passing)
    }

    /// Whether the next response of the node answers a COM_PING.
    pub(crate) fn owes_ping_reply(&self) -> bool {
        self.traffic.borrow().as_ref().is_some_and(|traffic| traffic.tracker.owes_ping_reply())
    }

    /// Handles bytes of the response to a COM_PING. Returns how many bytes belong to the response, and the packet for
    /// the client when the response is complete. The response may announce that the node shuts down. Then the sessions
    /// of the node migrate, and the packet hides the announcement, unless migrations are impossible or switched off.
    pub(crate) fn on_ping_reply(self: &Rc<Self>, bytes: &[u8]) -> (usize, Option<Vec<u8>>) {
        let received = self.with_traffic(|traffic| traffic.ping_reply.receive(bytes, traffic.tracker.status()));
        let Some((taken, answer)) = received else { return (bytes.len(), None) };
        let (packet, is_shutting_down) = match answer {
            PingOutcome::Incomplete => return (taken, None),
            PingOutcome::Complete(packet) => (packet, false),
            PingOutcome::ShuttingDown { ok, .. } if migration_scheduler::is_possible() => (ok, true),
            PingOutcome::ShuttingDown { error, .. } => (error, true),
        };
        if self.is_node(|node| node.record_shutdown_announcement(is_shutting_down)) {
            migration_scheduler::on_nodes_changed(&self.worker);
        }
        (taken, Some(packet))
    }

    /// Whether the node sends next: it has received a whole command, and owes the response.
    pub(crate) fn awaits_node(&self) -> bool {
        self.traffic.borrow().as_ref().is_some_and(|traffic| traffic.tracker.awaits_node())
    }

    /// Whether the client sends next: it has received all responses.
    pub(crate) fn awaits_client(&self) -> bool {
        self.counted_state()
            .is_some_and(|counted| matches!(counted.state, SessionState::Idle | SessionState::Transaction))
    }

    /// Why the client must not answer this request within a change of user. None: the client may answer.
    fn check_password_request(&self, request: PasswordRequest) -> Option<ProxyError> {
        let has_plain_node_side = self.with_traffic(|traffic| traffic.has_plain_node_side).unwrap_or_default();
        let node_has_tls = || self.upstream().is_some_and(|upstream| upstream.conn().has_tls());
        match request {
            PasswordRequest::SessionToken => Some(ProxyError::SessionTokenPlugin),
            _ if has_plain_node_side => Some(ProxyError::ClearTextPassword),
            // A client without TLS encrypts its password with an RSA key. A node with TLS expects it in clear text.
            PasswordRequest::Encrypted if !self.client_has_tls() && node_has_tls() => {
                Some(ProxyError::ChangeUserWithoutTls)
            }
            PasswordRequest::Encrypted | PasswordRequest::ClearText => None,
        }
    }

    pub(super) fn update_counted_state(&self) {
        if let (Some(traffic), Some(assigned)) = (&mut *self.traffic.borrow_mut(), &*self.node.borrow()) {
            traffic.count_at(assigned);
        }
    }

    /// Whether the client has sent COM_QUIT.
    pub(super) fn has_quit(&self) -> bool {
        self.traffic.borrow().as_ref().is_some_and(|traffic| traffic.commands.has_quit())
    }

    /// The session has migrated to a node with TLS.
    pub(super) fn clear_plain_node_side(&self) {
        self.with_traffic(|traffic| traffic.has_plain_node_side = false);
    }

    /// Detects that the client begins a transaction within the open one. Such a session is never outside of a
    /// transaction, so it cannot migrate. Called for each statement of a client, so it must be cheap.
    pub(crate) fn watch_transactions(&self, bytes: &[u8]) {
        if self.migration.is_migration_requested()
            && self.counted_state().is_some_and(|counted| {
                counted.state == SessionState::Transaction && counted.pinned == Some(node::PINNED_BY_TRANSACTION)
            })
            && Header::parse(bytes).is_some_and(|header| HEADER + header.length == bytes.len())
            && begins_transaction(&bytes[HEADER..])
        {
            self.with_traffic(|traffic| traffic.has_endless_transactions = true);
        }
    }
}
