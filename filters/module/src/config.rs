//! What the control plane configures, as JSON. Unknown keys are refused, and so is a control plane that does not fit.

use std::path::PathBuf;
use std::time::Duration;

use migration::rate_limit::RateLimit;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// The version of this module; major and minor are equal to those of a control plane that fits.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The `session` network filter.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionFilterConfig {
    /// Most clients of this Envoy; 0: no limit.
    pub(crate) max_connections: f64,
    pub(crate) login_limits: LoginLimitsConfig,
    /// Whether an access log shows what sessions report in their metadata.
    pub(crate) access_log: bool,
}

/// Limits of clients that have not finished their login; 0: no limit.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoginLimitsConfig {
    pub(crate) max_logins: f64,
    pub(crate) max_logins_per_address: f64,
    /// Bytes of theirs that are kept.
    pub(crate) max_bytes: f64,
    pub(crate) max_bytes_per_address: f64,
    /// Passwords that are decrypted in a second.
    pub(crate) max_decryptions_per_second: f64,
    pub(crate) max_decryptions_per_second_per_address: f64,
    /// Networks of addresses that many clients share: they have no limits per address.
    pub(crate) shared_addresses: Vec<ipnet::IpNet>,
}

/// The `trusted_proxies` listener filter.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrustedProxiesConfig {
    /// Networks whose clients send a PROXY header.
    pub(crate) networks: Vec<ipnet::IpNet>,
}

/// The `live_config` listener filter: what may change while Envoy runs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LiveConfig {
    /// None: a listener begins without it, until the control plane sends it.
    pub(crate) published: Option<Published>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Published {
    /// The group that the nodes are of.
    pub(crate) group: String,
    /// Seconds that a login may take.
    pub(crate) login_timeout: f64,
    /// Seconds without a command after which a session is ended; 0: never.
    pub(crate) idle_timeout: f64,
    /// Whether the module may handle the events of established connections instead of Envoy.
    #[serde(default = "is_on_by_default")]
    pub(crate) offload: bool,
    /// Whether sessions may migrate.
    #[serde(default = "is_on_by_default")]
    pub(crate) migration: bool,
    pub(crate) nodes: Vec<NodeInfo>,
}

fn is_on_by_default() -> bool {
    true
}

/// A node as the control plane publishes it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NodeInfo {
    /// `ip:port`, as Envoy knows it.
    pub(crate) endpoint: String,
    /// The control plane's name for it.
    pub(crate) address: String,
    pub(crate) state: String,
    /// Sessions that are still there are to be ended.
    #[serde(default)]
    pub(crate) close: bool,
    /// Empty: the control plane does not know it.
    #[serde(default)]
    pub(crate) version: String,
    /// How many sessions are to leave it although it stays in service (`migration::quota`); empty: none.
    #[serde(default)]
    pub(crate) moves: String,
    /// How many of those of other nodes it is to get; empty: none.
    #[serde(default)]
    pub(crate) wants: String,
}

/// The socket to clients.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClientSocketConfig {
    #[serde(with = "ClientTlsName")]
    pub(crate) tls: mysql_proto::login::ClientTls,
    pub(crate) cert: PathBuf,
    pub(crate) key: PathBuf,
    /// Empty: clients need no certificate.
    pub(crate) client_ca: PathBuf,
    /// Revocation lists for client certificates; empty: none.
    pub(crate) crl: PathBuf,
    #[serde(with = "MinVersionName")]
    pub(crate) min_version: tls::MinVersion,
    #[serde(with = "CompressionName")]
    pub(crate) compression: mysql_proto::login::Compression,
    /// Key with which clients without TLS encrypt passwords; empty: one is made at start.
    pub(crate) rsa_key: PathBuf,
}

/// The socket to nodes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NodeSocketConfig {
    #[serde(with = "NodeTlsName")]
    pub(crate) tls: mysql_proto::login::NodeTls,
    /// Empty: the system's.
    pub(crate) ca: PathBuf,
    #[serde(with = "VerifyName")]
    pub(crate) verify: tls::Verify,
    /// Revocation lists for nodes' certificates; empty: none.
    pub(crate) crl: PathBuf,
    #[serde(with = "MinVersionName")]
    pub(crate) min_version: tls::MinVersion,
    pub(crate) cert: PathBuf,
    pub(crate) key: PathBuf,
    pub(crate) proxy_protocol: ProxyProtocol,
    pub(crate) allow_cleartext_backend: bool,
    /// Seconds for which a node that cannot be used gets no new sessions.
    pub(crate) eject_seconds: f64,
    /// Whether nodes are watched by silent connections.
    pub(crate) sentinels: bool,
}

impl NodeSocketConfig {
    pub(crate) fn ejection(&self) -> Duration {
        Duration::try_from_secs_f64(self.eject_seconds).unwrap_or_default()
    }
}

/// The load-balancing policy.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PolicyConfig {
    /// The group of nodes that its cluster is for; empty: those that are in no other.
    pub(crate) group: String,
    /// Sessions that may begin to move to another node in a second; 0: none ever moves.
    pub(crate) moves_per_second: f64,
    /// Sessions that may be moving at the same time.
    pub(crate) moves_at_once: f64,
    /// Bytes that the states of one session may have.
    pub(crate) states_max_bytes: f64,
    /// Bytes that the states of all sessions may take together.
    pub(crate) states_budget_bytes: f64,
    /// How many nodes may fail before a new session is refused. Nodes that are full do not count.
    pub(crate) connect_attempts: f64,
}

impl PolicyConfig {
    pub(crate) fn migration_rate(&self) -> RateLimit {
        RateLimit { per_second: self.moves_per_second, max_concurrent: self.moves_at_once as usize }
    }
}

/// Telemetry has nothing to configure.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TelemetryConfig {}

// How the choices of `mysql_proto` and `tls` are written; these types themselves are never made.

#[derive(Deserialize)]
#[serde(remote = "mysql_proto::login::ClientTls", rename_all = "lowercase")]
enum ClientTlsName {
    Disabled,
    Optional,
    Required,
}

#[derive(Deserialize)]
#[serde(remote = "mysql_proto::login::NodeTls", rename_all = "lowercase")]
enum NodeTlsName {
    Disabled,
    Preferred,
    Required,
}

#[derive(Deserialize)]
#[serde(remote = "mysql_proto::login::Compression", rename_all = "lowercase")]
enum CompressionName {
    Off,
    Passthrough,
}

#[derive(Deserialize)]
#[serde(remote = "tls::Verify", rename_all = "lowercase")]
enum VerifyName {
    Full,
    Ca,
    None,
}

#[derive(Deserialize)]
#[serde(remote = "tls::MinVersion")]
enum MinVersionName {
    #[serde(rename = "TLSv1.2")]
    Tls12,
    #[serde(rename = "TLSv1.3")]
    Tls13,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ProxyProtocol {
    Off,
    V1,
    V2,
}

/// That a configuration is for the part of the module which is meant.
pub(crate) fn check_name(part: &str, name: &str) -> Result<(), String> {
    if name == part { Ok(()) } else { Err(format!("this module has no part {name:?} here, only {part:?}")) }
}

/// A part's configuration from JSON. The text of an error says what to do.
pub(crate) fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, String> {
    let mut tree: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(json).map_err(|error| format!("it is no JSON object: {error}"))?;
    match tree.remove("version") {
        Some(serde_json::Value::String(version)) => check_version(&version)?,
        _ => {
            return Err("it has no `version`: the control plane is too old for this module".to_owned());
        }
    }
    serde_json::from_value(serde_json::Value::Object(tree))
        .map_err(|error| format!("{error}; control plane and module do not fit"))
}

impl LiveConfig {
    /// As [`parse`], but in one pass: it has thousands of nodes, and Envoy's main thread waits for it.
    pub(crate) fn read(json: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Whole {
            version: String,
            published: Option<Published>,
        }
        match serde_json::from_slice::<Whole>(json) {
            Ok(Whole { version, published }) => check_version(&version).map(|()| Self { published }),
            // For the same error messages.
            Err(_) => parse(json),
        }
    }
}

fn check_version(version: &str) -> Result<(), String> {
    let line = |text: &str| text.splitn(3, '.').take(2).map(str::to_owned).collect::<Vec<_>>();
    if line(version) == line(VERSION) {
        return Ok(());
    }
    Err(format!(
        "the control plane is version {version}, and this module {VERSION}: run an Envoy image of the control plane's version"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(json: &str) -> Result<SessionFilterConfig, String> {
        parse(json.as_bytes())
    }

    #[test]
    fn a_whole_configuration_is_read() {
        let limits = r#"{"max_logins":1,"max_logins_per_address":2,"max_bytes":3,"max_bytes_per_address":4,
            "max_decryptions_per_second":5,"max_decryptions_per_second_per_address":6,"shared_addresses":["10.0.0.0/8"]}"#;
        let read = session(&format!(r#"{{"version":"{VERSION}","max_connections":10,"login_limits":{limits}}}"#))
            .expect("it fits");
        assert_eq!((read.max_connections, read.login_limits.max_logins_per_address), (10.0, 2.0));
    }

    #[test]
    fn what_may_change_is_read_with_the_nodes_and_without_anything() {
        let live = |rest: &str| {
            LiveConfig::read(format!(r#"{{"version":"{VERSION}"{rest}}}"#).as_bytes()).map(|read| read.published)
        };
        assert!(live("").expect("a listener begins with it").is_none());
        let nodes = r#"[{"endpoint":"10.0.0.1:4000","address":"a:4000","state":"active","version":"8.5.3","close":true,
            "moves":"1:00ff=3","wants":"1:00ff=4"},{"endpoint":"10.0.0.2:4000","address":"b:4000","state":"draining"}]"#;
        let whole = r#","published":{"group":"olap","login_timeout":1.5,"idle_timeout":0,"nodes":NODES}"#;
        let read = live(&whole.replace("NODES", nodes)).expect("it fits").expect("it has all");
        assert_eq!((read.group.as_str(), read.login_timeout, read.idle_timeout), ("olap", 1.5, 0.0));
        let [a, b] = read.nodes.as_slice() else { panic!("{:?}", read.nodes) };
        assert_eq!(
            (a.address.as_str(), a.close, a.moves.as_str(), a.wants.as_str()),
            ("a:4000", true, "1:00ff=3", "1:00ff=4")
        );
        assert_eq!((b.state.as_str(), b.close, b.version.as_str(), b.moves.as_str()), ("draining", false, "", ""));
        assert!(read.offload && read.migration, "both are on unless the control plane says otherwise");
        let off = whole.replace("NODES", r#"[],"offload":false,"migration":false"#);
        let read = live(&off).expect("it fits").expect("it has all");
        assert!(!read.offload && !read.migration);
        let only_offload =
            live(&whole.replace("NODES", r#"[],"offload":false"#)).expect("it fits").expect("it has all");
        assert!(!only_offload.offload && only_offload.migration);
        let no_boolean = whole.replace("NODES", r#"[],"offload":"off""#);
        for wrong in
            [no_boolean.as_str(), r#","nodes":[]"#, &whole.replace("NODES", r#"[{"endpoint":"10.0.0.1:4000"}]"#)]
        {
            assert!(live(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_policy_is_told_its_group() {
        let policy = |keys: &str| {
            let memory = r#""states_max_bytes":4194304,"states_budget_bytes":268435456"#;
            let json = format!(
                r#"{{"version":"{VERSION}",{keys}"moves_per_second":2,"moves_at_once":1,"connect_attempts":3,{memory}}}"#
            );
            parse::<PolicyConfig>(json.as_bytes()).map(|policy| policy.group)
        };
        assert_eq!(policy(r#""group":"olap","#), Ok("olap".to_owned()));
        assert_eq!(policy(r#""group":"","#), Ok(String::new()));
        assert!(policy("").is_err_and(|refused| refused.contains("group")));
    }

    #[test]
    fn a_later_patch_fits_and_another_minor_does_not() {
        assert_eq!(check_version("0.1.99"), Ok(()));
        let refused = check_version("0.2.0").expect_err("another minor version");
        assert!(refused.contains("0.2.0") && refused.contains(VERSION), "{refused}");
    }

    #[test]
    fn unknown_missing_and_absent_are_refused() {
        for (json, word) in [
            (r#"{"version":"0.1.0","max_connections":1,"speed":1}"#, "speed"),
            (r#"{"version":"0.1.0"}"#, "max_connections"),
            (r#"{"max_connections":1}"#, "version"),
            ("[]", "no JSON object"),
            ("", "no JSON object"),
        ] {
            let refused = session(json).expect_err(json);
            assert!(refused.contains(word), "{json}: {refused}");
        }
    }
}
