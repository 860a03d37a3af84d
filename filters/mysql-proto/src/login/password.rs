//! How authentication plugins send a password to the server, as far as the proxy must know.

use super::PasswordKey;
use crate::command_observer::PasswordRequest;
use crate::secret::SecretBytes;

/// Authentication plugins, grouped by what they send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plugin {
    /// Only hashes: mysql_native_password and older plugins.
    Hash,
    /// A hash first. If the server asks for more (`01 04`), the password: in clear text if the client has TLS, else
    /// encrypted with the server's RSA key, which the client requests with `02`.
    HashThenPassword,
    /// The password at once, in clear text or encrypted as above; the client requests the key with `01`.
    Password,
    /// The password, or a token that replaces it, always in clear text.
    ClearText,
    /// Others, among them MariaDB's ed25519 and parsec: passed on without inspection.
    Other,
}

/// TiDB's plugin with which a proxy logs in for a session that migrates. TiDB accepts it for every account
/// (`pkg/server/conn.go`), so clients must not use it.
pub const SESSION_TOKEN_PLUGIN: &[u8] = b"tidb_session_token";

/// The byte with which a client requests the public key, by plugin.
pub(super) const KEY_FOR_HASH_THEN_PASSWORD: u8 = 2;
pub(super) const KEY_FOR_PASSWORD: u8 = 1;

/// The only name here that is longer than the prefix that the tracker keeps of a packet.
const LONGEST: &[u8] = b"authentication_openid_connect_client";

impl Plugin {
    /// The plugin of that name. An empty name means the plugin from before plugins were named.
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

    /// Whether a client with TLS sends the password in clear text without another request.
    pub(super) fn sends_clear_text(self) -> bool {
        matches!(self, Self::Password | Self::ClearText)
    }

    /// Whether the server may send data that does not begin with `01`. MariaDB's servers put `01` only before data that
    /// would otherwise be mistaken for another packet; `dialog` and `parsec` send such data.
    pub(super) fn may_send_bare_data(self) -> bool {
        matches!(self, Self::ClearText | Self::Other)
    }
}

/// How a client sends its password after a switch to another plugin, of which the first bytes are given. None if it
/// sends none.
pub(crate) fn password_request_of_switch(switch: &[u8]) -> Option<PasswordRequest> {
    let end = switch.iter().position(|byte| *byte == 0);
    let name = &switch[..end.unwrap_or(switch.len())];
    // A name without NUL is either cut or at the end of the packet.
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

/// Whether authentication data is a password or a request for the key. Empty passwords are sent as no byte or NUL.
pub(super) fn is_password(data: &[u8]) -> bool {
    !matches!(data, [] | [0])
}

/// Decrypts a password, which the client XORed with the salt before encryption. The result includes the trailing NUL.
/// None if the client used another key or salt.
pub(super) fn decrypt_password(key: &dyn PasswordKey, encrypted: &[u8], salt: &[u8]) -> Option<SecretBytes> {
    let mut password = key.decrypt(encrypted)?;
    for (byte, salt) in password.iter_mut().zip(salt.iter().cycle()) {
        *byte ^= salt;
    }
    (password.last() == Some(&0)).then_some(password)
}
