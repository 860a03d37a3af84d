//! A login, relayed between a client's connection and a node's, which may differ in TLS. No I/O.
//!
//! The node's greeting and everything after it are passed on, so no password and no salt are the proxy's. What
//! is edited: the capability bits for TLS and compression in both first packets, and sequence numbers where one
//! connection has exchanged packets that the other has not.

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
use crate::packet::{HEADER, Header};
use crate::response::{HEAD, Response};
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
    /// Used where the node offers it.
    Preferred,
    Required,
}

/// The compressed protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// The greeting that a client receives does not offer it. A client that requests it anyway is refused.
    Off,
    /// Let through; the session cannot be followed then.
    Passthrough,
}

/// What a login has to keep to.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub client_tls: ClientTls,
    pub node_tls: NodeTls,
    pub compression: Compression,
    /// Whether a password may travel in clear text to a node without TLS, as a client with TLS sends it.
    pub allow_cleartext_backend: bool,
}

/// The RSA key with which clients without TLS encrypt a password (caching_sha2_password). The I/O side has it.
pub trait PasswordKey {
    /// The public key, PEM (`-----BEGIN PUBLIC KEY-----`).
    fn public_pem(&self) -> &[u8];
    /// Called before each [`Self::decrypt`].
    ///
    /// # Errors
    /// Why this password must not be decrypted.
    fn check_limit(&self) -> Result<(), ProxyError> {
        Ok(())
    }
    /// RSAES-OAEP with SHA-1, as MySQL's clients encrypt. None when it does not decrypt.
    fn decrypt(&self, encrypted: &[u8]) -> Option<SecretBytes>;
}

/// What to do after some bytes were taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// More bytes are awaited.
    More,
    /// The client's SSLRequest was taken: what follows from the client is TLS; decrypted, it goes on here.
    StartClientTls,
    /// The node said OK. Both sides are in the command phase; bytes behind this point are the session's.
    Established(Capabilities),
    /// The node said no, and the client was told; the node will close.
    Denied(u16),
    /// The proxy refuses. `back` (or `onward`, when the node's bytes caused it) ends with the error packet for
    /// the client; afterwards both connections are closed.
    Rejected(ProxyError),
}

/// What a step writes. The client's bytes may hold its password.
#[derive(Debug, Default)]
pub struct Output {
    /// In the direction in which the bytes came: to the node for the client's, to the client for the node's.
    pub onward: SecretBytes,
    /// Against it: only ever to the client, as an answer to its own bytes.
    pub back: SecretBytes,
}

/// One login.
pub struct Login {
    rules: Rules,
    stage: LoginStage,
    /// Whose packet is awaited, once there are two who talk.
    turn: Side,
    from_client: PacketReader,
    from_node: PacketReader,
    /// The next sequence number on the client's connection.
    client_next: u8,
    /// The next sequence number on the node's connection.
    node_next: u8,
    /// What the greeting offers the client, edited.
    offered: Capabilities,
    /// What the client claims, once it is known: its SSLRequest counts, as it does for MySQL's server. Some
    /// drivers clear the TLS bit in the response that follows.
    claimed: Option<Capabilities>,
    /// The client's SSLRequest: the client's connection has TLS.
    client_head: Option<[u8; HEAD]>,
    /// Whether the node's connection has TLS; known with the greeting.
    node_tls: bool,
    ssl_request: Option<[u8; 36]>,
    /// TLS must begin on the node's connection before the node sends anything else.
    node_tls_due: bool,
    plugin: Plugin,
    salt: Vec<u8>,
    password: ExpectedPassword,
    /// A response that waits for the password that must go into it.
    held_response: Option<(SecretBytes, Response)>,
    /// What the client has said of itself, without what proves it.
    response: Option<Vec<u8>>,
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

/// Whether the client's next packet is a password that the proxy must decrypt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpectedPassword {
    No,
    /// It is, unless it is this byte: then the client asks for the key first.
    OrRequest(u8),
    /// It is; the client has the key.
    Yes,
}

/// A step's answer: to go on, or how the login ends or pauses.
type LoginStep = Result<(), Progress>;

impl Login {
    /// Sets the rules for the node's connection, which may become known only with the node; before its greeting.
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
            password: ExpectedPassword::No,
            held_response: None,
            response: None,
        }
    }

    /// How much memory the bytes take that are kept.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        let held_response = self.held_response.as_ref().map_or(0, |(payload, _)| payload.capacity());
        self.from_client.capacity() + self.from_node.capacity() + held_response
    }

    /// The payload of the client's HandshakeResponse41 as it went to the node, without its authentication data; None
    /// before it did.
    pub fn take_response(&mut self) -> Option<Vec<u8>> {
        self.response.take()
    }

    /// Takes bytes from the client (decrypted where there is TLS). Returns how many were taken, and what to do.
    /// All are, unless the progress is `StartClientTls`, `Denied` or `Refused`.
    ///
    /// Once a login is over, nothing is taken any more, and its end is told again.
    pub fn on_client_bytes(&mut self, bytes: &[u8], key: &dyn PasswordKey, out: &mut Output) -> (usize, Progress) {
        let mut taken = 0;
        loop {
            if let LoginStage::Finished(end) = self.stage {
                return (taken, end);
            }
            if self.turn == Side::Node && taken < bytes.len() {
                // Nothing may follow before the answer; a server would find it out of order.
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

    /// Takes bytes from the node (decrypted where there is TLS), its greeting first. Returns how many were
    /// taken, and what to do. All are, unless the progress is `Established`, `Denied` or `Refused`.
    ///
    /// Between the client's response and [`Self::on_node_tls_started`] the node must not send anything: that ends the login. So does
    /// the beginning of a packet behind the greeting. Bytes that came without TLS must never be taken for protected ones.
    ///
    /// Once a login is over, nothing is taken any more, and its end is told again.
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

    /// The SSLRequest packet (header and 32 bytes) that must go to the node, followed by a TLS handshake,
    /// before the first `onward` bytes of the client; None when the connection to the node stays plain.
    ///
    /// Known as soon as `client` has returned the first `onward` bytes.
    #[must_use]
    pub fn node_ssl_request(&self) -> Option<[u8; 36]> {
        self.ssl_request
    }

    /// The SSLRequest was sent, and everything that came before was read. From here on bytes of the node are decrypted ones.
    pub fn on_node_tls_started(&mut self) {
        self.node_tls_due = false;
    }

    /// The error packet that fits where the login stands (sequence number, with or without SQLSTATE), for a
    /// refusal that the caller decides on: a slow login, no node, a failed TLS handshake.
    #[must_use]
    pub fn error_packet(&self, why: ProxyError) -> Vec<u8> {
        why.packet(self.next_client_sequence(), self.claimed.is_some())
    }

    /// Whether the client has to send the next packet, or the rest of it.
    #[must_use]
    pub fn awaits_client(&self) -> bool {
        matches!(self.stage, LoginStage::Response | LoginStage::Auth)
            && self.turn == Side::Client
            && self.from_node.is_empty()
    }

    /// The number of a packet that is sent to the client now. A client that has begun one counts it, and awaits
    /// the number behind.
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

    /// Releases what was collected, except what [`Self::take_response`] returns for a session.
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

    /// Refuses where a client trusts its TLS with a password that would then go on without any.
    fn check_clear_text(&self) -> LoginStep {
        let exposed = self.client_head.is_some() && !self.node_tls;
        if exposed && !self.rules.allow_cleartext_backend {
            return rejected(ProxyError::ClearTextPassword);
        }
        Ok(())
    }

    /// Whether the client encrypts its password for a server that, having TLS, wants it as it is.
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

    /// A node's capabilities, without compression if it is off.
    fn filter_compression(&self, capabilities: Capabilities) -> Capabilities {
        // Nobody could see a change of user ask for a password that must not be sent.
        let exposable =
            self.rules.client_tls != ClientTls::Disabled && !self.node_tls && !self.rules.allow_cleartext_backend;
        if exposable || self.rules.compression == Compression::Off {
            capabilities.without(Capabilities::ANY_COMPRESSION)
        } else {
            capabilities
        }
    }
}

fn rejected(why: ProxyError) -> LoginStep {
    Err(Progress::Rejected(why))
}

/// Appends `payload` as the packet with the number `next`, which counts on.
fn append_packet(payload: &[u8], next: &mut u8, out: &mut SecretBytes) {
    let header = Header { length: payload.len(), sequence: *next };
    out.extend_from_slice(&header.bytes());
    out.extend_from_slice(payload);
    *next = next.wrapping_add(1);
}

/// What a node's first packet is, for the choice between passing it on and trying another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstPacket {
    /// Not all of it is there.
    Incomplete,
    /// A greeting of protocol 10 with protocol 4.1.
    Greeting,
    /// An error, for example 1040 or 1053.
    Error(u16),
    /// No MySQL server speaks there, or it sent more than a greeting may be (64 KiB).
    Invalid,
}

/// Looks at what a node has sent so far.
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
