//! Errors with which the proxy itself answers clients; and the error code in a server's ERR packet.

use crate::packet::packets;

/// How many characters of a user name are part of an error text. TiDB allows 32.
const MAX_USER_CHARACTERS: usize = 32;

/// An error of the proxy itself. Its text says what the client or the operator can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProxyError {
    /// No node accepted the session, or no node is in service.
    NoNode,
    /// This Envoy has reached its limit of client connections.
    TooManyConnections,
    /// The client logs in without TLS, but TLS is required.
    TlsRequired,
    /// The client did not finish its login in time.
    LoginTooSlow,
    /// The client sent something other than a MySQL login.
    BadPacket,
    /// A packet of the client's login is larger than 1 MiB.
    PacketTooLarge,
    /// The client does not speak protocol 4.1: it is older than MySQL 4.1.
    TooOld,
    /// The password would travel to the node in clear text.
    ClearTextPassword,
    /// TLS to the node is required, and the node offers none.
    NodeWithoutTls,
    /// The TLS handshake with the node failed.
    NodeTlsFailed,
    /// The node sent something other than a MySQL login.
    NodeProtocol,
    /// The client encrypted its password, but not with the key of this proxy.
    PasswordUnreadable,
    /// The node closed the connection during the login.
    NodeGone,
    /// The client turns on compression although the greeting did not offer it.
    CompressionNotOffered,
    /// The node no longer answers.
    NodeUnreachable,
    /// The client names the authentication plugin with which only the proxy logs in.
    SessionTokenPlugin,
    /// The client's connection attributes are larger than 64 KiB.
    AttributesTooLarge,
    /// A change of user needs the password itself, which the client cannot send without TLS.
    ChangeUserWithoutTls,
    /// The limit of concurrent logins is reached.
    TooManyLogins,
    /// The limit of concurrent logins from the client's address is reached.
    TooManyLoginsOfAddress,
    /// The limit of password decryptions is reached; clients without TLS send encrypted passwords.
    TooManyDecryptions,
    /// This Envoy is about to stop, and accepts no more clients.
    EnvoyDraining,
    /// The limit of connections to all Envoys together is reached.
    FleetLimit,
    /// A limit of connections from the client's network is reached.
    NetworkLimit,
    /// A limit of the user's connections is reached.
    UserLimit,
    /// A limit of new connections per second is reached.
    ConnectionRate,
    /// A limit of the user's new connections per second is reached.
    UserConnectionRate,
}

impl ProxyError {
    /// All errors, for tables and counters.
    pub const ALL: [Self; 27] = [
        Self::NoNode,
        Self::TooManyConnections,
        Self::TlsRequired,
        Self::LoginTooSlow,
        Self::BadPacket,
        Self::PacketTooLarge,
        Self::TooOld,
        Self::ClearTextPassword,
        Self::NodeWithoutTls,
        Self::NodeTlsFailed,
        Self::NodeProtocol,
        Self::PasswordUnreadable,
        Self::NodeGone,
        Self::CompressionNotOffered,
        Self::NodeUnreachable,
        Self::SessionTokenPlugin,
        Self::AttributesTooLarge,
        Self::ChangeUserWithoutTls,
        Self::TooManyLogins,
        Self::TooManyLoginsOfAddress,
        Self::TooManyDecryptions,
        Self::EnvoyDraining,
        Self::FleetLimit,
        Self::NetworkLimit,
        Self::UserLimit,
        Self::ConnectionRate,
        Self::UserConnectionRate,
    ];

    /// Error code, SQLSTATE and text. MySQL and TiDB use the same codes for such errors.
    #[must_use]
    pub const fn code_state_text(self) -> (u16, &'static str, &'static str) {
        match self {
            Self::NoNode => (
                1105,
                "HY000",
                "Tidevoy: no TiDB server takes new sessions at the moment; try again (operator: `tidevoy nodes` \
                 tells why)",
            ),
            Self::TooManyConnections => (
                1040,
                "08004",
                "Tidevoy: too many connections; close some and try again (operator: sql.max_connections)",
            ),
            Self::TlsRequired => (
                3159,
                "HY000",
                "Tidevoy: connections without TLS are not accepted; turn on TLS in the client (mysql: \
                 --ssl-mode=REQUIRED)",
            ),
            Self::LoginTooSlow => (
                1159,
                "08S01",
                "Tidevoy: the login took too long; try again, and check the network between client and Tidevoy",
            ),
            Self::BadPacket => (
                1043,
                "08S01",
                "Tidevoy: this is no MySQL login; check that a MySQL client connects to this port, and its TLS \
                 setting",
            ),
            Self::PacketTooLarge => (
                1153,
                "08S01",
                "Tidevoy: a packet of the login is larger than 1 MiB; send fewer or shorter connection attributes",
            ),
            Self::TooOld => {
                (1251, "08004", "Tidevoy: the client does not speak protocol 4.1; use a client of MySQL 5.5 or newer")
            }
            Self::ClearTextPassword => (
                1105,
                "HY000",
                "Tidevoy: the password would go to TiDB in clear text (operator: turn on TLS to TiDB with \
                 tls.backend.mode, or accept it with tls.allow_cleartext_backend)",
            ),
            Self::NodeWithoutTls => (
                1105,
                "HY000",
                "Tidevoy: TLS to TiDB is required, but this TiDB server offers none (operator: set ssl-cert and \
                 ssl-key in TiDB's security section, or change tls.backend.mode)",
            ),
            Self::NodeTlsFailed => (
                1105,
                "HY000",
                "Tidevoy: the TLS handshake with the TiDB server failed (operator: Envoy's log tells why; check \
                 tls.backend and the server's certificate)",
            ),
            Self::NodeProtocol => (
                1105,
                "HY000",
                "Tidevoy: the TiDB server sent what is no MySQL login (operator: Envoy's log tells more; check \
                 the address of the node)",
            ),
            Self::PasswordUnreadable => (
                1045,
                "28000",
                "Tidevoy: the password was not encrypted with Tidevoy's key; use TLS, or let the client ask for \
                 the key (mysql: --get-server-public-key) instead of giving it a file",
            ),
            Self::NodeGone => (
                1105,
                "HY000",
                "Tidevoy: the TiDB server closed the connection during the login; try again (operator: see its log)",
            ),
            Self::CompressionNotOffered => (
                1235,
                "42000",
                "Tidevoy: the client turns on compression, which is not offered here; turn it off in the client \
                 (operator: sql.compression)",
            ),
            Self::NodeUnreachable => (
                1105,
                "HY000",
                "Tidevoy: the TiDB server does not answer any more; try again (operator: `tidevoy nodes` tells which)",
            ),
            Self::SessionTokenPlugin => (
                1045,
                "28000",
                "Tidevoy: access denied: only Tidevoy itself may use the authentication plugin tidb_session_token; log \
                 in with a password",
            ),
            Self::AttributesTooLarge => {
                (1153, "08S01", "Tidevoy: the connection attributes are larger than 64 KiB; send fewer or shorter ones")
            }
            Self::ChangeUserWithoutTls => (
                1235,
                "42000",
                "Tidevoy: a change of user to an account with caching_sha2_password or the like needs TLS between client \
                 and Tidevoy; turn on TLS in the client, or open a new connection",
            ),
            Self::TooManyLogins => (
                1040,
                "08004",
                "Tidevoy: too many clients are logging in at the same time; try again (operator: sql.login_limits)",
            ),
            Self::TooManyLoginsOfAddress => (
                1040,
                "08004",
                "Tidevoy: too many clients of this address are logging in at the same time; try again (operator: \
                 sql.login_limits)",
            ),
            Self::TooManyDecryptions => (
                1040,
                "08004",
                "Tidevoy: too many clients send encrypted passwords without TLS; try again, or turn on TLS in the client \
                 (operator: sql.login_limits)",
            ),
            Self::EnvoyDraining => (1053, "08S01", "Tidevoy: this load balancer is about to stop; connect again"),
            Self::FleetLimit => (
                1040,
                "08004",
                "Tidevoy: too many connections to all Envoys together (LIMIT); close some and try again (operator: \
                 limits.max_connections)",
            ),
            Self::NetworkLimit => (
                1040,
                "08004",
                "Tidevoy: the clients of your network have exceeded the limit of connections 'RULE' (LIMIT); close some \
                 and try again (operator: limits.rules)",
            ),
            Self::UserLimit => (
                1226,
                "42000",
                "Tidevoy: user 'USER' has exceeded the limit of connections 'RULE' (LIMIT); close some and try again \
                 (operator: limits.rules)",
            ),
            Self::ConnectionRate => (
                1040,
                "08004",
                "Tidevoy: too many new connections per second (limit 'RULE': LIMIT); try again, and keep connections \
                 open (operator: `tidevoy limits`)",
            ),
            Self::UserConnectionRate => (
                1226,
                "42000",
                "Tidevoy: user 'USER' opens too many connections per second (limit 'RULE': LIMIT); try again, and keep \
                 connections open (operator: `tidevoy limits`)",
            ),
        }
    }

    /// The text of an error about a limit of connections, with the names and the value of the limit.
    #[must_use]
    pub fn limit_text(self, rule: &str, limit: &str, user: &[u8]) -> String {
        let user: String = String::from_utf8_lossy(user)
            .chars()
            .map(|letter| if letter.is_control() { '?' } else { letter })
            .take(MAX_USER_CHARACTERS)
            .collect();
        let (mut text, mut rest) = (String::new(), self.code_state_text().2);
        // In one pass, so that a name that contains a placeholder stays as it is.
        while let Some((at, word, value)) = [("RULE", rule), ("LIMIT", limit), ("USER", user.as_str())]
            .into_iter()
            .filter_map(|(word, value)| rest.find(word).map(|at| (at, word, value)))
            .min_by_key(|(at, ..)| *at)
        {
            text.push_str(&rest[..at]);
            text.push_str(value);
            rest = &rest[at + word.len()..];
        }
        text + rest
    }

    /// The name in counters and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoNode => "no_node",
            Self::TooManyConnections => "too_many_connections",
            Self::TlsRequired => "tls_required",
            Self::LoginTooSlow => "login_too_slow",
            Self::BadPacket => "bad_packet",
            Self::PacketTooLarge => "packet_too_large",
            Self::TooOld => "too_old",
            Self::ClearTextPassword => "clear_text_password",
            Self::NodeWithoutTls => "node_without_tls",
            Self::NodeTlsFailed => "node_tls_failed",
            Self::NodeProtocol => "node_protocol",
            Self::PasswordUnreadable => "password_unreadable",
            Self::NodeGone => "node_gone",
            Self::CompressionNotOffered => "compression_not_offered",
            Self::NodeUnreachable => "node_unreachable",
            Self::SessionTokenPlugin => "session_token_plugin",
            Self::AttributesTooLarge => "attributes_too_large",
            Self::ChangeUserWithoutTls => "change_user_without_tls",
            Self::TooManyLogins => "too_many_logins",
            Self::TooManyLoginsOfAddress => "too_many_logins_of_address",
            Self::TooManyDecryptions => "too_many_decryptions",
            Self::EnvoyDraining => "envoy_draining",
            Self::FleetLimit => "fleet_limit",
            Self::NetworkLimit => "network_limit",
            Self::UserLimit => "user_limit",
            Self::ConnectionRate => "connection_rate",
            Self::UserConnectionRate => "user_connection_rate",
        }
    }

    /// The ERR packet, header included.
    ///
    /// `with_state`: whether the packet contains the SQLSTATE. Before the client has announced its protocol, a server
    /// leaves the SQLSTATE out, and a client would read it as part of the text.
    #[must_use]
    pub fn packet(self, sequence: u8, with_state: bool) -> Vec<u8> {
        self.packet_with_text(self.code_state_text().2, sequence, with_state)
    }

    /// Like [`Self::packet`], with a text that tells more.
    #[must_use]
    pub fn packet_with_text(self, text: &str, sequence: u8, with_state: bool) -> Vec<u8> {
        let (code, state, _) = self.code_state_text();
        packet(code, with_state.then_some(state), text, sequence)
    }
}

/// The ERR packet for an idle session whose node is taken out of service. It answers the client's next command.
#[must_use]
pub fn node_taken_away() -> Vec<u8> {
    const SHUTDOWN: u16 = 1053;
    const TEXT: &str = "Tidevoy: the server of this session was taken out of service; connect again";
    packet(SHUTDOWN, Some("08S01"), TEXT, 1)
}

/// The ERR packet for an idle session that an operator has ended. It answers the client's next command.
#[must_use]
pub fn session_killed() -> Vec<u8> {
    const SHUTDOWN: u16 = 1053;
    const TEXT: &str = "Tidevoy: an operator has ended this session (`tidevoy kill`); connect again";
    packet(SHUTDOWN, Some("08S01"), TEXT, 1)
}

/// The ERR packet for a session whose Envoy stops. It answers the client's next command.
#[must_use]
pub fn envoy_stopped() -> Vec<u8> {
    let (code, state, text) = ProxyError::EnvoyDraining.code_state_text();
    packet(code, Some(state), text, 1)
}

/// The ERR packet for a session whose node is gone. It answers the client's outstanding or next command.
#[must_use]
pub fn node_gone() -> Vec<u8> {
    const SHUTDOWN: u16 = 1053;
    const TEXT: &str = "Tidevoy: the server of this session has gone; connect again";
    packet(SHUTDOWN, Some("08S01"), TEXT, 1)
}

/// The ERR packet for a client that waits for a response of a node, `host:port`, that no longer answers.
///
/// The code is CR_SERVER_LOST, "lost connection during query", which MySQL's client libraries report and no MySQL
/// server sends. Drivers then close the connection and do not assume that the last statement ran or failed.
#[must_use]
pub fn node_unreachable(node: &str, sequence: u8) -> Vec<u8> {
    const SERVER_LOST: u16 = 2013;
    let text = format!(
        "Tidevoy: lost connection to TiDB server {node}, which does not answer any more; the statement may have run or \
         not, so check before you run it again"
    );
    packet(SERVER_LOST, Some("08S01"), &text, sequence)
}

/// The ERR packet for an idle session whose node, `host:port`, no longer answers. It answers the client's next command,
/// which is not run.
#[must_use]
pub fn node_unreachable_while_idle(node: &str) -> Vec<u8> {
    const SHUTDOWN: u16 = 1053;
    let text = format!("Tidevoy: TiDB server {node} of this session does not answer any more; connect again");
    packet(SHUTDOWN, Some("08S01"), &text, 1)
}

/// An ERR packet that answers a request with any error.
#[must_use]
pub fn answer_packet(code: u16, state: [u8; 5], text: &str, sequence: u8) -> Vec<u8> {
    packet(code, std::str::from_utf8(&state).ok(), text, sequence)
}

fn packet(code: u16, state: Option<&str>, text: &str, sequence: u8) -> Vec<u8> {
    let mut payload = vec![0xff];
    payload.extend(code.to_le_bytes());
    if let Some(state) = state {
        payload.push(b'#');
        payload.extend(state.as_bytes());
    }
    payload.extend(text.as_bytes());
    packets(&payload, sequence)
}

/// The error code in a server's ERR payload; None for any other payload.
#[must_use]
pub fn code(payload: &[u8]) -> Option<u16> {
    match payload {
        [0xff, low, high, ..] => Some(u16::from_le_bytes([*low, *high])),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::Header;
    use std::collections::HashSet;

    const DOCUMENT: &str = include_str!("../../../docs/reference/errors.md");

    #[test]
    fn error_reference_lists_exactly_the_proxy_errors() {
        let rows: Vec<&str> =
            DOCUMENT.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| code ")).collect();
        assert_eq!(rows.len(), ProxyError::ALL.len());
        for (row, error) in rows.into_iter().zip(ProxyError::ALL) {
            let (code, state, text) = error.code_state_text();
            let expected = format!("| {code} | {state} | `{}` | {text} |", error.name());
            assert!(row.starts_with(&expected), "docs/reference/errors.md lacks: {expected}");
            assert_eq!(row.matches(" | ").count(), 5, "{row}");
        }
    }

    #[test]
    fn names_are_unique_and_texts_fit_into_client_buffers() {
        let names: HashSet<_> = ProxyError::ALL.map(ProxyError::name).into();
        assert_eq!(names.len(), ProxyError::ALL.len());
        for error in ProxyError::ALL {
            let (code, state, text) = error.code_state_text();
            assert!(code >= 1000 && state.len() == 5);
            // MySQL clients keep 511 bytes of an error text.
            assert!(text.starts_with("Tidevoy: ") && text.len() < 512 && text.is_ascii());
        }
    }

    #[test]
    fn texts_of_limits_name_rule_value_and_user() {
        assert_eq!(
            ProxyError::UserLimit.limit_text("reporting", "100", b"report"),
            "Tidevoy: user 'report' has exceeded the limit of connections 'reporting' (100); close some and try again \
             (operator: limits.rules)"
        );
        let text = ProxyError::UserConnectionRate.limit_text("USER", "1.5", b"LIMIT\nRULE\xff");
        assert!(text.contains("user 'LIMIT?RULE\u{fffd}' opens") && text.contains("(limit 'USER': 1.5)"), "{text}");
        let longest =
            ProxyError::UserConnectionRate.limit_text(&"r".repeat(64), "100000.5", "\u{1f600}".repeat(99).as_bytes());
        assert!(longest.len() < 512, "{longest}");
        assert!(ProxyError::FleetLimit.limit_text("total", "20", b"").contains("together (20); close"));
    }

    #[test]
    fn packet_contains_the_sqlstate_only_on_request() {
        let bare = ProxyError::TooOld.packet(3, false);
        let full = ProxyError::TooOld.packet(3, true);
        assert_eq!(bare[3..7], [3, 0xff, 0xe3, 0x04]);
        assert!(bare[7..].starts_with(b"Tidevoy: "));
        assert!(full[7..].starts_with(b"#08004Tidevoy: "));
        for packet in [bare, full] {
            let header = Header::parse(&packet).expect("a header");
            assert_eq!(header.length, packet.len() - 4);
            assert_eq!(code(&packet[4..]), Some(1251));
        }
    }

    #[test]
    fn errors_name_the_unreachable_node_and_do_not_say_whether_a_statement_ran() {
        let busy = node_unreachable("tidb-1.example:4000", 7);
        assert_eq!((busy[3], code(&busy[4..])), (7, Some(2013)));
        let text = String::from_utf8_lossy(&busy[7..]).into_owned();
        assert!(text.contains(" tidb-1.example:4000,") && text.contains("may have run or not"), "{text}");
        let idle = node_unreachable_while_idle("tidb-1.example:4000");
        assert_eq!((idle[3], code(&idle[4..])), (1, Some(1053)));
        assert!(String::from_utf8_lossy(&idle).contains("TiDB server tidb-1.example:4000 "));
    }

    #[test]
    fn only_err_packets_have_error_codes() {
        assert_eq!(code(b"\xff\x10\x04Too many connections"), Some(1040));
        for other in [&b""[..], b"\xff", b"\xff\x10", b"\x00\x10\x04"] {
            assert_eq!(code(other), None);
        }
    }
}
