//! Certificates and keys in PEM files.

use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::pem::{Error, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

use crate::TlsError;

/// The content of a file.
#[derive(Clone, Copy)]
pub(crate) struct File<'a> {
    pub(crate) path: &'a Path,
    pub(crate) text: &'a [u8],
}

impl File<'_> {
    /// All certificates in the file, in order.
    pub(crate) fn certificates(self) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(self.text).collect();
        let found = found.map_err(|error| self.not_pem(&error))?;
        if found.is_empty() { Err(TlsError::NoCertificate { path: self.path.into() }) } else { Ok(found) }
    }

    /// All certificate revocation lists in the file.
    pub(crate) fn crls(self) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
        let found: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(self.text).collect();
        let found = found.map_err(|error| self.not_pem(&error))?;
        if found.is_empty() { Err(TlsError::NoCrl { path: self.path.into() }) } else { Ok(found) }
    }

    pub(crate) fn bad_crl(self, error: &impl ToString) -> TlsError {
        TlsError::BadCrl { path: self.path.into(), reason: error.to_string() }
    }

    /// The first private key in the file.
    pub(crate) fn key(self) -> Result<PrivateKeyDer<'static>, TlsError> {
        PrivateKeyDer::from_pem_slice(self.text).map_err(|error| match error {
            Error::NoItemsFound => TlsError::NoKey { path: self.path.into() },
            other => self.not_pem(&other),
        })
    }

    /// The certificates in the file, as trusted roots.
    pub(crate) fn roots(self) -> Result<RootCertStore, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in self.certificates()? {
            roots.add(certificate).map_err(|error| self.bad_certificate(&error))?;
        }
        Ok(roots)
    }

    pub(crate) fn bad_certificate(self, error: &rustls::Error) -> TlsError {
        TlsError::BadCertificate { path: self.path.into(), reason: error.to_string() }
    }

    /// The parser's own messages may quote a line of the file, which may belong to a key.
    fn not_pem(self, error: &Error) -> TlsError {
        let reason = match error {
            Error::MissingSectionEnd { .. } => "a block has no END line",
            Error::IllegalSectionStart { .. } => "a BEGIN line is malformed",
            Error::Base64Decode(_) => "a block is not base64",
            _ => "it cannot be parsed",
        };
        TlsError::NotPem { path: self.path.into(), reason }
    }
}

/// Converts an error of rustls about a certificate and its key.
pub(crate) fn pair_error(cert: File<'_>, key: File<'_>, error: &rustls::Error) -> TlsError {
    match error {
        rustls::Error::InconsistentKeys(_) => TlsError::Mismatch { cert: cert.path.into(), key: key.path.into() },
        rustls::Error::InvalidCertificate(_) => cert.bad_certificate(error),
        _ => TlsError::BadKey { path: key.path.into() },
    }
}
