//! The server: its address, the account, and TLS.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::failure::Failure;
use crate::options::{Account, Server, TlsMode};

#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    pub(crate) user: String,
    pub(crate) password: String,
    pub(crate) tls: TlsMode,
    name: ServerName<'static>,
    config: Arc<ClientConfig>,
}

impl Target {
    /// Looks up the address and reads the certificates.
    pub(crate) fn new(server: &Server) -> Result<Self, Failure> {
        let text = &server.address;
        let address = text
            .to_socket_addrs()
            .ok()
            .and_then(|mut found| found.next())
            .ok_or_else(|| Failure::Setting(format!("{text:?} is no address that can be found; give HOST:PORT")))?;
        let host = text.rsplit_once(':').map_or("", |(host, _)| host).trim_matches(['[', ']']);
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| Failure::Setting(format!("{host:?} is no name that a certificate could have")))?;
        let Account { user, password, ca } = server.account.clone();
        Ok(Self { address, user, password, tls: server.tls, name, config: config(ca.as_deref())? })
    }

    /// A TLS session that has not begun.
    pub(crate) fn session(&self) -> Result<ClientConnection, Failure> {
        Ok(ClientConnection::new(Arc::clone(&self.config), self.name.clone())?)
    }
}

fn config(ca: Option<&Path>) -> Result<Arc<ClientConfig>, Failure> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let algorithms = provider.signature_verification_algorithms;
    let builder = with_provider(provider)?;
    let Some(path) = ca else {
        let accept_all = Arc::new(AcceptAll { algorithms });
        return Ok(Arc::new(builder.dangerous().with_custom_certificate_verifier(accept_all).with_no_client_auth()));
    };
    let unreadable = |reason: &dyn std::fmt::Display| {
        Failure::Setting(format!("{} has no certificates that can be used: {reason}", path.display()))
    };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| unreadable(&error))? {
        roots.add(certificate.map_err(|error| unreadable(&error))?).map_err(|error| unreadable(&error))?;
    }
    if roots.is_empty() {
        return Err(unreadable(&"it is empty"));
    }
    Ok(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
}

fn with_provider(
    provider: Arc<CryptoProvider>,
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>, Failure> {
    Ok(ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?)
}

/// Accepts every certificate: without a CA, the identity of the server does not matter for the load.
#[derive(Debug)]
struct AcceptAll {
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for AcceptAll {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn server(address: &str) -> Server {
        let account = Account { user: "root".into(), password: String::new(), ca: None };
        Server { address: address.into(), tls: TlsMode::None, account }
    }

    #[test]
    fn unknown_addresses_are_rejected() {
        for address in ["", "127.0.0.1", "nowhere.invalid:3306", "127.0.0.1:99999"] {
            let failure = Target::new(&server(address)).expect_err(address);
            assert!(failure.to_string().contains("give HOST:PORT"), "{failure}");
        }
        assert_eq!(Target::new(&server("[::1]:4000")).expect("a target").address.port(), 4000);
    }

    #[test]
    fn unreadable_ca_files_are_rejected() {
        let mut server = server("127.0.0.1:4000");
        for path in ["/nowhere", "/dev/null"] {
            server.account.ca = Some(path.into());
            let failure = Target::new(&server).expect_err(path);
            assert!(failure.to_string().contains("no certificates that can be used"), "{failure}");
        }
    }
}
