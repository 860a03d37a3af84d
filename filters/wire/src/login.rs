//! A login, relayed between a client's link and a node's that may differ in TLS. Sans-I/O.
//!
//! The node's greeting and everything after it are passed on, so no password and no salt are the proxy's. What
//! is edited: the capability bits for TLS and compression in both first packets, and sequence numbers where one
//! link has exchanged packets that the other has not.

use crate::capability::Capabilities;
use crate::error::Refusal;

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
    /// Its bits are taken out of the greeting, so nobody asks for it.
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
    /// RSAES-OAEP with SHA-1, as MySQL's clients encrypt. None when it does not decrypt.
    fn decrypt(&self, encrypted: &[u8]) -> Option<Vec<u8>>;
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
    /// the client; afterwards both links are closed.
    Refused(Refusal),
}

/// What a step writes. The caller owns and clears them.
#[derive(Debug, Default)]
pub struct Output {
    /// In the direction in which the bytes came: to the node for the client's, to the client for the node's.
    pub onward: Vec<u8>,
    /// Against it: only ever to the client, as an answer to its own bytes.
    pub back: Vec<u8>,
}

/// One login.
pub struct Login {
    rules: Rules,
}

impl Login {
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self { rules }
    }

    /// Takes bytes from the client (decrypted where there is TLS). Returns how many were taken, and what to do.
    /// All are, unless the progress is `StartClientTls`, `Denied` or `Refused`.
    pub fn client(&mut self, bytes: &[u8], key: &dyn PasswordKey, out: &mut Output) -> (usize, Progress) {
        let _ = (self.rules, key, out);
        (bytes.len(), Progress::More)
    }

    /// Takes bytes from the node (decrypted where there is TLS), its greeting first. Returns how many were
    /// taken, and what to do. All are, unless the progress is `Established`, `Denied` or `Refused`.
    pub fn node(&mut self, bytes: &[u8], out: &mut Output) -> (usize, Progress) {
        let _ = out;
        (bytes.len(), Progress::More)
    }

    /// The SSLRequest packet (header and 32 bytes) that must go to the node, followed by a TLS handshake,
    /// before the first `onward` bytes of the client; None when the link to the node stays plain.
    ///
    /// Known as soon as `client` has returned the first `onward` bytes.
    #[must_use]
    pub fn node_ssl_request(&self) -> Option<[u8; 36]> {
        None
    }

    /// The error packet that fits where the login stands (sequence number, with or without SQLSTATE), for a
    /// refusal that the caller decides on: a slow login, no node, a failed TLS handshake.
    #[must_use]
    pub fn refusal(&self, why: Refusal) -> Vec<u8> {
        why.packet(0, false)
    }
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
    let _ = bytes;
    FirstPacket::Incomplete
}
