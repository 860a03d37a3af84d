//! A session's login.

use std::rc::Rc;
use std::time::{Duration, Instant};

use session::identity::Identity;
use wire::capability::Capabilities;
use wire::error::Refusal;
use wire::login::{Login, Output, PasswordKey, Progress, TOO_MANY_CONNECTIONS};
use wire::tracker::Tracker;

use super::{Phase, Session, refusal};
use crate::events::{self, Member};
use crate::login_elsewhere::LoginElsewhere;
use crate::node::{ConnectFailure, Counts};
use crate::{departures, node};

/// A server that closes sooner than this has not timed out: MariaDB's `connect_timeout` is at least 2 s (mariadb.com/docs,
/// "Server System Variables").
const CLIENT_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

impl Session {
    pub(crate) fn client_has_tls(&self) -> bool {
        self.client_tls.get()
    }

    /// The node has greeted: what it said goes to the client.
    pub(crate) fn greeted(&self) {
        self.phase.set(Phase::Login);
        self.full_node.replace(None);
    }

    /// Runs a step of the login; None when it is over.
    pub(crate) fn login<T>(&self, step: impl FnOnce(&mut Login) -> T) -> Option<T> {
        self.login.borrow_mut().as_mut().map(|login| step(login))
    }

    /// Bytes of the client go through the login.
    pub(crate) fn login_from_client(&self, bytes: &[u8], key: &dyn PasswordKey, out: &mut Output) -> (usize, Progress) {
        let (taken, progress) =
            self.login(|login| login.client(bytes, key, out)).unwrap_or((bytes.len(), Progress::More));
        self.progressed(progress);
        (taken, progress)
    }

    /// Bytes of the node go through the login.
    pub(crate) fn login_from_node(&self, bytes: &[u8], out: &mut Output) -> (usize, Progress) {
        let (taken, progress) = self.login(|login| login.node(bytes, out)).unwrap_or((bytes.len(), Progress::More));
        self.node_spoke_at.set(Some(Instant::now()));
        self.progressed(progress);
        (taken, progress)
    }

    /// Whether the node has answered the client's response with these bytes: that it is full. The client does not get them
    /// yet, since another node may take the login. [`Self::asks_elsewhere`] follows after this read.
    pub(crate) fn keeps_from_client(&self, bytes: &[u8]) -> bool {
        let full = self.login(|login| login.is_full(bytes)).unwrap_or_default();
        if !full || !self.may_ask_elsewhere.replace(false) {
            return false;
        }
        self.full_late.replace(bytes.to_vec());
        true
    }

    /// Whether other nodes are asked to take the login, or will be. What this node sends does not matter any more.
    pub(crate) fn is_asking_elsewhere(&self) -> bool {
        self.login_elsewhere.borrow().is_some() || !self.full_late.borrow().is_empty()
    }

    /// Asks other nodes to take the login, if that is due.
    pub(crate) fn asks_elsewhere(self: &Rc<Self>) {
        let refusal = self.full_late.take();
        let Some(vehicle) = self.travel.vehicle().filter(|_| !refusal.is_empty()) else { return };
        if let Some(node) = self.node() {
            vehicle.cannot_use(&node, &self.endpoint(), ConnectFailure::Full);
        }
        let attempt = self.login(|login| login.attempt_elsewhere()).flatten();
        let begun = attempt.is_some_and(|attempt| {
            events::takes_over(Rc::clone(&vehicle) as Rc<dyn Member>)
                && LoginElsewhere::begin(self, Rc::clone(&vehicle), attempt, refusal.clone())
        });
        if !begun {
            vehicle.receive_login(&refusal);
        }
    }

    /// Stops asking other nodes. Returns the error of the first one, for the client. None: no other node was asked.
    pub(super) fn stops_asking_elsewhere(&self) -> Option<Vec<u8>> {
        let asking = self.login_elsewhere.take()?;
        let mut output = Output::default();
        self.login_from_node(asking.abandon(), &mut output);
        Some(output.onward)
    }

    pub(super) fn progressed(&self, progress: Progress) {
        match progress {
            Progress::More => {}
            Progress::StartClientTls => self.client_tls.set(true),
            Progress::Established(capabilities) => self.established(capabilities),
            Progress::Denied(TOO_MANY_CONNECTIONS) => self.failed(node::NODE_FULL),
            Progress::Denied(_) => self.failed(node::DENIED),
            Progress::Refused(why) => {
                if why == Refusal::NodeTlsFailed {
                    self.node_spoke_before_tls();
                }
                self.failed(refusal(why));
            }
        }
    }

    /// The node has sent something behind its greeting, before TLS. Without TLS, it may have been injected on the network.
    pub(crate) fn node_spoke_before_tls(&self) {
        self.counts(|counts| counts.connect_failures[ConnectFailure::Tls as usize].add(1));
        let name = self.node.borrow().as_ref().map_or_else(String::new, |here| here.node.name.clone());
        abi::log!(
            Warn,
            "no TLS with {name}: it sent data behind its greeting, before TLS; it may have been injected on the network"
        );
    }

    pub(super) fn established(&self, capabilities: Capabilities) {
        self.phase.set(Phase::Established);
        self.established_at.set(Some(Instant::now()));
        self.tried.replace(Vec::new());
        let response = self.login.take().and_then(|mut login| login.take_response());
        let identity = response.and_then(|response| Identity::of(&response, capabilities));
        self.travel.identity.replace(identity.map(Box::new));
        let mut tracker = Tracker::new(capabilities);
        if capabilities.0 & (Capabilities::COMPRESS.0 | Capabilities::ZSTD_COMPRESSION.0) != 0 {
            tracker.give_up();
        }
        self.tracker.replace(Some(tracker));
        self.counts(|counts| counts.logins.add(1));
        if self.idle_timeout.get().is_zero() {
            self.deadline.replace(None);
        }
        self.is_active();
        self.recount();
        if self.is_on_a_left_node() && departures::are_possible() && self.travel.begins_to_leave() {
            self.travel.waits(); // its node was to be left while it logged in
        }
    }

    /// Why the node has closed the connection during the login. If it has waited for the client, that one was too slow.
    pub(crate) fn lost_login(&self) -> Refusal {
        let client_owes = self.login(|login| login.awaits_client()).unwrap_or(false);
        let waited = self.node_spoke_at.get().is_some_and(|since| since.elapsed() >= CLIENT_ANSWER_TIMEOUT);
        if client_owes && waited { Refusal::LoginTooSlow } else { Refusal::NodeGone }
    }

    pub(super) fn failed(&self, reason: usize) {
        self.counts(|counts| self.failed_at(counts, reason));
    }

    /// The login has failed. `counts`: those of the node that is the cause, which the session may have left.
    pub(super) fn failed_at(&self, counts: &Counts, reason: usize) {
        if self.failure.replace(Some(reason)).is_none() {
            counts.login_failures[reason].add(1);
        }
        self.phase.set(Phase::Over);
    }

    /// The client will send no more. True: it has not finished its login, so all is over.
    pub(crate) fn client_finished(&self) -> bool {
        if matches!(self.phase.get(), Phase::Connecting | Phase::Login) {
            self.failed(node::CLIENT_GONE);
        }
        self.phase.get() == Phase::Over
    }
}
