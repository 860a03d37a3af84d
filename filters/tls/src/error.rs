//! Errors of certificates, keys and connections, with advice.

use std::fmt;
use std::io;
use std::path::PathBuf;

use rustls::{AlertDescription, CertificateError, Error};

/// The other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// A MySQL client; its settings are in `tls.client`.
    Client,
    /// A TiDB server; its settings are in `tls.backend`.
    Node,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Client => "the client",
            Self::Node => "the TiDB server",
        })
    }
}

/// A TLS error. Its text names the file or the peer, and says what to do. It never contains key material.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {}: {source}; check the path and that Envoy's user may read it", path.display())]
    Read { path: PathBuf, source: io::Error },

    #[error("{} is not valid PEM ({reason}); write it again", path.display())]
    NotPem { path: PathBuf, reason: &'static str },

    #[error("{} has no revocation list; it must hold one or more `BEGIN X509 CRL` blocks", path.display())]
    NoCrl { path: PathBuf },

    #[error("a revocation list in {} cannot be used: {reason}; issue it again, as X.509 CRL version 2", path.display())]
    BadCrl { path: PathBuf, reason: String },

    #[error("the revocation list {} is of no use: certificates of {peer} are not verified; set a CA too", path.display())]
    UnusedCrl { path: PathBuf, peer: Peer },

    #[error("{} has no certificate; it must hold one or more `BEGIN CERTIFICATE` blocks", path.display())]
    NoCertificate { path: PathBuf },

    #[error(
        "{} has no private key that can be used; it must hold a `BEGIN PRIVATE KEY`, `BEGIN RSA PRIVATE KEY` or \
         `BEGIN EC PRIVATE KEY` block without a passphrase", path.display()
    )]
    NoKey { path: PathBuf },

    #[error("the certificate in {} cannot be used: {reason}; issue it again, as X.509 version 3", path.display())]
    BadCertificate { path: PathBuf, reason: String },

    #[error(
        "the private key in {} cannot be used; it must be RSA of 2048 to 8192 bits, ECDSA on P-256, P-384 or P-521, \
         or Ed25519", path.display()
    )]
    BadKey { path: PathBuf },

    #[error(
        "the private key in {} does not belong to the first certificate in {}; put both of one pair there",
        key.display(), cert.display()
    )]
    Mismatch { cert: PathBuf, key: PathBuf },

    #[error(
        "the system has no CA certificates (looked where OpenSSL does, and at SSL_CERT_FILE and SSL_CERT_DIR); set \
         tls.backend.ca, or install them"
    )]
    NoSystemCa,

    #[error("`{name}` is neither a DNS name nor an IP address, so no certificate can be checked against it")]
    ServerName { name: String },

    #[error("the RSA key for passwords in {} cannot be used; it must be RSA of 2048 to 8192 bits", path.display())]
    BadPasswordKey { path: PathBuf },

    #[error("TLS with {peer} failed: {source}{}", advice(*peer, source))]
    Connection { peer: Peer, source: Error },

    #[error("TLS cannot be set up: {0}; report this")]
    Setup(Error),
}

/// Advice for a failed connection; empty if there is none.
fn advice(peer: Peer, error: &Error) -> &'static str {
    use AlertDescription as Alert;
    match (peer, error) {
        (Peer::Client, Error::NoCertificatesPresented) => {
            "; tls.client.client_ca is set, so the client must present a certificate"
        }
        // If another CA has the same name, only its signature is wrong.
        (Peer::Client, Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature)) => {
            "; the client's certificate does not chain to tls.client.client_ca"
        }
        (Peer::Client, Error::InvalidCertificate(CertificateError::Revoked)) => {
            "; the client's certificate is in tls.client.crl: give the client another one"
        }
        (Peer::Client, Error::InvalidCertificate(CertificateError::UnknownRevocationStatus)) => {
            "; tls.client.crl needs a list of each CA that issued a certificate in the client's chain"
        }
        (Peer::Client, Error::InvalidCertificate(_)) => "; issue the client's certificate again",
        (
            Peer::Client,
            Error::AlertReceived(
                Alert::UnknownCA | Alert::BadCertificate | Alert::CertificateUnknown | Alert::CertificateExpired,
            ),
        ) => {
            "; the client does not accept the certificate in tls.client.cert: give the client its CA, connect by a \
             name that is in it, or renew it"
        }
        (Peer::Client, Error::PeerIncompatible(_)) => {
            "; the client must offer TLS 1.2 with ECDHE and AEAD, or newer, and at least tls.client.min_version"
        }
        (Peer::Client, Error::InvalidMessage(_)) => "; the received bytes are not TLS",
        (Peer::Node, Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            "; set tls.backend.ca to the CA that issued the TiDB server's certificate"
        }
        (
            Peer::Node,
            Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            ),
        ) => "; issue the TiDB server's certificate for this name, or set tls.backend.verify to ca",
        (
            Peer::Node,
            Error::InvalidCertificate(
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. },
            ),
        ) => "; renew the TiDB server's certificate, and check the clocks",
        (Peer::Node, Error::InvalidCertificate(CertificateError::Revoked)) => {
            "; the TiDB server's certificate is in tls.backend.crl: give the server another one"
        }
        (Peer::Node, Error::InvalidCertificate(CertificateError::UnknownRevocationStatus)) => {
            "; tls.backend.crl needs a list of each CA that issued a certificate in the TiDB server's chain"
        }
        (Peer::Node, Error::InvalidCertificate(_)) => {
            "; issue the TiDB server's certificate again: X.509 version 3, with a subjectAltName, and not itself a CA"
        }
        (
            Peer::Node,
            Error::AlertReceived(
                Alert::CertificateRequired
                | Alert::UnknownCA
                | Alert::DecryptError
                | Alert::BadCertificate
                | Alert::CertificateUnknown
                | Alert::CertificateExpired,
            ),
        ) => {
            "; the TiDB server wants another client certificate: set tls.backend.cert and key to one that its ssl-ca \
             accepts"
        }
        (Peer::Node, Error::PeerIncompatible(_) | Error::AlertReceived(Alert::ProtocolVersion)) => {
            "; the TiDB server must offer TLS 1.2 with ECDHE and AEAD, or newer, and at least tls.backend.min_version"
        }
        (Peer::Node, Error::InvalidMessage(_)) => "; the received bytes are not TLS",
        _ => "",
    }
}
