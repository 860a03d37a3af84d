//! COM_CHANGE_USER: another user logs in within a session.
//!
//! Layout: `11`, user NUL, length u8 and authentication data, database NUL, collation u16, plugin NUL, attributes
//! ("COM_CHANGE_USER", dev.mysql.com). All behind the database may be missing.

use crate::error::ProxyError;
use crate::login::SESSION_TOKEN_PLUGIN;
use crate::response::{self, MAX_ATTRIBUTES_BYTES};

/// The first byte of its payload.
pub const CHANGE_USER: u8 = 0x11;
/// The most payload bytes of the command: attributes, and names that no server allows to be as long as this.
pub const MAX_CHANGE_USER_BYTES: usize = MAX_ATTRIBUTES_BYTES + 4 * 1024;

/// The parts of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeUser<'a> {
    pub user: &'a [u8],
    pub database: &'a [u8],
    /// None: neither it nor anything behind it is there.
    pub collation: Option<[u8; 2]>,
    /// The name of the client's plugin; empty when there is none.
    pub plugin: &'a [u8],
    /// All that is behind the plugin: the attributes, and in front of them their length.
    pub attributes: &'a [u8],
}

impl<'a> ChangeUser<'a> {
    /// The parts of `payload`, command byte included; None when it ends too early.
    #[must_use]
    pub fn parse(payload: &'a [u8]) -> Option<Self> {
        let (user, rest) = until_nul(payload.get(1..)?)?;
        let (&length, rest) = rest.split_first()?;
        let (database, rest) = until_nul(rest.get(usize::from(length)..)?)?;
        let (collation, rest) = match rest.split_first_chunk::<2>() {
            Some((collation, rest)) => (Some(*collation), rest),
            None => (None, &[][..]),
        };
        // Some clients leave out the NUL behind the last text.
        let (plugin, attributes) = until_nul(rest).unwrap_or((rest, &[]));
        Some(Self { user, database, collation, plugin, attributes })
    }

    /// Why the proxy rejects it.
    ///
    /// # Errors
    /// The plugin is not for clients, or there are too many attributes.
    pub fn check(&self) -> Result<(), ProxyError> {
        if self.plugin == SESSION_TOKEN_PLUGIN {
            return Err(ProxyError::SessionTokenPlugin);
        }
        if response::exceeds_attribute_limit(self.attributes) {
            return Err(ProxyError::AttributesTooLarge);
        }
        Ok(())
    }
}

/// What stands before the next NUL, and behind it.
fn until_nul(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|&byte| byte == 0)?;
    Some((&bytes[..at], &bytes[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_are_found() {
        let command = b"\x11other\0\x02\0xdb\0\x2d\0mysql_native_password\0\x03\x01a\0";
        let parsed = ChangeUser::parse(command).expect("a command");
        assert_eq!((parsed.user, parsed.database), (&b"other"[..], &b"db"[..]));
        assert_eq!(parsed.collation, Some([0x2d, 0]));
        assert_eq!((parsed.plugin, parsed.attributes), (&b"mysql_native_password"[..], &b"\x03\x01a\0"[..]));
        assert_eq!(parsed.check(), Ok(()));
    }

    #[test]
    fn parts_at_the_end_may_be_missing() {
        for command in [&b"\x11other\0\0\0"[..], b"\x11other\0\0\0\x2d"] {
            let parsed = ChangeUser::parse(command).expect("a command");
            assert_eq!((parsed.collation, parsed.plugin, parsed.attributes), (None, &b""[..], &b""[..]));
        }
        let parsed = ChangeUser::parse(b"\x11other\0\0\0\x2d\0mysql_native_password").expect("a command");
        assert_eq!((parsed.plugin, parsed.attributes), (&b"mysql_native_password"[..], &b""[..]));
        for broken in [&b""[..], b"\x11", b"\x11user", b"\x11user\0\x09x"] {
            assert_eq!(ChangeUser::parse(broken), None, "{broken:?}");
        }
    }

    #[test]
    fn the_plugin_of_session_tokens_is_not_for_clients() {
        for end in [&b""[..], b"\0", b"\0\x03\x01a\0"] {
            let command = [b"\x11root\0\x01tdb\0\x2d\0tidb_session_token", end].concat();
            let checked = ChangeUser::parse(&command).expect("a command").check();
            assert_eq!(checked, Err(ProxyError::SessionTokenPlugin));
        }
        let other = ChangeUser::parse(b"\x11tidb_session_token\0\0\0\x2d\0tidb_session_tokens\0").expect("a command");
        assert_eq!(other.check(), Ok(()));
    }

    #[test]
    fn attributes_have_a_limit() {
        let with_attributes = |length: usize| {
            let length_bytes = (length as u64).to_le_bytes();
            let attributes = [&[0xfe], &length_bytes[..], &vec![b'a'; length]].concat();
            [b"\x11root\0\0\0\x2d\0mysql_native_password\0", &attributes[..]].concat()
        };
        let (fits, too_large) = (with_attributes(MAX_ATTRIBUTES_BYTES), with_attributes(MAX_ATTRIBUTES_BYTES + 1));
        assert!(fits.len() <= MAX_CHANGE_USER_BYTES);
        assert_eq!(ChangeUser::parse(&fits).expect("a command").check(), Ok(()));
        assert_eq!(ChangeUser::parse(&too_large).expect("a command").check(), Err(ProxyError::AttributesTooLarge));
    }
}
