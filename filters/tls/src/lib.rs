//! TLS of the module's two sockets. Sans-I/O: bytes in, bytes out; only certificates and keys are read from files.
//!
//! * [`ClientSide`] is what clients connect to, [`NodeSide`] connects to TiDB. Both read their files again when
//!   these change, and no connection that exists notices.
//! * [`Stream`] is one connection of either.
//! * [`RsaPasswordKey`] decrypts the password of a client without TLS (`caching_sha2_password`).

#![forbid(unsafe_code)]

mod buffer;
mod client;
mod error;
mod node;
mod password;
mod peer_rules;
mod pem;
mod provider;
mod rotating;
mod stream;
mod verify;

pub use client::ClientSide;
pub use error::{Peer, TlsError};
pub use node::{NodeSide, Verify};
pub use password::RsaPasswordKey;
pub use peer_rules::{MinVersion, PeerRules};
pub use stream::{ReceiveResult, Stream};
