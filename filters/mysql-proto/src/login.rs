//! Relays a login between the connections of a client and a node. The two may differ in TLS. No I/O.
//!
//! The node's greeting and everything after it are passed on, so the proxy has neither passwords nor salts of its own.
//! It edits the capability bits for TLS and compression in both first packets, and the sequence numbers where only one
//! of the connections has exchanged a packet.

mod failover;
mod from_client;
mod from_node;
mod packet_reader;
mod password;
#[cfg(test)]
mod tests;

use crate::capability::Capabilities;
use crate::error::{self, ProxyError};
use crate::greeting::{self, Greeting};
use crate::handshake_response::{self, HEAD, HandshakeResponse};
use crate::login_names::LoginNames;
use crate::packet::{HEADER, Header};
use crate::secret::SecretBytes;
pub use failover::{FailoverAction, LoginAttempt, TOO_MANY_CONNECTIONS};
use packet_reader::{PacketProgress, PacketReader};
use password::Plugin;
pub use password::SESSION_TOKEN_PLUGIN;
pub(crate) use password::password_request_of_switch;

/// TLS with clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientTls {
    Disabled,
    Optional,
    Required,
}

/// TLS with nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeTls {
    Disabled,
    /// Used if the node offers TLS.
    Preferred,
    Required,
}

/// The compressed protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// The greeting to the client does not offer compression. A client that turns it on anyway is rejected.
    Off,
    /// Passed on; the session is not tracked then.
    Passthrough,
}

/// The configuration of a login.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub client_tls: ClientTls,
    pub node_tls: NodeTls,
    pub compression: Compression,
    /// Whether a client with TLS may send its password in clear text to a node without TLS.
    pub allow_cleartext_backend: bool,
}

/// The RSA key with which clients without TLS encrypt a password (caching_sha2_password, sha256_password).
pub trait PasswordKey {
    /// The public key in PEM (`-----BEGIN PUBLIC KEY-----`).
    fn public_pem(&self) -> &[u8];
    /// Called before each [`Self::decrypt`].
    ///
    /// # Errors
    /// The reason why the password must not be decrypted.
    fn check_limit(&self) -> Result<(), ProxyError> {
        Ok(())
    }
    /// Decrypts RSAES-OAEP with SHA-1, which MySQL's clients use. None if that fails.
    fn decrypt(&self, encrypted: &[u8]) -> Option<SecretBytes>;
}

/// What the caller does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Wait for more bytes.
    More,
    /// The client sent its SSLRequest. The caller begins TLS and passes on the client's decrypted bytes.
    StartClientTls,
    /// The node accepted the login. Both connections are in the command phase; the bytes that follow belong to the
    /// session.
    Established(Capabilities),
    /// The node rejected the login with this error code, and the client gets the error. The node will close its
    /// connection.
    Denied(u16),
    /// The proxy rejects the login. `back` (or `onward`, if the node's bytes are the cause) ends with the ERR packet
    /// for the client. The caller then closes both connections.
    Rejected(ProxyError),
}

/// The bytes to send after a step. Those for the node may contain the client's password.
#[derive(Debug, Default)]
pub struct Output {
    /// Bytes for the peer: for the node if the client's bytes were processed, for the client if the node's were.
    pub onward: SecretBytes,
    /// Bytes for the client in answer to its own bytes.
    pub back: SecretBytes,
}

/// One login.
pub struct Login {
    rules: Rules,
    stage: LoginStage,
    /// The side whose packet is awaited; valid after the greeting.
    turn: Side,
    from_client: PacketReader,
    from_node: PacketReader,
    /// The next sequence number on the client's connection.
    client_next: u8,
    /// The next sequence number on the node's connection.
    node_next: u8,
    /// The capabilities in the greeting to the client.
    offered: Capabilities,
    /// The capabilities that the client announced. If it sent an SSLRequest, that packet counts, as in MySQL's server:
    /// some drivers clear the TLS bit in the response that follows.
    claimed: Option<Capabilities>,
    /// The payload of the client's SSLRequest; None if the client has no TLS.
    client_head: Option<[u8; HEAD]>,
    /// Whether the node's connection uses TLS; known after the greeting.
    node_tls: bool,
    ssl_request: Option<[u8; 36]>,
    /// TLS must begin on the node's connection before the node sends anything else.
    node_tls_due: bool,
    plugin: Plugin,
    salt: Vec<u8>,
    expected_password: ExpectedPassword,
    /// A response that is held back until the password for it arrives.
    held_response: Option<(SecretBytes, HandshakeResponse)>,
    /// The client's response without its authentication data.
    response: Option<Vec<u8>>,
    names: Option<LoginNames>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoginStage {
    Greeting,
    Response,
    Auth,
    Finished(Progress),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Client,
    Node,
}

/// Whether the client's next packet contains a password that the proxy must decrypt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpectedPassword {
    No,
    /// Yes, unless the packet is this byte, which asks for the public key.
    OrRequest(u8),
    /// Yes; the client has the key.
    Yes,
}

/// The result of a step: continue, or how the login pauses or ends.
type LoginStep = Result<(), Progress>;

impl Login {
    /// Sets the rules for the node's connection, before its greeting. They may depend on the node.
    pub fn set_node_rules(&mut self, node_tls: NodeTls, allow_cleartext_backend: bool) {
        self.rules.node_tls = node_tls;
        self.rules.allow_cleartext_backend = allow_cleartext_backend;
    }

    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            stage: LoginStage::Greeting,
            turn: Side::Node,
            from_client: PacketReader::default(),
            from_node: PacketReader::default(),
            client_next: 0,
            node_next: 0,
            offered: Capabilities::default(),
            claimed: None,
            client_head: None,
            node_tls: false,
            ssl_request: None,
            node_tls_due: false,
            plugin: Plugin::Hash,
            salt: Vec::new(),
            expected_password: ExpectedPassword::No,
            held_response: None,
            response: None,
            names: None,
        }
    }

    /// Bytes of memory that the held packets take.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        let held_response = self.held_response.as_ref().map_or(0, |(payload, _)| payload.capacity());
        self.from_client.capacity() + self.from_node.capacity() + held_response
    }

    /// Takes the payload of the client's HandshakeResponse41 as sent to the node, without its authentication data; None
    /// before it is sent.
    pub fn take_response(&mut self) -> Option<Vec<u8>> {
        self.response.take()
    }

    /// The user and the database; None until the client has sent its response.
    #[must_use]
    pub const fn names(&self) -> Option<&LoginNames> {
        self.names.as_ref()
    }

    /// Whether the client has sent anything. Valid until the login ends.
    #[must_use]
    pub fn has_client_bytes(&self) -> bool {
        self.claimed.is_some() || !self.from_client.is_empty()
    }

    /// The code of the error with which the node has rejected the login; None: it has not.
    #[must_use]
    pub const fn node_error(&self) -> Option<u16> {
        match self.stage {
            LoginStage::Finished(Progress::Denied(code)) => Some(code),
            _ => None,
        }
    }

    /// Takes bytes from the client (decrypted if there is TLS). Returns how many were taken, and the progress. All are
    /// taken, unless the progress is `StartClientTls`, `Denied` or `Rejected`.
    ///
    /// After the end of the login no bytes are taken, and the progress is that of its end.
    pub fn on_client_bytes(&mut self, bytes: &[u8], key: &dyn PasswordKey, out: &mut Output) -> (usize, Progress) {
        let mut taken = 0;
        loop {
            if let LoginStage::Finished(end) = self.stage {
                return (taken, end);
            }
            if self.turn == Side::Node && taken < bytes.len() {
                // The client may not send more before the node answers. A server would reject the packet as out of
                // order.
                return (taken, self.reject(ProxyError::BadPacket, &mut out.back));
            }
            let (count, received) = self.from_client.receive(&bytes[taken..]);
            taken += count;
            let step = match received {
                PacketProgress::Incomplete => return (taken, Progress::More),
                PacketProgress::Header(header) => self.check_client_header(header),
                PacketProgress::Complete(payload) => {
                    self.client_next = self.client_next.wrapping_add(1);
                    self.on_client_packet(payload, key, out)
                }
            };
            match step {
                Ok(()) => {}
                Err(Progress::Rejected(why)) => return (taken, self.reject(why, &mut out.back)),
                Err(progress) => return (taken, progress),
            }
        }
    }

    /// Takes bytes from the node (decrypted if there is TLS), its greeting first. Returns how many were taken, and the
    /// progress. All are taken, unless the progress is `Established`, `Denied` or `Rejected`.
    ///
    /// Bytes from before TLS must never be taken for protected ones. So the login is rejected if the node sends
    /// anything between the client's response and [`Self::on_node_tls_started`], or has begun a packet after its
    /// greeting.
    ///
    /// After the end of the login no bytes are taken, and the progress is that of its end.
    pub fn on_node_bytes(&mut self, bytes: &[u8], out: &mut Output) -> (usize, Progress) {
        let mut taken = 0;
        loop {
            if let LoginStage::Finished(end) = self.stage {
                return (taken, end);
            }
            if self.node_tls_due && !bytes.is_empty() {
                return (taken, self.reject(ProxyError::NodeTlsFailed, &mut out.onward));
            }
            let sequence = self.from_node.header().map(|header| header.sequence);
            let (count, received) = self.from_node.receive(&bytes[taken..]);
            taken += count;
            let step = match received {
                PacketProgress::Incomplete => return (taken, Progress::More),
                PacketProgress::Header(header) if header.length > greeting::MAX_GREETING_BYTES => {
                    Err(Progress::Rejected(ProxyError::NodeProtocol))
                }
                PacketProgress::Header(_) => Ok(()),
                PacketProgress::Complete(payload) => {
                    let in_order = sequence == Some(self.node_next);
                    self.node_next = self.node_next.wrapping_add(1);
                    self.on_node_packet(payload, in_order, out)
                }
            };
            match step {
                Ok(()) => {}
                Err(Progress::Rejected(why)) => return (taken, self.reject(why, &mut out.onward)),
                Err(progress) => return (taken, self.end(progress)),
            }
        }
    }

    /// The SSLRequest packet (header and 32 bytes) for the node. The caller sends it, and completes the TLS handshake,
    /// before it sends the first [`Output::onward`] bytes. None: the connection to the node has no TLS.
    ///
    /// The result is valid once [`Self::on_client_bytes`] has returned these bytes.
    #[must_use]
    pub fn node_ssl_request(&self) -> Option<[u8; 36]> {
        self.ssl_request
    }

    /// The SSLRequest was sent, and everything received before was read. From now on the node's bytes are decrypted
    /// ones.
    pub fn on_node_tls_started(&mut self) {
        self.node_tls_due = false;
    }

    /// The ERR packet for an error that the caller detects: a slow login, no node, a failed TLS handshake. Its sequence
    /// number and SQLSTATE fit the progress of the login.
    #[must_use]
    pub fn error_packet(&self, why: ProxyError) -> Vec<u8> {
        why.packet(self.next_client_sequence(), self.claimed.is_some())
    }

    /// Like [`Self::error_packet`], with a text that tells more.
    #[must_use]
    pub fn error_packet_with_text(&self, why: ProxyError, text: &str) -> Vec<u8> {
        why.packet_with_text(text, self.next_client_sequence(), self.claimed.is_some())
    }

    /// The client's user. None: the client's response has not been passed on to the node.
    #[must_use]
    pub fn user(&self) -> Option<&[u8]> {
        self.response.as_deref().and_then(handshake_response::user)
    }

    /// Whether the login waits for a packet of the client, or for the rest of one.
    #[must_use]
    pub fn awaits_client(&self) -> bool {
        matches!(self.stage, LoginStage::Response | LoginStage::Auth)
            && self.turn == Side::Client
            && self.from_node.is_empty()
    }

    /// The sequence number of the next packet to the client. A client that has begun a packet expects the number after
    /// it.
    fn next_client_sequence(&self) -> u8 {
        match self.from_client.header() {
            Some(header) => header.sequence.wrapping_add(1),
            None if self.from_client.is_empty() => self.client_next,
            None => self.client_next.wrapping_add(1),
        }
    }

    fn reject(&mut self, why: ProxyError, to_client: &mut SecretBytes) -> Progress {
        to_client.extend_from_slice(&self.error_packet(why));
        self.client_next = self.next_client_sequence().wrapping_add(1);
        self.end(Progress::Rejected(why))
    }

    /// Releases the collected data, except what [`Self::take_response`] returns for a session.
    fn end(&mut self, progress: Progress) -> Progress {
        self.stage = LoginStage::Finished(progress);
        if !matches!(progress, Progress::Established(_)) {
            self.response = None;
        }
        self.from_client = PacketReader::default();
        self.from_node = PacketReader::default();
        self.salt = Vec::new();
        self.held_response = None;
        progress
    }

    /// Rejects a login in which the client sends its password through TLS, but the node's connection has none.
    fn check_clear_text(&self) -> LoginStep {
        let exposed = self.client_head.is_some() && !self.node_tls;
        if exposed && !self.rules.allow_cleartext_backend {
            return rejected(ProxyError::ClearTextPassword);
        }
        Ok(())
    }

    /// Whether the client encrypts its password although the node, which has TLS, expects it in clear text.
    fn must_decrypt_passwords(&self) -> bool {
        self.client_head.is_none() && self.node_tls
    }

    fn send_to_node(&mut self, payload: &[u8], out: &mut Output) {
        append_packet(payload, &mut self.node_next, &mut out.onward);
        self.turn = Side::Node;
    }

    fn send_to_client(&mut self, payload: &[u8], out: &mut SecretBytes) {
        append_packet(payload, &mut self.client_next, out);
    }

    /// The capabilities without compression, if compression is off or passwords could be exposed.
    fn filter_compression(&self, capabilities: Capabilities) -> Capabilities {
        // In a compressed session the proxy does not see the node request a password in COM_CHANGE_USER.
        let exposable =
            self.rules.client_tls != ClientTls::Disabled && !self.node_tls && !self.rules.allow_cleartext_backend;
        if exposable || self.rules.compression == Compression::Off {
            capabilities.without(Capabilities::COMPRESSION)
        } else {
            capabilities
        }
    }
}

fn rejected(why: ProxyError) -> LoginStep {
    Err(Progress::Rejected(why))
}

/// Appends `payload` as a packet with the sequence number `next`, and increments `next`.
fn append_packet(payload: &[u8], next: &mut u8, out: &mut SecretBytes) {
    let header = Header { length: payload.len(), sequence: *next };
    out.extend_from_slice(&header.bytes());
    out.extend_from_slice(payload);
    *next = next.wrapping_add(1);
}

/// The kind of a node's first packet. It decides between relaying the login and trying another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstPacket {
    /// The packet is incomplete.
    Incomplete,
    /// A greeting of protocol 10 with protocol 4.1.
    Greeting,
    /// An ERR packet with its code, for example 1040 or 1053.
    Error(u16),
    /// Neither of these, or larger than a greeting may be (64 KiB).
    Invalid,
}

/// Classifies what a node has sent so far.
#[must_use]
pub fn first_packet(bytes: &[u8]) -> FirstPacket {
    let Some(header) = Header::parse(bytes) else {
        return FirstPacket::Incomplete;
    };
    if header.length == 0 || header.length > greeting::MAX_GREETING_BYTES {
        return FirstPacket::Invalid;
    }
    let rest = &bytes[HEADER..];
    let payload = rest.get(..header.length);
    match (rest.first(), payload) {
        (None, _) | (Some(10 | 0xff), None) => FirstPacket::Incomplete,
        (Some(0xff), Some(payload)) => error::code(payload).map_or(FirstPacket::Invalid, FirstPacket::Error),
        (Some(10), Some(payload)) if header.sequence == 0 && Greeting::parse(payload).is_some() => {
            FirstPacket::Greeting
        }
        _ => FirstPacket::Invalid,
    }
}
