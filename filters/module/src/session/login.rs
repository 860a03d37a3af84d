//! A session's login.

use std::time::Instant;

use session::identity::Identity;
use wire::capability::Capabilities;
use wire::error::Refusal;
use wire::login::{Login, PasswordKey, Progress};
use wire::tracker::Tracker;

use super::{Phase, Session, refusal};
use crate::node::ConnectFailure;
use crate::{departures, node};

impl Session {
    pub(crate) fn client_has_tls(&self) -> bool {
        self.client_tls.get()
    }

    /// The node has greeted: what it said goes to the client.
    pub(crate) fn greeted(&self) {
        self.phase.set(Phase::Login);
        self.tried.replace(Vec::new());
    }

    /// Runs a step of the login; None when it is over.
    pub(crate) fn login<T>(&self, step: impl FnOnce(&mut Login) -> T) -> Option<T> {
        self.login.borrow_mut().as_mut().map(|login| step(login))
    }

    /// Bytes of the client go through the login.
    pub(crate) fn login_from_client(
        &self,
        bytes: &[u8],
        key: &dyn PasswordKey,
        out: &mut wire::login::Output,
    ) -> (usize, Progress) {
        let (taken, progress) =
            self.login(|login| login.client(bytes, key, out)).unwrap_or((bytes.len(), Progress::More));
        self.progressed(progress);
        (taken, progress)
    }

    /// Bytes of the node go through the login.
    pub(crate) fn login_from_node(&self, bytes: &[u8], out: &mut wire::login::Output) -> (usize, Progress) {
        let (taken, progress) = self.login(|login| login.node(bytes, out)).unwrap_or((bytes.len(), Progress::More));
        self.progressed(progress);
        (taken, progress)
    }

    pub(super) fn progressed(&self, progress: Progress) {
        match progress {
            Progress::More => {}
            Progress::StartClientTls => self.client_tls.set(true),
            Progress::Established(capabilities) => self.established(capabilities),
            Progress::Denied(_) => self.failed(node::DENIED),
            Progress::Refused(why) => {
                if why == Refusal::NodeTlsFailed {
                    self.node_spoke_before_tls();
                }
                self.failed(refusal(why));
            }
        }
    }

    /// The node has sent something behind its greeting that no TLS protects, and TLS was to begin: it may be from somebody
    /// else.
    pub(crate) fn node_spoke_before_tls(&self) {
        self.counts(|counts| counts.connect_failures[ConnectFailure::Tls as usize].add(1));
        let name = self.node.borrow().as_ref().map_or_else(String::new, |here| here.node.name.clone());
        abi::log!(
            Warn,
            "no TLS with {name}: it sent data behind its greeting, before TLS; somebody may have injected it"
        );
    }

    pub(super) fn established(&self, capabilities: Capabilities) {
        self.phase.set(Phase::Established);
        self.established_at.set(Some(Instant::now()));
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

    pub(super) fn failed(&self, reason: usize) {
        if self.failure.replace(Some(reason)).is_none() {
            self.counts(|counts| counts.login_failures[reason].add(1));
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
