//! Continues a login at another node, because the node that greeted is full (error 1040). No I/O.
//!
//! TiDB checks its limit before its greeting, and again after the client's response (`openSession` in
//! pkg/server/conn.go). In a burst of logins, the second check rejects many of them. The client computed its response
//! with the salt of that node's greeting. So another node gets the response without the hash, and with an
//! authentication plugin that no account has. That node then asks the client to authenticate with its own salt
//! ("Protocol::AuthSwitchRequest", dev.mysql.com), and the login continues as usual.

use super::{FirstPacket, Login, LoginStage, first_packet};
use crate::capability::Capabilities;
use crate::error;
use crate::greeting::Greeting;
use crate::handshake_response::{self, HandshakeResponse};
use crate::packet::{HEADER, Header, packets};

/// ER_CON_COUNT_ERROR: the server is full.
pub const TOO_MANY_CONNECTIONS: u16 = 1040;
/// A plugin that no account has.
const UNKNOWN_PLUGIN: &[u8] = b"tidevoy_asks_anew";

/// What the caller does next.
#[derive(Debug, PartialEq, Eq)]
pub enum FailoverAction {
    /// Wait for more bytes.
    Wait,
    Send(Vec<u8>),
    /// Send the SSLRequest, start TLS, and call [`LoginAttempt::on_tls_established`] when it is established.
    StartTls([u8; 36]),
    /// The node is full, too.
    Full,
    /// The node's first packet is another error.
    Error,
    /// The node violates the protocol.
    Invalid,
    /// The node lacks a capability that the client and the first node agreed on, or offers no TLS although the first
    /// node's connection uses it.
    MissingCapability,
    /// The node answered the login: call [`Login::on_node_bytes`] with these bytes.
    Answer(Vec<u8>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FailoverPhase {
    Greeting,
    Securing,
    Login,
}

/// An attempt to log in at one node.
#[derive(Debug, Clone)]
pub struct LoginAttempt {
    phase: FailoverPhase,
    ssl_request: Option<[u8; 36]>,
    needed: Capabilities,
    response: Vec<u8>,
    received: Vec<u8>,
    node_connection_id: Option<u32>,
}

impl LoginAttempt {
    /// Takes bytes from the node, decrypted if there is TLS.
    pub fn receive(&mut self, bytes: &[u8]) -> FailoverAction {
        self.received.extend_from_slice(bytes);
        match self.phase {
            FailoverPhase::Greeting => self.on_greeting(),
            // The node must not send anything before TLS is established.
            FailoverPhase::Securing => FailoverAction::Invalid,
            FailoverPhase::Login => self.on_answer(),
        }
    }

    /// TLS is established. Returns the login packet.
    pub fn on_tls_established(&mut self) -> Vec<u8> {
        self.phase = FailoverPhase::Login;
        self.login()
    }

    /// The node's id of the connection; None before its greeting.
    #[must_use]
    pub const fn node_connection_id(&self) -> Option<u32> {
        self.node_connection_id
    }

    fn login(&self) -> Vec<u8> {
        packets(&self.response, if self.ssl_request.is_some() { 2 } else { 1 })
    }

    fn on_greeting(&mut self) -> FailoverAction {
        match first_packet(&self.received) {
            FirstPacket::Incomplete => return FailoverAction::Wait,
            FirstPacket::Error(TOO_MANY_CONNECTIONS) => return FailoverAction::Full,
            FirstPacket::Error(_) => return FailoverAction::Error,
            FirstPacket::Invalid => return FailoverAction::Invalid,
            FirstPacket::Greeting => {}
        }
        let received = std::mem::take(&mut self.received);
        let end = Header::parse(&received).map_or(0, |header| HEADER + header.length);
        let Some(greeting) = Greeting::parse(&received[HEADER..end]).filter(|_| received.len() == end) else {
            return FailoverAction::Invalid;
        };
        self.node_connection_id = Some(greeting.connection_id);
        let offered = greeting.capabilities.understood();
        match self.ssl_request {
            _ if !offered.has(self.needed) => FailoverAction::MissingCapability,
            Some(_) if !offered.has(Capabilities::SSL) => FailoverAction::MissingCapability,
            Some(request) => {
                self.phase = FailoverPhase::Securing;
                FailoverAction::StartTls(request)
            }
            None => {
                self.phase = FailoverPhase::Login;
                FailoverAction::Send(self.login())
            }
        }
    }

    fn on_answer(&mut self) -> FailoverAction {
        match packet_code(&self.received) {
            None => FailoverAction::Wait,
            Some(Some(TOO_MANY_CONNECTIONS)) => FailoverAction::Full,
            Some(_) => FailoverAction::Answer(std::mem::take(&mut self.received)),
        }
    }
}

/// The error code of the first packet in `bytes`, if it is an ERR packet. The outer None: the packet is incomplete.
fn packet_code(bytes: &[u8]) -> Option<Option<u16>> {
    let header = Header::parse(bytes)?;
    Some(error::code(bytes.get(HEADER..HEADER + header.length)?))
}

impl Login {
    /// Whether `bytes` begin with the node's complete answer to the client's response, and this answer is the error
    /// that the node is full. Consumes nothing.
    #[must_use]
    pub fn is_full(&self, bytes: &[u8]) -> bool {
        self.stage == LoginStage::Auth
            && self.node_next == self.answer_sequence()
            && self.from_node.is_empty()
            && packet_code(bytes) == Some(Some(TOO_MANY_CONNECTIONS))
    }

    /// An attempt to log in at another node. None if the client could not answer that node's authentication request.
    #[must_use]
    pub fn failover_attempt(&self) -> Option<LoginAttempt> {
        let mut response = self.response.clone().filter(|_| self.stage == LoginStage::Auth)?;
        let claimed = handshake_response::capabilities(&response);
        let plugin =
            HandshakeResponse::parse(&response, claimed)?.plugin.filter(|_| claimed.has(Capabilities::PLUGIN_AUTH))?;
        response.splice(plugin, UNKNOWN_PLUGIN.iter().copied());
        let needed = claimed.and(self.offered.understood()).without(Capabilities::SSL);
        let ssl_request = self.ssl_request.filter(|_| self.node_tls);
        let phase = FailoverPhase::Greeting;
        Some(LoginAttempt { phase, ssl_request, needed, response, received: Vec::new(), node_connection_id: None })
    }

    /// The sequence number of the node's answer to the client's response.
    fn answer_sequence(&self) -> u8 {
        if self.node_tls { 3 } else { 2 }
    }
}
