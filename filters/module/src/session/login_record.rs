//! Counts and logs the ends of logins and of changes of user.

use std::time::{Duration, SystemTime};

use mysql_proto::login::Login;
use mysql_proto::login_names::LoginNames;

use super::Session;
use crate::commands::ChangeUserResult;
use crate::login_log::{self, LoginRecord, TlsRecord};
use crate::node::{LoginFailure, WorkerNode};

/// How a login or a change of user has ended.
struct LoginOutcome<'a> {
    kind: &'static str,
    /// None: the node has accepted it.
    failure: Option<LoginFailure>,
    /// The code of the error that the client gets.
    error_code: Option<u16>,
    duration: Duration,
    names: Option<&'a LoginNames>,
}

impl Session {
    /// Counts and logs a login that the node has accepted.
    pub(super) fn record_login(&self) {
        self.with_counts(|counts| counts.logins.add(1));
        self.log_login(None, self.node().as_deref());
    }

    /// Counts and logs a failed login, or a change of user that the module refuses.
    pub(super) fn record_login_failure(&self, failure: LoginFailure) {
        self.with_counts(|counts| counts.login_failures[failure.index()].add(1));
        self.log_login(Some(failure), self.node().as_deref());
    }

    /// Counts and logs a failed login at a node that the session no longer uses.
    pub(super) fn record_login_failure_at(&self, failure: LoginFailure, node: &WorkerNode) {
        node.counts.login_failures[failure.index()].add(1);
        self.log_login(Some(failure), Some(node));
    }

    /// Logs a change of user that the node has answered.
    pub(super) fn log_change_user(&self, result: ChangeUserResult) {
        if login_log::is_on() {
            let failure = result.error.map(|_| LoginFailure::Denied);
            self.write_change_user(failure, result.error, result.duration);
        }
    }

    fn log_login(&self, failure: Option<LoginFailure>, node: Option<&WorkerNode>) {
        if !login_log::is_on() {
            return;
        }
        let login = self.login.borrow();
        let Some(login) = &*login else {
            let duration = self.with_traffic(|traffic| traffic.commands.running_time()).unwrap_or_default();
            return self.write_change_user(failure, failure.and_then(LoginFailure::error_code), duration);
        };
        let relay = login.relay();
        if failure == Some(LoginFailure::ClientGone) && relay.is_some_and(|relay| !relay.has_client_bytes()) {
            return; // such as a load balancer that checks the port
        }
        let outcome = LoginOutcome {
            kind: "login",
            failure,
            error_code: failure.and_then(|failure| failure.error_code().or_else(|| relay?.node_error())),
            duration: login.elapsed(),
            names: relay.and_then(Login::names),
        };
        self.write_record(&outcome, node);
    }

    fn write_change_user(&self, failure: Option<LoginFailure>, error_code: Option<u16>, duration: Duration) {
        let names = self.identity.change_user_names();
        let outcome = LoginOutcome { kind: "change_user", failure, error_code, duration, names: names.as_ref() };
        self.write_record(&outcome, self.node().as_deref());
    }

    fn write_record(&self, outcome: &LoginOutcome<'_>, node: Option<&WorkerNode>) {
        let addresses = self.addresses();
        login_log::push(&LoginRecord {
            time: SystemTime::now(),
            kind: outcome.kind,
            result: if outcome.failure.is_none() { "ok" } else { "failed" },
            reason: outcome.failure.map(LoginFailure::name),
            error_code: outcome.error_code,
            names: outcome.names,
            client: addresses.map(|(client, _)| client),
            listener: addresses.map(|(_, listener)| listener),
            node: node.map(|node| node.shared.name.as_str()),
            tls: self.client.tls_details().map(|tls| TlsRecord {
                version: tls.version,
                cipher: tls.cipher,
                client_certificate: tls.has_peer_certificate,
            }),
            duration: outcome.duration,
            connection_id: self.id,
        });
    }
}
