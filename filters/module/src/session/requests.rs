//! The requests of an established session: the module finds them in the client's bytes, and sees some of them as a whole.
//!
//! A command that changes the identity is held until it is complete, if no response is outstanding. While statements are
//! observed, requests with statements are shown when their bytes have passed.

use mysql_proto::command::Command;
use mysql_proto::request_reader::{Found, Interest, Request, RequestStart};
use mysql_proto::secret::SecretBytes;
use mysql_proto::tracker::TrackerState;

use super::Session;
use super::identity;
use crate::commands::{ChangeUserResult, Commands};
use crate::statements;

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
        let awaits_client = self.awaits_client();
        let mut traffic = self.traffic.borrow_mut();
        let Some(traffic) = traffic.as_mut().filter(|traffic| traffic.tracker.state() != TrackerState::Opaque) else {
            return Some(Found::Bytes(std::mem::take(bytes)));
        };
        self.follow_statements_switch(&mut traffic.commands);
        let statements = &traffic.commands.statements;
        let expects_command = traffic.tracker.expects_command();
        self.requests.borrow_mut().next(bytes, |start: RequestStart<'_>| match Command::from(start.command) {
            _ if !expects_command => Interest::None,
            Command::ChangeUser | Command::SetOption if start.is_first && awaits_client => identity::interest(start),
            command if statements.is_observed(command, start.content) => Interest::Observe,
            _ => Interest::None,
        })
    }

    /// The client's bytes up to the end of this request were tracked.
    pub(crate) fn on_request(&self, request: &Request<'_>) {
        self.with_traffic(|traffic| traffic.commands.statements.on_request(&self.worker.statements, request));
    }

    /// Collects statistics of statements or not, as the control plane wants.
    fn follow_statements_switch(&self, commands: &mut Commands) {
        let is_on = statements::is_on();
        if commands.statements.is_collecting() == is_on {
            return;
        }
        if is_on {
            commands.statements.collect(&self.worker.statements, &self.user());
        } else {
            commands.statements.stop_collecting();
        }
    }

    /// A change of user has ended.
    pub(super) fn update_statements_user(&self, result: ChangeUserResult) {
        let names = self.identity.change_user_names();
        if let Some(names) = names.filter(|_| result.error.is_none()) {
            self.with_traffic(|traffic| {
                let statements = &mut traffic.commands.statements;
                statements.on_user_changed(&self.worker.statements, names.user(), names.database());
            });
        }
    }

    fn is_opaque(&self) -> bool {
        self.with_traffic(|traffic| traffic.tracker.state() == TrackerState::Opaque).unwrap_or_default()
    }
}
