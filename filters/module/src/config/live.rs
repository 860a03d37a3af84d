//! The configuration that may change while Envoy runs.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use serde::Deserialize;

use super::{ClientSocketConfig, LoginLimitsConfig, NodeSocketConfig, ProxyRulesConfig, check_version, parse};
use crate::line_log::LogTarget;

/// The `live_config` listener filter: the configuration that may change while Envoy runs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LiveConfig {
    /// None: the configuration that a listener starts with, until the control plane has sent another one.
    pub(crate) published: Option<Published>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Published {
    /// The group that the nodes belong to.
    pub(crate) group: String,
    /// Seconds that a login may take.
    pub(crate) login_timeout: f64,
    /// Seconds without a command after which a session is closed; 0: never.
    pub(crate) idle_timeout: f64,
    /// Seconds for which a login waits for a node; 0: it does not wait.
    #[serde(default = "default_wait_for_node")]
    pub(crate) wait_for_node: f64,
    /// The highest number of logins that wait for a node.
    #[serde(default = "default_max_waiting_logins")]
    pub(crate) max_waiting_logins: f64,
    /// Whether this Envoy is ready for new clients, as far as operators decide.
    #[serde(default = "is_on_by_default")]
    pub(crate) ready: bool,
    /// Whether this Envoy drains.
    #[serde(default)]
    pub(crate) drain: bool,
    /// Seconds for which an Envoy that drains still serves new clients.
    #[serde(default)]
    pub(crate) end_wait: f64,
    /// Seconds after which an Envoy that drains closes the sessions that are left.
    #[serde(default = "default_end_timeout")]
    pub(crate) end_timeout: f64,
    /// Whether the module may handle the events of established connections instead of Envoy.
    #[serde(default = "is_on_by_default")]
    pub(crate) offload: bool,
    /// Whether sessions may migrate.
    #[serde(default = "is_on_by_default")]
    pub(crate) migration: bool,
    /// None: logins are not logged.
    #[serde(default)]
    pub(crate) login_log: Option<LoginLogConfig>,
    /// None: statements are not logged.
    #[serde(default)]
    pub(crate) statement_log: Option<StatementLogConfig>,
    /// None: no statistics of statements are collected.
    #[serde(default)]
    pub(crate) statements: Option<StatementsConfig>,
    /// None: no traffic is captured.
    #[serde(default)]
    pub(crate) capture: Option<CaptureConfig>,
    /// How many bytes of requests all sessions may hold for the rules. None: control planes of earlier builds.
    #[serde(default)]
    pub(crate) max_held_bytes: Option<f64>,
    /// Limits of client connections over all Envoys together.
    #[serde(default)]
    pub(crate) limits: Vec<LimitConfig>,
    /// Rules for statements. They are read later, so that a rule that this module does not know rejects no state of
    /// nodes.
    #[serde(default)]
    pub(crate) rules: Vec<serde_json::Value>,
    /// The settings of this Envoy. None: those of its listeners and clusters apply.
    #[serde(default)]
    pub(crate) settings: Option<Settings>,
    pub(crate) nodes: Vec<NodeInfo>,
}

/// The login log.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoginLogConfig {
    pub(crate) path: PathBuf,
    /// The size at which the module rotates the file; 0: never.
    pub(crate) max_bytes: f64,
    /// How many rotated files are kept.
    pub(crate) keep: f64,
}

impl From<LoginLogConfig> for LogTarget {
    fn from(config: LoginLogConfig) -> Self {
        Self { path: config.path, max_bytes: config.max_bytes as u64, kept_files: config.keep as u32 }
    }
}

/// The log of statements.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StatementLogConfig {
    pub(crate) path: PathBuf,
    pub(crate) format: StatementLogFormat,
    /// Statements that take at least as many seconds are logged.
    pub(crate) threshold: f64,
    /// The fraction of these statements that is logged.
    pub(crate) sample: f64,
    /// Whether failed statements are all logged.
    pub(crate) errors: bool,
    /// Whether literals are replaced.
    pub(crate) redact: bool,
    /// The size at which the module rotates the file; 0: never.
    pub(crate) max_bytes: f64,
    /// How many rotated files are kept.
    pub(crate) keep: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum StatementLogFormat {
    Json,
    /// That of TiDB's slow log.
    Tidb,
}

impl StatementLogConfig {
    pub(crate) fn target(&self) -> LogTarget {
        LogTarget { path: self.path.clone(), max_bytes: self.max_bytes as u64, kept_files: self.keep as u32 }
    }
}

/// The statistics of statements.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StatementsConfig {
    /// The highest number of rows with a statement in a report.
    pub(crate) max_rows: f64,
    /// Seconds between two reports.
    pub(crate) interval: f64,
}

/// A capture of traffic.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CaptureConfig {
    pub(crate) name: String,
    /// The directory of all captures.
    pub(crate) directory: PathBuf,
    /// When the capture ends, in seconds since 1970. The control plane never gives two captures the same time.
    until: f64,
    /// Empty: all.
    pub(crate) users: Vec<String>,
    /// Empty: all.
    pub(crate) groups: Vec<String>,
    /// The size of the files at which the capture ends; 0: no limit.
    pub(crate) max_bytes: f64,
    /// The id of this Envoy.
    pub(crate) envoy: String,
}

impl CaptureConfig {
    /// When the capture ends, in milliseconds since 1970.
    pub(crate) fn until_milliseconds(&self) -> u64 {
        (self.until * 1000.0).round() as u64
    }

    pub(crate) fn end(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_millis(self.until_milliseconds())
    }

    /// Whether this is the same capture, although its settings may have changed.
    pub(crate) fn is_same_capture(&self, other: &Self) -> bool {
        self.name == other.name && self.until == other.until
    }
}

/// A limit of client connections over all Envoys together, and the quotas of the Envoy processes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitConfig {
    pub(crate) rule: String,
    /// None: the connections of all users count.
    #[serde(default)]
    pub(crate) user: Option<String>,
    /// None: the connections from all networks count.
    #[serde(default)]
    pub(crate) network: Option<ipnet::IpNet>,
    /// Connections to all Envoys together; 0: no limit.
    #[serde(default)]
    pub(crate) limit: u64,
    /// Connections to each Envoy process, by [`crate::telemetry::instance`].
    #[serde(default)]
    pub(crate) quotas: HashMap<String, u64>,
    /// Connections to an Envoy process without a quota of its own: the control plane does not know it yet.
    #[serde(default)]
    pub(crate) unlisted: u64,
    /// New connections per second to all Envoys together; 0: no limit.
    #[serde(default)]
    pub(crate) rate_limit: f64,
    /// New connections per second to each Envoy process.
    #[serde(default)]
    pub(crate) rate: f64,
}

/// The settings that change while Envoy runs. Listeners and clusters have most of them, too: for the time until the
/// first live configuration arrives, and for control planes that do not send these settings.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    /// The highest number of clients of this Envoy; 0: no limit.
    pub(crate) max_connections: f64,
    pub(crate) login_limits: LoginLimitsConfig,
    pub(crate) proxy_rules: ProxyRulesConfig,
    pub(crate) client: ClientSocketConfig,
    pub(crate) client_keepalive: KeepaliveConfig,
    pub(crate) node: NodeSocketConfig,
    pub(crate) node_keepalive: KeepaliveConfig,
    /// Seconds until a node must have greeted.
    pub(crate) connect_timeout: f64,
    /// How many nodes may fail before a new session is refused. Full nodes do not count.
    pub(crate) connect_attempts: f64,
    /// The highest number of connections of this Envoy to nodes; 0: no limit.
    pub(crate) max_node_connections: f64,
    pub(crate) migration_limits: MigrationLimitsConfig,
}

/// TCP keepalive.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeepaliveConfig {
    /// Seconds of silence before the first probe.
    pub(crate) idle: f64,
    /// Seconds between two probes.
    pub(crate) interval: f64,
    /// The number of unanswered probes after which the connection is closed.
    pub(crate) probes: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MigrationLimitsConfig {
    /// Migrations that may start per second; 0: none.
    pub(crate) per_second: f64,
    /// Migrations that may run at the same time.
    pub(crate) concurrent: f64,
    /// Bytes that the states of one session may take.
    pub(crate) state_bytes: f64,
    /// Bytes that the states of all sessions may take together.
    pub(crate) total_state_bytes: f64,
}

// Control planes of earlier builds do not send these keys.
fn default_wait_for_node() -> f64 {
    5.0
}

fn default_max_waiting_logins() -> f64 {
    10_000.0
}

fn default_end_timeout() -> f64 {
    30.0
}

fn is_on_by_default() -> bool {
    true
}

/// A node as the control plane publishes it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NodeInfo {
    /// `ip:port` of Envoy's endpoint.
    pub(crate) endpoint: String,
    /// The control plane's name for the node.
    pub(crate) address: String,
    pub(crate) state: String,
    /// Whether the node's remaining sessions must be closed.
    #[serde(default)]
    pub(crate) close: bool,
    /// The node's release. Empty: the control plane does not know the release.
    #[serde(default)]
    pub(crate) version: String,
    /// How many sessions rebalancing migrates from the node, which stays in service (`migration::quota`). Empty: none.
    #[serde(default)]
    pub(crate) moves: String,
    /// How many sessions rebalancing migrates to the node (`migration::quota`). Empty: none.
    #[serde(default)]
    pub(crate) wants: String,
}

impl LiveConfig {
    /// Like [`parse`], but in one pass: the configuration has thousands of nodes, and Envoy's main thread waits.
    pub(crate) fn read(json: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Versioned {
            version: String,
            published: Option<Published>,
        }
        match serde_json::from_slice::<Versioned>(json) {
            Ok(Versioned { version, published }) => check_version(&version).map(|()| Self { published }),
            // This gives the same error messages as for other extensions.
            Err(_) => parse(json),
        }
    }
}
