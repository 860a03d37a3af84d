//! What the control plane can know about a session: its ids, and what it does.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use super::{Session, SessionPhase};
use crate::deadlines::Deadline;
use crate::fleet_commands::{ListSessions, SessionMessage};
use crate::node::SessionState;

/// The longest part of a statement's text.
const MAX_TEXT_BYTES: usize = 512;

/// The connection ids of a session, as far as they are known.
#[derive(Default)]
pub(super) struct ConnectionIds {
    /// In the greeting that the client got.
    first: Cell<Option<u32>>,
    /// At the present node.
    node: Cell<Option<u32>>,
    /// As long as it has not passed, the session does not migrate.
    pin: RefCell<Option<Deadline>>,
}

impl ConnectionIds {
    /// The id at the present node.
    pub(super) fn node_id(&self) -> Option<u32> {
        self.node.get()
    }

    /// The session has ended.
    pub(super) fn release(&self) {
        self.pin.replace(None);
    }
}

impl Session {
    /// The client gets a greeting with this connection id.
    pub(crate) fn set_first_id(&self, id: Option<u32>) {
        self.ids.first.set(id);
        self.ids.node.set(id);
    }

    /// The session is at another node.
    pub(crate) fn set_node_id(&self, id: Option<u32>) {
        self.ids.node.set(id);
    }

    /// Whether the session has this id: that of its handshake, that at its node, or that at the node to which it
    /// migrates.
    pub(crate) fn has_id(&self, id: u64) -> bool {
        let next = self.migration.driver().and_then(|driver| driver.target_connection_id());
        [self.ids.first.get(), self.ids.node.get(), next].into_iter().flatten().any(|known| u64::from(known) == id)
    }

    /// Whether it is open at which node the session will be in a moment.
    pub(crate) fn is_on_its_way(&self) -> bool {
        self.migration.is_probing()
            || self.phase() == SessionPhase::LoginFailover
            || self.migration.driver().is_some_and(|driver| driver.is_client_held())
    }

    /// Prevents migrations for this time, except those that a failed node makes necessary.
    pub(crate) fn pin(self: &Rc<Self>, time: Duration) {
        let deadline = Deadline::new(&self.worker.deadlines, time, &Rc::downgrade(self));
        self.ids.pin.replace(Some(deadline));
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.ids.pin.borrow().as_ref().is_some_and(|pin| !pin.has_passed())
    }

    /// Continues a migration that a pin has delayed.
    pub(super) fn release_pin(self: &Rc<Self>) {
        let has_passed = self.ids.pin.borrow().as_ref().is_some_and(Deadline::has_passed);
        if has_passed {
            self.ids.pin.replace(None);
            if self.phase() == SessionPhase::Established {
                self.on_quiescent();
            }
        }
    }

    /// An operator ends the session.
    pub(crate) fn end_by_operator(&self) {
        self.end_with_error("operator", mysql_proto::error::session_killed());
    }

    /// Whether a list may have the session.
    pub(crate) fn fits(&self, list: &ListSessions) -> bool {
        list.fits(&self.user(), &self.node_name(), &self.client_text())
    }

    pub(crate) fn describe(self: &Rc<Self>) -> SessionMessage {
        let state = self.counted_state().map(|counted| counted.state);
        let mut message = SessionMessage {
            connection: self.id(),
            id: self.ids.first.get().unwrap_or_default(),
            node_id: self.ids.node.get().unwrap_or_default(),
            client: self.client_text(),
            user: String::from_utf8_lossy(&self.user()).into_owned(),
            node: self.node_name(),
            state: match state {
                _ if self.is_on_its_way() => "moving",
                Some(SessionState::Idle) if self.has_held_request() => "busy",
                Some(state) => SessionState::NAMES[state as usize],
                None => "login",
            }
            .to_owned(),
            moves: self.migration.migrations(),
            ..SessionMessage::default()
        };
        let is_login = self.with_traffic(|traffic| {
            let is_busy = traffic.is_busy();
            let commands = &traffic.commands;
            let since = if is_busy { commands.running_time() } else { traffic.last_command_ended_at().elapsed() };
            message.milliseconds_in_state = milliseconds(since);
            message.milliseconds_logged_in = Some(milliseconds(traffic.established_at.elapsed()));
            message.database = String::from_utf8_lossy(commands.statements.database()).into_owned();
            if let Some(statement) = commands.statements.running().filter(|_| is_busy) {
                message.digest = statement.digest.to_vec();
                message.text = beginning(&statement.text, MAX_TEXT_BYTES).to_owned();
            }
        });
        if is_login.is_none() {
            message.milliseconds_in_state = milliseconds(self.login_time());
        }
        message
    }

    fn client_text(&self) -> String {
        self.addresses().map(|(client, _)| client.to_string()).unwrap_or_default()
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn beginning(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or_default()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!(beginning("abc", 5), "abc");
        assert_eq!(beginning("a\u{e9}b", 2), "a");
    }
}
