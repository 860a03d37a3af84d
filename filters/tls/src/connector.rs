//! TLS to TiDB.

use std::path::Path;
use std::sync::Arc;

use rustls::client::{UnbufferedClientConnection, WebPkiServerVerifier};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};

use crate::pem::{File, pair_error};
use crate::provider::provider;
use crate::rotating::Rotating;
use crate::verify::AnyName;
use crate::{MinVersion, Peer, PeerRules, Stream, TlsError};

/// How a node's certificate is verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verify {
    /// The chain to the CA, the validity and the name.
    Full,
    /// The chain to the CA and the validity.
    Ca,
    /// Only that the node has the certificate's key. An attacker that redirects the connection can read it.
    None,
}

/// The CA and, if nodes ask for one, a certificate and its key. Shared by all workers.
pub struct TlsConnector {
    config: Rotating<Arc<ClientConfig>>,
}

impl TlsConnector {
    /// `ca`: the CA certificates for nodes, PEM; None: those of the system at this time. `pair`: the certificate that
    /// nodes get, with its intermediates, and its key, PEM. `rules`: other requirements; revocation lists need a
    /// verified chain.
    ///
    /// # Errors
    /// The error names the file and its defect, or says that the system has no CA certificates.
    pub fn load(
        ca: Option<&Path>,
        verify: Verify,
        pair: Option<(&Path, &Path)>,
        rules: PeerRules<'_>,
    ) -> Result<Self, TlsError> {
        if let (Some(crl), Verify::None) = (rules.crl, verify) {
            return Err(TlsError::UnusedCrl { path: crl.into(), peer: Peer::Node });
        }
        // A CA that is not used need not exist.
        let ca = ca.filter(|_| verify != Verify::None);
        let mut paths: Vec<_> = ca.into_iter().map(Path::to_path_buf).collect();
        paths.extend(pair.into_iter().flat_map(|(cert, key)| [cert.to_path_buf(), key.to_path_buf()]));
        paths.extend(rules.crl.map(Path::to_path_buf));
        let (with_ca, with_crl, min_version) = (ca.is_some(), rules.crl.is_some(), rules.min_version);
        let config = Rotating::load(paths, move |files| {
            let (ca, rest) = files.split_at(usize::from(with_ca));
            let (pair, crl) = rest.split_at(rest.len() - usize::from(with_crl));
            let pair = match pair {
                [cert, key] => Some((*cert, *key)),
                _ => None,
            };
            configure(ca.first().copied(), verify, pair, crl.first().copied(), min_version)
        })?;
        Ok(Self { config })
    }

    /// A connection to a node; its ClientHello is in [`Stream::outgoing`]. `server_name`: the name that the node's
    /// certificate must have, a DNS name or an IP address (IPv6 with or without brackets).
    ///
    /// # Errors
    /// [`TlsError::ServerName`] if `server_name` is neither.
    pub fn connect(&self, server_name: &str) -> Result<Stream, TlsError> {
        let bare = server_name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(server_name);
        let name =
            ServerName::try_from(bare.to_owned()).map_err(|_| TlsError::ServerName { name: server_name.to_owned() })?;
        let connection = UnbufferedClientConnection::new(Arc::clone(&self.config.current()), name)
            .map_err(|source| TlsError::Connection { peer: Peer::Node, source })?;
        Ok(Stream::client(connection))
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
    ca: Option<File<'_>>,
    verify: Verify,
    pair: Option<(File<'_>, File<'_>)>,
    crl: Option<File<'_>>,
    min_version: MinVersion,
) -> Result<Arc<ClientConfig>, TlsError> {
    let provider = provider();
    let algorithms = provider.signature_verification_algorithms;
    let builder =
        ClientConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(min_version.versions());
    let builder = builder.map_err(TlsError::Setup)?;
    let chain_verifier = || {
        let roots = ca.map_or_else(system_roots, File::roots)?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .with_crls(crl.map_or(Ok(Vec::new()), File::crls)?)
            .build();
        // The only errors are about roots and revocation lists, and there are roots.
        verifier.map_err(|error| crl.map_or(TlsError::NoSystemCa, |crl| crl.bad_crl(&error)))
    };
    let builder = match verify {
        Verify::Full => builder.with_webpki_verifier(chain_verifier()?),
        Verify::Ca => {
            let chain = Some(chain_verifier()?);
            builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyName { chain, algorithms }))
        }
        Verify::None => {
            builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyName { chain: None, algorithms }))
        }
    };
    let config = match pair {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => builder
            .with_client_auth_cert(cert.certificates()?, key.key()?)
            .map_err(|error| pair_error(cert, key, &error))?,
    };
    Ok(Arc::new(config))
}

/// The system's CA certificates, not a compiled-in list: operators add their own CA there, and updates maintain them.
fn system_roots() -> Result<RootCertStore, TlsError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // Ignores certificates that cannot be parsed: nothing chains to them.
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() { Err(TlsError::NoSystemCa) } else { Ok(roots) }
}
