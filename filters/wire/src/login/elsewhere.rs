//! A login that goes on at another node, because the one that greeted is full (error 1040). Sans-I/O.
//!
//! TiDB looks at its limit before its greeting, and again when it has the client's response (`openSession` in
//! pkg/server/conn.go): of a burst of logins many are refused the second time. The client has answered to the salt of
//! that greeting, so another node gets the response without that answer, and with a plugin that no account has: it asks
//! anew then, with a salt of its own ("Protocol::AuthSwitchRequest", dev.mysql.com), and from there on the login is an
//! ordinary one.

use super::{FirstPacket, Login, Side, Stage, first_packet};
use crate::capability::Capabilities;
use crate::error;
use crate::greeting::Greeting;
use crate::packet::{HEADER, Header};
use crate::response::{self, Response};

/// ER_CON_COUNT_ERROR: the server has as many connections as it may have.
pub const TOO_MANY_CONNECTIONS: u16 = 1040;
/// No account has this plugin.
const NO_PLUGIN: &[u8] = b"tidevoy_asks_anew";

/// What is to be done next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// More bytes are awaited.
    Wait,
    Send(Vec<u8>),
    /// Send this, and begin TLS behind it; [`Attempt::secured`] when it stands.
    StartTls([u8; 36]),
    /// This node is full, too.
    Full,
    /// It greets with another error.
    Error,
    /// It does not speak MySQL's protocol as it must.
    Invalid,
    /// It lacks what client and first node have agreed on.
    Unfit,
    /// It answers to the login: these bytes go to [`Login::node`] behind [`Login::goes_on_elsewhere`].
    Answer(Vec<u8>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Greeting,
    Securing,
    Login,
}

/// An attempt at one node.
#[derive(Debug, Clone)]
pub struct Attempt {
    at: At,
    ssl_request: Option<[u8; 36]>,
    needed: Capabilities,
    response: Vec<u8>,
    received: Vec<u8>,
}

impl Attempt {
    /// Takes bytes of the node, decrypted where there is TLS.
    pub fn take(&mut self, bytes: &[u8]) -> Next {
        self.received.extend_from_slice(bytes);
        match self.at {
            At::Greeting => self.greeted(),
            // Nothing may come before TLS stands.
            At::Securing => Next::Invalid,
            At::Login => self.answered(),
        }
    }

    /// TLS stands: the login.
    pub fn secured(&mut self) -> Vec<u8> {
        self.at = At::Login;
        self.login()
    }

    fn login(&self) -> Vec<u8> {
        let header = Header { length: self.response.len(), sequence: if self.ssl_request.is_some() { 2 } else { 1 } };
        [&header.bytes()[..], &self.response].concat()
    }

    fn greeted(&mut self) -> Next {
        match first_packet(&self.received) {
            FirstPacket::Incomplete => return Next::Wait,
            FirstPacket::Error(TOO_MANY_CONNECTIONS) => return Next::Full,
            FirstPacket::Error(_) => return Next::Error,
            FirstPacket::Invalid => return Next::Invalid,
            FirstPacket::Greeting => {}
        }
        let received = std::mem::take(&mut self.received);
        let end = Header::parse(&received).map_or(0, |header| HEADER + header.length);
        let Some(greeting) = Greeting::parse(&received[HEADER..end]).filter(|_| received.len() == end) else {
            return Next::Invalid;
        };
        // TiDB understands these two whether or not it offers them (`pkg/parser/mysql/const.go`, `pkg/server/conn.go`).
        let offered =
            greeting.capabilities.with(Capabilities::CONNECT_ATTRS).with(Capabilities::PLUGIN_AUTH_LENENC_DATA);
        match self.ssl_request {
            _ if !offered.has(self.needed) => Next::Unfit,
            Some(_) if !offered.has(Capabilities::SSL) => Next::Unfit,
            Some(request) => {
                self.at = At::Securing;
                Next::StartTls(request)
            }
            None => {
                self.at = At::Login;
                Next::Send(self.login())
            }
        }
    }

    fn answered(&mut self) -> Next {
        match packet_code(&self.received) {
            None => Next::Wait,
            Some(Some(TOO_MANY_CONNECTIONS)) => Next::Full,
            Some(_) => Next::Answer(std::mem::take(&mut self.received)),
        }
    }
}

/// The error code of the first packet in `bytes`, if it is an error; None when the packet is not whole.
fn packet_code(bytes: &[u8]) -> Option<Option<u16>> {
    let header = Header::parse(bytes)?;
    Some(error::code(bytes.get(HEADER..HEADER + header.length)?))
}

impl Login {
    /// Whether these bytes, which are not taken, are the node's answer to the client's response: that it is full.
    #[must_use]
    pub fn is_full(&self, bytes: &[u8]) -> bool {
        self.stage == Stage::Auth
            && self.node_next == self.number_of_answer()
            && self.from_node.is_empty()
            && packet_code(bytes) == Some(Some(TOO_MANY_CONNECTIONS))
    }

    /// What it takes to log in at another node. None: the client could not be asked anew.
    #[must_use]
    pub fn attempt_elsewhere(&self) -> Option<Attempt> {
        let offered_or_own = self.offered.with(Capabilities::CONNECT_ATTRS).with(Capabilities::PLUGIN_AUTH_LENENC_DATA);
        let mut response = self.response.clone().filter(|_| self.stage == Stage::Auth)?;
        let claimed = response::capabilities(&response);
        let plugin = Response::parse(&response, claimed)?.plugin.filter(|_| claimed.has(Capabilities::PLUGIN_AUTH))?;
        response.splice(plugin, NO_PLUGIN.iter().copied());
        let needed = claimed.and(offered_or_own).without(Capabilities::SSL);
        let ssl_request = self.ssl_request.filter(|_| self.node_tls);
        Some(Attempt { at: At::Greeting, ssl_request, needed, response, received: Vec::new() })
    }

    /// The node's link is that of an [`Attempt`] from now on.
    pub fn goes_on_elsewhere(&mut self) {
        self.node_next = self.number_of_answer();
        self.turn = Side::Node;
    }

    /// The number of the node's first packet behind the response.
    fn number_of_answer(&self) -> u8 {
        if self.node_tls { 3 } else { 2 }
    }
}
