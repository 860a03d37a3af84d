//! The identity of a session: user, database and options. With these the module logs in at another node on
//! behalf of the client.
//!
//! COM_CHANGE_USER and COM_SET_OPTION change the identity. If no response is outstanding, the module first collects
//! the whole command, so that it can parse or reject the command.
//!
//! In a session that has migrated, the authentication response in COM_CHANGE_USER was computed from the greeting of
//! another node. The module removes this response, so that the current node requests a new one.

use std::cell::RefCell;

use migration::identity::Identity;
use mysql_proto::change_user::{CHANGE_USER, ChangeUser, MAX_CHANGE_USER_BYTES};
use mysql_proto::error::ProxyError;
use mysql_proto::login_names::LoginNames;
use mysql_proto::packet::{HEADER, Header};
use mysql_proto::request_reader::{Interest, RequestStart};
use mysql_proto::secret::SecretBytes;

use super::Session;
use crate::commands::IdentityChange;

const SET_OPTION: u8 = 0x1b;
/// The maximum size of the kept bytes: a change of user, and what the client sends until the node has answered.
const MAX_CHANGE_BYTES: usize = 2 * MAX_CHANGE_USER_BYTES;

#[derive(Default)]
pub(crate) struct SessionIdentity {
    /// None: the module cannot log in for the session at another node.
    current: RefCell<Option<Box<Identity>>>,
    /// The bytes that were sent to the node since the start of a command that changes the identity.
    change_command: RefCell<SecretBytes>,
}

impl SessionIdentity {
    pub(super) fn set(&self, identity: Option<Identity>) {
        self.current.replace(identity.map(Box::new));
    }

    /// None: the module cannot log in for the session at another node.
    pub(super) fn get(&self) -> Option<Box<Identity>> {
        self.current.borrow().clone()
    }

    pub(super) fn is_known(&self) -> bool {
        self.current.borrow().is_some()
    }

    /// Handles bytes of the client, in which the tracker has found `change`. If other bytes precede the command, or the
    /// bytes are too many, the identity of the session becomes unknown.
    pub(super) fn on_client_bytes(&self, bytes: &[u8], change: IdentityChange) {
        let mut command = self.change_command.borrow_mut();
        if change == IdentityChange::None && command.is_empty() {
            return;
        }
        command.extend_from_slice(bytes);
        let may_be_known = matches!(command.get(HEADER), None | Some(&(CHANGE_USER | SET_OPTION)));
        if command.len() > MAX_CHANGE_BYTES || !may_be_known {
            command.clear();
            self.current.replace(None);
        }
    }

    /// The user and the database of the present change of user. None: the module does not know them.
    pub(super) fn change_user_names(&self) -> Option<LoginNames> {
        let command = self.change_command.borrow();
        let header = Header::parse(&command)?;
        let payload =
            command.get(HEADER..HEADER + header.length).filter(|payload| payload.first() == Some(&CHANGE_USER))?;
        ChangeUser::parse(payload).map(|change| change.names())
    }

    /// Handles bytes of the node, in which the tracker has found `change`.
    pub(super) fn on_node_bytes(&self, change: IdentityChange) {
        let packet = match change {
            IdentityChange::None | IdentityChange::Began => return,
            IdentityChange::Failed | IdentityChange::Done => self.change_command.take(),
        };
        let mut identity = self.current.borrow_mut();
        let end = HEADER + Header::parse(&packet).map_or(0, |header| header.length);
        let is_whole = (HEADER + 1..=packet.len()).contains(&end);
        let is_known = match (identity.as_mut(), packet.get(HEADER)) {
            (Some(_), _) if change == IdentityChange::Failed => true,
            (Some(identity), Some(&CHANGE_USER)) if is_whole => identity.apply_change_user(&packet[HEADER..end]),
            // What follows may be another command that changes the identity.
            (Some(identity), Some(&SET_OPTION)) if is_whole && end == packet.len() => {
                identity.allow_multi_statements(packet.get(HEADER + 1) == Some(&0));
                true
            }
            _ => false,
        };
        if !is_known {
            *identity = None;
        }
    }
}

impl Session {
    /// Checks a whole command that changes the identity. Some: the bytes to forward instead.
    ///
    /// # Errors
    /// Why the module rejects the command.
    pub(crate) fn check_identity_command(&self, command: &[u8]) -> Result<Option<SecretBytes>, ProxyError> {
        if command[HEADER] != CHANGE_USER {
            return Ok(None);
        }
        let check = |change: ChangeUser<'_>| {
            change.check()?;
            self.take_slots_of_next_user(change.user)
        };
        if let Err(why) = ChangeUser::parse(&command[HEADER..]).map_or(Ok(()), check) {
            self.identity.change_command.replace(command.into()); // for the login log
            return Err(why);
        }
        if !self.migration.has_migrated() {
            return Ok(None);
        }
        let identity = self.identity.current.borrow();
        let without_response =
            identity.as_ref().and_then(|identity| identity.without_auth_response(&command[HEADER..]));
        Ok(without_response.map(|payload| {
            let header = Header { length: payload.len(), sequence: command[HEADER - 1] };
            [&header.bytes()[..], &payload].concat().into()
        }))
    }
}

/// How a command that may change the identity is treated.
pub(super) fn interest(start: RequestStart<'_>) -> Interest {
    match start.length {
        ..=MAX_CHANGE_USER_BYTES => Interest::Hold,
        _ if start.command == CHANGE_USER => Interest::Refuse,
        _ => Interest::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_of_user_that_is_too_long_is_refused() {
        for (length, command, expected) in [
            (MAX_CHANGE_USER_BYTES, CHANGE_USER, Interest::Hold),
            (MAX_CHANGE_USER_BYTES + 1, CHANGE_USER, Interest::Refuse),
            (MAX_CHANGE_USER_BYTES, SET_OPTION, Interest::Hold),
            (MAX_CHANGE_USER_BYTES + 1, SET_OPTION, Interest::None),
        ] {
            assert_eq!(interest(RequestStart { command, length, content: b"", is_first: true }), expected);
        }
    }
}
