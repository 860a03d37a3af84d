//! Limits of statements: what one rule allows.

use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;
use std::time::Duration;

use crate::answer::Answer;
use crate::config::{LimitConfig, LimitScope};

/// The keys of the hash, random for each process.
static HASH: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// A limit that a statement must pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitKey {
    /// The index of the rule.
    pub rule: usize,
    /// Statements with the same bucket share a count. It depends on the name and the limit of the rule, so a count stays
    /// when other rules change.
    pub(crate) bucket: u64,
}

#[derive(Debug)]
pub(crate) struct Limit {
    /// The time of one statement. None: there is no rate.
    pub(crate) interval: Option<Duration>,
    /// Statements that may follow at once after a pause.
    pub(crate) burst: f64,
    pub(crate) concurrent: u32,
    pub(crate) wait: Duration,
    pub(crate) rate_answer: Answer,
    pub(crate) concurrency_answer: Answer,
    /// The bucket for the whole rule.
    pub(crate) base: u64,
    by_user: bool,
    pub(crate) by_digest: bool,
    by_client: bool,
    client_prefix: u8,
}

impl Limit {
    pub(crate) fn new(rule: &str, config: &LimitConfig) -> Self {
        let scopes = &config.by;
        let each = if scopes.is_empty() { String::new() } else { format!(" for each {}", scope_names(scopes)) };
        let rate = format!("{} statements per second{each}", config.per_second.unwrap_or_default());
        let concurrent = format!("{} statements at the same time{each}", config.concurrent.unwrap_or_default());
        let mut base = HASH.build_hasher();
        rule.hash(&mut base);
        (config.concurrent, config.per_second.map(f64::to_bits), config.client_prefix).hash(&mut base);
        scopes.hash(&mut base);
        Self {
            interval: config.per_second.map(|rate| Duration::from_secs_f64(1.0 / rate)),
            burst: config.per_second.unwrap_or_default().max(1.0),
            concurrent: config.concurrent.unwrap_or(u32::MAX),
            wait: Duration::from_secs_f64(config.wait),
            rate_answer: Answer::limited(rule, &rate),
            concurrency_answer: Answer::limited(rule, &concurrent),
            base: base.finish(),
            by_user: scopes.contains(&LimitScope::User),
            by_digest: scopes.contains(&LimitScope::Digest),
            by_client: scopes.contains(&LimitScope::Client),
            client_prefix: config.client_prefix.unwrap_or(128),
        }
    }

    /// The bucket of a statement.
    pub(crate) fn bucket(&self, user: &[u8], digest: &[u8], client: Option<IpAddr>) -> u64 {
        let mut hasher = HASH.build_hasher();
        self.base.hash(&mut hasher);
        self.by_user.then_some(user).hash(&mut hasher);
        self.by_digest.then_some(digest).hash(&mut hasher);
        client.filter(|_| self.by_client).map(|client| prefix(client, self.client_prefix)).hash(&mut hasher);
        hasher.finish()
    }
}

fn scope_names(scopes: &[LimitScope]) -> String {
    let name = |scope: &LimitScope| match scope {
        LimitScope::User => "user",
        LimitScope::Digest => "digest",
        LimitScope::Client => "client",
    };
    scopes.iter().map(name).collect::<Vec<_>>().join(" and ")
}

/// The first bits of an address.
fn prefix(address: IpAddr, bits: u8) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(bits.min(32))).unwrap_or_default();
            IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() & mask))
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(bits.min(128))).unwrap_or_default();
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & mask))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_depends_on_what_has_a_limit_of_its_own() {
        let bucket = |by: &[LimitScope], bits, user: &str, client: &str| {
            let config =
                LimitConfig { concurrent: Some(1), by: by.to_vec(), client_prefix: bits, ..LimitConfig::default() };
            Limit::new("rule", &config).bucket(user.as_bytes(), b"", client.parse().ok())
        };
        assert_eq!(bucket(&[], None, "a", "10.0.0.1"), bucket(&[], None, "b", "10.0.0.2"));
        let user = [LimitScope::User];
        assert_ne!(bucket(&user, None, "a", "10.0.0.1"), bucket(&user, None, "b", "10.0.0.1"));
        assert_eq!(bucket(&user, None, "a", "10.0.0.1"), bucket(&user, None, "a", "10.0.0.2"));
        let client = [LimitScope::Client];
        assert_ne!(bucket(&client, None, "a", "10.0.0.1"), bucket(&client, None, "a", "10.0.0.2"));
        assert_eq!(bucket(&client, Some(24), "a", "10.0.0.1"), bucket(&client, Some(24), "a", "::ffff:10.0.0.2"));
        assert_ne!(bucket(&client, Some(64), "a", "fd00::1"), bucket(&client, Some(64), "a", "fd00:1::1"));
        assert_eq!(bucket(&client, Some(64), "a", "fd00::1"), bucket(&client, Some(64), "a", "fd00::2"));
    }
}
