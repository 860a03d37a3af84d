//! The settings that the control plane changes while Envoy runs. They are a part of the live configuration
//! ([`crate::live_config`]), and take precedence over those of listeners and clusters.
//!
//! If the TLS files for clients cannot be used, the TLS options for clients stay as they are, and all other settings
//! apply; the same goes for nodes. The module reports the reason to the control plane, and tries again until the files
//! can be used.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use migration::rate_limit::RateLimit;
use mysql_proto::login::Compression;
use socket2::TcpKeepalive;

use crate::config::{self, KeepaliveConfig, MigrationLimitsConfig, ProxyProtocol, limit, seconds};
use crate::login_limits::LoginLimits;
use crate::tls_options::{ClientTlsOptions, NodeTlsOptions};
use crate::trusted_proxies::ProxyRules;
use crate::{migration_scheduler, sentinels, states_memory};

/// The settings in force. They never change; a change replaces them as a whole.
pub(crate) struct LiveSettings {
    pub(crate) max_clients: u64,
    pub(crate) login_limits: Arc<LoginLimits>,
    pub(crate) proxy_rules: ProxyRules,
    /// None: those of the listener.
    pub(crate) client_tls: Option<Arc<ClientTlsOptions>>,
    pub(crate) compression: Compression,
    pub(crate) client_keepalive: TcpKeepalive,
    /// None: those of the cluster.
    pub(crate) node_tls: Option<Arc<NodeTlsOptions>>,
    /// The PROXY header for nodes.
    pub(crate) proxy_protocol: ProxyProtocol,
    /// How long one ejection of a node lasts.
    pub(crate) ejection: Duration,
    pub(crate) node_keepalive: TcpKeepalive,
    /// How long a node may take to greet.
    pub(crate) connect_timeout: Duration,
    /// How many nodes may fail before a session gets no other node.
    pub(crate) connect_attempts: usize,
    pub(crate) max_node_connections: u64,
}

static CURRENT: RwLock<Option<Arc<LiveSettings>>> = RwLock::new(None);

/// The settings that were published last, and why a part of them does not apply.
#[derive(Default)]
struct Published {
    config: Option<config::Settings>,
    /// Why the TLS options for clients do not apply. Empty: they do.
    client_error: String,
    /// The same for nodes.
    node_error: String,
}

static PUBLISHED: Mutex<Published> =
    Mutex::new(Published { config: None, client_error: String::new(), node_error: String::new() });

fn published() -> MutexGuard<'static, Published> {
    PUBLISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The settings in force. None: the control plane has sent none; those of listeners and clusters apply.
pub(crate) fn current() -> Option<Arc<LiveSettings>> {
    CURRENT.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Applies published settings. Called on Envoy's main thread.
pub(crate) fn apply(config: config::Settings) {
    let mut published = published();
    // Each change of a node publishes the settings again, and each group does.
    if published.config.as_ref() != Some(&config) {
        replace_current(&config, &mut published);
        published.config = Some(config);
    }
}

/// Tries again to use the files that could not be used. Called once a second on Envoy's main thread.
pub(crate) fn retry() {
    let mut published = published();
    if published.client_error.is_empty() && published.node_error.is_empty() {
        return;
    }
    if let Some(config) = published.config.take() {
        replace_current(&config, &mut published);
        published.config = Some(config);
    }
}

fn replace_current(config: &config::Settings, published: &mut Published) {
    let client_tls = ClientTlsOptions::load(&config.client);
    report(&mut published.client_error, "client", client_tls.as_ref().err());
    let node_tls = NodeTlsOptions::load(&config.node);
    report(&mut published.node_error, "node", node_tls.as_ref().err());
    let settings = LiveSettings {
        max_clients: limit(config.max_connections),
        login_limits: Arc::new(LoginLimits::new(&config.login_limits)),
        proxy_rules: ProxyRules::from(&config.proxy_rules),
        client_tls: client_tls.ok().or_else(ClientTlsOptions::last_loaded),
        compression: config.client.compression,
        client_keepalive: keepalive(&config.client_keepalive),
        node_tls: node_tls.ok().or_else(NodeTlsOptions::last_loaded),
        proxy_protocol: config.node.proxy_protocol,
        ejection: seconds(config.node.eject_seconds),
        node_keepalive: keepalive(&config.node_keepalive),
        connect_timeout: seconds(config.connect_timeout),
        connect_attempts: config.connect_attempts as usize,
        max_node_connections: limit(config.max_node_connections),
    };
    sentinels::configure(config.node.sentinels, config.node.proxy_protocol);
    set_migration_limits(&config.migration_limits);
    // The old settings are dropped after the lock is released.
    let _before = CURRENT.write().unwrap_or_else(PoisonError::into_inner).replace(Arc::new(settings));
}

/// Sets the limits of all migrations of this Envoy.
pub(crate) fn set_migration_limits(limits: &MigrationLimitsConfig) {
    migration_scheduler::configure(RateLimit {
        per_second: limits.per_second,
        max_concurrent: limits.concurrent as usize,
    });
    states_memory::set_limits(limits.state_bytes as usize, limits.total_state_bytes as usize);
}

/// Reports why the TLS options of a side are not in force, once for each reason.
fn report(known: &mut String, side: &str, error: Option<&String>) {
    let error = error.cloned().unwrap_or_default();
    if error == *known {
        return;
    }
    if error.is_empty() {
        envoy_abi::log!(Info, "the changed TLS settings of the {side} side are in force");
    } else {
        let reason = format!("{error}; the previous TLS settings stay in force");
        envoy_abi::log!(Error, "the changed TLS settings of the {side} side cannot be used: {reason}");
        envoy_abi::module::report_rejected(side, reason);
    }
    *known = error;
}

fn keepalive(config: &KeepaliveConfig) -> TcpKeepalive {
    TcpKeepalive::new()
        .with_time(seconds(config.idle))
        .with_interval(seconds(config.interval))
        .with_retries(config.probes as u32)
}
