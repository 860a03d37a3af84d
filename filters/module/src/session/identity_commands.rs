//! Commands that change who a session is, or what it may do: they go to the node whole, so that they can be read here.
//!
//! In a session that has migrated, COM_CHANGE_USER answers the greeting of another node. That answer is left out, so that
//! the present node requests another one.

use std::borrow::Cow;

use mysql_proto::packet::{HEADER, Header};

use super::Session;

const CHANGE_USER: u8 = 0x11;
const SET_OPTION: u8 = 0x1b;
/// Bytes of a command that are kept until it is whole.
const MAX_COMMAND_BYTES: usize = 64 * 1024;

impl Session {
    /// What goes to the node for these bytes of the client: all of them, as they are, but for such a command. Less, while
    /// it is not whole.
    pub(crate) fn assemble_identity_command<'a>(&self, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        let mut is_started = self.migration.partial_command.borrow_mut();
        if is_started.is_empty() && !(may_change_identity(bytes) && self.awaits_client()) {
            return Cow::Borrowed(bytes);
        }
        is_started.extend_from_slice(bytes);
        if !may_change_identity(&is_started) {
            return Cow::Owned(std::mem::take(&mut *is_started));
        }
        let Some(header) = Header::parse(&is_started).filter(|header| is_started.len() >= HEADER + header.length)
        else {
            return Cow::Borrowed(&[]);
        };
        let whole = std::mem::take(&mut *is_started);
        if whole[HEADER] != CHANGE_USER || !self.migration.has_migrated() {
            return Cow::Owned(whole);
        }
        let (command, rest) = whole.split_at(HEADER + header.length);
        let identity = self.migration.identity.borrow();
        let reworded = identity.as_ref().and_then(|identity| identity.without_auth_response(&command[HEADER..]));
        match reworded {
            None => Cow::Owned(whole),
            Some(payload) => {
                let header = Header { length: payload.len(), sequence: header.sequence };
                Cow::Owned([&header.bytes()[..], &payload, rest].concat())
            }
        }
    }
}

/// Whether a command that begins so is one of them and of a bearable length, or may yet become one.
fn may_change_identity(bytes: &[u8]) -> bool {
    match bytes.get(HEADER) {
        Some(&command) => {
            matches!(command, CHANGE_USER | SET_OPTION)
                && Header::parse(bytes).is_some_and(|header| (1..=MAX_COMMAND_BYTES).contains(&header.length))
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
}
