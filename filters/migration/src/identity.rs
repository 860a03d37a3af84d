//! The client's part of a login, which the proxy repeats to log a session in at another node.

use mysql_proto::capability::Capabilities;
use mysql_proto::change_user::ChangeUser;
use mysql_proto::handshake_response::{self, HandshakeResponse};
use mysql_proto::lenenc;
use mysql_proto::login::SESSION_TOKEN_PLUGIN;
use mysql_proto::secret::SecretBytes;

/// The user, collation, attributes and capabilities of a session.
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    capabilities: Capabilities,
    largest_packet: u32,
    collation: u8,
    user: Box<[u8]>,
    /// As in the handshake response: a length, then names and values. Empty if there are none.
    attributes: Box<[u8]>,
}

/// Hides the user's name, which is confidential.
impl std::fmt::Debug for Identity {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Identity({:08x}, collation {})", self.capabilities.0, self.collation)
    }
}

impl Identity {
    /// Reads the payload of a client's HandshakeResponse41; `agreed`: the capabilities of client and node. None if the
    /// payload is cut short.
    #[must_use]
    pub fn from_handshake_response(payload: &[u8], agreed: Capabilities) -> Option<Self> {
        let head = payload.first_chunk::<{ handshake_response::HEAD }>()?;
        let claimed = handshake_response::capabilities(payload);
        let parts = HandshakeResponse::parse(payload, claimed)?;
        let user = payload[handshake_response::HEAD..].split(|&byte| byte == 0).next()?;
        let attributes = match &parts.plugin {
            Some(_) if claimed.has(Capabilities::CONNECT_ATTRS) => &payload[parts.attributes.clone()],
            _ => &[],
        };
        Some(Self {
            capabilities: agreed,
            largest_packet: u32::from_le_bytes([head[4], head[5], head[6], head[7]]),
            collation: head[8],
            user: user.into(),
            attributes: attributes.into(),
        })
    }

    /// The capabilities that client and node agreed on.
    #[must_use]
    pub const fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    #[must_use]
    pub const fn user(&self) -> &[u8] {
        &self.user
    }

    /// Applies COM_SET_OPTION, which allows or forbids several statements in one query.
    pub const fn allow_multi_statements(&mut self, allowed: bool) {
        self.capabilities = if allowed {
            self.capabilities.with(Capabilities::MULTI_STATEMENTS)
        } else {
            self.capabilities.without(Capabilities::MULTI_STATEMENTS)
        };
    }

    /// Applies a successful COM_CHANGE_USER; `payload` includes the command byte. False: the payload is invalid, so the
    /// session's user is unknown.
    #[must_use]
    pub fn apply_change_user(&mut self, payload: &[u8]) -> bool {
        let Some(changed) = self.parse_change_user(payload) else { return false };
        *self = changed;
        true
    }

    fn parse_change_user(&self, payload: &[u8]) -> Option<Self> {
        let change = ChangeUser::parse(payload)?;
        let mut changed = Self { user: change.user.into(), attributes: Box::default(), ..self.clone() };
        // The collation stays that of the login, because TiDB ignores this one (`handleChangeUser` in
        // `pkg/server/conn.go`).
        if change.collation.is_some() && self.capabilities.has(Capabilities::CONNECT_ATTRS) {
            changed.attributes = change.attributes.into();
        }
        Some(changed)
    }

    /// A COM_CHANGE_USER payload for a node other than the one that sent the client its greeting. The client computed
    /// its authentication data for that greeting, so they are left out. None: the payload is invalid or too short for a
    /// plugin, or the client supports no plugins.
    ///
    /// The node asks the client again, because the plugin is not the account's (pingcap/tidb `pkg/server/conn.go`).
    #[must_use]
    pub fn without_auth_response(&self, payload: &[u8]) -> Option<Vec<u8>> {
        const UNKNOWN_PLUGIN: &[u8] = b"tidevoy_asks_anew";
        if !self.capabilities.has(Capabilities::PLUGIN_AUTH) {
            return None;
        }
        let change = ChangeUser::parse(payload)?;
        let mut reworded = vec![*payload.first()?];
        for text in [change.user, &[], change.database] {
            reworded.extend_from_slice(text);
            reworded.push(0);
        }
        reworded.extend_from_slice(&change.collation?);
        reworded.extend_from_slice(UNKNOWN_PLUGIN);
        reworded.push(0);
        reworded.extend_from_slice(change.attributes);
        Some(reworded)
    }

    /// The first 32 bytes of the login at another node, which are also the SSLRequest's payload. `tls`: whether the
    /// connection uses TLS.
    #[must_use]
    pub fn handshake_head(&self, tls: bool) -> [u8; handshake_response::HEAD] {
        let mut head = [0; handshake_response::HEAD];
        head[..4].copy_from_slice(&self.login_capabilities(tls).0.to_le_bytes());
        head[4..8].copy_from_slice(&self.largest_packet.to_le_bytes());
        head[8] = self.collation;
        head
    }

    /// The payload of the login at another node.
    #[must_use]
    pub fn handshake_response(&self, token: &[u8], database: &str, tls: bool) -> SecretBytes {
        let mut payload = SecretBytes::from(&self.handshake_head(tls)[..]);
        payload.extend_from_slice(&self.user);
        payload.push(0);
        let mut length = Vec::new();
        lenenc::write(&mut length, token.len() as u64);
        payload.extend_from_slice(&length);
        payload.extend_from_slice(token);
        if self.login_capabilities(tls).has(Capabilities::CONNECT_WITH_DB) {
            payload.extend_from_slice(database.as_bytes());
            payload.push(0);
        }
        payload.extend_from_slice(SESSION_TOKEN_PLUGIN);
        payload.push(0);
        if self.attributes.is_empty() {
            if self.login_capabilities(tls).has(Capabilities::CONNECT_ATTRS) {
                payload.push(0);
            }
        } else {
            payload.extend_from_slice(&self.attributes);
        }
        payload
    }

    /// The client's capabilities, and those that a login with a token needs: a token is longer than 255 bytes.
    fn login_capabilities(&self, tls: bool) -> Capabilities {
        let needed = Capabilities::PLUGIN_AUTH
            .with(Capabilities::PLUGIN_AUTH_LENENC_DATA)
            .with(Capabilities::SECURE_CONNECTION)
            .with(Capabilities::PROTOCOL_41)
            .with(Capabilities::CONNECT_WITH_DB);
        let claimed = self.capabilities.with(needed);
        if tls { claimed.with(Capabilities::SSL) } else { claimed.without(Capabilities::SSL) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGREED: Capabilities = Capabilities(
        Capabilities::PROTOCOL_41.0
            | Capabilities::SECURE_CONNECTION.0
            | Capabilities::PLUGIN_AUTH.0
            | Capabilities::CONNECT_ATTRS.0
            | Capabilities::DEPRECATE_EOF.0,
    );
    const ATTRIBUTES: &[u8] = b"\x06\x02os\x02ux";

    /// A client's response with the capabilities `claimed`, and a database if they say so.
    fn login(claimed: Capabilities) -> Vec<u8> {
        let mut payload = claimed.0.to_le_bytes().to_vec();
        payload.extend(0x0100_0000_u32.to_le_bytes());
        payload.push(46);
        payload.extend([0; 23]);
        payload.extend(b"root\0\x04hash");
        if claimed.has(Capabilities::CONNECT_WITH_DB) {
            payload.extend(b"test\0");
        }
        payload.extend(b"mysql_native_password\0");
        payload.extend(ATTRIBUTES);
        payload
    }

    #[test]
    fn login_at_another_node_repeats_everything_but_the_password() {
        for claimed in [AGREED, AGREED.with(Capabilities::CONNECT_WITH_DB).with(Capabilities::SSL)] {
            let identity = Identity::from_handshake_response(&login(claimed), AGREED).expect("a login");
            let token = vec![b't'; 500];
            let payload = identity.handshake_response(&token, "now", false);
            let capabilities = handshake_response::capabilities(&payload);
            let parts = HandshakeResponse::parse(&payload, capabilities).expect("a response");
            assert_eq!(&payload[parts.auth], &token);
            let plugin = parts.plugin.expect("a plugin");
            assert_eq!(&payload[plugin.clone()], SESSION_TOKEN_PLUGIN);
            assert_eq!(&payload[plugin.end + 1..], ATTRIBUTES);
            assert_eq!(&payload[4..9], &login(claimed)[4..9]);
            assert!(payload.windows(5).any(|found| found == b"now\0t"));
            assert!(payload[handshake_response::HEAD..].starts_with(b"root\0"));
            assert!(capabilities.has(AGREED) && !capabilities.has(Capabilities::SSL));
        }
    }

    #[test]
    fn handshake_claims_tls_if_requested() {
        let identity = Identity::from_handshake_response(&login(AGREED), AGREED).expect("a login");
        assert!(handshake_response::capabilities(&identity.handshake_head(true)).has(Capabilities::SSL));
        assert_eq!(
            identity.handshake_head(true)[4..],
            identity.handshake_response(b"t", "", true)[4..handshake_response::HEAD]
        );
    }

    #[test]
    fn missing_attributes_are_sent_as_empty() {
        let payload = login(AGREED);
        let without = &payload[..payload.len() - ATTRIBUTES.len()];
        let identity = Identity::from_handshake_response(without, AGREED).expect("a login");
        assert!(identity.handshake_response(b"t", "", false).ends_with(b"tidb_session_token\0\0"));
    }

    #[test]
    fn identity_follows_a_change_of_user() {
        let mut identity = Identity::from_handshake_response(&login(AGREED), AGREED).expect("a login");
        assert!(identity.apply_change_user(b"\x11other\0\x02xxdb\0\x2d\0mysql_native_password\0\x03\x01a\0"));
        let payload = identity.handshake_response(b"t", "db", false);
        assert!(payload[handshake_response::HEAD..].starts_with(b"other\0"));
        assert_eq!(payload[8], 46, "the collation is that of the login");
        assert!(payload.ends_with(b"\0\x03\x01a\0"));
        assert!(identity.apply_change_user(b"\x11third\0\0\0"));
        assert!(identity.handshake_response(b"t", "", false).ends_with(b"tidb_session_token\0\0"), "no attributes");
        for broken in [&b""[..], b"\x11", b"\x11user", b"\x11user\0\x09x"] {
            assert!(!identity.clone().apply_change_user(broken), "{broken:?}");
        }
    }

    #[test]
    fn change_user_for_another_node_has_no_auth_response() {
        let identity = Identity::from_handshake_response(&login(AGREED), AGREED).expect("a login");
        assert_eq!(
            identity.without_auth_response(b"\x11other\0\x02xxdb\0\x2d\0mysql_native_password\0\x03\x01a\0").as_deref(),
            Some(&b"\x11other\0\0db\0\x2d\0tidevoy_asks_anew\0\x03\x01a\0"[..])
        );
        assert_eq!(
            identity.without_auth_response(b"\x11other\0\x02xx\0\x2d\0mysql_native_password").as_deref(),
            Some(&b"\x11other\0\0\0\x2d\0tidevoy_asks_anew\0"[..])
        );
        for broken in [&b""[..], b"\x11user", b"\x11user\0\x09x", b"\x11user\0\0\0\x2d"] {
            assert_eq!(identity.without_auth_response(broken), None, "{broken:?}");
        }
        let old = Identity { capabilities: AGREED.without(Capabilities::PLUGIN_AUTH), ..identity };
        assert_eq!(old.without_auth_response(b"\x11other\0\x02xxdb\0\x2d\0"), None);
    }

    #[test]
    fn identity_follows_the_multi_statements_option() {
        let mut identity = Identity::from_handshake_response(&login(AGREED), AGREED).expect("a login");
        identity.allow_multi_statements(true);
        assert!(identity.capabilities().has(Capabilities::MULTI_STATEMENTS));
        identity.allow_multi_statements(false);
        assert_eq!(identity.capabilities(), AGREED);
    }

    #[test]
    fn truncated_handshake_response_is_rejected() {
        let payload = login(AGREED);
        for length in [0, 31, 33, 36, 40] {
            assert!(Identity::from_handshake_response(&payload[..length], AGREED).is_none(), "{length}");
        }
    }

    #[test]
    fn debug_output_hides_the_user() {
        assert!(!format!("{:?}", Identity::from_handshake_response(&login(AGREED), AGREED)).contains("root"));
    }
}
