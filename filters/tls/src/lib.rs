//! TLS of the module's two sockets. No I/O except that certificates and keys are read from files.
//!
//! * [`TlsAcceptor`] accepts connections of clients, [`TlsConnector`] connects to TiDB. Both reload their files when
//!   these change, without effect on existing connections.
//! * [`Stream`] is one connection of either side.
//! * [`RsaPasswordKey`] decrypts the password of a client without TLS (`caching_sha2_password`).

#![forbid(unsafe_code)]

mod acceptor;
mod buffer;
mod connector;
mod error;
mod password;
mod peer_rules;
mod pem;
mod provider;
mod rotating;
mod stream;
mod verify;

pub use acceptor::TlsAcceptor;
pub use connector::{TlsConnector, Verify};
pub use error::{Peer, TlsError};
pub use password::RsaPasswordKey;
pub use peer_rules::{MinVersion, PeerRules};
pub use stream::{ReceiveResult, Stream, TlsDetails};
