//! The server on which traffic is replayed, and the account.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::{fs, io};

use mysql_proto::secret::SecretBytes;
use tls::{PeerRules, TlsConnector, TlsError, Verify};

use crate::options::TargetOptions;

#[derive(Debug, thiserror::Error)]
pub(crate) enum TargetError {
    #[error("'{0}' is not HOST:PORT")]
    NotAnAddress(String),
    #[error("cannot resolve {host}: {source}")]
    Unresolved { host: String, source: io::Error },
    #[error("cannot read the password in {}: {source}", path.display())]
    Password { path: Box<Path>, source: io::Error },
    #[error(transparent)]
    Tls(#[from] TlsError),
}

pub(crate) struct Target {
    /// As the user has written it.
    pub(crate) name: String,
    pub(crate) host: String,
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) user: String,
    pub(crate) password: SecretBytes,
    /// None: without TLS.
    pub(crate) tls: Option<TlsConnector>,
}

impl Target {
    pub(crate) fn new(options: &TargetOptions) -> Result<Self, TargetError> {
        let (host, port) =
            split_address(&options.target).ok_or_else(|| TargetError::NotAnAddress(options.target.clone()))?;
        let addresses = (host, port).to_socket_addrs();
        let addresses =
            addresses.map_err(|source| TargetError::Unresolved { host: host.to_owned(), source })?.collect();
        let tls = match (&options.ca_file, options.tls_insecure) {
            (Some(ca), _) => Some(TlsConnector::load(Some(ca), Verify::Full, None, PeerRules::default())?),
            (None, true) => Some(TlsConnector::load(None, Verify::None, None, PeerRules::default())?),
            (None, false) => None,
        };
        Ok(Self {
            name: options.target.clone(),
            host: host.to_owned(),
            addresses,
            user: options.user.clone(),
            password: options.password_file.as_deref().map_or_else(|| Ok(SecretBytes::default()), read_password)?,
            tls,
        })
    }
}

/// Host and port of `host:port`; an IPv6 address has brackets.
fn split_address(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let is_valid = !bare.is_empty() && (bare.len() < host.len() || !bare.contains(':'));
    Some((bare, port.parse().ok().filter(|port| *port > 0)?)).filter(|_| is_valid)
}

/// The content of the file without the line feed at its end.
fn read_password(path: &Path) -> Result<SecretBytes, TargetError> {
    let content = fs::read(path).map_err(|source| TargetError::Password { path: path.into(), source })?;
    let mut password = SecretBytes::from(content);
    while matches!(password.last(), Some(b'\n' | b'\r')) {
        password.truncate(password.len() - 1);
    }
    Ok(password)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_split_into_host_and_port() {
        assert_eq!(split_address("tidb.example:4000"), Some(("tidb.example", 4000)));
        assert_eq!(split_address("[::1]:4000"), Some(("::1", 4000)));
        for wrong in ["tidb", ":4000", "::1:4000", "tidb:", "tidb:0", "tidb:70000", "tidb:x"] {
            assert_eq!(split_address(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn password_is_read_without_its_line_end() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("password");
        fs::write(&path, "a b \r\n").expect("a file");
        assert_eq!(read_password(&path).expect("a password"), b"a b ");
        let error = read_password(&directory.path().join("none")).expect_err("no file");
        assert!(error.to_string().starts_with("cannot read the password in /"), "{error}");
    }
}
