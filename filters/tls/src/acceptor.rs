//! TLS with clients.

use std::path::Path;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs::Ticketer;
use rustls::server::{NoServerSessionStorage, UnbufferedServerConnection, WebPkiClientVerifier};

use crate::pem::{File, pair_error};
use crate::provider::provider;
use crate::rotating::Rotating;
use crate::{MinVersion, Peer, PeerRules, Stream, TlsError};

/// The certificate, its key and, if clients need certificates, their CA. Shared by all workers.
pub struct TlsAcceptor {
    config: Rotating<Arc<ServerConfig>>,
}

impl TlsAcceptor {
    /// `cert`: the certificate and its intermediates, PEM. `key`: its private key, PEM. `client_ca`: if given, each
    /// client must present a certificate that chains to one of its certificates. `rules`: other requirements;
    /// revocation lists need a `client_ca`.
    ///
    /// # Errors
    /// The error names the file and its defect.
    pub fn load(cert: &Path, key: &Path, client_ca: Option<&Path>, rules: PeerRules<'_>) -> Result<Self, TlsError> {
        if let (Some(crl), None) = (rules.crl, client_ca) {
            return Err(TlsError::UnusedCrl { path: crl.into(), peer: Peer::Client });
        }
        let mut paths = vec![cert.to_path_buf(), key.to_path_buf()];
        paths.extend(client_ca.into_iter().chain(rules.crl).map(Path::to_path_buf));
        let min_version = rules.min_version;
        let config = Rotating::load(paths, move |files| match files {
            [cert, key, verification @ ..] => {
                configure(*cert, *key, verification.first().copied(), verification.get(1).copied(), min_version)
            }
            _ => unreachable!("at least two paths were given"),
        })?;
        Ok(Self { config })
    }

    /// A connection of a client that is about to send its ClientHello. Uses the current certificate.
    ///
    /// # Panics
    /// Never, as long as rustls accepts a configuration that it has built.
    #[must_use]
    pub fn accept(&self) -> Stream {
        let connection = UnbufferedServerConnection::new(Arc::clone(&self.config.current()));
        Stream::server(connection.expect("the configuration was checked when it was built"))
    }

    /// Reads the files again if they changed. Returns true if the configuration was replaced.
    ///
    /// # Errors
    /// The defect of the files. The current configuration stays. Each bad content causes one error; later calls return
    /// `Ok(false)` until the files change.
    pub fn refresh(&self) -> Result<bool, TlsError> {
        self.config.refresh()
    }
}

fn configure(
    cert: File<'_>,
    key: File<'_>,
    client_ca: Option<File<'_>>,
    crl: Option<File<'_>>,
    min_version: MinVersion,
) -> Result<Arc<ServerConfig>, TlsError> {
    let builder = ServerConfig::builder_with_provider(provider()).with_protocol_versions(min_version.versions());
    let builder = builder.map_err(TlsError::Setup)?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(ca) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(ca.roots()?), provider())
                .with_crls(crl.map_or(Ok(Vec::new()), File::crls)?)
                .build();
            // The only errors are about roots and revocation lists, and there are roots.
            let verifier = verifier.map_err(|error| match crl {
                Some(crl) => crl.bad_crl(&error),
                None => TlsError::BadCertificate { path: ca.path.into(), reason: error.to_string() },
            })?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let built = builder.with_single_cert(cert.certificates()?, key.key()?);
    let mut config = built.map_err(|error| pair_error(cert, key, &error))?;
    // Tickets contain the whole session state, so nothing is stored here. Each configuration has new ticket keys: a
    // ticket must not outlive the CA that its client was verified against.
    config.ticketer = Ticketer::new().map_err(TlsError::Setup)?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 1;
    Ok(Arc::new(config))
}
