//! The login of a session.

use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use migration::identity::Identity;
use mysql_proto::capability::Capabilities;
use mysql_proto::error::ProxyError;
use mysql_proto::login::{Login, Output, PasswordKey, Progress, Rules, TOO_MANY_CONNECTIONS};
use mysql_proto::secret::SecretBytes;

use super::assigned_node::CountedState;
use super::lifecycle::{Event, Rejection};
use super::traffic::Traffic;
use super::{Session, SessionPhase};
use crate::live_config;
use crate::login_failover::LoginFailover;
use crate::login_limits::{LoginLimits, LoginSlot};
use crate::migration_scheduler;
use crate::no_node_log;
use crate::node::{ConnectFailure, LoginFailure, WorkerNode};
use crate::offload::{self, OffloadedConn};
use crate::reachability::{self, MonitoredEndpoint};
use crate::slot::Slot;
use crate::waiting_logins::{self, ConnectingSlot, MAX_RETRYING, RETRYING, WAITING};

/// A server that closes the connection sooner than this has not waited for the client in vain: MariaDB's
/// `connect_timeout` is at least 2 s (mariadb.com/docs, "Server System Variables").
const CLIENT_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// How often the module checks whether a client that waits for a node has left.
const WAIT_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The state that a session needs until it is established.
pub(super) struct SessionLogin {
    /// None: the module has refused the login.
    relay: Option<Login>,
    tried_endpoints: Vec<String>,
    /// How many of the tried nodes were full before the greeting.
    full_nodes: usize,
    /// The last node that sent the error that it is full instead of a greeting, and this error. The client gets the
    /// error if no other node is found.
    full_node_error: Option<(Rc<WorkerNode>, Vec<u8>)>,
    /// Whether the login may still fail over after the greeting. This is done at most once.
    may_fail_over: bool,
    /// The error of a full node that has greeted. Kept until the failover starts.
    late_full_error: Vec<u8>,
    failover: Option<Rc<LoginFailover>>,
    /// The login waits for a node as long as this value exists.
    waiting_slot: Option<Slot>,
    /// All tried nodes refuse connections, and the login tries them again as long as this value exists.
    retry_slot: Option<Slot>,
    /// The node that was tried last refuses connections, or does not answer.
    is_refused: bool,
    /// The login has waited, and no node has greeted it yet.
    connecting_slot: Option<ConnectingSlot>,
    began_at: Instant,
    /// The login counts towards the limits of logins as long as this value exists.
    slot: Option<LoginSlot>,
    /// When the node sent its last bytes.
    last_node_bytes_at: Option<Instant>,
    /// The client's connection has TLS, the node's has none, and the module must not forward passwords in clear text.
    has_plain_node_side: bool,
}

impl SessionLogin {
    pub(super) fn new(rules: Rules) -> Self {
        Self {
            relay: Some(Login::new(rules)),
            tried_endpoints: Vec::new(),
            full_nodes: 0,
            full_node_error: None,
            may_fail_over: true,
            late_full_error: Vec::new(),
            failover: None,
            waiting_slot: None,
            retry_slot: None,
            is_refused: false,
            connecting_slot: None,
            began_at: Instant::now(),
            slot: None,
            last_node_bytes_at: None,
            has_plain_node_side: false,
        }
    }

    /// None: the module has refused the login.
    pub(super) fn relay(&self) -> Option<&Login> {
        self.relay.as_ref()
    }

    /// The time since the client has connected.
    pub(super) fn elapsed(&self) -> Duration {
        self.began_at.elapsed()
    }

    fn count_held_bytes(&self) -> Result<(), ProxyError> {
        let held = self.relay.as_ref().map_or(0, Login::held_bytes);
        self.slot.as_ref().map_or(Ok(()), |slot| slot.set_bytes(held as u64))
    }

    /// `text`: the text of the error. None: the general one.
    fn error_packet(&self, why: ProxyError, text: Option<&str>) -> Vec<u8> {
        let packet = |relay: &Login| match text {
            Some(text) => relay.error_packet_with_text(why, text),
            None => relay.error_packet(why),
        };
        self.relay.as_ref().map(packet).unwrap_or_default()
    }

    /// Why the node has closed the connection. If the node has waited for the client, the client was too slow.
    fn loss_error(&self) -> ProxyError {
        let awaits_client = self.relay.as_ref().is_some_and(Login::awaits_client);
        let has_waited = self.last_node_bytes_at.is_some_and(|since| since.elapsed() >= CLIENT_ANSWER_TIMEOUT);
        if awaits_client && has_waited { ProxyError::LoginTooSlow } else { ProxyError::NodeGone }
    }
}

/// The key for passwords. Decryptions count towards the limits of logins.
struct LimitedKey<'a> {
    key: &'a dyn PasswordKey,
    slot: Option<&'a LoginSlot>,
}

impl PasswordKey for LimitedKey<'_> {
    fn public_pem(&self) -> &[u8] {
        self.key.public_pem()
    }

    fn check_limit(&self) -> Result<(), ProxyError> {
        self.slot.map_or(Ok(()), LoginSlot::check_decryption)
    }

    fn decrypt(&self, encrypted: &[u8]) -> Option<SecretBytes> {
        self.key.decrypt(encrypted)
    }
}

impl Session {
    /// None: the login is over.
    fn with_session_login<T>(&self, run: impl FnOnce(&mut SessionLogin) -> T) -> Option<T> {
        self.login.borrow_mut().as_mut().map(|login| run(login))
    }

    /// Runs a step of the login relay. None: the login is over.
    pub(crate) fn with_login<T>(&self, step: impl FnOnce(&mut Login) -> T) -> Option<T> {
        self.with_session_login(|login| login.relay.as_mut().map(step)).flatten()
    }

    pub(crate) fn client_has_tls(&self) -> bool {
        self.client.has_tls()
    }

    /// How long the login has been going on. Zero: it is over.
    pub(super) fn login_time(&self) -> Duration {
        self.with_session_login(|login| login.elapsed()).unwrap_or_default()
    }

    /// See [`SessionLogin::has_plain_node_side`].
    pub(crate) fn set_plain_node_side(&self) {
        self.with_session_login(|login| login.has_plain_node_side = true);
    }

    /// Counts the client and its login towards the limits.
    ///
    /// # Errors
    /// There are too many connections or logins.
    pub(crate) fn start_login(&self, limits: &Arc<LoginLimits>) -> Result<(), ProxyError> {
        self.take_slots_of_address()?;
        let address: Option<IpAddr> = self.addresses().map(|(client, _)| client.ip());
        let slot = LoginSlot::try_acquire(limits, address)?;
        self.with_session_login(|login| login.slot = Some(slot));
        Ok(())
    }

    /// If no node accepts sessions, waits for one, within the limits. True: the connection must be withheld from Envoy's
    /// proxy until [`Effect::ContinueConnection`].
    pub(crate) fn try_wait_for_node(self: &Rc<Self>) -> bool {
        let limits = live_config::limits();
        let waiting = &self.worker.waiting_logins;
        self.worker.apply_published();
        let has_node = waiting_logins::has_node(&self.worker);
        if has_node && waiting.is_empty() || limits.wait_for_node.is_zero() {
            return false;
        }
        let Some(slot) = WAITING.try_acquire(limits.max_waiting_logins) else { return false };
        self.with_session_login(|login| login.waiting_slot = Some(slot));
        self.handle(Event::WaitBegan);
        self.start_deadline(WAIT_CHECK_INTERVAL.min(limits.wait_for_node));
        waiting.add(self);
        if has_node {
            self.worker.waker.wake(); // for `waiting_logins::resume`: perhaps all others have left
        }
        true
    }

    /// A node is in service now. If the login still waits, it continues.
    pub(crate) fn stop_waiting(self: &Rc<Self>) {
        let slot = ConnectingSlot::new(&self.worker);
        self.with_session_login(|login| {
            login.waiting_slot = None;
            login.connecting_slot = Some(slot);
        });
        self.handle(if self.client.has_ended() { Event::ClientFinished } else { Event::NodeInService });
    }

    /// Must be called when no untried node is left. If the node that was tried last refused the connection or did not
    /// answer, forgets which nodes were tried, so that the login tries them again until `wait_for_node` has passed. False:
    /// the login must fail, because a node has answered, too many logins try again, or the client has left.
    ///
    /// Unlike [`Self::try_wait_for_node`], this is for connections that Envoy's proxy handles already, and that can no
    /// longer be withheld from it. If all open endpoints were tried, later logins are withheld at once.
    pub(crate) fn try_nodes_again(&self) -> bool {
        let limits = live_config::limits();
        let is_refused = self.with_session_login(|login| login.is_refused) == Some(true);
        if is_refused && self.worker.hosts.all_open_endpoints(|endpoint| self.has_tried(endpoint)) {
            reachability::suspect_outage();
        }
        if !is_refused || self.client.has_ended() {
            return false;
        }
        let retry = |login: &mut SessionLogin| {
            // A full node has answered, so there is nothing to wait for.
            if login.full_nodes > 0 || login.elapsed() >= limits.wait_for_node {
                return None;
            }
            if login.retry_slot.is_none() {
                login.retry_slot = Some(RETRYING.try_acquire(MAX_RETRYING.min(limits.max_waiting_logins))?);
            }
            login.tried_endpoints.clear();
            Some(login.connecting_slot.take()) // other logins need not wait for this one
        };
        let Some(_connecting_slot) = self.with_session_login(retry).flatten() else { return false };
        self.extend_deadline(limits.login_timeout); // the wait does not count towards it
        true
    }

    /// Whether the login tries nodes again, because those that it has tried refuse connections.
    pub(crate) fn is_retrying(&self) -> bool {
        self.with_session_login(|login| login.retry_slot.is_some()) == Some(true)
    }

    /// Must be called when the node that was tried last cannot be used. `is_refused`: it refuses connections, or does not
    /// answer.
    pub(crate) fn record_refusal(&self, is_refused: bool) {
        self.with_session_login(|login| login.is_refused = is_refused);
    }

    /// A node has greeted: other logins may connect or try again.
    pub(crate) fn release_connecting_slots(&self) {
        let _slots = self.with_session_login(|login| (login.retry_slot.take(), login.connecting_slot.take()));
    }

    /// Ends the wait for a node if it is over, or if the client has left. Envoy does not notice that meanwhile.
    pub(super) fn check_wait(self: &Rc<Self>) {
        let waited = self.with_session_login(|login| login.elapsed()).unwrap_or_default();
        let rest = live_config::limits().wait_for_node.saturating_sub(waited);
        if self.client.has_ended() {
            self.handle(Event::ClientFinished);
        } else if rest.is_zero() {
            self.handle(Event::WaitOver);
        } else {
            self.start_deadline(WAIT_CHECK_INTERVAL.min(rest));
        }
    }

    /// The policy or the failover of the login has chosen a node. A connection to this node is about to be made.
    pub(crate) fn try_node(&self, address: &str, node: &Rc<WorkerNode>, endpoint: Option<Arc<MonitoredEndpoint>>) {
        self.with_session_login(|login| login.tried_endpoints.push(address.to_owned()));
        self.set_login_node(node, endpoint);
    }

    /// The login continues at a node, perhaps one that was tried before.
    pub(crate) fn set_login_node(&self, node: &Rc<WorkerNode>, endpoint: Option<Arc<MonitoredEndpoint>>) {
        self.assign_node(node, endpoint, CountedState::LOGIN);
    }

    pub(crate) fn has_tried(&self, endpoint: &str) -> bool {
        self.login.borrow().as_ref().is_some_and(|login| login.tried_endpoints.iter().any(|tried| tried == endpoint))
    }

    /// The endpoint that was tried last. Empty: none was tried, or the login is over.
    pub(crate) fn last_tried_endpoint(&self) -> String {
        let login = self.login.borrow();
        login.as_ref().and_then(|login| login.tried_endpoints.last().cloned()).unwrap_or_default()
    }

    /// How many of the tried nodes have failed. Nodes that were full before the greeting do not count.
    pub(crate) fn failed_node_count(&self) -> usize {
        let login = self.login.borrow();
        login.as_ref().map_or(0, |login| login.tried_endpoints.len().saturating_sub(login.full_nodes))
    }

    /// The node has sent the error that it is full instead of a greeting. Another node may have room.
    pub(crate) fn on_node_full(&self, node: &Rc<WorkerNode>, packet: &[u8]) {
        if self.phase() == SessionPhase::Connecting {
            self.with_session_login(|login| {
                login.full_nodes += 1;
                login.full_node_error = Some((Rc::clone(node), packet.to_vec()));
            });
        }
    }

    /// Relays bytes of the client. Returns how many bytes were taken.
    pub(crate) fn login_from_client(
        self: &Rc<Self>,
        bytes: &[u8],
        key: &dyn PasswordKey,
        out: &mut Output,
    ) -> (usize, Progress) {
        let step = self.with_session_login(|login| {
            let relay = login.relay.as_mut()?;
            let limited = LimitedKey { key, slot: login.slot.as_ref() };
            let (taken, progress) = relay.on_client_bytes(bytes, &limited, out);
            // The response, if there is one, is not sent to the node yet.
            let is_allowed = relay.user().map_or(Ok(()), |user| self.take_slots_of_user(user));
            match is_allowed.and_then(|()| login.count_held_bytes()) {
                Err(why) if progress == Progress::More => {
                    out.onward = SecretBytes::default();
                    out.back.extend_from_slice(&login.error_packet(why, self.refusal_text().as_deref()));
                    login.relay = None;
                    Some((taken, Progress::Rejected(why)))
                }
                _ => Some((taken, progress)),
            }
        });
        let (taken, progress) = step.flatten().unwrap_or((bytes.len(), Progress::More));
        self.on_login_progress(progress);
        (taken, progress)
    }

    /// Relays bytes of the node. Returns how many bytes were taken.
    pub(crate) fn login_from_node(self: &Rc<Self>, bytes: &[u8], out: &mut Output) -> (usize, Progress) {
        let step = self.with_session_login(|login| {
            login.last_node_bytes_at = Some(Instant::now());
            Some(login.relay.as_mut()?.on_node_bytes(bytes, out))
        });
        let (taken, progress) = step.flatten().unwrap_or((bytes.len(), Progress::More));
        self.on_login_progress(progress);
        (taken, progress)
    }

    fn on_login_progress(self: &Rc<Self>, progress: Progress) {
        match progress {
            Progress::More | Progress::StartClientTls => {}
            Progress::Established(capabilities) => {
                self.create_traffic(capabilities);
                self.handle(Event::LoggedIn);
                // Dropped when the login is no longer borrowed.
                let _login = self.login.take();
            }
            Progress::Denied(TOO_MANY_CONNECTIONS) => self.handle(Event::LoginFailed(LoginFailure::NodeFull)),
            Progress::Denied(_) => self.handle(Event::LoginFailed(LoginFailure::Denied)),
            Progress::Rejected(why) => {
                if why == ProxyError::NodeTlsFailed {
                    self.report_data_before_tls();
                }
                self.handle(Event::LoginFailed(LoginFailure::Error(why)));
            }
        }
    }

    /// The node has accepted the login: creates the state of an established session.
    fn create_traffic(&self, capabilities: Capabilities) {
        let taken = self.with_session_login(|login| {
            let database = login.relay.as_ref().and_then(Login::names).map(|names| names.database().to_vec());
            let response = login.relay.as_mut().and_then(Login::take_response);
            (response, login.has_plain_node_side, database)
        });
        let Some((response, has_plain_node_side, database)) = taken else { return };
        let identity = response.and_then(|response| Identity::from_handshake_response(&response, capabilities));
        self.identity.set(identity);
        let database = database.unwrap_or_default();
        let mut traffic = Traffic::new(capabilities, has_plain_node_side, &database);
        traffic.commands.statements.set_node_connection_id(self.ids.node_id());
        self.traffic.replace(Some(traffic));
    }

    pub(super) fn start_traffic(self: &Rc<Self>) {
        self.record_login();
        if self.idle_timeout().is_zero() {
            self.deadline.replace(None);
        }
        self.restart_idle_timeout();
        self.update_counted_state();
        if self.is_on_draining_node() && migration_scheduler::is_possible() && self.migration.request_migration() {
            self.migration.defer_until_idle(); // the node began to drain during the login
        }
    }

    /// Reports that bytes have followed the greeting of the node before TLS. An attacker on the network may have
    /// injected these.
    pub(crate) fn report_data_before_tls(&self) {
        self.with_counts(|counts| counts.connect_failures[ConnectFailure::Tls as usize].add(1));
        let name = self.node_name();
        envoy_abi::log!(
            Warn,
            "no TLS with {name}: it sent data behind its greeting, before TLS; it may have been injected on the network"
        );
    }

    /// Whether these bytes of the node are the error that it is full, and the login may fail over. The module keeps the
    /// error, since another node may accept the login. After this read, [`Self::fail_over_login`] must be called.
    pub(crate) fn hold_full_error(self: &Rc<Self>, bytes: &[u8]) -> bool {
        let is_held = self.phase() == SessionPhase::Login
            && self
                .with_session_login(|login| {
                    let is_full = login.relay.as_ref().is_some_and(|relay| relay.is_full(bytes));
                    let is_held = is_full && std::mem::replace(&mut login.may_fail_over, false);
                    if is_held {
                        login.late_full_error = bytes.to_vec();
                    }
                    is_held
                })
                .unwrap_or_default();
        if is_held {
            self.handle(Event::NodeFull);
        }
        is_held
    }

    /// Starts the failover of the login after [`Self::hold_full_error`] has returned true.
    pub(crate) fn fail_over_login(self: &Rc<Self>) {
        if self.phase() != SessionPhase::LoginFailover {
            return;
        }
        let Some(upstream) = self.upstream() else { return };
        let full_error =
            self.with_session_login(|login| std::mem::take(&mut login.late_full_error)).unwrap_or_default();
        if full_error.is_empty() {
            return; // the failover runs already
        }
        if let Some(node) = self.node() {
            upstream.report_connect_failure(&node, &self.last_tried_endpoint(), ConnectFailure::Full);
        }
        let attempt = self.with_login(|login| login.failover_attempt()).flatten();
        let is_started = attempt.is_some_and(|attempt| {
            offload::try_offload_login(Rc::clone(&upstream) as Rc<dyn OffloadedConn>)
                && LoginFailover::start(self, Rc::clone(&upstream), attempt, full_error.clone())
        });
        if !is_started {
            self.handle(Event::LoginResumed);
            upstream.receive_login(&full_error);
        }
    }

    pub(crate) fn set_login_failover(&self, failover: Rc<LoginFailover>) {
        self.with_session_login(|login| login.failover = Some(failover));
    }

    /// The failover has ended, and the login continues.
    pub(crate) fn resume_login(self: &Rc<Self>) {
        // Dropped when the login is no longer borrowed.
        let _failover = self.take_login_failover();
        self.handle(Event::LoginResumed);
    }

    pub(super) fn take_login_failover(&self) -> Option<Rc<LoginFailover>> {
        self.with_session_login(|login| login.failover.take()).flatten()
    }

    /// Stops the failover of the login. Returns the error of the first node, for the client.
    fn abandon_login_failover(self: &Rc<Self>) -> Vec<u8> {
        let failover = self.take_login_failover();
        let full_error = match &failover {
            Some(failover) => failover.abandon().to_vec(),
            None => self.with_session_login(|login| std::mem::take(&mut login.late_full_error)).unwrap_or_default(),
        };
        let mut output = Output::default();
        self.login_from_node(&full_error, &mut output);
        output.onward.to_vec()
    }

    /// Counts and logs a failed login, and keeps the error for the client.
    pub(super) fn reject_login(self: &Rc<Self>, rejection: Rejection) {
        let packet = match rejection {
            Rejection::Error(why) => {
                self.record_login_failure(LoginFailure::Error(why));
                self.error_packet(why)
            }
            Rejection::NodeLost => {
                let why = self.login_loss_error();
                self.record_login_failure(LoginFailure::Error(why));
                self.error_packet(why)
            }
            Rejection::NoNode => match self.with_session_login(|login| login.full_node_error.take()).flatten() {
                Some((node, packet)) => {
                    self.record_login_failure_at(LoginFailure::NodeFull, &node);
                    packet
                }
                None => {
                    self.with_session_login(|login| {
                        no_node_log::log_login_without_node(&self.worker.hosts, &login.tried_endpoints);
                    });
                    self.record_login_failure(LoginFailure::Error(ProxyError::NoNode));
                    self.error_packet(ProxyError::NoNode)
                }
            },
            Rejection::NodeFull => {
                let packet = self.abandon_login_failover();
                self.record_login_failure(LoginFailure::NodeFull); // at the first node, to which the login has returned
                packet
            }
        };
        self.final_error.replace(packet);
    }

    /// The error packet for a client whose login has failed.
    pub(crate) fn error_packet(&self, why: ProxyError) -> Vec<u8> {
        let text = self.refusal_text();
        self.login.borrow().as_ref().map(|login| login.error_packet(why, text.as_deref())).unwrap_or_default()
    }

    /// Why the node has closed the connection during the login.
    pub(crate) fn login_loss_error(&self) -> ProxyError {
        self.login.borrow().as_ref().map_or(ProxyError::NodeGone, |login| login.loss_error())
    }
}
