//! The RSA key with which clients without TLS encrypt a password.

use std::fs;
use std::path::Path;

use aws_lc_rs::encoding::{AsDer, Pkcs8V1Der};
use aws_lc_rs::rsa::{KeyPair, KeySize, OAEP_SHA1_MGF1SHA1, OaepPrivateDecryptingKey, PrivateDecryptingKey};
use mysql_proto::secret::SecretBytes;
use pem::{EncodeConfig, LineEnding, Pem};
use rustls::pki_types::PrivateKeyDer;

use crate::TlsError;
use crate::pem::File;

/// An RSA key of 2048 bits or more.
pub struct RsaPasswordKey {
    key: OaepPrivateDecryptingKey,
    public_pem: Vec<u8>,
}

impl RsaPasswordKey {
    /// Generates a key of 2048 bits, which takes up to some hundred milliseconds.
    ///
    /// # Panics
    /// If the system lacks memory or random numbers.
    #[must_use]
    pub fn generate() -> Self {
        let key = PrivateDecryptingKey::generate(KeySize::Rsa2048).ok();
        key.and_then(Self::from_key).expect("an RSA key is made where there is memory and randomness")
    }

    /// Loads the key in a PEM file (PKCS#1 or PKCS#8, without a passphrase).
    ///
    /// # Errors
    /// The error names the file and its defect.
    pub fn load(path: &Path) -> Result<Self, TlsError> {
        let text =
            fs::read(path).map(SecretBytes::from).map_err(|source| TlsError::Read { path: path.into(), source })?;
        let key = match (File { path, text: &text }).key()? {
            PrivateKeyDer::Pkcs8(der) => PrivateDecryptingKey::from_pkcs8(der.secret_pkcs8_der()).ok(),
            PrivateKeyDer::Pkcs1(der) => {
                let wrapped: Option<Pkcs8V1Der<'_>> =
                    KeyPair::from_der(der.secret_pkcs1_der()).ok().and_then(|pair| pair.as_der().ok());
                wrapped.and_then(|der| PrivateDecryptingKey::from_pkcs8(der.as_ref()).ok())
            }
            _ => None,
        };
        key.and_then(Self::from_key).ok_or_else(|| TlsError::BadPasswordKey { path: path.into() })
    }

    fn from_key(key: PrivateDecryptingKey) -> Option<Self> {
        let public = key.public_key().as_der().ok()?;
        let public = Pem::new("PUBLIC KEY", public.as_ref());
        let public_pem = pem::encode_config(&public, EncodeConfig::new().set_line_ending(LineEnding::LF));
        Some(Self { key: OaepPrivateDecryptingKey::new(key).ok()?, public_pem: public_pem.into_bytes() })
    }
}

impl mysql_proto::login::PasswordKey for RsaPasswordKey {
    fn public_pem(&self) -> &[u8] {
        &self.public_pem
    }

    fn decrypt(&self, encrypted: &[u8]) -> Option<SecretBytes> {
        let mut plain = SecretBytes::from(vec![0; self.key.min_output_size()]);
        let length = self.key.decrypt(&OAEP_SHA1_MGF1SHA1, encrypted, &mut plain, None).ok()?.len();
        plain.truncate(length);
        Some(plain)
    }
}
