//! A session's login.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use migration::identity::Identity;
use mysql_proto::capability::Capabilities;
use mysql_proto::error::ProxyError;
use mysql_proto::login::{Login, Output, PasswordKey, Progress, TOO_MANY_CONNECTIONS};
use mysql_proto::secret::SecretBytes;
use mysql_proto::tracker::Tracker;

use super::{Session, SessionPhase, proxy_error_index};
use crate::login_failover::LoginFailover;
use crate::login_limits::{LoginLimits, LoginSlot};
use crate::node::{ConnectFailure, Counts};
use crate::offload::{self, OffloadedConn};
use crate::{migration_scheduler, node};

/// A server that closes sooner than this has not timed out: MariaDB's `connect_timeout` is at least 2 s (mariadb.com/docs,
/// "Server System Variables").
const CLIENT_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The key for passwords, as far as the limits of logins allow its use.
struct LimitedKey<'a> {
    key: &'a dyn PasswordKey,
    slot: &'a RefCell<Option<LoginSlot>>,
}

impl PasswordKey for LimitedKey<'_> {
    fn public_pem(&self) -> &[u8] {
        self.key.public_pem()
    }

    fn check_limit(&self) -> Result<(), ProxyError> {
        self.slot.borrow().as_ref().map_or(Ok(()), LoginSlot::check_decryption)
    }

    fn decrypt(&self, encrypted: &[u8]) -> Option<SecretBytes> {
        self.key.decrypt(encrypted)
    }
}

impl Session {
    pub(crate) fn client_has_tls(&self) -> bool {
        self.client_has_tls.get()
    }

    /// The node has greeted: its greeting goes to the client.
    pub(crate) fn on_greeting(&self) {
        self.phase.set(SessionPhase::Login);
        self.full_node_error.replace(None);
    }

    /// Runs a step of the login; None when it is over.
    pub(crate) fn with_login<T>(&self, step: impl FnOnce(&mut Login) -> T) -> Option<T> {
        self.login.borrow_mut().as_mut().map(|login| step(login))
    }

    /// The login begins.
    ///
    /// # Errors
    /// There are too many logins.
    pub(crate) fn start_login(&self, limits: &Arc<LoginLimits>) -> Result<(), ProxyError> {
        let address = self.addresses.get().map(|(client, _)| client.ip());
        self.login_slot.replace(Some(LoginSlot::try_acquire(limits, address)?));
        Ok(())
    }

    /// Bytes of the client go through the login.
    pub(crate) fn login_from_client(&self, bytes: &[u8], key: &dyn PasswordKey, out: &mut Output) -> (usize, Progress) {
        let limited = LimitedKey { key, slot: &self.login_slot };
        let (taken, progress) = self
            .with_login(|login| login.on_client_bytes(bytes, &limited, out))
            .unwrap_or((bytes.len(), Progress::More));
        let progress = match self.count_held_bytes() {
            Err(why) if progress == Progress::More => {
                out.back.extend_from_slice(&self.with_login(|login| login.error_packet(why)).unwrap_or_default());
                self.login.replace(None);
                Progress::Rejected(why)
            }
            _ => progress,
        };
        self.on_login_progress(progress);
        (taken, progress)
    }

    fn count_held_bytes(&self) -> Result<(), ProxyError> {
        let held = self.with_login(|login| login.held_bytes()).unwrap_or_default();
        self.login_slot.borrow().as_ref().map_or(Ok(()), |slot| slot.set_bytes(held as u64))
    }

    /// Bytes of the node go through the login.
    pub(crate) fn login_from_node(&self, bytes: &[u8], out: &mut Output) -> (usize, Progress) {
        let (taken, progress) =
            self.with_login(|login| login.on_node_bytes(bytes, out)).unwrap_or((bytes.len(), Progress::More));
        self.last_node_bytes_at.set(Some(Instant::now()));
        self.on_login_progress(progress);
        (taken, progress)
    }

    /// Whether the node has answered the client's response with these bytes: that it is full. The client does not get them
    /// yet, since another node may take the login. [`Self::fail_over_login`] follows after this read.
    pub(crate) fn hold_full_error(&self, bytes: &[u8]) -> bool {
        let full = self.with_login(|login| login.is_full(bytes)).unwrap_or_default();
        if !full || !self.may_fail_over.replace(false) {
            return false;
        }
        self.late_full_error.replace(bytes.to_vec());
        true
    }

    /// Whether the login fails over to another node, or will. What this node sends does not matter any more.
    pub(crate) fn is_failing_over(&self) -> bool {
        self.login_failover.borrow().is_some() || !self.late_full_error.borrow().is_empty()
    }

    /// Starts the failover of the login, if that is due.
    pub(crate) fn fail_over_login(self: &Rc<Self>) {
        let full_error = self.late_full_error.take();
        let Some(upstream) = self.migration.upstream().filter(|_| !full_error.is_empty()) else { return };
        if let Some(node) = self.node() {
            upstream.report_connect_failure(&node, &self.last_tried_endpoint(), ConnectFailure::Full);
        }
        let attempt = self.with_login(|login| login.failover_attempt()).flatten();
        let is_started = attempt.is_some_and(|attempt| {
            offload::try_offload_login(Rc::clone(&upstream) as Rc<dyn OffloadedConn>)
                && LoginFailover::start(self, Rc::clone(&upstream), attempt, full_error.clone())
        });
        if !is_started {
            upstream.receive_login(&full_error);
        }
    }

    /// Stops the failover of the login. Returns the error of the first node, for the client. None: there was no failover.
    pub(super) fn stop_login_failover(&self) -> Option<Vec<u8>> {
        let failover = self.login_failover.take()?;
        let mut output = Output::default();
        self.login_from_node(failover.abandon(), &mut output);
        Some(output.onward.to_vec())
    }

    pub(super) fn on_login_progress(&self, progress: Progress) {
        match progress {
            Progress::More => {}
            Progress::StartClientTls => self.client_has_tls.set(true),
            Progress::Established(capabilities) => self.on_established(capabilities),
            Progress::Denied(TOO_MANY_CONNECTIONS) => self.record_login_failure(node::NODE_FULL),
            Progress::Denied(_) => self.record_login_failure(node::DENIED),
            Progress::Rejected(why) => {
                if why == ProxyError::NodeTlsFailed {
                    self.report_data_before_tls();
                }
                self.record_login_failure(proxy_error_index(why));
            }
        }
    }

    /// The node has sent something behind its greeting, before TLS. Without TLS, it may have been injected on the network.
    pub(crate) fn report_data_before_tls(&self) {
        self.with_counts(|counts| counts.connect_failures[ConnectFailure::Tls as usize].add(1));
        let name = self.node.borrow().as_ref().map_or_else(String::new, |node| node.shared.name.clone());
        envoy_abi::log!(
            Warn,
            "no TLS with {name}: it sent data behind its greeting, before TLS; it may have been injected on the network"
        );
    }

    pub(super) fn on_established(&self, capabilities: Capabilities) {
        self.phase.set(SessionPhase::Established);
        self.login_slot.replace(None);
        self.established_at.set(Some(Instant::now()));
        self.tried_endpoints.replace(Vec::new());
        let response = self.login.take().and_then(|mut login| login.take_response());
        let identity = response.and_then(|response| Identity::from_handshake_response(&response, capabilities));
        self.migration.identity.replace(identity.map(Box::new));
        let mut tracker = Tracker::new(capabilities);
        if capabilities.0 & (Capabilities::COMPRESS.0 | Capabilities::ZSTD_COMPRESSION.0) != 0 {
            tracker.stop_tracking();
        }
        self.tracker.replace(Some(tracker));
        self.with_counts(|counts| counts.logins.add(1));
        if self.idle_timeout.get().is_zero() {
            self.deadline.replace(None);
        }
        self.restart_idle_timeout();
        self.update_counted_state();
        if self.is_on_draining_node() && migration_scheduler::is_possible() && self.migration.request_migration() {
            self.migration.defer_until_idle(); // its node began to drain while it logged in
        }
    }

    /// Why the node has closed the connection during the login. If it has waited for the client, that one was too slow.
    pub(crate) fn login_loss_error(&self) -> ProxyError {
        let client_owes = self.with_login(|login| login.awaits_client()).unwrap_or(false);
        let waited = self.last_node_bytes_at.get().is_some_and(|since| since.elapsed() >= CLIENT_ANSWER_TIMEOUT);
        if client_owes && waited { ProxyError::LoginTooSlow } else { ProxyError::NodeGone }
    }

    pub(super) fn record_login_failure(&self, reason: usize) {
        self.with_counts(|counts| self.record_login_failure_in(counts, reason));
    }

    /// The login has failed. `counts`: those of the node that is the cause, which the session may have left.
    pub(super) fn record_login_failure_in(&self, counts: &Counts, reason: usize) {
        if self.login_failure.replace(Some(reason)).is_none() {
            counts.login_failures[reason].add(1);
        }
        self.phase.set(SessionPhase::Ended);
    }

    /// The client will send no more. True: it has not finished its login, so all is over.
    pub(crate) fn on_client_finished(&self) -> bool {
        if matches!(self.phase.get(), SessionPhase::Connecting | SessionPhase::Login) {
            self.record_login_failure(node::CLIENT_GONE);
        }
        self.phase.get() == SessionPhase::Ended
    }
}
