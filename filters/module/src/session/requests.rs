//! The requests of an established session: the module finds them in the client's bytes, and sees some of them as a whole.
//!
//! A command that changes the identity is held until it is complete, if no response is outstanding. While statements are
//! observed, requests with statements are shown when their bytes have passed.

use mysql_proto::capability::Capabilities;
use mysql_proto::login::Login;
use mysql_proto::request_reader::{Found, Interest, Request, RequestReader, RequestStart};
use mysql_proto::secret::SecretBytes;
use mysql_proto::status;
use mysql_proto::tracker::TrackerState;

use super::Session;
use super::identity;
use super::traffic::Traffic;
use crate::statements::{self, SessionDetails, SessionStatements};

impl Session {
    /// To be called first with bytes of the client. Some: the bytes to read instead, which begin with earlier ones.
    pub(crate) fn join_client_bytes(&self, bytes: &[u8]) -> Option<SecretBytes> {
        let mut reader = self.requests.borrow_mut();
        if !self.is_opaque() {
            return reader.join(bytes);
        }
        let mut kept = reader.stop();
        if kept.is_empty() {
            return None;
        }
        kept.extend_from_slice(bytes);
        Some(kept)
    }

    /// Finds the next request in the bytes of the client, which must not be empty. None: all bytes are kept.
    pub(crate) fn next_request<'a>(&self, bytes: &mut &'a [u8]) -> Option<Found<'a>> {
        if self.is_opaque() {
            self.with_traffic(|traffic| traffic.commands.statements = None);
            return Some(Found::Bytes(std::mem::take(bytes)));
        }
        let mut reader = self.requests.borrow_mut();
        self.follow_statements_switch(&reader);
        let expects_command = self.with_traffic(|traffic| traffic.tracker.expects_command()).unwrap_or_default();
        let is_observing = self.with_traffic(|traffic| traffic.commands.statements.is_some()).unwrap_or_default();
        let awaits_client = self.awaits_client();
        reader.next(bytes, |start: RequestStart| match start {
            _ if !expects_command => Interest::None,
            start if start.is_first && awaits_client && identity::may_change(start.command) => {
                identity::interest(start)
            }
            start if is_observing && SessionStatements::is_observed(start.command) => Interest::Observe,
            _ => Interest::None,
        })
    }

    /// The client's bytes up to the end of this request were tracked.
    pub(crate) fn on_request(&self, request: &Request<'_>) {
        self.with_traffic(|traffic| {
            if let Some(statements) = &mut traffic.commands.statements {
                statements.on_request(&self.worker.statements, request);
            }
        });
    }

    /// The login has ended: begins to observe statements, if the control plane wants it.
    pub(super) fn start_statements(&self) {
        if !statements::is_on() {
            return;
        }
        let login = self.login.borrow();
        let names = login.as_ref().and_then(|login| login.relay()).and_then(Login::names);
        self.with_traffic(|traffic| {
            let mut statements = self.new_statements(traffic);
            statements.set_database(names.map_or(b"", |names| names.database()));
            traffic.commands.statements = Some(Box::new(statements));
        });
    }

    /// Begins or ends to observe statements between two commands, as the control plane wants.
    fn follow_statements_switch(&self, reader: &RequestReader) {
        let mut traffic = self.traffic.borrow_mut();
        let Some(traffic) = &mut *traffic else { return };
        if traffic.commands.statements.is_some() == statements::is_on() {
            return;
        }
        if traffic.commands.statements.is_some() {
            traffic.commands.statements = None;
        } else if traffic.commands.is_idle() && reader.is_between_requests() {
            traffic.commands.statements = Some(Box::new(self.new_statements(traffic)));
        }
    }

    /// The user has changed.
    pub(super) fn update_statements_user(&self) {
        let user = self.user();
        self.with_traffic(|traffic| {
            if let Some(statements) = &mut traffic.commands.statements {
                statements.set_user(&self.worker.statements, &user);
            }
        });
    }

    /// A change of user has succeeded, or another command that may change the identity.
    pub(super) fn update_statements_database(&self) {
        self.with_traffic(|traffic| {
            if let Some(statements) = &mut traffic.commands.statements
                && let Some(names) = self.identity.change_user_names()
            {
                statements.set_database(names.database());
            }
        });
    }

    /// The session has migrated, `moves` times by now.
    pub(super) fn update_statements_moves(&self, moves: u32) {
        self.with_traffic(|traffic| {
            if let Some(statements) = &mut traffic.commands.statements {
                statements.set_moves(moves);
            }
        });
    }

    fn new_statements(&self, traffic: &Traffic) -> SessionStatements {
        let has_attributes = traffic.capabilities.has(Capabilities::QUERY_ATTRIBUTES);
        let details = SessionDetails {
            connection_id: self.id,
            client: self.addresses().map(|(client, _)| client),
            database: None,
            moves: self.migration.migrations(),
            is_in_transaction: traffic.tracker.status() & status::IN_TRANSACTION != 0,
        };
        SessionStatements::new(&self.worker.statements, &self.user(), has_attributes, details)
    }

    fn is_opaque(&self) -> bool {
        self.with_traffic(|traffic| traffic.tracker.state() == TrackerState::Opaque).unwrap_or_default()
    }
}
