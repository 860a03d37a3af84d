//! TLS that clients connect to.

use std::path::Path;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs::Ticketer;
use rustls::server::{NoServerSessionStorage, UnbufferedServerConnection, WebPkiClientVerifier};

use crate::pem::{File, pair_error};
use crate::provider::provider;
use crate::rotating::Rotating;
use crate::{MinVersion, Peer, PeerRules, Stream, TlsError};

/// The certificate, the key and, where clients need a certificate, its CA. Shared by all workers.
pub struct ClientSide {
    config: Rotating<Arc<ServerConfig>>,
}

impl ClientSide {
    /// `cert`: the certificate and what leads to its CA, PEM. `key`: its private key, PEM. `client_ca`: when given,
    /// every client must present a certificate that chains to one of these.
    /// `rules`: what a client has to fulfil besides; revocation lists need a `client_ca`.
    ///
    /// # Errors
    /// One names the file and says what is wrong with it.
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

    /// A connection of a client that is about to say ClientHello, with the certificate that is current.
    ///
    /// # Panics
    /// Never, as long as rustls accepts the configuration that it has built.
    #[must_use]
    pub fn accept(&self) -> Stream {
        let connection = UnbufferedServerConnection::new(Arc::clone(&self.config.current()));
        Stream::server(connection.expect("the configuration was checked when it was built"))
    }

    /// Reads the files again if they changed. True when what they hold replaced what was current.
    ///
    /// # Errors
    /// What is wrong with them, once for each content; what was current stays. So does it, without an error, while
    /// the files stay as they are.
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
            // Its only errors are about roots and revocation lists; there are roots.
            let verifier = verifier.map_err(|error| match crl {
                Some(crl) => crl.bad_crl(&error),
                None => TlsError::BadCertificate { path: ca.path.into(), reason: error.to_string() },
            })?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let built = builder.with_single_cert(cert.certificates()?, key.key()?);
    let mut config = built.map_err(|error| pair_error(cert, key, &error))?;
    // Sessions are resumed by tickets that hold all there is to know, so nothing is stored here. The keys are new
    // with each configuration: a ticket must not outlive the CA that its client was checked against.
    config.ticketer = Ticketer::new().map_err(TlsError::Setup)?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 1;
    Ok(Arc::new(config))
}
