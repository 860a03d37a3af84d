//! TLS with clients and with nodes: the modes, and what is loaded from certificate files.
//!
//! Listeners and clusters have initial options. The control plane changes them while Envoy runs
//! ([`crate::live_settings`]). Equal options are loaded once, and only the latest ones are refreshed from their files.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use mysql_proto::login::{ClientTls, NodeTls};
use tls::{PeerRules, RsaPasswordKey, TlsAcceptor, TlsConnector};

use crate::config::{ClientSocketConfig, NodeSocketConfig};
use crate::refresh::{Refresher, non_empty_path};

/// The key of all listeners that have no configured key. It stays the same, since clients may have cached its public
/// part, and generating a key takes long.
static PASSWORD_KEY: OnceLock<Arc<RsaPasswordKey>> = OnceLock::new();

static LAST_CLIENT_OPTIONS: LastLoaded<ClientTlsOptions> = LastLoaded::new();
static LAST_NODE_OPTIONS: LastLoaded<NodeTlsOptions> = LastLoaded::new();

/// TLS with clients.
pub(crate) struct ClientTlsOptions {
    config: ClientSocketConfig,
    pub(crate) mode: ClientTls,
    /// None: TLS is disabled.
    pub(crate) certificate: Option<Arc<TlsAcceptor>>,
    pub(crate) password_key: Arc<RsaPasswordKey>,
    refresher: Option<Refresher>,
}

impl ClientTlsOptions {
    /// # Errors
    /// A file cannot be used. The error names it.
    pub(crate) fn load(config: &ClientSocketConfig) -> Result<Arc<Self>, String> {
        LAST_CLIENT_OPTIONS.load(|last| last.config == *config, || Self::read(config), |last| last.refresher.as_ref())
    }

    /// The options that were loaded last, if they are in use.
    pub(crate) fn last_loaded() -> Option<Arc<Self>> {
        LAST_CLIENT_OPTIONS.get()
    }

    fn read(config: &ClientSocketConfig) -> Result<Self, String> {
        let certificate = if config.tls == ClientTls::Disabled {
            None
        } else {
            let rules = PeerRules { min_version: config.min_version, crl: non_empty_path(&config.crl) };
            let loaded = TlsAcceptor::load(&config.cert, &config.key, non_empty_path(&config.client_ca), rules);
            Some(Arc::new(loaded.map_err(|error| error.to_string())?))
        };
        let password_key = match non_empty_path(&config.rsa_key) {
            Some(path) => Arc::new(RsaPasswordKey::load(path).map_err(|error| error.to_string())?),
            None => Arc::clone(PASSWORD_KEY.get_or_init(|| Arc::new(RsaPasswordKey::generate()))),
        };
        let refresher = certificate.clone().map(|side| Refresher::new("new clients", move || side.refresh()));
        Ok(Self { config: config.clone(), mode: config.tls, certificate, password_key, refresher })
    }
}

/// TLS with nodes.
pub(crate) struct NodeTlsOptions {
    config: NodeSocketConfig,
    pub(crate) mode: NodeTls,
    /// None: TLS is disabled.
    pub(crate) connector: Option<Arc<TlsConnector>>,
    pub(crate) allow_cleartext_backend: bool,
    refresher: Option<Refresher>,
}

impl NodeTlsOptions {
    /// # Errors
    /// A file cannot be used. The error names it.
    pub(crate) fn load(config: &NodeSocketConfig) -> Result<Arc<Self>, String> {
        LAST_NODE_OPTIONS.load(|last| last.config == *config, || Self::read(config), |last| last.refresher.as_ref())
    }

    /// The options that were loaded last, if they are in use.
    pub(crate) fn last_loaded() -> Option<Arc<Self>> {
        LAST_NODE_OPTIONS.get()
    }

    fn read(config: &NodeSocketConfig) -> Result<Self, String> {
        let connector = if config.tls == NodeTls::Disabled {
            None
        } else {
            let pair = non_empty_path(&config.cert).zip(non_empty_path(&config.key));
            let rules = PeerRules { min_version: config.min_version, crl: non_empty_path(&config.crl) };
            let loaded = TlsConnector::load(non_empty_path(&config.ca), config.verify, pair, rules);
            Some(Arc::new(loaded.map_err(|error| error.to_string())?))
        };
        let refresher =
            connector.clone().map(|side| Refresher::new("new connections to nodes", move || side.refresh()));
        Ok(Self {
            config: config.clone(),
            mode: config.tls,
            connector,
            allow_cleartext_backend: config.allow_cleartext_backend,
            refresher,
        })
    }
}

/// The value that was loaded last, as long as it is in use.
struct LastLoaded<T>(Mutex<Weak<T>>);

impl<T> LastLoaded<T> {
    const fn new() -> Self {
        Self(Mutex::new(Weak::new()))
    }

    fn get(&self) -> Option<Arc<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// Returns the last value if `is_same`, or a new one. Then the last one is no longer refreshed, though sessions may
    /// still use it.
    fn load(
        &self,
        is_same: impl FnOnce(&T) -> bool,
        read: impl FnOnce() -> Result<T, String>,
        refresher: impl FnOnce(&T) -> Option<&Refresher>,
    ) -> Result<Arc<T>, String> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = last.upgrade();
        if let Some(before) = before.as_ref().filter(|before| is_same(before)) {
            return Ok(Arc::clone(before));
        }
        let loaded = Arc::new(read()?);
        if let Some(refresher) = before.as_deref().and_then(refresher) {
            refresher.stop();
        }
        *last = Arc::downgrade(&loaded);
        Ok(loaded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_options_are_loaded_once_while_they_are_in_use() {
        let last = LastLoaded::<u32>::new();
        let load = |value: u32| last.load(|before| *before == value, || Ok(value), |_| None).expect("a value");
        let first = load(1);
        assert!(Arc::ptr_eq(&first, &load(1)) && last.get().is_some_and(|got| Arc::ptr_eq(&got, &first)));
        assert_eq!(*load(2), 2);
        assert!(last.get().is_none(), "nothing uses it any more");
    }

    #[test]
    fn value_that_cannot_be_loaded_leaves_the_last_one() {
        let last = LastLoaded::<u32>::new();
        let first = last.load(|_| false, || Ok(1), |_| None).expect("a value");
        let refused = last.load(|_| false, || Err("no file".to_owned()), |_| None);
        assert_eq!(refused, Err("no file".to_owned()));
        assert!(last.get().is_some_and(|got| Arc::ptr_eq(&got, &first)));
    }
}
