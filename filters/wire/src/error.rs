//! Errors that the proxy itself answers clients with, and reading the code of a server's.

use crate::packet::Header;

/// An error of the proxy's own: what the client reads says what can be done about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// All nodes that were tried refused, or there is none in service.
    NoNode,
    /// This Envoy has as many clients as it may have.
    TooManyConnections,
    /// A login without TLS where it is required.
    TlsRequired,
    /// The client did not finish its login in time.
    LoginTooSlow,
    /// What the client sent is no MySQL login.
    BadPacket,
    /// The first packet of the client is larger than a login may be.
    PacketTooLarge,
    /// A client older than MySQL 4.1.
    TooOld,
    /// The password would have travelled in clear text to the node.
    ClearTextPassword,
    /// TLS to the node is required, and the node offers none.
    NodeWithoutTls,
    /// The TLS handshake with the node failed.
    NodeTlsFailed,
    /// The node sent something that is no login of MySQL's protocol.
    NodeProtocol,
}

impl Refusal {
    /// Every one, for tables and counters.
    pub const ALL: [Self; 11] = [
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
    ];

    /// Code, SQLSTATE and text. Codes are MySQL's and TiDB's own for the same thing.
    #[must_use]
    pub const fn parts(self) -> (u16, &'static str, &'static str) {
        match self {
            Self::NoNode => (
                1105,
                "HY000",
                "Tidevoy: no TiDB server is available; try again, and see `tidevoy nodes` for the reasons",
            ),
            Self::TooManyConnections => (
                1040,
                "08004",
                "Tidevoy: too many connections; close some, or raise sql.max_connections",
            ),
            Self::TlsRequired => (
                3159,
                "HY000",
                "Tidevoy: connections without TLS are not accepted here; connect with TLS (--ssl-mode=REQUIRED)",
            ),
            Self::LoginTooSlow => (
                1159,
                "08S01",
                "Tidevoy: the login took too long; check the network between client and load balancer",
            ),
            Self::BadPacket => (
                1043,
                "08S01",
                "Tidevoy: bad handshake; is this a MySQL client that speaks protocol 4.1 or newer?",
            ),
            Self::PacketTooLarge => (
                1153,
                "08S01",
                "Tidevoy: the login packet is larger than 1 MiB; send fewer connection attributes",
            ),
            Self::TooOld => (
                1251,
                "08004",
                "Tidevoy: the client does not speak protocol 4.1; upgrade the client",
            ),
            Self::ClearTextPassword => (
                1105,
                "HY000",
                "Tidevoy: the password would go to TiDB in clear text; turn on TLS to TiDB (tls.backend), \
                 or set allow_cleartext_backend",
            ),
            Self::NodeWithoutTls => (
                1105,
                "HY000",
                "Tidevoy: the TiDB server offers no TLS, which tls.backend requires; configure its \
                 security.ssl-cert and ssl-key",
            ),
            Self::NodeTlsFailed => (
                1105,
                "HY000",
                "Tidevoy: the TLS handshake with the TiDB server failed; see Envoy's log, and check the CA and \
                 the names in its certificate",
            ),
            Self::NodeProtocol => (
                1105,
                "HY000",
                "Tidevoy: the TiDB server answered the login with something unknown; see Envoy's log",
            ),
        }
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
        }
    }

    /// The whole ERR packet, header included.
    ///
    /// `with_state`: whether the SQLSTATE stands in it. Before the client has said which protocol it speaks a
    /// server leaves it out, and clients read it as part of the text.
    #[must_use]
    pub fn packet(self, sequence: u8, with_state: bool) -> Vec<u8> {
        let (code, state, text) = self.parts();
        let mut payload = vec![0xff];
        payload.extend(code.to_le_bytes());
        if with_state {
            payload.push(b'#');
            payload.extend(state.as_bytes());
        }
        payload.extend(text.as_bytes());
        let mut packet = Header { length: payload.len(), sequence }.bytes().to_vec();
        packet.extend(payload);
        packet
    }
}

/// The code of a server's ERR payload; None when it is none.
#[must_use]
pub fn code(payload: &[u8]) -> Option<u16> {
    match payload {
        [0xff, low, high, ..] => Some(u16::from_le_bytes([*low, *high])),
        _ => None,
    }
}
