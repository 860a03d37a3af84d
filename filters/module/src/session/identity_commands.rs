//! Commands that change who a session is, or what it may do: they go to the node whole, so that they can be read here.
//! A change of user that is rejected does not reach the node.
//!
//! In a session that has migrated, COM_CHANGE_USER answers the greeting of another node. That answer is left out, so that
//! the present node requests another one.

use mysql_proto::change_user::{CHANGE_USER, ChangeUser, MAX_CHANGE_USER_BYTES};
use mysql_proto::error::ProxyError;
use mysql_proto::packet::{HEADER, Header};
use mysql_proto::secret::SecretBytes;

use super::Session;

const SET_OPTION: u8 = 0x1b;

impl Session {
    /// What goes to the node instead of these bytes of the client, if it is such a command: nothing, while it is not whole.
    /// None: the bytes as they are.
    ///
    /// # Errors
    /// Why the proxy rejects the command.
    pub(crate) fn assemble_identity_command(&self, bytes: &[u8]) -> Result<Option<SecretBytes>, ProxyError> {
        let mut is_started = self.migration.partial_command.borrow_mut();
        if is_started.is_empty() {
            if !self.awaits_client() {
                return Ok(None);
            }
            if !may_change_identity(bytes) {
                return check_size(bytes).map(|()| None);
            }
        }
        is_started.extend_from_slice(bytes);
        if !may_change_identity(&is_started) {
            let bytes = std::mem::take(&mut *is_started);
            return check_size(&bytes).map(|()| Some(bytes));
        }
        let Some(header) = Header::parse(&is_started).filter(|header| is_started.len() >= HEADER + header.length)
        else {
            return Ok(Some(SecretBytes::default()));
        };
        let whole = std::mem::take(&mut *is_started);
        if whole[HEADER] != CHANGE_USER {
            return Ok(Some(whole));
        }
        let (command, rest) = whole.split_at(HEADER + header.length);
        ChangeUser::parse(&command[HEADER..]).map_or(Ok(()), |change| change.check())?;
        if !self.migration.has_migrated() {
            return Ok(Some(whole));
        }
        let identity = self.migration.identity.borrow();
        let reworded = identity.as_ref().and_then(|identity| identity.without_auth_response(&command[HEADER..]));
        Ok(Some(match reworded {
            None => whole,
            Some(payload) => {
                let header = Header { length: payload.len(), sequence: header.sequence };
                [&header.bytes()[..], &payload, rest].concat().into()
            }
        }))
    }
}

/// A change of user that is longer than any may be is rejected by its header.
fn check_size(bytes: &[u8]) -> Result<(), ProxyError> {
    let is_too_long = bytes.get(HEADER) == Some(&CHANGE_USER)
        && Header::parse(bytes).is_some_and(|header| header.length > MAX_CHANGE_USER_BYTES);
    if is_too_long { Err(ProxyError::AttributesTooLarge) } else { Ok(()) }
}

/// Whether a command that begins so is one of them and of a bearable length, or may yet become one.
fn may_change_identity(bytes: &[u8]) -> bool {
    match bytes.get(HEADER) {
        Some(&command) => {
            matches!(command, CHANGE_USER | SET_OPTION)
                && Header::parse(bytes).is_some_and(|header| (1..=MAX_CHANGE_USER_BYTES).contains(&header.length))
        }
        None => Header::parse(bytes).is_none_or(|header| header.length > 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_told_by_its_first_bytes() {
        for (bytes, may) in [
            (&b""[..], true),
            (b"\x05\0\0", true),
            (b"\x05\0\0\0", true),
            (b"\x05\0\0\0\x11", true),
            (b"\x03\0\0\0\x1b\0", true),
            (b"\x05\0\0\0\x03", false),
            (b"\0\0\0\0", false),
            (b"\0\0\0\0\x11", false),
            (b"\xff\xff\xff\0\x11", false),
        ] {
            assert_eq!(may_change_identity(bytes), may, "{bytes:?}");
        }
    }

    #[test]
    fn a_change_of_user_that_is_too_long_is_known_by_its_header() {
        let header = |length| Header { length, sequence: 0 }.bytes();
        for (length, command, expected) in [
            (MAX_CHANGE_USER_BYTES, CHANGE_USER, Ok(())),
            (MAX_CHANGE_USER_BYTES + 1, CHANGE_USER, Err(ProxyError::AttributesTooLarge)),
            (MAX_CHANGE_USER_BYTES + 1, SET_OPTION, Ok(())),
        ] {
            assert_eq!(check_size(&[&header(length)[..], &[command]].concat()), expected);
        }
    }
}
