//! The configuration of each extension, as JSON from the control plane. Unknown keys are rejected, and so is a control
//! plane of an incompatible version.

mod live;

pub(crate) use live::{
    CaptureConfig, KeepaliveConfig, LimitConfig, LiveConfig, LoginLogConfig, MigrationLimitsConfig, NodeInfo, Settings,
    StatementLogConfig, StatementLogFormat, StatementsConfig,
};

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// The version of this module. A compatible control plane has the same major and minor version.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The `session` network filter.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionFilterConfig {
    /// The highest number of clients of this Envoy; 0: no limit.
    pub(crate) max_connections: f64,
    pub(crate) login_limits: LoginLimitsConfig,
    /// Whether an access log shows what sessions report in their metadata.
    pub(crate) access_log: bool,
}

/// Limits for clients that have not finished their login. 0: no limit.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoginLimitsConfig {
    pub(crate) max_logins: f64,
    pub(crate) max_logins_per_address: f64,
    /// Bytes that the module keeps for these clients.
    pub(crate) max_bytes: f64,
    pub(crate) max_bytes_per_address: f64,
    /// Password decryptions per second.
    pub(crate) max_decryptions_per_second: f64,
    pub(crate) max_decryptions_per_second_per_address: f64,
    /// Networks whose addresses are each shared by many clients. Limits per address do not apply to them.
    pub(crate) shared_addresses: Vec<ipnet::IpNet>,
}

/// The `trusted_proxies` listener filter, whose networks do not change.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrustedProxiesConfig {
    /// Networks whose clients send a PROXY header.
    pub(crate) networks: Vec<ipnet::IpNet>,
}

/// The `proxy_protocol` listener filter: its initial rules.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProxyRulesConfig {
    /// Networks whose clients send a PROXY header.
    pub(crate) networks: Vec<ipnet::IpNet>,
    /// Whether other clients are disconnected.
    pub(crate) required: bool,
}

/// The `readiness` HTTP filter.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReadinessConfig {}

/// The transport socket for clients.
#[derive(Debug, Clone, PartialEq, Deserialize)]
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
    /// The RSA key for passwords that clients send without TLS. Empty: the module generates a key at start.
    pub(crate) rsa_key: PathBuf,
}

/// The transport socket for nodes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NodeSocketConfig {
    #[serde(with = "NodeTlsName")]
    pub(crate) tls: mysql_proto::login::NodeTls,
    /// Empty: the CA certificates of the system.
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
    /// Seconds for which a failed node gets no new sessions.
    pub(crate) eject_seconds: f64,
    /// Whether the module watches nodes by silent connections ([`crate::sentinels`]).
    pub(crate) sentinels: bool,
}

/// The load-balancing policy.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PolicyConfig {
    /// The group whose nodes are the hosts of the cluster. Empty: the nodes that belong to no named group.
    pub(crate) group: String,
    /// Migrations that may start per second; 0: none.
    pub(crate) moves_per_second: f64,
    /// Migrations that may run at the same time.
    pub(crate) moves_at_once: f64,
    /// Bytes that the states of one session may take.
    pub(crate) states_max_bytes: f64,
    /// Bytes that the states of all sessions may take together.
    pub(crate) states_budget_bytes: f64,
    /// How many nodes may fail before a new session is refused. Full nodes do not count.
    pub(crate) connect_attempts: f64,
}

impl PolicyConfig {
    pub(crate) fn migration_limits(&self) -> MigrationLimitsConfig {
        MigrationLimitsConfig {
            per_second: self.moves_per_second,
            concurrent: self.moves_at_once,
            state_bytes: self.states_max_bytes,
            total_state_bytes: self.states_budget_bytes,
        }
    }
}

/// The telemetry extension, which has no settings.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TelemetryConfig {}

// The names of the enum variants of `mysql_proto` and `tls` in JSON. Only serde uses these types.

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

/// A limit of which 0 means: no limit.
pub(crate) fn limit(value: f64) -> u64 {
    if value >= 1.0 { value as u64 } else { u64::MAX }
}

/// A time in seconds. Zero if the number is not a time.
pub(crate) fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or_default()
}

/// Checks that Envoy's configuration names the extension `part`.
pub(crate) fn check_name(part: &str, name: &str) -> Result<(), String> {
    if name == part { Ok(()) } else { Err(format!("this module has no part {name:?} here, only {part:?}")) }
}

/// Parses the configuration of an extension. An error text tells the operator what to do.
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

fn check_version(version: &str) -> Result<(), String> {
    let minor_version = |text: &str| text.splitn(3, '.').take(2).map(str::to_owned).collect::<Vec<_>>();
    if minor_version(version) == minor_version(VERSION) {
        return Ok(());
    }
    Err(format!(
        "the control plane is version {version}, and this module {VERSION}: run an Envoy image of the control plane's version"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line_log::LogTarget;

    fn session(json: &str) -> Result<SessionFilterConfig, String> {
        parse(json.as_bytes())
    }

    #[test]
    fn session_filter_configuration_is_parsed() {
        let limits = r#"{"max_logins":1,"max_logins_per_address":2,"max_bytes":3,"max_bytes_per_address":4,
            "max_decryptions_per_second":5,"max_decryptions_per_second_per_address":6,"shared_addresses":["10.0.0.0/8"]}"#;
        let read = session(&format!(
            r#"{{"version":"{VERSION}","max_connections":10,"access_log":true,"login_limits":{limits}}}"#
        ))
        .expect("a valid configuration");
        assert_eq!((read.max_connections, read.login_limits.max_logins_per_address), (10.0, 2.0));
        assert!(read.access_log);
    }

    #[test]
    fn live_configuration_is_parsed_with_and_without_published_values() {
        let live = |rest: &str| {
            LiveConfig::read(format!(r#"{{"version":"{VERSION}"{rest}}}"#).as_bytes()).map(|read| read.published)
        };
        assert!(live("").expect("a valid configuration").is_none());
        let nodes = r#"[{"endpoint":"10.0.0.1:4000","address":"a:4000","state":"active","version":"8.5.3","close":true,
            "moves":"1:00ff=3","wants":"1:00ff=4"},{"endpoint":"10.0.0.2:4000","address":"b:4000","state":"draining"}]"#;
        let whole = r#","published":{"group":"olap","login_timeout":1.5,"idle_timeout":0,"nodes":NODES}"#;
        let read = live(&whole.replace("NODES", nodes)).expect("a valid configuration").expect("published values");
        assert_eq!((read.group.as_str(), read.login_timeout, read.idle_timeout), ("olap", 1.5, 0.0));
        let [a, b] = read.nodes.as_slice() else { panic!("{:?}", read.nodes) };
        assert_eq!(
            (a.address.as_str(), a.close, a.moves.as_str(), a.wants.as_str()),
            ("a:4000", true, "1:00ff=3", "1:00ff=4")
        );
        assert_eq!((b.state.as_str(), b.close, b.version.as_str(), b.moves.as_str()), ("draining", false, "", ""));
        assert!(read.offload && read.migration, "both are on unless the control plane says otherwise");
        // The control plane omits these values: controlplane/config/sql.py.
        assert_eq!((read.wait_for_node, read.max_waiting_logins, read.ready), (5.0, 10_000.0, true));
        assert_eq!((read.login_log, read.statement_log), (None, None));
        let log = r#"{"path":"/log/logins.log","max_bytes":65536,"keep":2}"#;
        let read = live(&whole.replace("NODES", &format!(r#"[],"login_log":{log}"#))).expect("a valid configuration");
        let login_log = read.and_then(|published| published.login_log).expect("a login log");
        assert_eq!(login_log, LoginLogConfig { path: "/log/logins.log".into(), max_bytes: 65536.0, keep: 2.0 });
        let log = r#"{"path":"/log/s.log","format":"tidb","threshold":0.3,"sample":0.5,"errors":true,"redact":false,
            "max_bytes":65536,"keep":2}"#;
        let read =
            live(&whole.replace("NODES", &format!(r#"[],"statement_log":{log}"#))).expect("a valid configuration");
        let read = read.and_then(|published| published.statement_log).expect("a statement log");
        let target = LogTarget { path: "/log/s.log".into(), max_bytes: 65536, kept_files: 2 };
        assert_eq!((read.target(), read.format), (target, StatementLogFormat::Tidb));
        assert_eq!((read.threshold, read.sample, read.errors, read.redact), (0.3, 0.5, true, false));
        let off = whole.replace("NODES", r#"[],"offload":false,"migration":false"#);
        let read = live(&off).expect("a valid configuration").expect("published values");
        assert!(!read.offload && !read.migration);
        let offload_off = whole.replace("NODES", r#"[],"offload":false"#);
        let migration_only = live(&offload_off).expect("a valid configuration").expect("published values");
        assert!(!migration_only.offload && migration_only.migration);
        assert!(read.limits.is_empty());
        let limits = r#"[],"limits":[{"rule":"total","limit":20,"quotas":{"00ff":12},"unlisted":4},
            {"rule":"batch","user":"etl","network":"10.0.0.0/8","rate_limit":30.5,"rate":15.25}]"#;
        let read = live(&whole.replace("NODES", limits)).expect("a valid configuration").expect("published values");
        let [total, batch] = read.limits.as_slice() else { panic!("{:?}", read.limits) };
        assert_eq!((total.limit, total.quotas.get("00ff"), total.unlisted, total.rate), (20, Some(&12), 4, 0.0));
        assert_eq!((batch.user.as_deref(), batch.network.is_some(), batch.limit), (Some("etl"), true, 0));
        let no_boolean = whole.replace("NODES", r#"[],"offload":"off""#);
        for wrong in
            [no_boolean.as_str(), r#","nodes":[]"#, &whole.replace("NODES", r#"[{"endpoint":"10.0.0.1:4000"}]"#)]
        {
            assert!(live(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn live_settings_are_parsed_as_a_whole() {
        let whole = r#"{"max_connections":7,"login_limits":{"max_logins":1,"max_logins_per_address":2,"max_bytes":3,
            "max_bytes_per_address":4,"max_decryptions_per_second":5,"max_decryptions_per_second_per_address":6,
            "shared_addresses":[]},"proxy_rules":{"networks":["10.0.0.0/8"],"required":true},
            "client":{"tls":"optional","cert":"/c","key":"/k","client_ca":"","crl":"","min_version":"TLSv1.3",
            "compression":"passthrough","rsa_key":""},"client_keepalive":{"idle":60,"interval":10,"probes":3},
            "node":{"tls":"preferred","ca":"","verify":"full","crl":"","min_version":"TLSv1.2","cert":"","key":"",
            "proxy_protocol":"v2","allow_cleartext_backend":true,"eject_seconds":0.5,"sentinels":true},
            "node_keepalive":{"idle":61,"interval":4,"probes":6},"connect_timeout":1.5,"connect_attempts":4,
            "max_node_connections":9,"migration_limits":{"per_second":500,"concurrent":64,"state_bytes":4194304,
            "total_state_bytes":268435456}}"#;
        let live = |settings: &str| {
            let published = r#"{"group":"","login_timeout":8,"idle_timeout":0,"settings":SETTINGS,"nodes":[]}"#;
            let published = published.replace("SETTINGS", settings);
            LiveConfig::read(format!(r#"{{"version":"{VERSION}","published":{published}}}"#).as_bytes())
                .map(|read| read.published.and_then(|published| published.settings))
        };
        let settings = live(whole).expect("a valid configuration").expect("settings");
        assert_eq!((settings.max_connections, settings.connect_timeout), (7.0, 1.5));
        assert!(settings.proxy_rules.required && settings.client.tls == mysql_proto::login::ClientTls::Optional);
        assert_eq!((settings.node.proxy_protocol, settings.node_keepalive.idle), (ProxyProtocol::V2, 61.0));
        for (before, after) in [(r#""max_connections":7,"#, ""), (r#""required":true"#, r#""required":true,"more":1"#)]
        {
            assert!(live(&whole.replace(before, after)).is_err(), "{before}");
        }
    }

    #[test]
    fn policy_configuration_requires_a_group() {
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
    fn another_patch_version_is_compatible_and_another_minor_version_is_not() {
        assert_eq!(check_version("0.1.99"), Ok(()));
        let refused = check_version("0.2.0").expect_err("another minor version");
        assert!(refused.contains("0.2.0") && refused.contains(VERSION), "{refused}");
    }

    #[test]
    fn unknown_keys_missing_keys_and_invalid_json_are_rejected() {
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
