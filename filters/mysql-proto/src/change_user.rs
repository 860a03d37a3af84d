//! COM_CHANGE_USER: another user logs in on an established session.
//!
//! Layout: `11`, user NUL, length u8 and authentication data, database NUL, collation u16, plugin NUL, attributes
//! ("COM_CHANGE_USER", dev.mysql.com). Everything after the database is optional.

use crate::error::ProxyError;
use crate::handshake_response::{self, MAX_ATTRIBUTES_BYTES};
use crate::login::SESSION_TOKEN_PLUGIN;
use crate::login_names::LoginNames;

/// The first payload byte of the command.
pub const CHANGE_USER: u8 = 0x11;
/// Maximum payload bytes of the command: the attributes, and more than any server allows for the names.
pub const MAX_CHANGE_USER_BYTES: usize = MAX_ATTRIBUTES_BYTES + 4 * 1024;

/// The fields of a COM_CHANGE_USER payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeUser<'a> {
    pub user: &'a [u8],
    pub database: &'a [u8],
    /// None if the payload ends after the database.
    pub collation: Option<[u8; 2]>,
    /// The name of the client's plugin; empty if the payload names none.
    pub plugin: &'a [u8],
    /// Everything after the plugin: the length of the attributes, and the attributes.
    pub attributes: &'a [u8],
}

impl<'a> ChangeUser<'a> {
    /// Finds the fields of `payload`, which includes the command byte. None if the payload is cut short.
    #[must_use]
    pub fn parse(payload: &'a [u8]) -> Option<Self> {
        let (user, rest) = until_nul(payload.get(1..)?)?;
        let (&length, rest) = rest.split_first()?;
        let (database, rest) = until_nul(rest.get(usize::from(length)..)?)?;
        let (collation, rest) = match rest.split_first_chunk::<2>() {
            Some((collation, rest)) => (Some(*collation), rest),
            None => (None, &[][..]),
        };
        // Some clients leave out the NUL after the last field.
        let (plugin, attributes) = until_nul(rest).unwrap_or((rest, &[]));
        Some(Self { user, database, collation, plugin, attributes })
    }

    #[must_use]
    pub fn names(&self) -> LoginNames {
        LoginNames::new(self.user, self.database)
    }

    /// Checks whether the proxy passes the command on.
    ///
    /// # Errors
    /// The client must not use the plugin, or the attributes exceed their limit.
    pub fn check(&self) -> Result<(), ProxyError> {
        if self.plugin == SESSION_TOKEN_PLUGIN {
            return Err(ProxyError::SessionTokenPlugin);
        }
        if handshake_response::exceeds_attribute_limit(self.attributes) {
            return Err(ProxyError::AttributesTooLarge);
        }
        Ok(())
    }
}

/// The bytes before the next NUL, and those after it.
fn until_nul(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|&byte| byte == 0)?;
    Some((&bytes[..at], &bytes[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_finds_all_fields_of_change_user() {
        let command = b"\x11other\0\x02\0xdb\0\x2d\0mysql_native_password\0\x03\x01a\0";
        let parsed = ChangeUser::parse(command).expect("a command");
        assert_eq!((parsed.user, parsed.database), (&b"other"[..], &b"db"[..]));
        assert_eq!((parsed.names().user(), parsed.names().database()), (parsed.user, parsed.database));
        assert_eq!(parsed.collation, Some([0x2d, 0]));
        assert_eq!((parsed.plugin, parsed.attributes), (&b"mysql_native_password"[..], &b"\x03\x01a\0"[..]));
        assert_eq!(parsed.check(), Ok(()));
    }

    #[test]
    fn fields_at_the_end_of_change_user_may_be_missing() {
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
    fn change_user_with_the_session_token_plugin_is_rejected() {
        for end in [&b""[..], b"\0", b"\0\x03\x01a\0"] {
            let command = [b"\x11root\0\x01tdb\0\x2d\0tidb_session_token", end].concat();
            let checked = ChangeUser::parse(&command).expect("a command").check();
            assert_eq!(checked, Err(ProxyError::SessionTokenPlugin));
        }
        let other = ChangeUser::parse(b"\x11tidb_session_token\0\0\0\x2d\0tidb_session_tokens\0").expect("a command");
        assert_eq!(other.check(), Ok(()));
    }

    #[test]
    fn change_user_with_too_many_attribute_bytes_is_rejected() {
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
