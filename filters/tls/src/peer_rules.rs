//! Requirements for peers other than their certificate's chain.

use std::path::Path;

use rustls::SupportedProtocolVersion;
use rustls::version::{TLS12, TLS13};

/// The minimum version of TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MinVersion {
    #[default]
    Tls12,
    Tls13,
}

/// The accepted versions, the newest first.
static VERSIONS: [&SupportedProtocolVersion; 2] = [&TLS13, &TLS12];

impl MinVersion {
    pub(crate) fn versions(self) -> &'static [&'static SupportedProtocolVersion] {
        match self {
            Self::Tls12 => &VERSIONS,
            Self::Tls13 => &VERSIONS[..1],
        }
    }
}

/// Rules for the peers of one side.
#[derive(Debug, Clone, Copy, Default)]
pub struct PeerRules<'a> {
    pub min_version: MinVersion,
    /// Certificate revocation lists, PEM. Each CA in a peer's chain needs one. An expired list still counts: otherwise
    /// a revoked certificate would be accepted again.
    pub crl: Option<&'a Path>,
}
