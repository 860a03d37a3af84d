//! How plugins bring a password to the server, as far as the proxy must know it.

use super::PasswordKey;
use crate::command_observer::PasswordRequest;
use crate::secret::SecretBytes;

/// Authentication plugins, by what they put on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plugin {
    /// Only hashes travel: mysql_native_password, and what is older.
    Hash,
    /// A hash first; when the server wants more (`01 04`), the password: as it is where the client has TLS,
    /// else encrypted for the server's RSA key, asked for with `02`.
    HashThenPassword,
    /// The password at once, as it is or encrypted, alike; the key is asked for with `01`.
    Password,
    /// The password, or a token that is as good, as it is, in any case.
    ClearText,
    /// Others, among them MariaDB's ed25519 and parsec: passed on without looking.
    Other,
}

/// TiDB's plugin with which a proxy logs in for a session that moves to another server. TiDB accepts it for every account
/// (`pkg/server/conn.go`), so it is not for clients.
pub const SESSION_TOKEN_PLUGIN: &[u8] = b"tidb_session_token";

/// The byte with which a client asks for the public key, by plugin.
pub(super) const KEY_FOR_HASH_THEN_PASSWORD: u8 = 2;
pub(super) const KEY_FOR_PASSWORD: u8 = 1;

/// The only plugin that matters here whose name is longer than what the tracker keeps of a packet.
const LONGEST: &[u8] = b"authentication_openid_connect_client";

impl Plugin {
    /// By its name; without one it is what clients had before plugins were named.
    pub(super) fn named(name: &[u8]) -> Self {
        match name {
            b"" | b"mysql_native_password" | b"mysql_old_password" => Self::Hash,
            b"caching_sha2_password" | b"tidb_sm3_password" => Self::HashThenPassword,
            b"sha256_password" => Self::Password,
            // `dialog` is PAM of MariaDB and Percona; the OpenID plugin and TiDB's session token carry bearer tokens.
            b"mysql_clear_password" | b"dialog" | LONGEST | SESSION_TOKEN_PLUGIN => Self::ClearText,
            _ => Self::Other,
        }
    }

    /// Whether a client with TLS sends the password as it is, without being asked for it once more.
    pub(super) fn sends_clear_text(self) -> bool {
        matches!(self, Self::Password | Self::ClearText)
    }

    /// Whether the server may send data whose first byte is not `01`. MariaDB's servers put it only before data
    /// that would be taken for something else; `dialog` and `parsec` make use of that.
    pub(super) fn may_send_bare_data(self) -> bool {
        matches!(self, Self::ClearText | Self::Other)
    }
}

/// The password that a switch to another plugin, of which the first bytes are given, makes a client send. None: it sends none.
pub(crate) fn password_request_of_switch(switch: &[u8]) -> Option<PasswordRequest> {
    let end = switch.iter().position(|byte| *byte == 0);
    let name = &switch[..end.unwrap_or(switch.len())];
    // Without a NUL it is cut, or a packet that ends with the name.
    if end.is_none() && !name.is_empty() && LONGEST.starts_with(name) {
        return Some(PasswordRequest::ClearText);
    }
    match Plugin::named(name) {
        _ if name == SESSION_TOKEN_PLUGIN => Some(PasswordRequest::SessionToken),
        Plugin::Password => Some(PasswordRequest::Encrypted),
        Plugin::ClearText => Some(PasswordRequest::ClearText),
        Plugin::Hash | Plugin::HashThenPassword | Plugin::Other => None,
    }
}

/// Whether authentication data holds a password (or a request for the key): empty ones are sent as no byte or NUL.
pub(super) fn is_password(data: &[u8]) -> bool {
    !matches!(data, [] | [0])
}

/// The password, with the NUL behind it, that a client encrypted after a bytewise XOR with the salt; None when it
/// was encrypted for another key or salt.
pub(super) fn decrypt_password(key: &dyn PasswordKey, encrypted: &[u8], salt: &[u8]) -> Option<SecretBytes> {
    let mut password = key.decrypt(encrypted)?;
    for (byte, salt) in password.iter_mut().zip(salt.iter().cycle()) {
        *byte ^= salt;
    }
    (password.last() == Some(&0)).then_some(password)
}
